"""Terms: what a leader begins with, and after a repair."""

from __future__ import annotations

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.machine import apply, decide
from forebay.service.core.state import State

from .given import Given


def test_two_journals_do_not_share_ids() -> None:
    ids = set()
    for journal_id in ("a", "b"):
        state = State()
        elect = c.ElectLeader(term=1, address="a:1", version="0", journal_id=journal_id)
        for event in decide(state, elect, 1).events:
            apply(state, event)
        ids.add(state.next_id)
    assert len(ids) == 2


def test_after_a_repair_nobody_goes_on_and_no_id_comes_back() -> None:
    given = Given()
    worker_id = given.worker(1)
    joined = given.iteration("shared")
    task_id = given.task_of(worker_id)
    lease = given.lease(task_id, 10)
    given.when(c.LoseWorker(worker_id=given.worker(2), reason="no sign of life"))
    cut = ev.LeaderElected(term=2, journal_id="k", after_repair=True)
    apply(given.state, ev.Event(leader_elected=cut))
    given.when(c.ElectLeader(term=3, address="a:1", version="0", journal_id="unused"))
    assert given.then == ["lease_lost", "consumer_left", "worker_lost", "leader_elected"]
    state = given.state
    assert not state.lost_tasks
    assert state.predecessors == ["j"]
    given.when(c.ElectLeader(term=4, address="a:1", version="0", journal_id="unused"))
    assert given.then == ["leader_elected"]
    assert not (state.workers or state.worker_at or state.consumers or state.tasks or state.leases)
    assert state.iterations[joined.iteration_id].ledgers[0].lost == [(0, lease.count)]
    again = given.worker(1)
    assert again > lease.lease_id + 1000
    given.iteration("shared")
    lease = given.lease(given.task_of(again), 10)
    assert lease.first == 10


@pytest.mark.parametrize("sharding", [ev.OFF, ev.DYNAMIC])
def test_after_a_repair_a_coordinated_read_begins_anew_with_round_0(sharding: int) -> None:
    """Rather than with tasks that wait for workers, in rounds that nobody counts any more."""
    given = Given()
    given.worker(1, stock=True)
    job = c.GetOrCreateJob(dataset_id="d", name="rounds", sharding=sharding, num_consumers=1)
    job_id = given.when(job)
    joined = given.when(c.JoinIteration(job_id=job_id, epoch=0))
    task_id = max(given.state.tasks)
    if sharding == ev.DYNAMIC:
        given.lease(task_id, 5)
    given.worker(2, stock=True)  # pending
    given.when(c.ReportRound(consumer_id=joined.consumer_id, current_round=7))
    cut = ev.LeaderElected(term=2, journal_id="k", after_repair=True)
    apply(given.state, ev.Event(leader_elected=cut))
    given.when(c.ElectLeader(term=3, address="a:1", version="0", journal_id="unused"))
    over = "iteration_collected" if sharding == ev.OFF else "iteration_paused"
    assert given.then.count(over) == 1
    assert not (given.state.tasks or given.state.leases)
    given.worker(1, stock=True)
    given.when(c.JoinIteration(job_id=job_id, epoch=0))
    (task,) = given.state.tasks.values()
    assert (task.starting_round, task.orphan) == (0, None)
    assert task.task_id != task_id
