"""A finished epoch has no elements. The log says so, and which call reads the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

from forebay import service

from ..stock import DispatcherProcess

DYNAMIC = service.ShardingPolicy.DYNAMIC
count = tf.data.Dataset.range
ALL = [0, 1, 2]
OVER = "is over, so this iteration has no elements"

pytestmark = pytest.mark.usefixtures("worker")


def by_id(target: str, name: str, initial_epoch: int) -> Any:
    dataset_id = service.register_dataset(target, count(3))
    return service.from_dataset_id(
        DYNAMIC, target, dataset_id, job_name=name, initial_epoch=initial_epoch
    )


def distributed(target: str, name: str, initial_epoch: int) -> Any:
    read = service.distribute(DYNAMIC, target, name, initial_epoch=initial_epoch)
    return count(3).apply(read)


def behind_others(target: str, name: str, initial_epoch: int) -> Any:
    return by_id(target, name, initial_epoch).map(lambda i: i).prefetch(2)


class InNumPy:
    def __init__(self, target: str, name: str, initial_epoch: int) -> None:
        self._target, self._name, self._epoch = target, name, initial_epoch
        self._dataset_id = service.register_dataset(target, count(3))

    def __iter__(self) -> Iterator[Any]:
        self._epoch += 1
        return service.read(
            self._target, self._dataset_id, processing_mode=DYNAMIC, job_name=self._name,
            initial_epoch=self._epoch - 1,
        )  # fmt: skip


@pytest.mark.parametrize("make", [by_id, distributed, behind_others, InNumPy])
def test_a_finished_epoch_without_initial_epoch_is_warned_of(
    dispatcher: DispatcherProcess, make: Callable[[str, str, int], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def elements(dataset: Any) -> list[int]:
        return sorted(int(e) for e in dataset)

    def warnings() -> list[str]:
        return [said for said in caplog.messages if OVER in said]

    name = make.__name__
    first = make(dispatcher.target, name, 0)
    early = make(dispatcher.target, name, 0)  # which is iterated over when the epoch is over
    assert [elements(first), elements(first)] == [ALL, ALL]
    assert not warnings()
    assert elements(early) == []
    (said,) = warnings()
    assert f"epoch 0 of the job {name!r} {OVER}" in said and "initial_epoch=" in said
    dispatcher.kill_and_restart()
    caplog.clear()
    again = make(dispatcher.target, name, 0)
    assert [elements(again), elements(again)] == [[], []]
    said = warnings()[0]
    assert "initial_epoch=2" in said and "another job_name" in said
    assert make is InNumPy or len(warnings()) == 1
    caplog.clear()
    assert elements(again) == elements(make(dispatcher.target, name, 3)) == ALL
    assert elements(make(dispatcher.target, f"another than {name}", 0)) == ALL
    assert not warnings()


def test_later_epochs_that_are_empty_are_not_warned_of(
    dispatcher: DispatcherProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """Other trainers may have had all of a short one."""
    slow, fast = (by_id(dispatcher.target, "of two", 0) for _ in range(2))
    assert sorted(int(e) for e in slow) == ALL
    assert [sorted(int(e) for e in fast) for _ in range(3)] == [[], ALL, ALL]
    caplog.clear()
    assert [sorted(int(e) for e in slow) for _ in range(3)] == [[], [], ALL]
    assert not caplog.messages


@pytest.mark.parametrize("make", [distributed, by_id])
def test_initial_epoch_needs_a_named_job(target_of: str, make: Any) -> None:
    for name, wrong in ((None, 1), ("j", -1), ("j", True)):
        with pytest.raises(ValueError, match=f"initial_epoch={wrong}"):
            make(target_of, name, wrong)
        with pytest.raises(ValueError, match=f"initial_epoch={wrong}"):
            service.read(target_of, "x", job_name=name, initial_epoch=wrong)


@pytest.fixture
def target_of(dispatcher: DispatcherProcess) -> str:
    return dispatcher.target
