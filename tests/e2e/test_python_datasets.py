"""Python datasets through the service: real processes, and whoever dies meanwhile."""

from __future__ import annotations

import collections
import contextlib
import importlib
import itertools
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
import tensorflow as tf
from apache_beam.io import iobase
from apache_beam.io.range_trackers import OffsetRangeTracker
from tensorflow.data.experimental import service as stock

from forebay import service
from forebay.journal.proto import events_pb2 as ev
from forebay.service.client.reader import fetch_dataset
from forebay.service.errors import PipelineError

from ..cluster import WorkerProcess
from ..standbys import status
from ..stock import DispatcherProcess

OFF, DYNAMIC = service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC


@pytest.fixture(scope="module")
def workers(dispatcher: DispatcherProcess) -> Iterator[None]:
    with WorkerProcess(dispatcher.address), WorkerProcess(dispatcher.address, processes=2):
        yield


@pytest.fixture(params=["python", "beam"])
def kind(request: pytest.FixtureRequest) -> str:
    """Of a dataset, that `register` makes of a function of splits."""
    return str(request.param)


def register(
    kind: str,
    dispatcher: DispatcherProcess | service.DispatchServer,
    function: Callable[..., Any],
    splits: range,
    **how: Any,
) -> str:
    if kind == "python":
        return str(service.register_dataset(dispatcher.target, function, splits=splits, **how))
    chain = beam.Pipeline() | beam.Create(splits) | beam.FlatMap(function)
    return str(service.register_dataset(dispatcher.target, chain, **how))


def twenty(split: int) -> Iterator[dict[str, Any]]:
    """20 of them a split."""
    for number in range(20 * split, 20 * (split + 1)):
        yield {"number": number, "text": f"{number}", "array": np.full((2, 3), number, np.int32)}


numbers = service.python_dataset(range(50))(twenty)


@pytest.mark.usefixtures("workers")
def test_every_element_comes_once_or_once_a_worker(
    kind: str, dispatcher: DispatcherProcess
) -> None:
    dataset_id = register(kind, dispatcher, twenty, range(50))
    assert register(kind, dispatcher, twenty, range(50)) == dataset_id
    for mode, times in ((DYNAMIC, 1), (OFF, 2)):
        found = []
        for element in service.read(dispatcher.target, dataset_id, processing_mode=mode):
            number = int(element["number"])
            assert element["text"] == str(number).encode()
            assert element["array"].tolist() == [[number] * 3] * 2
            found.append(number)
        assert collections.Counter(found) == dict.fromkeys(range(1000), times)
    dataset = service.from_dataset_id(DYNAMIC, dispatcher.target, dataset_id)
    assert dataset.element_spec == {
        "number": tf.TensorSpec([], tf.int64),
        "text": tf.TensorSpec([], tf.string),
        "array": tf.TensorSpec([2, 3], tf.int32),
    }
    assert sorted(int(element["number"]) for element in dataset) == [*range(1000)]


def raises(error: BaseException) -> Callable[[], object]:
    def function() -> None:
        raise type(error)(*error.args)

    return function


def fills_memory() -> object:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), hard))
    return bytearray(1 << 30)


class Breaks(iobase.BoundedSource):  # type: ignore[misc]
    """Four splits, of one element each; the third one ends behind it with an error."""

    def estimate_size(self) -> int:
        return 4

    def split(self, wished_bytes: int, *_: Any) -> Iterator[iobase.SourceBundle]:
        for at in range(4):
            yield iobase.SourceBundle(1, self, at, at + 1)

    def get_range_tracker(self, start: int | None, stop: int | None) -> OffsetRangeTracker:
        return OffsetRangeTracker(start or 0, 4 if stop is None else stop)

    def read(self, tracker: OffsetRangeTracker) -> Iterator[int]:
        yield 1
        if tracker.start_position() == 2:
            raise OSError("the store is away")


