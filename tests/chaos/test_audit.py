"""The audit can fail: it finds each broken promise, and no excuse goes further than it should."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest

from forebay.chaos.audit import Verdict, check
from forebay.chaos.excuses import (
    EPOCH_PAUSED,
    HANDED_BACK_LATE,
    NOBODY_READ,
    TRAINER_GONE,
    WORKER_GIVEN_UP,
    WORKER_KILLED,
)
from forebay.chaos.history import read_history
from forebay.chaos.members import Life
from forebay.chaos.partitions import Partition
from forebay.chaos.records import Got, Joined, Left, ReadToEnd, Record, Started
from forebay.journal.proto import events_pb2 as ev

ELEMENTS = 10
HELD = 2  # elements that a trainer can take with it, of one worker
JOB, ITERATION, WORKERS, TASKS = 1, 2, (10, 11), (20, 21)


class Run:
    """One epoch of ten elements: worker 0 has those below five, worker 1 the others.

    In every pass of it, of which there is one.
    """

    passes = 1

    def __init__(self) -> None:
        self.events: list[tuple[int, ev.Event]] = []  # with their term
        self.lives = {
            name: Life(name, name[:-3], int(name[-3]), 0.0, ended_s=100.0, code=0)
            for name in ("worker0.1", "worker1.1", "trainer0.1", "trainer1.1")
        }
        self.partitions: list[Partition] = []
        self.lease_ids = itertools.count(100)
        self.term = 0
        self.elect(1)
        self.add(job_created=ev.JobCreated(job_id=JOB, name="chaos", sharding="DYNAMIC"))
        self.add(iteration_created=ev.IterationCreated(
            iteration_id=ITERATION, job_id=JOB, epoch=1))  # fmt: skip
        for number, (worker, task) in enumerate(zip(WORKERS, TASKS, strict=True)):
            self.add(worker_registered=ev.WorkerRegistered(
                worker_id=worker, tags=[f"worker{number}.1"]))  # fmt: skip
            self.add(task_created=ev.TaskCreated(
                task_id=task, iteration_id=ITERATION, worker_id=worker))  # fmt: skip
        self.leases = [
            self.lease(worker, 5 * worker, 5, in_pass=in_pass)
            for in_pass in range(self.passes) for worker in (0, 1)
        ]  # fmt: skip

    def add(self, at_s: float = 1.0, **event: Any) -> None:
        self.events.append((self.term, ev.Event(time_ms=int(at_s * 1000), **event)))

    def elect(self, term: int) -> None:
        self.term = term
        self.add(leader_elected=ev.LeaderElected(term=term, address="d:1"))

    def lease(
        self, worker: int, first: int, count: int, at_s: float = 1.0, in_pass: int = 0
    ) -> int:
        lease_id = next(self.lease_ids)
        self.add(at_s, splits_leased=ev.SplitsLeased(
            lease_id=lease_id, iteration_id=ITERATION, task_id=TASKS[worker],
            pass_number=in_pass, first=first, count=count))  # fmt: skip
        return lease_id

    def give_back(self, lease_id: int, count: int) -> None:
        self.add(lease_returned=ev.LeaseReturned(lease_id=lease_id, count=count))

    def finish(self) -> None:
        self.add(iteration_finished=ev.IterationFinished(iteration_id=ITERATION))

    def verdict(self, *trainers: list[Record], finished: bool = True) -> Verdict:
        if finished:
            self.finish()
        records = [(n, term, event) for n, (term, event) in enumerate(self.events, 1)]
        return check(
            read_history(records),
            "chaos",
            trainers,
            self.lives,
            elements=ELEMENTS,
            passes=self.passes,
            lost_with_a_trainer=HELD,
            partitions=self.partitions,
        )


def reader(
    number: int,
    *ids: int,
    name: str = "",
    ended_s: float | None = 50.0,
    left_s: float | None = None,
    joined_s: float = 1.0,
    unheard: Sequence[int] = TASKS,
) -> list[Record]:
    """A trainer that got these; None: it never saw the epoch's end."""
    records: list[Record] = [
        Started(name or f"trainer{number}.1", 0.0),
        Joined(1, 30 + number, joined_s),
        Got(1, 2.0, TASKS[0], [i for i in ids if i < 5]),
        Got(1, 2.0, TASKS[1], [i for i in ids if i >= 5]),
    ]
    if left_s is not None:
        return [*records, Left(1, left_s, [*unheard])]
    return records if ended_s is None else [*records, ReadToEnd(1, ended_s)]


