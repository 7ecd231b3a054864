"""A partition excuses what a pause excuses, of those that it cut off from each other."""

from __future__ import annotations

import pytest

from forebay.chaos.audit import Verdict, check
from forebay.chaos.excuses import CUT_OFF, NOBODY_READ, WORKER_GIVEN_UP
from forebay.chaos.history import History, read_history
from forebay.chaos.members import Life
from forebay.chaos.partitions import Partition, failed_cut_off
from forebay.journal.proto import events_pb2 as ev

from .test_audit import WORKERS, Run, broken, reader

DISPATCHER = ("dispatcher0",)
OWN = reader(0, *range(5))
"""A trainer that got nothing of worker 1."""


@pytest.fixture
def run() -> Run:
    return Run()


def test_who_is_cut_off() -> None:
    partition = Partition((("worker1", "trainer0"), ("worker10", "dispatcher0")), 2.0, 20.0)
    assert partition.cuts("worker1", "dispatcher") and partition.cuts("dispatcher0", "worker1")
    assert partition.cuts("trainer0", "worker") and partition.cuts("trainer0", "worker10")
    assert not partition.cuts("trainer0", "worker1") and not partition.cuts("worker2", "worker")


class TestWorkers:
    def give_up(self, run: Run, at_s: float, *others: str) -> Verdict:
        """Worker 1 is given up then, and was cut off from those from 2 to 20 s."""
        run.partitions = [Partition((("worker1",), others), 2.0, 20.0)]
        run.add(at_s, worker_lost=ev.WorkerLost(worker_id=WORKERS[1], reason="no sign of life"))
        return run.verdict(OWN)

    def test_only_a_partition_of_its_host_excuses_it_from_a_dispatcher(self, run: Run) -> None:
        verdict = self.give_up(run, 12.0, "trainer0", "dispatcher0")
        assert not verdict.broken and verdict.lost == {WORKER_GIVEN_UP: 5}

    def test_long_before(self, run: Run) -> None:
        assert "lost: worker1.1 had them" in broken(self.give_up(run, 41.0, "dispatcher0"))

    def test_from_trainers_alone(self, run: Run) -> None:
        assert "lost: worker1.1 had them" in broken(self.give_up(run, 12.0, "trainer0"))

    def test_another_worker_was_cut_off(self, run: Run) -> None:
        run.partitions = [Partition((("worker0",), DISPATCHER), 2.0, 20.0)]
        run.add(12.0, worker_lost=ev.WorkerLost(worker_id=WORKERS[1], reason="no sign of life"))
        assert "lost: worker1.1 had them" in broken(run.verdict(OWN))

    def test_it_could_not_hand_back(self, run: Run) -> None:
        """It was told to stop, ended, and its next process came to its address."""
        run.lives["worker1.1"].terminated_s = 10.0
        run.add(14.0, worker_lost=ev.WorkerLost(worker_id=WORKERS[1], reason="another came"))
        run.partitions = [Partition((("worker1",), DISPATCHER), 2.0, 12.0)]
        assert run.verdict(OWN).lost == {WORKER_GIVEN_UP: 5}

    def test_it_said_goodbye(self, run: Run) -> None:
        run.lives["worker1.1"].terminated_s = 10.0
        run.add(14.0, worker_lost=ev.WorkerLost(worker_id=WORKERS[1], reason="", left=True))
        run.partitions = [Partition((("worker1",), DISPATCHER), 2.0, 12.0)]
        assert "lost: worker1.1 had them" in broken(run.verdict(OWN))


class TestDraining:
    def cut_off(self, run: Run, *trainers: str, until_s: float = 12.0) -> None:
        """Worker 1 stops from 10 to 15 s, and cannot reach those trainers from 2 s on."""
        run.lives["worker1.1"].terminated_s = 10.0
        run.lives["worker1.1"].ended_s = 15.0
        run.partitions = [Partition((trainers, ("worker1",)), 2.0, until_s)]

    def test_from_every_trainer(self, run: Run) -> None:
        self.cut_off(run, "trainer0", "trainer1")
        verdict = run.verdict(OWN, reader(1))
        assert not verdict.broken and verdict.lost == {NOBODY_READ: 5}

    def test_from_one_of_two(self, run: Run) -> None:
        """What that one can hold may be missing, and no more."""
        self.cut_off(run, "trainer0")
        verdict = run.verdict(reader(0, *range(8)), reader(1))
        assert not verdict.broken and verdict.lost == {CUT_OFF: 2}

    def test_and_more_is_missing(self, run: Run) -> None:
        self.cut_off(run, "trainer0")
        verdict = run.verdict(reader(0, *range(7)), reader(1))
        assert "1 elements (9) lost" in broken(verdict) and verdict.lost == {CUT_OFF: 2}

    def test_and_everybody_was_back_before(self, run: Run) -> None:
        self.cut_off(run, "trainer0", "trainer1")
        run.lives["worker1.1"].terminated_s, run.lives["worker1.1"].ended_s = 33.0, 40.0
        assert "lost: worker1.1 had them" in broken(run.verdict(OWN, reader(1)))


class TestFailedCutOff:
    """Trainers that failed because they were cut off."""

    def history(self, reason: str = "no sign of life") -> History:
        events = [
            ev.Event(leader_elected=ev.LeaderElected(term=1)),
            ev.Event(job_created=ev.JobCreated(job_id=1, name="chaos")),
            ev.Event(iteration_created=ev.IterationCreated(iteration_id=2, job_id=1, epoch=1)),
            ev.Event(consumer_joined=ev.ConsumerJoined(consumer_id=7, iteration_id=2)),
            ev.Event(time_ms=12_000, consumer_left=ev.ConsumerLeft(consumer_id=7, reason=reason)),
        ]
        return read_history((n, 1, event) for n, event in enumerate(events, 1))

    def failed(self, history: History, *partitions: Partition) -> set[str]:
        return failed_cut_off(
            history, {7: "trainer0.1"}, {"trainer0.1": "trainer0"}, partitions, 0.0
        )

    def test_only_a_partition_of_its_host_excuses_it(self) -> None:
        cut = Partition((DISPATCHER, ("trainer0",)), 1.0, 11.0)
        assert self.failed(self.history(), cut) == {"trainer0.1"}
        assert self.failed(self.history("it said goodbye"), cut) == set()
        assert self.failed(self.history(), Partition(cut.sides, 13.0, 20.0)) == set()
        assert self.failed(self.history(), Partition((DISPATCHER, ("worker0",)), 1, 30)) == set()

    @pytest.mark.parametrize("excused", [False, True])
    def test_it_may_end_by_itself(self, excused: bool) -> None:
        lives = {"trainer0.1": Life("trainer0.1", "trainer", 0, 0.0, code=1)}
        verdict = check(
            self.history(), "chaos", [], lives, elements=0, passes=1, lost_with_a_trainer=0,
            cut_off=["trainer0.1"] if excused else [],
        )  # fmt: skip
        ended = [promise for promise in verdict.broken if "ended by itself" in promise]
        assert len(ended) == (not excused)