FAILURES: dict[str, tuple[Callable[[], object], str]] = {
    "raises": (raises(KeyError("why")), r"KeyError\('why'\)\nTraceback"),
    "exits": (raises(SystemExit(3)), r"SystemExit\(3\)\nTraceback"),
    "is interrupted": (raises(KeyboardInterrupt()), r"KeyboardInterrupt\(\)\nTraceback"),
    "dies": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "the process .* killed by SIGSEGV"),
    # It sleeps until it is killed, which is what is tested.
    "hangs": (lambda: time.sleep(3600), r"it has taken longer than 1 s"),
    # Or what came before it finds no memory to be sent.
    "fills its memory": (fills_memory, r"(MemoryError|it could not be sent: OSError)\(.*\)\nTrace"),
    "a source": (print, r"OSError\(.the store is away"),
}


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.usefixtures("workers")
def test_a_failing_function_fails_its_trainer_alone(
    how: str, dispatcher: DispatcherProcess
) -> None:
    """The worker is unharmed, and others read on."""
    last, wanted = FAILURES[how]

    def fails(split: str) -> Iterator[int]:
        yield 1
        if split == "c":
            last()

    with service.read(
        dispatcher.target, service.register_dataset(dispatcher.target, numbers)
    ) as others:
        first = next(others)
        if how == "a source":
            broken = beam.Pipeline() | beam.io.Read(Breaks())
            dataset_id = service.register_dataset(dispatcher.target, broken)
        else:
            timeout_s = 1 if how == "hangs" else None
            dataset_id = service.register_dataset(
                dispatcher.target, fails, splits=[*"abcd"], timeout_s=timeout_s
            )
        named = rf"worker 127.*split 2( \('c'\))?, element [01]: {wanted}"
        with pytest.raises(PipelineError, match=named):
            list(service.read(dispatcher.target, dataset_id, processing_mode=DYNAMIC))
        if how in ("raises", "dies"):
            with pytest.raises(tf.errors.OpError, match="split 2"):
                list(service.from_dataset_id(DYNAMIC, dispatcher.target, dataset_id))
        assert 1 + sum(1 for _ in others) == 2000
    assert int(first["number"]) in range(1000)