def broken(verdict: Verdict) -> str:
    """The one promise that was broken."""
    (promise,) = verdict.broken
    return promise


@pytest.fixture
def run() -> Run:
    return Run()


def test_all_is_well(run: Run) -> None:
    verdict = run.verdict(reader(0, 0, 1, 2, 5, 6), reader(1, 3, 4, 7, 8, 9))
    assert verdict == Verdict([], 1, 10, 0, 0, {}, 0)


class TestDelivery:
    def test_twice_at_two_trainers(self, run: Run) -> None:
        verdict = run.verdict(reader(0, *range(10)), reader(1, 4))
        assert "epoch 1: 1 elements (4) delivered more often than they were leased" in broken(
            verdict
        )
        assert verdict.twice == 1

    def test_twice_at_one_trainer(self, run: Run) -> None:
        verdict = run.verdict(reader(0, *range(10), 4, 4, 5))
        assert verdict.twice == 3 and "2 elements (4, 5)" in broken(verdict)

    def test_before_and_after_a_restart_of_the_trainer(self, run: Run) -> None:
        run.lives["trainer0.2"] = Life("trainer0.2", "trainer", 0, 10.0)
        first = reader(0, 0, 1, ended_s=None)
        verdict = run.verdict([*first, *reader(0, *range(1, 10), name="trainer0.2")])
        assert "delivered more often than they were leased" in broken(verdict)

    def test_never_leased(self, run: Run) -> None:
        verdict = run.verdict(reader(0, *range(11)))
        assert "(10) delivered by a task that had no lease of them" in broken(verdict)

    def test_by_a_worker_that_had_handed_it_back(self, run: Run) -> None:
        run.give_back(run.leases[0], 1)
        run.lease(1, 4, 1)
        verdict = run.verdict(reader(0, *range(10)))
        assert any("(4) delivered by a task that had no lease" in b for b in verdict.broken)

    def test_of_no_epoch(self, run: Run) -> None:
        stray: list[Record] = [Joined(2, 77, 1.0), Got(2, 2.0, TASKS[0], [3]), ReadToEnd(2, 3.0)]
        verdict = run.verdict([*reader(0, *range(10)), *stray])
        assert "epoch 2" in broken(verdict) and "not in the journal" in broken(verdict)

    def test_damaged(self, run: Run) -> None:
        records = reader(0, *range(10))
        records[3] = Got(1, 2.0, TASKS[1], list(range(5, 10)), [7])
        verdict = run.verdict(records)
        assert "(7) damaged" in broken(verdict) and verdict.damaged == 1


