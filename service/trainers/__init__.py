"""Datasets for the tasks of a training job, and for their frameworks.

`context.py` reads from the environment which task this process is, without any framework.
In `across.py`, the chief registers a dataset, and all tasks read it (TensorFlow).
"""