@pytest.mark.usefixtures("workers")
def test_the_users_own_modules_travel_with_a_function(
    kind: str, dispatcher: DispatcherProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which no worker has; of packages with a file of their own, and without."""
    for path in ("own_module.py", "own_package/part.py", "own_folder/inner/part.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(OWN)
    (tmp_path / "own_package" / "__init__.py").write_text("from . import part")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("own_module", "own_package.part", "own_folder.inner.part")
    modules = [importlib.import_module(name) for name in names]
    of_a_folder, inner = sys.modules["own_folder"], modules[-1]
    whole, add = sys.modules["own_package"], modules[0].add

    def function(split: int) -> Iterator[list[int]]:
        yield [
            add(split), whole.part.add(split), inner.add(split), of_a_folder.inner.part.add(split),
            inner.Row(split).number,
        ]  # fmt: skip

    try:
        dataset_id = register(kind, dispatcher, function, range(10))
    finally:
        for name in [name for name in sys.modules if name.startswith("own_")]:
            del sys.modules[name]
    found = service.read(dispatcher.target, dataset_id, processing_mode=DYNAMIC)
    assert sorted(x.tolist() for x in found) == [[n + 3] * 4 + [n] for n in range(10)]


OWN = """
LIMIT = 3

class Row:
    def __init__(self, number):
        self.number = number

def add(number):
    return Row(number + LIMIT).number
"""


@pytest.mark.usefixtures("workers")
def test_every_way_of_reading(kind: str, dispatcher: DispatcherProcess) -> None:
    """In rounds, from a cache, compressed, handed back by who leaves, by TensorFlow's client."""
    target = dispatcher.target

    def endless(split: int) -> Iterator[Any]:
        for number in itertools.count():
            time.sleep(0.001)  # or one process fills the cache before the other begins
            yield np.array([number, os.getpid(), random.getrandbits(60)])

    endless_id = register(kind, dispatcher, endless, range(1))
    with contextlib.ExitStack() as stack:
        consumers = [
            stack.enter_context(
                service.read(
                    target, endless_id, job_name=f"{kind} rounds", consumer_index=index,
                    num_consumers=2,
                )
            )
            for index in range(2)
        ]  # fmt: skip
        pool = stack.enter_context(ThreadPoolExecutor(2))
        for _ in range(20):
            one, other = (x.tolist() for x in pool.map(next, consumers))
            assert one[0] % 2 == 0 and other[:2] == [one[0] + 1, one[1]]
    cached: list[dict[tuple[int, int], int]] = []
    for trainer in "ab":
        found: dict[tuple[int, int], int] = {}
        with service.read(
            target, endless_id, job_name=f"{kind} cache",
            cross_trainer_cache=service.CrossTrainerCache(trainer),
        ) as elements:  # fmt: skip
            processes: set[int] = set()
            while len(processes) < 2:
                number, process, drawn = next(elements).tolist()
                found[number, process] = drawn
                processes.add(process)
        cached.append(found)
    a, b = cached
    both = a.keys() & b.keys()
    assert {process for _, process in a} == {process for _, process in b}
    assert both and all(a[key] == b[key] for key in both)

    dataset_id = register(kind, dispatcher, twenty, range(50), compression="ZSTD")
    definition = fetch_dataset(target, dataset_id).definition
    assert definition.compression == ev.ZSTD
    compressed = service.read(
        target, dataset_id, processing_mode=DYNAMIC, data_transfer_protocol="tcp"
    )
    seen = []
    for element in compressed:
        assert element["array"].tolist() == [[element["number"]] * 3] * 2
        seen.append(int(element["number"]))
    assert sorted(seen) == [*range(1000)]

    seen = []
    for most in (10, 30, 1000):
        with service.read(
            target, dataset_id, processing_mode=DYNAMIC, job_name=f"{kind} left"
        ) as elements:
            seen += [int(element["number"]) for element in itertools.islice(elements, most)]
    assert sorted(seen) == [*range(1000)]

    spec = service.from_dataset_id(DYNAMIC, target, dataset_id).element_spec
    for mode, times in (("distributed_epoch", 1), ("parallel_epochs", 2)):
        theirs = stock.from_dataset_id(mode, target, dataset_id, spec)
        seen = []
        for element in theirs.as_numpy_iterator():
            assert element["text"] == b"%d" % element["number"]
            assert element["array"].tolist() == [[element["number"]] * 3] * 2
            seen.append(int(element["number"]))
        assert collections.Counter(seen) == dict.fromkeys(range(1000), times)


@pytest.mark.usefixtures("workers")
def test_skipped_splits_are_counted_over_all_workers_and_journaled(
    dispatcher: DispatcherProcess,
) -> None:
    def fails(split: int) -> Iterator[int]:
        yield split
        if split % 10 == 3:
            raise KeyError("why")
        yield split

    how: dict[str, Any] = {"splits": range(50), "on_error": "skip"}
    for limit in (5, 4):
        dataset_id = service.register_dataset(dispatcher.target, fails, **how, limit=limit)
        reading = service.read(
            dispatcher.target, dataset_id, processing_mode=DYNAMIC, job_name=f"limit {limit}"
        )
        if limit == 5:
            found = collections.Counter(map(int, reading))
            assert found == {split: 1 + (split % 10 != 3) for split in range(50)}
        else:
            with pytest.raises(PipelineError, match=r"no more than 4 splits are skipped in an"):
                list(reading)
    named = [job for job in status(dispatcher)["jobs"] if job["name"]]
    jobs = {job["name"].rpartition("/")[2]: job for job in named}
    for limit in (5, 4):
        (skipped,) = jobs[f"limit {limit}"]["iterations"]
        assert skipped["skipped"] == limit
        assert {skip["split"] % 10 for skip in skipped["skips"]} == {3}
        for skip in skipped["skips"]:
            where = f"split {skip['split']} ({skip['split']}), element 1"
            assert skip["reason"] == f"{where}: KeyError('why')"
            assert skip["worker_address"].startswith("127.0.0.1:")


def lives(process: int) -> bool:
    """Nobody may have asked yet how it ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.usefixtures("workers")
def test_with_lengths_an_ordered_read_begins_without_counting(
    dispatcher: DispatcherProcess, tmp_path: Path
) -> None:
    def noted(split: int) -> Iterator[int]:
        (tmp_path / str(split)).touch()
        yield from range(100 * split, 101 * split)

    dataset_id = service.register_dataset(
        dispatcher.target, noted, splits=range(100), lengths=range(100), element_spec="int64"
    )
    order: dict[str, Any] = {"ordered": True, "shuffle": False, "cycle_length": 1}
    behind = sum(range(98)) + 5
    with service.read(dispatcher.target, dataset_id, start_position=behind, **order) as elements:
        found = [int(number) for number in itertools.islice(elements, 98 - 5 + 99)]
    assert found == [*range(9805, 9898), *range(9900, 9999)]
    assert not (tmp_path / "50").exists()