class TestLosses:
    def test_without_excuse(self, run: Run) -> None:
        verdict = run.verdict(reader(0, *range(9)))
        assert "1 elements (9) lost: worker1.1 had them" in broken(verdict)
        assert verdict.lost_unexplained == 1 and verdict.lost == {}

    def test_a_killed_worker_excuses_its_own(self, run: Run) -> None:
        run.lives["worker1.1"].killed_s = 20.0
        verdict = run.verdict(reader(0, 0, 1, 2, 3, 4))
        assert verdict.broken == [] and verdict.lost == {WORKER_KILLED: 5}

    def test_a_killed_worker_does_not_excuse_the_others(self, run: Run) -> None:
        run.lives["worker0.1"].killed_s = 20.0
        verdict = run.verdict(reader(0, *range(9)))
        assert verdict.lost_unexplained == 1

    def test_a_worker_killed_after_the_epoch_was_read_is_no_excuse(self, run: Run) -> None:
        run.lives["worker1.1"].killed_s = 51.0
        assert run.verdict(reader(0, *range(9))).lost_unexplained == 1

    def test_a_worker_told_to_stop_is_no_excuse(self, run: Run) -> None:
        run.lives["worker1.1"].terminated_s = 20.0
        run.lives["worker1.1"].ended_s = 25.0
        assert run.verdict(reader(0, *range(9))).lost_unexplained == 1

    def test_a_worker_told_to_stop_after_the_epoch_was_read_is_none_either(self, run: Run) -> None:
        run.lives["worker1.1"].terminated_s = 60.0
        assert run.verdict(reader(0, *range(9))).lost_unexplained == 1

    def test_a_worker_that_stopped_while_nobody_read(self, run: Run) -> None:
        run.lives["worker1.1"].terminated_s = 20.0
        run.lives["worker1.1"].ended_s = 25.0
        run.lives["trainer0.1"].ended_s = 21.0
        run.lives["trainer0.2"] = Life("trainer0.2", "trainer", 0, 22.0)
        first = reader(0, *range(6), ended_s=None)
        verdict = run.verdict([*first, *reader(0, name="trainer0.2", joined_s=24.0)])
        assert verdict.broken == []
        assert verdict.lost == {TRAINER_GONE: HELD, NOBODY_READ: 2}

    def test_a_trainer_excuses_what_its_buffers_hold_and_no_more(self, run: Run) -> None:
        run.lives["trainer1.1"].ended_s = 30.0
        trainers = reader(0, 0, 1, 2, 3, 4, 5, 6, 7), reader(1, ended_s=None)
        assert run.verdict(*trainers).lost == {TRAINER_GONE: HELD}
        trainers = reader(0, 0, 1, 2, 3, 4, 5, 6), reader(1, ended_s=None)
        verdict = run.verdict(*trainers)
        assert verdict.lost == {TRAINER_GONE: HELD} and verdict.lost_unexplained == 1

    def test_of_each_worker_a_trainer_can_hold_some(self, run: Run) -> None:
        trainers = reader(0, 0, 1, 2, 5, 6, 7), reader(1, ended_s=None)
        assert run.verdict(*trainers).lost == {TRAINER_GONE: 2 * HELD}

    def test_a_trainer_that_left_before_the_lease_is_no_excuse(self, run: Run) -> None:
        run.give_back(run.leases[1], 1)
        run.lease(0, 9, 1, at_s=40.0)
        run.lives["trainer1.1"].ended_s = 30.0
        trainers = reader(0, *range(9)), reader(1, ended_s=None)
        assert run.verdict(*trainers).lost_unexplained == 1

    def test_a_trainer_that_left_another_epoch_is_no_excuse(self, run: Run) -> None:
        run.add(iteration_created=ev.IterationCreated(
            iteration_id=ITERATION + 1, job_id=JOB, epoch=2))  # fmt: skip
        other: list[Record] = [Started("trainer1.1", 0.0), Joined(2, 31, 1.0)]
        verdict = run.verdict(reader(0, *range(9)), other)
        assert verdict.lost_unexplained == 1

    def test_a_worker_given_up_needs_to_have_been_paused(self, run: Run) -> None:
        lost = ev.WorkerLost(worker_id=WORKERS[1], reason="no sign of life")
        run.add(40.0, worker_lost=lost)
        assert run.verdict(reader(0, *range(9))).lost_unexplained == 1
        run.lives["worker1.1"].pauses = [(30.0, 39.0)]
        assert run.verdict(reader(0, *range(9)), finished=False).lost == {WORKER_GIVEN_UP: 1}

    def test_never_handed_out(self, run: Run) -> None:
        run.give_back(run.leases[1], 2)
        run.lives["worker1.1"].killed_s = 20.0  # which has nothing to do with it
        verdict = run.verdict(reader(0, *range(8)))
        assert "finished without handing them out" in broken(verdict)
        assert verdict.lost_unexplained == 2


class TwoPasses(Run):
    passes = 2


