"""Coordinated reads: tasks join and go at a round on which all consumers agree."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.encoding import decode_state, encode_state
from forebay.service.core.state import Iteration
from forebay.service.errors import FailedPrecondition, InvalidArgument, NotFound

from .given import Given


class Rounds(Given):
    """A coordinated read."""

    def __init__(self, num_consumers: int = 2, sharding: int = ev.OFF) -> None:
        super().__init__()
        self.job_id = self.when(
            c.GetOrCreateJob(
                dataset_id="d", name="rounds", sharding=sharding, num_consumers=num_consumers
            )
        )

    def worker(self, number: int, stock: bool = True, draining: bool = False) -> int:
        return super().worker(number, stock, draining)

    def join(self, stock: bool = False, index: int | None = None) -> int:
        join = c.JoinIteration(job_id=self.job_id, epoch=0, stock=stock, consumer_index=index)
        joined: ev.ConsumerJoined = self.when(join)
        return joined.consumer_id

    def leave(self, consumer_id: int) -> None:
        self.when(c.LeaveIteration(consumer_id=consumer_id, reason="r"))

    def report(self, consumer_id: int, current: int, blocked: int | None = None) -> list[str]:
        self.when(
            c.ReportRound(consumer_id=consumer_id, current_round=current, blocked_round=blocked)
        )
        return self.then

    def restart(self) -> None:
        """The dispatcher begins anew, from a snapshot."""
        self.state = decode_state(encode_state(self.state))

    def why_left(self, consumer_id: int) -> str:
        left = [event.consumer_left for _, event in self.state.recent]
        return next(event.reason for event in left if event.consumer_id == consumer_id)

    @property
    def read(self) -> Iteration:
        (iteration,) = self.state.iterations.values()
        return iteration

    @property
    def target(self) -> int | None:
        barrier = self.read.barrier
        return None if barrier is None else barrier.target_round

    @property
    def starting_rounds(self) -> list[int]:
        return [self.state.tasks[task_id].starting_round for task_id in self.read.tasks]


def test_the_workers_that_are_there_begin_with_round_0() -> None:
    rounds = Rounds()
    rounds.worker(1), rounds.worker(2)
    rounds.join()
    assert rounds.then == [
        "iteration_created", "task_created", "task_created", "consumer_joined",
    ]  # fmt: skip
    rounds.join()
    assert rounds.then == ["consumer_joined"]
    assert rounds.starting_rounds == [0, 0]


@pytest.mark.parametrize("stock", [False, True])
def test_consumers_of_both_kinds_cannot_share_a_read(stock: bool) -> None:
    rounds = Rounds()
    rounds.worker(1)
    first = rounds.join(stock)
    rounds.restart()
    with pytest.raises(FailedPrecondition, match=r"job rounds, .* use one kind"):
        rounds.join(not stock)
    rounds.join(stock)
    rounds.leave(first)
    with pytest.raises(FailedPrecondition, match="leave"):
        rounds.join(not stock)
    rounds.leave(max(rounds.state.consumers))
    rounds.join(not stock)
    shared = rounds.iteration("shared")  # of a read without rounds
    rounds.when(c.JoinIteration(job_id=rounds.state.job_by_name["shared"], epoch=0, stock=True))
    assert len(rounds.state.iterations[shared.iteration_id].consumers) == 2


def test_a_worker_joins_at_a_round_that_no_consumer_has_begun() -> None:
    rounds = Rounds()
    rounds.worker(1)
    a, b = rounds.join(), rounds.join()
    assert rounds.report(a, 3) == ["consumer_began"]
    assert rounds.report(a, 4) == []
    new = rounds.worker(2)
    assert rounds.then == ["worker_registered", "task_proposed"]
    task_id = rounds.task_of(new)  # which the worker may prepare
    assert task_id not in rounds.read.tasks
    assert rounds.target == 0
    assert rounds.report(a, 5) == ["round_targeted"]
    assert rounds.target == 6
    rounds.restart()
    assert rounds.report(b, 7) == ["consumer_began", "round_targeted"]
    assert rounds.target == 9
    assert rounds.report(a, 6, blocked=6) == ["consumer_blocked"]  # it has not heard of 9 yet
    rounds.restart()
    assert rounds.report(a, 9, blocked=9) == []  # nor begins it: it waits there
    assert rounds.report(b, 9) == ["round_targeted"]  # it heard of 9 too late
    assert rounds.target == 13
    assert rounds.report(b, 12, blocked=13) == ["consumer_blocked", "task_started"]
    assert rounds.starting_rounds == [0, 13]
    assert rounds.read.tasks[1] == task_id
    assert rounds.target is None


def test_all_workers_that_join_meanwhile_start_in_the_same_round() -> None:
    rounds = Rounds(num_consumers=1)
    a = rounds.join()
    rounds.worker(1)
    rounds.report(a, 0)
    rounds.worker(2)
    assert rounds.report(a, 1, blocked=1) == ["consumer_blocked", "task_started", "task_started"]
    assert rounds.starting_rounds == [1, 1]


def test_a_round_waits_for_as_many_consumers_as_the_job_has() -> None:
    rounds = Rounds(num_consumers=2)
    a = rounds.join()
    rounds.worker(1)
    rounds.report(a, 0)
    assert rounds.report(a, 1, blocked=1) == ["consumer_blocked"]
    b = rounds.join()
    assert rounds.report(a, 1, blocked=1) == []
    assert rounds.report(b, 0) == ["consumer_began"]
    assert rounds.report(b, 0, blocked=1) == ["consumer_blocked", "task_started"]


def test_a_consumer_that_came_back_does_not_stand_for_another() -> None:
    rounds = Rounds(num_consumers=2)
    rounds.worker(1)
    a, b = rounds.join(), rounds.join()
    rounds.report(a, 3), rounds.report(b, 3)
    rounds.worker(2)
    rounds.report(a, 3)
    rounds.report(a, 4, blocked=4)
    again = rounds.join()  # of a, which was killed
    rounds.report(again, 0)
    assert rounds.report(again, 0, blocked=4) == ["consumer_blocked"]
    idle = rounds.join()  # that never reads
    rounds.leave(a)
    assert rounds.report(b, 4, blocked=4) == ["consumer_blocked", "task_started"]
    rounds.leave(idle)


def test_a_consumer_that_others_wait_for_may_leave() -> None:
    rounds = Rounds(num_consumers=2)
    rounds.worker(1)
    a, b, more = rounds.join(), rounds.join(), rounds.join()
    for consumer in (a, b, more):
        rounds.report(consumer, 1)
    rounds.worker(2)
    rounds.report(a, 1)
    rounds.report(a, 2, blocked=2)
    assert rounds.report(b, 2, blocked=2) == ["consumer_blocked"]
    rounds.leave(more)
    assert rounds.report(a, 2, blocked=2) == ["task_started"]


def test_a_lost_worker_that_was_pending_holds_up_nobody() -> None:
    rounds = Rounds(num_consumers=2)
    rounds.worker(1)
    a, b = rounds.join(), rounds.join()
    late = rounds.worker(2)
    rounds.report(a, 5)
    rounds.report(a, 6, blocked=6)
    rounds.when(c.LoseWorker(worker_id=late, reason="r"))
    assert rounds.then == ["worker_lost"]
    assert rounds.target is None
    rounds.worker(2)  # once more: and who was blocked then need not be now
    assert rounds.then == ["worker_registered", "task_proposed"]
    assert rounds.report(b, 6) == ["consumer_began", "round_targeted"]
    assert rounds.report(b, 6, blocked=7) == ["consumer_blocked"]
    assert rounds.report(a, 8) == ["round_targeted"]


def test_a_lost_worker_stays_listed_until_all_do_without_it() -> None:
    rounds = Rounds()
    lost, other = rounds.worker(1), rounds.worker(2)
    a, _ = rounds.join(), rounds.join()
    task_id, others = rounds.task_of(lost), rounds.task_of(other)
    rounds.when(c.LoseWorker(worker_id=lost, reason="r"))
    assert rounds.then == ["worker_lost"]
    assert rounds.read.tasks == [task_id, others]
    orphan = rounds.state.tasks[task_id].orphan
    assert orphan is not None
    assert (orphan.address, orphan.uid) == ("w:1", 1)
    rounds.restart()
    rounds.when(c.RemoveTask(task_id=task_id, round=7))
    assert rounds.then == ["task_removed"]
    assert rounds.read.tasks == [others]
    rounds.when(c.RemoveTask(task_id=task_id, round=7))
    assert rounds.then == []
    rounds.report(a, 7)
    rounds.worker(1)
    assert rounds.then == ["worker_registered", "task_proposed"]


@pytest.mark.parametrize("lost_before", [True, False])
def test_a_worker_that_comes_to_the_address_goes_on(lost_before: bool) -> None:
    rounds = Rounds(sharding=ev.DYNAMIC)
    first, _ = rounds.worker(1), rounds.worker(2)
    rounds.join()
    task_id, tasks = rounds.task_of(first), list(rounds.read.tasks)
    lease = rounds.lease(task_id, 5)
    if lost_before:
        rounds.when(c.LoseWorker(worker_id=first, reason="r"))
        assert rounds.then == ["lease_lost", "worker_lost"]
        assert rounds.worker(1)  # the same process
        assert rounds.then == ["worker_registered", "task_created"]
        assert list(rounds.state.leases) == [lease.lease_id]
    second = rounds.when(c.RegisterWorker(address="w:1", uid=9, stock=True))
    assert rounds.then == ["lease_lost", "worker_lost", "worker_registered", "task_created"]
    assert rounds.read.tasks == tasks
    assert rounds.task_of(second) == task_id
    assert not rounds.state.leases
    assert rounds.lease(task_id, 5).first == 5


def test_a_worker_that_consumers_cannot_reach_gets_another_task() -> None:
    rounds = Rounds()
    worker_id = rounds.worker(1)
    rounds.join()
    rounds.when(c.RemoveTask(task_id=rounds.task_of(worker_id), round=7))
    assert rounds.state.workers[worker_id].tasks == set()
    assert rounds.worker(1) == worker_id
    assert rounds.then == ["task_proposed"]
    rounds.worker(1)
    assert rounds.then == []
    with pytest.raises(FailedPrecondition, match="pending"):
        rounds.when(c.RemoveTask(task_id=rounds.task_of(worker_id), round=7))


def test_another_process_of_forebays_at_the_address_is_another_task() -> None:
    """It cannot tell which of its elements is of which round of the process before."""
    rounds = Rounds()
    first = rounds.worker(1, stock=False)
    rounds.join(), rounds.join()
    task_id = rounds.task_of(first)
    rounds.when(c.RegisterWorker(address="w:1", uid=9))
    assert rounds.then == ["worker_lost", "worker_registered", "task_proposed"]
    rounds.when(c.RegisterWorker(address="w:1", uid=9))
    assert rounds.then == []
    assert rounds.read.tasks == [task_id]
    rounds.when(c.RemoveTask(task_id=task_id, round=7))
    assert rounds.read.removed == {task_id: 7}


def test_a_task_of_another_read_is_not_removed() -> None:
    rounds = Rounds()
    worker_id = rounds.worker(1)
    rounds.iteration()
    with pytest.raises(FailedPrecondition, match="no coordinated read"):
        rounds.when(c.RemoveTask(task_id=rounds.task_of(worker_id), round=7))


@pytest.mark.parametrize("sharding", [ev.OFF, ev.DYNAMIC])
def test_all_begin_anew_with_a_consumer_that_is_started_again(sharding: int) -> None:
    rounds = Rounds(sharding=sharding)
    first = rounds.worker(1)
    a, b = rounds.join(index=0), rounds.join(index=1)
    rounds.lease(rounds.task_of(first), 5) if sharding == ev.DYNAMIC else None
    rounds.report(a, 30), rounds.report(b, 30)
    rounds.worker(2)  # its task is pending
    before = set(rounds.read.all_tasks)
    rounds.restart()
    again = rounds.join(index=1)
    over, begun = ["iteration_collected"], ["iteration_created"]
    if sharding == ev.DYNAMIC:
        over, begun = ["lease_lost", "iteration_paused"], []
    created = ["task_created", "task_created", "consumer_joined"]
    assert rounds.then == ["consumer_left", "consumer_left", *over, *begun, *created]
    assert rounds.read.consumers == {again}
    assert "consumer_index=1" in rounds.why_left(a) and "start all" in rounds.why_left(a)
    assert "consumer_index=1, which is this one's" in rounds.why_left(b)
    for gone in (a, b):
        with pytest.raises(NotFound):
            rounds.report(gone, 31)
    rounds.join(index=0)
    assert rounds.then == ["consumer_joined"]  # which nobody has to make room for
    assert rounds.starting_rounds == [0, 0] and not before & set(rounds.read.all_tasks)
    if sharding == ev.DYNAMIC:
        assert rounds.lease(rounds.task_of(first), 5).first == 5


@pytest.mark.parametrize("sharding", [ev.OFF, ev.DYNAMIC])
def test_all_begin_anew_with_a_consumer_that_left_in_order_and_comes_back(sharding: int) -> None:
    """It begins with round 0, which the others have passed."""
    rounds = Rounds(sharding=sharding)
    rounds.worker(1)
    a, b = rounds.join(index=0), rounds.join(index=1)
    rounds.report(a, 30), rounds.report(b, 30)
    rounds.leave(b)
    assert rounds.then == ["consumer_left"]
    before = set(rounds.read.all_tasks)
    rounds.restart()
    again = rounds.join(index=1)
    over = ["iteration_collected", "iteration_created"]
    over = over if sharding == ev.OFF else ["iteration_paused"]
    assert rounds.then == ["consumer_left", *over, "task_created", "consumer_joined"]
    assert rounds.read.consumers == {again}
    assert rounds.starting_rounds == [0] and not before & set(rounds.read.all_tasks)
    with pytest.raises(NotFound):
        rounds.report(a, 31)
    rounds.join(index=0)
    assert rounds.then == ["consumer_joined"]
    for consumer in sorted(rounds.read.consumers):
        rounds.report(consumer, 5)
        rounds.leave(consumer)
    rounds.join(index=0)  # none of those that began with it is there
    assert rounds.then[-2:] == ["task_created", "consumer_joined"]
    assert "consumer_left" not in rounds.then


def test_a_consumer_that_never_began_is_replaced_without_a_restart() -> None:
    """Its client gave up before it was answered, and joins again as another caller."""
    rounds = Rounds()
    rounds.worker(1)
    unheard, a = rounds.join(index=1), rounds.join(index=0)
    rounds.report(a, 0)
    rounds.restart()
    again = rounds.join(index=1)
    assert rounds.then == ["consumer_left", "consumer_joined"]
    assert rounds.read.consumers == {a, again}
    with pytest.raises(NotFound):
        rounds.report(unheard, 0)
    alone = Rounds()
    alone.worker(1)
    alone.join(index=1)
    kept = list(alone.read.tasks)
    alone.join(index=1)
    assert alone.then == ["consumer_left", "consumer_joined"]
    assert alone.read.tasks == kept


@pytest.mark.parametrize("sharding", [ev.OFF, ev.DYNAMIC])
def test_consumers_that_are_ejected_begin_anew(sharding: int) -> None:
    rounds = Rounds(sharding=sharding)
    rounds.worker(1)
    a, b = rounds.join(index=0), rounds.join(index=1)
    rounds.report(a, 30), rounds.report(b, 31)
    eject = c.EjectConsumers(iteration_id=rounds.read.iteration_id, reason="torn")
    rounds.when(eject)
    over = "iteration_collected" if sharding == ev.OFF else "iteration_paused"
    assert rounds.then == ["consumer_left", "consumer_left", over]
    assert rounds.why_left(a) == rounds.why_left(b) == "torn"
    rounds.when(eject)
    assert rounds.then == []
    rounds.restart()
    for index in (1, 0):
        rounds.join(index=index)
        assert "consumer_left" not in rounds.then
    assert rounds.starting_rounds == [0]


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_of_no_consumer(index: int) -> None:
    with pytest.raises(InvalidArgument, match=f"consumer_index={index} is none of the 2"):
        Rounds().join(index=index)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_consumers": 0}, "num_consumers=0 must be from 1 to 65536"),
        ({"num_consumers": 1 << 41}, "num_consumers=2199023255552 must be from 1 to 65536"),
        ({"name": ""}, "without a name; set job_name"),
        ({"cross_trainer_cache": True}, "cross-trainer cache; leave out one of them"),
        ({"sharding": ev.DATA}, "static sharding .DATA.; use OFF or DYNAMIC"),
        ({"target_workers": 3}, 'LOCAL". Coordinated reads require non-local workers: all'),
    ],
)
def test_options_that_do_not_go_with_a_coordinated_read_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    wanted = {"dataset_id": "d", "name": "n", "sharding": ev.OFF, "num_consumers": 2}
    with pytest.raises(InvalidArgument, match=message):
        Given().when(c.GetOrCreateJob(**{**wanted, **fields}))


@pytest.mark.parametrize("reported", [(-1, None), (1 << 62, None), (1, -1), (1, 1 << 62)])
def test_invalid_rounds_are_refused(reported: tuple[int, int | None]) -> None:
    rounds = Rounds()
    consumer = rounds.join()
    with pytest.raises(InvalidArgument, match="rounds are from 0"):
        rounds.report(consumer, *reported)
    with pytest.raises(NotFound, match="Consumer id 9999"):
        rounds.report(9999, 1)


def test_tasks_of_a_coordinated_read_have_no_end() -> None:
    rounds = Rounds()
    worker_id = rounds.worker(1)
    rounds.join()
    rounds.when(c.CompleteTask(task_id=rounds.task_of(worker_id)))
    assert rounds.then == []


def test_a_worker_that_drains_joins_no_round_again() -> None:
    rounds = Rounds(num_consumers=1)
    drains, stays = rounds.worker(1, stock=False), rounds.worker(2, stock=False)
    consumer = rounds.join()
    rounds.worker(1, stock=False, draining=True)
    rounds.when(c.RemoveTask(task_id=rounds.task_of(drains), round=9))
    rounds.worker(1, stock=False, draining=True)
    assert rounds.then == []
    rounds.worker(2, stock=False)
    rounds.when(c.RemoveTask(task_id=rounds.task_of(stays), round=9))
    rounds.worker(2, stock=False)
    assert rounds.then == ["task_proposed"]
    assert rounds.report(consumer, 0) == ["consumer_began", "round_targeted"]


def test_a_worker_that_drains_begins_no_round_that_it_was_to_join() -> None:
    """Nobody has had an element of it, so others read its splits."""
    rounds = Rounds(num_consumers=1, sharding=ev.DYNAMIC)
    stays = rounds.worker(1, stock=False)
    consumer = rounds.join()
    drains, other = rounds.worker(2, stock=False), rounds.worker(3, stock=False)
    pending, begun = rounds.task_of(drains), rounds.task_of(other)
    lease = rounds.lease(pending, 9)
    rounds.worker(2, stock=False, draining=True)
    assert rounds.then == ["worker_drains", "lease_returned", "task_removed"]
    rounds.restart()
    assert not rounds.state.workers[drains].tasks
    again = rounds.lease(rounds.task_of(stays), 9)
    assert again.first == lease.first
    assert rounds.report(consumer, 0, blocked=0) == [
        "consumer_began", "consumer_blocked", "task_started",
    ]  # fmt: skip
    assert rounds.read.tasks == [rounds.task_of(stays), begun]
    rounds.worker(4, stock=False)
    assert rounds.target == 0
    rounds.worker(4, stock=False, draining=True)
    assert rounds.then == ["worker_drains", "task_removed"]
    assert rounds.target is None, "there is nothing to stop for any more"
