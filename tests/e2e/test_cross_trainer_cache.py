"""The cross-trainer cache of Forebay's workers: stock clients, Forebay's, and `read`."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.data.experimental import service as stock

from forebay import service

from .. import forks
from ..cluster import WorkerProcess
from ..stock import DispatcherProcess

OFF, DYNAMIC = service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC
MIB = 1 << 20
Elements = Iterator[Any]
Trainer = Callable[[str, str, str, str], Elements]
"""A dispatcher, a dataset, a job's name and a trainer's id: what it reads, as NumPy has it."""


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DispatcherProcess]:
    with DispatcherProcess(tmp_path_factory.mktemp("journal")) as running, worker(running):
        yield running


@pytest.fixture(scope="module")
def target(dispatcher: DispatcherProcess) -> str:
    return dispatcher.target


def worker(dispatcher: DispatcherProcess, **options: Any) -> service.WorkerServer:
    """A worker in this process, which has imported TensorFlow already."""
    return service.WorkerServer(service.WorkerConfig(dispatcher.address, **options))


def numbers() -> Any:
    return tf.data.Dataset.range(10**12).repeat()


def stock_trainer(target: str, dataset_id: str, job: str, trainer_id: str) -> Elements:
    cache = stock.CrossTrainerCache(trainer_id)
    dataset = stock.from_dataset_id(
        "parallel_epochs", target, dataset_id, job_name=job, cross_trainer_cache=cache
    )
    return iter(dataset.as_numpy_iterator())


def our_trainer(target: str, dataset_id: str, job: str, trainer_id: str) -> Elements:
    cache = stock.CrossTrainerCache(trainer_id)  # as it is in a program that changed its import
    dataset = service.from_dataset_id(
        "parallel_epochs", target, dataset_id, job_name=job, cross_trainer_cache=cache
    )
    return iter(dataset.as_numpy_iterator())


def reading_trainer(
    target: str, dataset_id: str, job: str, trainer_id: str
) -> service.ElementIterator:
    cache = service.CrossTrainerCache(trainer_id)
    return service.read(target, dataset_id, job_name=job, cross_trainer_cache=cache)


def take(elements: Elements, count: int) -> list[Any]:
    return [x.tolist() for x in itertools.islice(elements, count)]


def first(elements: Elements, count: int) -> list[Any]:
    """Of a reader that is left then."""
    with elements if isinstance(elements, service.ElementIterator) else nullcontext():
        return take(elements, count)


def test_all_trainers_read_what_is_produced_once(target: str) -> None:
    """Random elements show that they are produced only once. Stock clients take part."""

    def drawn(i: Any) -> Any:
        return tf.stack([tf.cast(i, tf.float64), tf.random.uniform([], dtype=tf.float64)])

    dataset = numbers().map(drawn)
    dataset_id = service.register_dataset(target, dataset)
    got = [
        first(trainer(target, dataset_id, "job", f"{trainer.__name__} {number}"), 300)
        for trainer in (stock_trainer, our_trainer, reading_trainer)
        for number in range(2)
    ]
    assert [number for number, _ in got[0]] == [*range(300)]
    assert all(elements == got[0] for elements in got)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[str]:
    """A cache of 4 elements of 1 MiB."""
    with (
        DispatcherProcess(tmp_path) as dispatcher,
        worker(dispatcher, cross_trainer_cache_size_bytes=4 * (MIB + 1024)),
    ):
        yield dispatcher.target


def test_a_slow_trainer_skips_and_is_told_how_much(
    small: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = tf.data.Dataset.range(10**9).map(lambda i: tf.fill([MIB // 8], i)).repeat()
    dataset_id = service.register_dataset(small, dataset)
    cache = service.CrossTrainerCache("slow")
    with service.read(
        small, dataset_id, job_name="job", cross_trainer_cache=cache, max_outstanding_requests=1
    ) as slow:
        got = [int(next(slow)[0])]
        fast = service.CrossTrainerCache("fast")
        with service.read(
            small, dataset_id, job_name="job", cross_trainer_cache=fast, max_outstanding_requests=1
        ) as elements:
            begin = int(next(elements)[0])  # what the slow one has had may have gone
            assert [int(next(elements)[0]) for _ in range(30)] == [*range(begin + 1, begin + 31)]
        with caplog.at_level(logging.WARNING, "forebay"):
            got += [int(next(slow)[0]) for _ in range(4)]
    assert fast.skipped == 0
    assert cache.skipped == got[-1] + 1 - len(got) > 0
    assert got == sorted(set(got))
    assert "trainer 'slow' has skipped" in caplog.text


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("read", [service.read, service.from_dataset_id])
def test_wrong_arguments_are_refused(target: str, read: Any) -> None:
    endless = service.register_dataset(target, numbers())
    cache = service.CrossTrainerCache("trainer")
    mode = () if read is service.read else (OFF,)
    with pytest.raises(ValueError, match=r"requires named jobs\. Got empty `job_name`"):
        read(*mode, target, endless, cross_trainer_cache=cache)
    with pytest.raises(ValueError, match="hands over what the cache keeps"):
        read(
            *mode, target, endless,
            job_name="job", cross_trainer_cache=cache, data_transfer_protocol="local",
        )  # fmt: skip
    with pytest.raises(ValueError, match="must be a CrossTrainerCache, not <class 'str'>"):
        read(*mode, target, endless, job_name="job", cross_trainer_cache="trainer")
    for size in (0, 10):
        ended = service.register_dataset(target, tf.data.Dataset.range(size))
        with pytest.raises(ValueError, match=f"to be infinite. Got input with cardinality {size}"):
            read(*mode, target, ended, job_name="job", cross_trainer_cache=cache)


def test_a_cache_does_not_go_with_coordinated_reads(target: str) -> None:
    cache = service.CrossTrainerCache("trainer")
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not support coordinated reads"):
        service.distribute(
            OFF, target, job_name="job", consumer_index=0, num_consumers=1,
            cross_trainer_cache=cache,
        )  # fmt: skip


def test_a_dataset_is_iterated_over_once(target: str) -> None:
    cached = numbers().apply(
        service.distribute(
            OFF, target, job_name="once", cross_trainer_cache=service.CrossTrainerCache("trainer")
        )
    )
    assert take(cached.take(3).as_numpy_iterator(), 3) == [0, 1, 2]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"disallows multiple repetitions.* 2"):
        list(cached.take(3))


def test_a_job_is_cached_for_all_or_for_none(target: str) -> None:
    dataset_id = service.register_dataset(target, numbers())
    assert first(our_trainer(target, dataset_id, "all", "trainer"), 1) == [0]
    with pytest.raises(ValueError, match="cross-trainer cache: <enabled>; got <disabled>"):
        next(service.read(target, dataset_id, job_name="all"))


@pytest.mark.parametrize("trainer", [stock_trainer, our_trainer, reading_trainer])
def test_a_dataset_that_turns_out_to_end(target: str, trainer: Trainer) -> None:
    """Every trainer gets all elements before the error, also one that comes late."""
    dataset = tf.data.Dataset.range(100).filter(lambda _: True)  # of unknown cardinality
    dataset_id = service.register_dataset(target, dataset)
    for number in range(2):
        elements = trainer(target, dataset_id, f"ends {trainer.__name__}", f"trainer {number}")
        got: list[int] = []
        with pytest.raises(
            (tf.errors.InvalidArgumentError, service.ForebayError), match="reached the end"
        ):
            for element in elements:
                got += [int(element)]
        # TensorFlow's client may raise the error before it gives what it has.
        least = 90 if trainer is stock_trainer else 100
        assert got == [*range(len(got))] and len(got) >= least


# -- what dies -----------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from forebay import service
target, dataset_id = sys.argv[1:]
cache = service.CrossTrainerCache("trainer")
elements = service.read(target, dataset_id, job_name="killed", cross_trainer_cache=cache)
for _ in range(1000):
    last = int(next(elements))
print(last, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_trainer_goes_on_and_the_dispatcher_may_die(dispatcher: DispatcherProcess) -> None:
    """The killed trainer gets no element again, and other trainers notice neither death."""
    target = dispatcher.target
    dataset_id = service.register_dataset(target, numbers())
    with reading_trainer(target, dataset_id, "killed", "other") as other:
        assert take(other, 500) == [*range(500)]
        killed = forks.run(["-c", KILLED, target, dataset_id])
        assert killed.returncode == -9 and int(killed.stdout) == 999
        dispatcher.kill_and_restart()
        again = first(reading_trainer(target, dataset_id, "killed", "trainer"), 1000)
        assert again == [*range(again[0], again[0] + 1000)] and again[0] >= 1000
        assert take(other, 2000) == [*range(500, 2500)]
        assert first(reading_trainer(target, dataset_id, "killed", "new"), 10) == [*range(10)]


def test_with_a_killed_worker_its_cache_is_lost(tmp_path: Path) -> None:
    """The next worker produces its part of the dataset again, here all of it, for all trainers."""
    with DispatcherProcess(tmp_path) as dispatcher:
        target = dispatcher.target
        dataset_id = service.register_dataset(
            target,
            numbers().map(lambda i: (i, tf.random.uniform([], maxval=2**60, dtype=tf.int64))),
        )
        with (
            reading_trainer(target, dataset_id, "job", "a") as a,
            reading_trainer(target, dataset_id, "job", "b") as b,
        ):
            with WorkerProcess(dispatcher.address) as killed:
                before = [list(itertools.islice(elements, 10)) for elements in (a, b)]
                killed.kill()
            with worker(dispatcher):
                anew = []
                for elements in (a, b):
                    begin = next(x for x in elements if x[0] == 0)
                    anew.append([begin, *itertools.islice(elements, 9)])
    assert before[0] == before[1] and anew[0] == anew[1]
    assert [int(number) for number, _ in anew[0]] == [*range(10)]
    assert not np.array_equal(before[0], anew[0])