class TestPasses:
    """Each element comes as often as the pipeline passes over it."""

    @pytest.fixture
    def run(self) -> Run:
        return TwoPasses()

    def test_each_comes_twice(self, run: Run) -> None:
        verdict = run.verdict(reader(0, *range(10)), reader(1, *range(10)))
        assert verdict == Verdict([], 1, 20, 0, 0, {}, 0)

    def test_more_often_than_there_are_passes(self, run: Run) -> None:
        verdict = run.verdict(reader(0, *range(10)), reader(1, *range(10), 7))
        assert "(7) delivered more often than they were leased" in broken(verdict)
        assert verdict.twice == 1

    def test_twice_of_one_pass_when_the_other_was_lost_with_its_worker(self, run: Run) -> None:
        """As often as it should come, but not from whom."""
        run.give_back(run.leases[2], 1)
        run.lease(1, 4, 1, in_pass=1)
        run.lives["worker1.1"].killed_s = 20.0
        verdict = run.verdict(reader(0, *range(10)), reader(1, *range(10)))
        assert "(4) delivered more often than they were leased" in broken(verdict)
        assert verdict.lost == {WORKER_KILLED: 1}

    def test_lost_in_one_pass(self, run: Run) -> None:
        verdict = run.verdict(reader(0, *range(10)), reader(1, *range(9)))
        assert "(9) lost: worker1.1 had them" in broken(verdict)
        assert verdict.lost_unexplained == 1

    def test_a_worker_that_was_killed_excuses_it_in_no_other_ones_pass(self, run: Run) -> None:
        run.give_back(run.leases[2], 1)
        run.lease(1, 4, 1, in_pass=1)
        run.lives["worker1.1"].killed_s = 20.0
        of_both = reader(0, *range(10)), reader(1, *range(4), *range(5, 10))
        verdict = run.verdict(*of_both)
        assert verdict.broken == [] and verdict.lost == {WORKER_KILLED: 1}
        of_one: list[Record] = [*of_both[0][:2], Got(1, 2.0, TASKS[1], [4])]
        of_one += [Got(1, 2.0, TASKS[0], [0, 1, 2, 3]), *of_both[0][3:]]
        verdict = run.verdict(of_one, of_both[1], finished=False)
        assert "(4) lost: worker0.1 had them" in broken(verdict)

    def test_handed_back_at_the_end_of_a_pass_and_leased_in_the_next(self, run: Run) -> None:
        run.give_back(run.leases[1], 1)
        run.lease(1, 9, 1, at_s=3.0)
        assert run.verdict(reader(0, *range(10)), reader(1, *range(10))).broken == []

    def test_handed_back_at_the_end_of_a_pass_and_forgotten(self, run: Run) -> None:
        run.give_back(run.leases[1], 1)
        verdict = run.verdict(reader(0, *range(10)), reader(1, *range(9)))
        assert "(9) lost: it finished without handing them out" in broken(verdict)

    def test_leased_again_in_the_next_pass_without_having_been_handed_back(self, run: Run) -> None:
        run.lease(1, 9, 1, at_s=3.0)
        verdict = run.verdict(reader(0, *range(10)), reader(1, *range(10)))
        assert "(9) of pass 0 leased again" in broken(verdict)

    def test_a_pass_too_many(self, run: Run) -> None:
        run.lease(1, 9, 1, in_pass=2)
        verdict = run.verdict(reader(0, *range(10)), reader(1, *range(10), 9))
        assert "(9) leased that it does not have" in broken(verdict)


