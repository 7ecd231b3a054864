"""What every test has in common."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from . import hypothesis_profiles as hypothesis_profiles  # registers them

if TYPE_CHECKING:
    from .postgres_server import PostgresServer
    from .stock import DispatcherProcess

# Read by TensorFlow when it is first imported, here and in the processes that tests start.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
# OpenMP's threads spin while they wait for one another, and take other tests' processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As Forebay does, which some tests import after gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Journals are in memory where there is room: other tests can make a disk's fsync take seconds.
# What a power failure leaves of files is for the simulation, and for tests/storage/test_torn.py.
MEMORY = Path("/dev/shm")
if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 8 << 30:
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)

# Where the tests are run in the background, Ctrl-C is ignored, and so it would be in the processes
# that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Files and folders that `make test` leaves to `make test-nightly`, besides tests marked `long`.
LONG = (
    # They test tests and tools, or need other environments or programs of a whole machine.
    *("benchmarks", "examples", "environments", "frameworks", "deploy", "test_options.py"),
    "dashboard/test_pages.py",
    *("chaos", "cli/test_backup_page.py", "cli/test_chaos.py"),
    # Real processes, in kinds and combinations beyond the essential ones.
    *(f"e2e/test_{name}.py" for name in (
        *("across_hosts", "after_errors", "audit", "beam_datasets", "launched_workers"),
        *("coordinated_reads", "cross_trainer_cache", "crowd", "custom_ops"),
        *("doctor", "failover", "files", "fuzz", "left_early"),
        *("mixed", "object_store", "opaque_elements", "ordered_checkpoint", "pairings"),
        *("partitioned", "preemption", "previous_version"),
        *("python_datasets", "repeat_and_zip", "saves", "shares"),
        *("static_sharding", "tf_documentation", "tfds", "trainers", "transports"),
    )),
    *("trainers/test_across.py", "trainers/test_keras.py", "trainers/test_multi_worker.py"),
    *("trainers/test_parameter_server.py", "trainers/test_strategies.py"),
    *("client/test_what_is_kept.py", "dispatcher/test_emptied_storage.py"),
    *("materialized/test_runners.py", "pipelines/test_beam.py", "pipelines/test_tables.py"),
    # They wait for long, until peers or storages that are silent are given up.
    *("dispatcher/test_failure_detector.py", "dispatcher/test_storage_hangs.py"),
    *("storage/test_lost_files.py", "storage/test_redis_unavailable.py"),
    *("storage/test_redis_sentinel.py", "storage/test_postgres_standby.py"),
    *("storage/test_server_unavailable.py", "storage/test_postgres_unavailable.py"),
    *("transport/test_short_lived_connections.py", "transport/test_stalling_peers.py"),
)  # fmt: skip
TESTS = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """A collection of garbage over a heap with TensorFlow's modules takes a second of processor
    time. So there is none while tests are collected, and later ones look only at what was made
    since. Nothing is thawed, as the simulation freezes its garbage, too."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def is_long(path: Path) -> bool:
    return any(path.is_relative_to(TESTS / name) for name in LONG)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is long."""
    assert all((TESTS / name).exists() for name in LONG), "LONG names what is no more"
    for item in items:
        if is_long(item.path):
            item.add_marker("long")


@pytest.hookimpl(wrapper=True, trylast=True)  # before hooks that make a warning of it
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports a failure, where Python says instead that it can't parse the test's source.

    CPython 3.11 raises SystemError, "AST constructor recursion depth mismatch", where two threads
    parse at once (gh-106905). That would end pytest itself, and not just one test. To be deleted
    once 3.12 is the least version.
    """
    try:
        return (yield)
    except SystemError as error:
        if "AST constructor" not in str(error):
            raise
        return pytest.TestReport.from_item_and_call(item, call)


# Unless --hypothesis-profile names the long one.
hypothesis.settings.load_profile("short")


@pytest.fixture(autouse=True)
def no_global_seed() -> Iterator[None]:
    """No test leaves TensorFlow's global seed behind: graphs of other tests would draw by it, and
    so would all workers alike."""
    yield
    context = sys.modules.get("tensorflow.python.eager.context")
    if context is not None and context.global_seed() is not None:
        sys.modules["tensorflow"].random.set_seed(None)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis for tests that take a key prefix of their own, and leave it as it is."""
    from .redis_server import shared_server_url

    with shared_server_url() as url:
        yield url


@pytest.fixture
def redis_storage_url(redis_url: str) -> Iterator[str]:
    """The URL of a new storage in that Redis."""
    from .redis_server import new_storage

    with new_storage(redis_url) as url:
        yield url


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL for tests that take a schema of their own, and leave it as it is."""
    from .postgres_server import running_postgres

    with running_postgres() as server:
        yield server


@pytest.fixture
def postgres_storage_url(postgres: PostgresServer) -> str:
    """The URL of a new storage there."""
    from .postgres_server import new_storage

    return new_storage(postgres)


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DispatcherProcess]:
    """A process of its own, which a module's tests share; its journal is a file."""
    from .stock import DispatcherProcess

    with DispatcherProcess(tmp_path_factory.mktemp("journal")) as running:
        yield running


@pytest.fixture(scope="module")
def worker(dispatcher: DispatcherProcess) -> Iterator[None]:
    """One, of that dispatcher."""
    from .cluster import WorkerProcess

    with WorkerProcess(dispatcher.address):
        yield


@pytest.fixture(scope="module")
def workers(dispatcher: DispatcherProcess) -> Iterator[None]:
    """Two of them, of that dispatcher."""
    from .cluster import WorkerProcess

    with WorkerProcess(dispatcher.address), WorkerProcess(dispatcher.address):
        yield


@pytest.fixture(params=["files", "redis"])
def any_storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new storage, of each kind that outlasts a process.

    On PostgreSQL, which is as Redis to a dispatcher, only where a test asks for it: ON_ALL.
    """
    if request.param == "files":
        return str(tmp_path / "journal")
    return request.getfixturevalue(f"{request.param}_storage_url")
