"""What every test has in common."""

import os

import hypothesis

# Read by TensorFlow when it is first imported, here and in the processes that tests start.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

# No test asserts a duration. A failing example is printed so that it can be run again.
hypothesis.settings.register_profile("forebay", deadline=None, print_blob=True)
hypothesis.settings.load_profile("forebay")