class TestHandingBack:
    """A trainer is preempted: what it had not used comes to another one."""

    @staticmethod
    def preempted(*ids: int, unheard: Sequence[int] = ()) -> list[Record]:
        return [*reader(0, *ids, ended_s=None), Left(1, 3.0, [*unheard])]

    def test_all_of_it_is_owed(self, run: Run) -> None:
        assert run.verdict(self.preempted(0), reader(1, *range(1, 10))).broken == []
        verdict = run.verdict(self.preempted(0), reader(1, *range(1, 9)), finished=False)
        assert verdict.lost_unexplained == 1 and "(9) lost" in broken(verdict)

    def test_but_for_what_a_worker_has_not_heard(self, run: Run) -> None:
        trainers = self.preempted(0, unheard=TASKS[1:]), reader(1, *range(1, 8))
        assert run.verdict(*trainers).lost == {TRAINER_GONE: HELD}
        trainers = self.preempted(0, unheard=TASKS[1:]), reader(1, *range(1, 7))
        verdict = run.verdict(*trainers, finished=False)
        assert verdict.lost_unexplained == 1, "no more than it can have had"
        trainers = self.preempted(0, unheard=TASKS[:1]), reader(1, *range(1, 8))
        verdict = run.verdict(*trainers, finished=False)
        assert verdict.lost_unexplained == 2, "this worker has heard"

    def test_nor_for_what_was_leased_later(self, run: Run) -> None:
        run.give_back(run.leases[1], 1)
        run.lease(1, 9, 1, at_s=4.0)
        trainers = self.preempted(0, unheard=TASKS), reader(1, *range(1, 9))
        assert run.verdict(*trainers).lost_unexplained == 1

    def test_and_what_came_back_to_a_worker_that_was_stopping(self, run: Run) -> None:
        run.lives["worker1.1"].terminated_s = 2.5
        trainers = self.preempted(0), reader(1, *range(1, 8))
        assert run.verdict(*trainers).lost == {HANDED_BACK_LATE: HELD}
        trainers = self.preempted(0), reader(1, *range(1, 7))
        assert run.verdict(*trainers, finished=False).lost_unexplained == 1
        run.lives["worker1.1"].terminated_s = 4.5
        trainers = self.preempted(0), reader(1, *range(1, 9))
        assert run.verdict(*trainers, finished=False).lost_unexplained == 1


class TestLeaving:
    def test_one_and_the_other_is_owed_the_rest(self, run: Run) -> None:
        trainers = reader(0, 0, left_s=3.0), reader(1, 1, 2, 3, 4, *range(7, 10))
        verdict = run.verdict(*trainers)
        assert verdict.broken == [] and verdict.lost == {TRAINER_GONE: HELD}
        trainers = reader(0, 0, left_s=3.0), reader(1, 1, 2, 3, 4, 8, 9)
        assert run.verdict(*trainers, finished=False).lost_unexplained == 1

    def test_one_and_the_other_sees_no_end(self, run: Run) -> None:
        trainers = reader(0, 0, left_s=3.0), reader(1, 1, ended_s=None)
        assert "epoch 1 never finished" in broken(run.verdict(*trainers, finished=False))

    def test_a_pause_while_nobody_read(self, run: Run) -> None:
        run.lives["trainer0.1"].ended_s = 30.0
        run.lives["trainer0.2"] = Life("trainer0.2", "trainer", 0, 32.0)
        run.add(31.0, iteration_paused=ev.IterationPaused(iteration_id=ITERATION))
        again = reader(0, 9, name="trainer0.2", joined_s=35.0)
        verdict = run.verdict([*reader(0, 0, ended_s=None), *again])
        assert verdict.broken == [] and verdict.lost == {EPOCH_PAUSED: 8}

    def test_a_pause_while_somebody_read(self, run: Run) -> None:
        run.add(31.0, iteration_paused=ev.IterationPaused(iteration_id=ITERATION))
        assert run.verdict(reader(0, *range(9))).lost_unexplained == 1

    def test_a_pause_is_no_excuse_for_later_tasks(self, run: Run) -> None:
        run.add(0.5, iteration_paused=ev.IterationPaused(iteration_id=ITERATION))
        later = TASKS[1] + 10
        run.add(task_created=ev.TaskCreated(
            task_id=later, iteration_id=ITERATION, worker_id=WORKERS[1]))  # fmt: skip
        run.give_back(run.leases[1], 1)
        run.add(2.0, splits_leased=ev.SplitsLeased(
            lease_id=999, iteration_id=ITERATION, task_id=later, first=9, count=1))  # fmt: skip
        assert run.verdict(reader(0, *range(9))).lost_unexplained == 1


