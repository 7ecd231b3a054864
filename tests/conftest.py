"""What every test has in common."""

import os
import pathlib
import signal
import uuid
from collections.abc import Iterator

import hypothesis
import pytest

# Read by TensorFlow when it is first imported, here and in the processes that tests start.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
# As Forebay does, which some tests import after gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Where the tests are run in the background, Ctrl-C is ignored, and so it would be in the processes
# that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test asserts a duration. A failing example is printed so that it can be run again.
hypothesis.settings.register_profile("forebay", deadline=None, print_blob=True)
hypothesis.settings.load_profile("forebay")


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis for tests that take a key prefix of their own, and leave it as it is."""
    from .redis_server import shared_server_url

    with shared_server_url() as url:
        yield url


@pytest.fixture
def redis_storage_url(redis_url: str) -> Iterator[str]:
    """The URL of a new storage in that Redis."""
    from .redis_server import delete_prefix

    prefix = f"test-{uuid.uuid4().hex}"
    yield f"{redis_url}{'&' if '?' in redis_url else '?'}prefix={prefix}"
    delete_prefix(redis_url, prefix)


@pytest.fixture(params=["files", "redis"])
def any_storage(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    """The URL of a new storage, of each kind that outlasts a process."""
    if request.param == "files":
        return str(tmp_path / "journal")
    url: str = request.getfixturevalue("redis_storage_url")
    return url
