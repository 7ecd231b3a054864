"""What the events tell about jobs, when the state has forgotten it."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.cli.audit_shared import unordered
from forebay.service.core import commands as c
from forebay.service.core.job_history import JobHistories, JobHistory
from forebay.service.core.state import State

from .given import Given
from .test_claims import Claiming
from .test_ordered import ORDER, Ordered


class Following(Given):
    """Histories that follow datasets and jobs."""

    now_ms, step_ms = 0, 1

    def __init__(self, *how: Any) -> None:
        self.histories = JobHistories(State())
        super().__init__(*how)

    def event(self, event: ev.Event) -> None:
        self.histories.observe(self.state, event)
        super().event(event)

    @property
    def history(self) -> JobHistory:
        """Of the only job."""
        self.histories.follow_end(self.state)
        (history,) = self.histories.jobs.values()
        return history


class Followed(Following, Ordered):
    """Of ordered jobs, and others."""


class FollowedClaims(Following, Claiming):
    """Of a job that is read at least once."""


def test_the_groups_of_an_ordered_job() -> None:
    given = Followed()
    first, second = given.join(0, start=0), given.join(1, start=0)
    given.leave(first)
    again = given.join(0, start=0)  # it was restarted
    for consumer in (again, second):
        given.leave(consumer)
    given.join(2, of=3, start=80)
    groups = given.history.groups()
    ids = [[stay.consumer_id for stay in group] for group in groups]
    assert ids[0] == [first.consumer_id, second.consumer_id, again.consumer_id]
    (last,) = groups[1]
    assert last.member is not None and (last.member.start_position, last.left_ms) == (80, None)
    assert (groups[0][0].left_ms, groups[0][0].why) == (5, "r")
    assert (groups[0][0].joined_ms or 0) < (groups[0][1].joined_ms or 0) < 5
    assert first.position is None and groups[0][2].left_ms == 7


def test_who_left_before_a_change_knew_nothing_of_it() -> None:
    """Two begin again where they began, one by one: somebody reads all the time."""
    given = Followed()
    before = [given.join(index, start=0) for index in range(2)]
    behind = []
    for index, consumer in enumerate(before):
        given.leave(consumer)
        behind.append(given.join(index, start=0))
    job_id, readers = given.history.job.job_id, tuple(each.consumer_id for each in behind)
    change = ev.ScheduleChange(place=24, skipped=8)
    given.when(c.ChangeSchedule(job_id=job_id, change=change, readers=readers))
    ids = [tuple(stay.consumer_id for stay in group) for group in given.history.groups()]
    assert ids == [tuple(each.consumer_id for each in before), readers]


def test_a_job_that_was_removed_is_remembered_with_its_lengths() -> None:
    given = Followed()
    consumer = given.join(0, of=1, name="")
    given.when(c.LearnLengths(consumer_id=consumer.consumer_id, bundles=(3, 5), lengths=(7, 0)))
    given.leave(consumer)
    assert not given.state.jobs
    history = given.history
    assert history.job.user_name == str(history.job.job_id)
    assert history.lengths == [-1, -1, -1, 7, -1, 0] + 94 * [-1]
    assert history.learned == {1: [(4, 2)]}


def test_users_names() -> None:
    given = Followed()
    given.job(name="dataset_id=/d/train")
    assert given.history.job.user_name == "train"


def test_splits_that_are_lost_and_found() -> None:
    given = Followed()
    one, other = given.worker(1), given.worker(2)
    given.iteration("j")
    begun, kept = (given.lease(given.task_of(w), 5) for w in (one, other))
    assert begun and kept
    given.when(c.LoseWorker(worker_id=one, reason="silent"))
    given.when(c.LoseWorker(worker_id=other, reason="killed", left=True))
    assert [(x.splits, x.worker, x.why, x.found) for x in given.history.lost] == [
        ((0, 4), "w:1", "silent", False),
        ((5, 9), "w:2", "killed", False),
    ]
    given.worker(1)  # that process comes back
    assert [lost.found for lost in given.history.lost] == [True, False]
    assert given.history.leased_twice == []


def test_leases_of_a_job_that_nobody_reads() -> None:
    given = Followed()
    worker = given.worker(1)
    joined = given.iteration("j")
    given.lease(given.task_of(worker), 5)
    given.when(c.LeaveIteration(consumer_id=joined.consumer_id, reason="r"))
    given.when(c.CollectIteration(iteration_id=joined.iteration_id))
    (lost,) = given.history.lost
    assert (lost.splits, lost.why) == ((0, 4), "nobody read the epoch any more")


@pytest.mark.parametrize(("first", "twice"), [(0, True), (3, True), (5, False), (20, False)])
def test_splits_that_are_leased_twice_are_noticed(first: int, twice: bool) -> None:
    """No dispatcher decides that; a journal might say so."""
    given = Followed()
    worker = given.worker(1)
    given.iteration("j")
    task_id = given.task_of(worker)
    lease = given.lease(task_id, 8)
    given.hand_back(lease, 3)
    leased = ev.SplitsLeased(
        lease_id=99, iteration_id=lease.iteration_id, task_id=task_id, first=first, count=2
    )
    given.histories.observe(given.state, ev.Event(splits_leased=leased))
    assert given.history.leased_twice == [leased] * twice


def test_a_history_that_begins_with_a_state() -> None:
    given = Followed()
    consumer = given.join(0, of=1, start=40)
    histories = JobHistories(given.state)
    (history,) = histories.jobs.values()
    (stay,) = history.stays
    assert stay.consumer_id == consumer.consumer_id and stay.joined_ms is None
    assert stay.member is not None and stay.member.start_position == 40
    assert history.job.order is not None and history.job.order.seed == ORDER.seed


def test_the_start_of_a_group_is_in_the_journal() -> None:
    member = ev.GroupMember(consumers=1, batch_size=8, start_step=3, drop_remainder=True)
    given = Followed()
    job_id = given.job().job_id
    given.when(c.JoinIteration(job_id=job_id, epoch=0, member=member))
    assert given.history.stays[0].member == member


def test_claims_that_are_done_and_that_return() -> None:
    given = FollowedClaims(4)
    one, other = given.join(), given.join()
    given.claim(one, most=1)
    given.claim(other, most=1)
    given.claim(one, most=1, done=[0])
    given.claim(other, most=0, p1=7)
    given.leave(other)
    given.claim(one, most=2)
    history = given.history
    assert [(x.place, x.consumer_id, x.start, x.cursor, x.why) for x in history.claims] == [
        (0, one, 0, 0, None),
        (1, other, 0, 7, "r"),
        (2, one, 0, 0, None),
        (1, one, 7, 7, None),
    ]
    done, returned, *_ = history.claims
    assert done.done_ms is not None and done.returned_ms is None
    assert returned.done_ms is None and returned.returned_ms is not None


def test_claims_of_a_state_that_the_history_begins_with() -> None:
    given = Claiming(4)
    consumer = given.join()
    given.claim(consumer, most=1)
    given.claim(consumer, most=0, p0=3)
    histories = JobHistories(given.state)
    histories.follow_end(given.state)
    (history,) = histories.jobs.values()
    (claim,) = history.claims
    assert (claim.consumer_id, claim.cursor, claim.claimed_ms) == (consumer, 3, None)


def test_what_a_repair_cut_off_came_after_the_last_event_that_is_left() -> None:
    given = Followed()
    given.when(c.JoinJob(dataset_id="d", name="shared", sharding=ev.DYNAMIC, epoch=0))
    left = given.state.sequence
    cut = ev.LeaderElected(term=2, journal_id="k", after_repair=True)
    given.event(ev.Event(leader_elected=cut))
    assert given.history.missing == f"a repair cut off what came after event {left}"


def test_what_may_be_missing_where_a_worker_was_lost() -> None:
    """What was taken is not among it, and what came back with the worker goes on."""
    given = Followed()
    given.when(c.RegisterWorker(address="w:1", uid=1))
    given.when(c.JoinJob(dataset_id="d", name="shared", sharding=ev.DYNAMIC, epoch=0))
    (task,) = given.state.tasks

    def lease(number: int, **report: Any) -> int:
        command = c.LeaseSplits(
            request=(f"task/{task}/0", number), task_id=task, source=0, pass_number=0, want=5,
            **report,
        )  # fmt: skip
        return given.when(command).lease_id

    a = lease(1, dropped=2)
    untold = "2 elements that workers had made may have reached nobody, and of 2 the journal does"
    assert untold in unordered(given.state, given.history)["promise"]
    b = lease(2, taken=(a,))  # so its pipeline tells splits apart
    assert "does not tell" not in unordered(given.state, given.history)["promise"]
    d = lease(3, begun=(b,))
    e = lease(4, begun=(d,))
    lease(5, lost=(e,), dropped=3)
    (worker,) = given.state.workers
    given.when(c.LoseWorker(worker_id=worker, reason="no sign of life"))
    found = [(lost.splits, lost.mixed, lost.found) for lost in given.history.lost]
    assert found == [((15, 19), False, False), ((20, 24), False, False), ((5, 14), True, False)]
    assert [dropped.elements for dropped in given.history.dropped] == [2, 3]
    given.when(c.RegisterWorker(address="w:1", uid=1))
    assert [lost.found for lost in given.history.lost] == [False, True, True]
    given.when(c.LeaseSplits(task_id=task, all_taken=True))
    given.when(c.LoseWorker(worker_id=max(given.state.workers), reason="no sign of life"))
    assert sum(lost.mixed for lost in given.history.lost) == 1