class TestJournal:
    def test_a_split_leased_twice(self, run: Run) -> None:
        run.lease(1, 9, 1)
        assert "(9) of pass 0 leased again" in broken(run.verdict(reader(0, *range(10))))

    def test_a_split_handed_back_may_be_leased_again(self, run: Run) -> None:
        run.give_back(run.leases[1], 1)
        run.lease(1, 9, 1)
        assert run.verdict(reader(0, *range(10))).broken == []

    def test_what_was_begun_was_not_handed_back(self, run: Run) -> None:
        run.give_back(run.leases[1], 1)
        run.lease(0, 8, 1)
        assert any(
            "(8) of pass 0 leased again" in b for b in run.verdict(reader(0, *range(10))).broken
        )

    def test_an_epoch_that_never_finished(self, run: Run) -> None:
        verdict = run.verdict(reader(0, *range(4), ended_s=None), finished=False)
        assert "epoch 1 never finished: 6 elements (4, 5, 6, 7, 8, …)" in broken(verdict)

    def test_a_term_that_does_not_grow(self, run: Run) -> None:
        run.elect(3)
        run.elect(3)
        assert "term 3 follows term 3" in broken(run.verdict(reader(0, *range(10))))

    def test_an_event_of_a_term_that_has_passed(self, run: Run) -> None:
        run.elect(3)
        run.term = 1
        run.add(consumer_left=ev.ConsumerLeft(consumer_id=1))
        run.term = 3
        assert "of term 1 was written in term 3" in broken(run.verdict(reader(0, *range(10))))

    def test_a_gap(self, run: Run) -> None:
        run.finish()
        records = [(n, t, e) for n, (t, e) in enumerate(run.events, 1)]
        assert len(read_history([*records[:-1], (99, *records[-1][1:])]).broken) == 1


def test_when_there_was_no_worker() -> None:
    run = Run()
    for at_s, worker in ((2.0, 0), (3.0, 1)):
        lost = ev.WorkerLost(worker_id=WORKERS[worker], reason="it said goodbye", left=True)
        run.add(at_s, worker_lost=lost)
    run.add(5.0, worker_registered=ev.WorkerRegistered(worker_id=12))
    run.add(6.0, worker_lost=ev.WorkerLost(worker_id=12))
    events = [(n, term, event) for n, (term, event) in enumerate(run.events, 1)]
    assert read_history(events).no_worker_ms == [(3000, 5000), (6000, math.inf)]


class TestProcesses:
    @pytest.mark.parametrize("name", ["worker0.1", "trainer1.1"])
    def test_one_that_ends_by_itself(self, run: Run, name: str) -> None:
        run.lives[name].code = 1
        assert f"{name} ended by itself, with 1" in broken(run.verdict(reader(0, *range(10))))

    def test_one_that_was_killed_did_not(self, run: Run) -> None:
        run.lives["worker0.1"].code = -9
        run.lives["worker0.1"].killed_s = 20.0
        assert run.verdict(reader(0, *range(10))).broken == []

    def test_one_that_stops_badly(self, run: Run) -> None:
        life = run.lives["worker0.1"]
        life.terminated_s, life.code = 20.0, 1
        assert "told to stop, and ended with 1" in broken(run.verdict(reader(0, *range(10))))

    def test_a_worker_that_says_it_dropped_something(self, run: Run) -> None:
        """Whether it may have is a matter of the elements."""
        life = run.lives["worker0.1"]
        life.terminated_s, life.code = 20.0, 3
        assert run.verdict(reader(0, *range(10))).broken == []
        assert run.verdict(reader(0, *range(1, 10)), finished=False).lost_unexplained == 1
        run.lives["trainer0.1"].terminated_s, run.lives["trainer0.1"].code = 20.0, 3
        assert "trainer0.1 was told to stop" in broken(
            run.verdict(reader(0, *range(10)), finished=False)
        )

    def test_one_that_does_not_stop(self, run: Run) -> None:
        life = run.lives["worker0.1"]
        life.terminated_s, life.killed_s, life.code, life.stuck = 20.0, 60.0, -9, True
        assert "had to be killed" in broken(run.verdict(reader(0, *range(10))))
