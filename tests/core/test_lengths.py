"""Lengths of bundles: each is learned once, and stays with the dataset."""

from __future__ import annotations

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.lengths import elements_of, lengths_of
from forebay.service.core.state import Consumer, Job
from forebay.service.core.status import status
from forebay.service.errors import InvalidArgument, NotFound

from .test_ordered import ORDER, Ordered


class Learning(Ordered):
    """A dataset of 5 bundles."""

    def __init__(self) -> None:
        super().__init__()
        self.register("e", ev.SplitSource(count=5))
        self.consumer = self.join(dataset_id="e")

    def learn(self, *learned: tuple[int, int], consumer: Consumer | None = None) -> list[int]:
        bundles, lengths = zip(*learned, strict=True) if learned else ((), ())
        by = consumer or self.consumer
        command = c.LearnLengths(consumer_id=by.consumer_id, bundles=bundles, lengths=lengths)
        return self.when(command)

    def job_of(self, consumer: Consumer) -> Job:
        return self.state.jobs[self.iteration_of(consumer).job_id]


def test_only_new_lengths_are_learned() -> None:
    given = Learning()
    job = given.job_of(given.consumer)
    assert lengths_of(given.state, job) == [-1] * 5
    assert given.learn((3, 7), (0, 0)) == []
    assert given.then == ["lengths_learned"]
    assert lengths_of(given.state, job) == [0, -1, -1, 7, -1]
    assert given.learn((3, 7), (1, 4)) == []
    assert given.then == ["lengths_learned"]
    assert given.state.recent[-1][1].lengths_learned == ev.LengthsLearned(
        dataset_id="e", bundle_splits=1, bundles=[1], lengths=[4]
    )
    assert given.learn((3, 7), (0, 0)) == []
    assert given.then == []
    assert given.learn() == []
    assert given.then == []
    assert lengths_of(given.state, job) == [0, 4, -1, 7, -1]
    assert status(given.state)["jobs"][0]["order"]["known_lengths"] == 3


def test_a_length_that_is_known_stays() -> None:
    given = Learning()
    given.learn((2, 5))
    assert given.learn((2, 6)) == [2]
    assert given.then == []
    assert given.learn((4, 1), (2, 6), (4, 2)) == [2, 4]
    assert given.then == ["lengths_learned"]
    assert lengths_of(given.state, given.job_of(given.consumer)) == [-1, -1, 5, -1, 1]


@pytest.mark.parametrize("learned", [(5, 1), (-1, 1), (0, -1)])
def test_impossible_lengths_are_refused(learned: tuple[int, int]) -> None:
    given = Learning()
    with pytest.raises(InvalidArgument, match=r"bundles are 0 to 4"):
        given.learn((1, 1), learned)
    assert not given.state.datasets["e"].lengths


def test_lengths_without_bundles_are_refused() -> None:
    given = Learning()
    command = c.LearnLengths(consumer_id=given.consumer.consumer_id, bundles=(1,), lengths=())
    with pytest.raises(InvalidArgument, match="0 lengths of 1 bundles"):
        given.when(command)


def test_workers_tell_lengths_of_ordered_reads_by_bundles_of_all_epochs() -> None:
    given = Learning()
    job = given.job_of(given.consumer)

    def count(job_id: int, bundles: tuple[int, ...], *lengths: int) -> object:
        return given.when(c.CountBundles(job_id=job_id, bundles=bundles, lengths=lengths))

    assert count(job.job_id, (2, 9), 5, 7) == []
    assert lengths_of(given.state, job) == [-1, -1, 5, -1, 7]
    assert count(job.job_id, (4, 7), 8, 5) == [4]
    assert given.then == []
    for impossible in ((1,), (1, 2)):
        with pytest.raises(InvalidArgument, match="a worker, of job j, reports"):
            count(job.job_id, impossible, -1)
    assert count(4711, (1,), 1) == [], "it was removed"
    other = given.job_of(given.state.consumers[given.iteration("unordered").consumer_id])
    assert count(other.job_id, (1,), 1) == []
    assert given.then == []


def test_only_consumers_of_ordered_reads_learn() -> None:
    given = Learning()
    other = given.state.consumers[given.iteration("unordered").consumer_id]
    with pytest.raises(InvalidArgument, match="job unordered is not read in order"):
        given.learn((1, 1), consumer=other)
    given.leave(given.consumer)
    with pytest.raises(NotFound, match=f"Consumer id {given.consumer.consumer_id} not found"):
        given.learn((1, 1))


def test_lengths_are_the_datasets_by_the_size_of_bundles() -> None:
    given = Learning()
    given.learn((0, 3), (4, 2))
    given.leave(given.consumer)
    again = given.join(name="", dataset_id="e")
    assert lengths_of(given.state, given.job_of(again)) == [3, -1, -1, -1, 2]
    given.leave(again)
    order = ev.OrderSpec(cycle_length=1, block_length=1, bundle_splits=2)
    larger = given.join(name="larger", dataset_id="e", order=order)
    assert lengths_of(given.state, given.job_of(larger)) == [-1, -1, -1]
    given.learn((2, 9), consumer=larger)
    assert given.state.datasets["e"].lengths == {1: [3, -1, -1, -1, 2], 2: [-1, -1, 9]}
    elsewhere = given.join(name="elsewhere", order=ORDER)
    assert lengths_of(given.state, given.job_of(elsewhere)) == [-1] * 100
    given.when(c.RemoveDataset(dataset_id="e", force=True))
    assert "e" not in given.state.datasets


def test_whoever_registers_may_know_the_lengths() -> None:
    given = Learning()
    given.register("f", ev.SplitSource(count=3))
    assert given.when(c.DeclareLengths(dataset_id="f", lengths=(4, 0, 9))) is None
    assert given.then == ["lengths_learned"]
    assert given.state.datasets["f"].lengths == {1: [4, 0, 9]}
    given.when(c.DeclareLengths(dataset_id="f", lengths=(4, 0, 9)))
    assert given.then == []
    assert elements_of(given.state.datasets["f"]) == 13
    given.learn((0, 2), (4, 3))
    assert elements_of(given.state.datasets["e"]) is None
    given.learn((1, 2), (2, 2), (3, 0))
    assert elements_of(given.state.datasets["e"]) == 9


def test_what_was_learned_stays_when_lengths_are_declared() -> None:
    given = Learning()
    given.learn((2, 5))
    given.when(c.DeclareLengths(dataset_id="e", lengths=(1, 2, 3, 4, 5)))
    assert lengths_of(given.state, given.job_of(given.consumer)) == [1, 2, 5, 4, 5]


@pytest.mark.parametrize(
    ("lengths", "why"),
    [
        ((), "0 lengths were given for dataset e of 5 splits"),
        ((1, 2, 3, 4), "4 lengths were given for dataset e of 5 splits"),
        ((1, 2, 3, -1, 4), "split 3 of dataset e cannot have -1 elements"),
    ],
)
def test_impossible_declarations_are_refused(lengths: tuple[int, ...], why: str) -> None:
    given = Learning()
    with pytest.raises(InvalidArgument, match=why):
        given.when(c.DeclareLengths(dataset_id="e", lengths=lengths))
