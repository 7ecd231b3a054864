"""Coordinated reads: in each round, every consumer gets an element of every task, or none does.

Consumers count rounds by themselves, and visit their tasks in the same order in each round. So the
dispatcher only decides each task's first and last round, such that all consumers agree. The
protocol is that of TensorFlow's tf.data service, whose clients take part:

A new task is *pending*. The dispatcher picks a target round, past that of the first consumer to
report, and tells all consumers. Each one stops before the target round: it is *blocked*. A consumer
that has already begun that round moves the target, by twice as many rounds each time. Once all are
blocked, and as many as the job wants have joined, all pending tasks start in the target round. A
consumer stays blocked until it hears of a later target round, or of none. So each message may be
lost or delayed, and the dispatcher may crash after any step.

The dispatcher removes a task when all consumers ask for it in the same round: none then has an
element of that round. A lost worker's task is *orphaned* until its removal: it stays listed at the
same address, so that all consumers drop it together. A worker that returns resumes it.
"""

from __future__ import annotations

from ...journal.proto import events_pb2 as ev
from ..errors import FailedPrecondition, InvalidArgument
from . import tasks
from .base import Bodies, Command, Decision, EventKind, find_consumer, reserve_id
from .read_kinds import ROUNDS_READ, kind_of
from .splits import lost_leases
from .state import Barrier, Consumer, Iteration, State, Task

MAX_ROUND = 1 << 60
MAX_STEP_LOG2 = 20
"""The target round moves by at most 2**20 rounds, about a million."""


MAX_REMOVED = 1000
"""Removed tasks remembered per iteration, so that a late consumer learns the round."""


class ReportRound(Command, frozen=True, kw_only=True):
    """A consumer reports its position.

    → (ConsumerBegan,) RoundTargeted, or (ConsumerBlocked,) TaskStarted …
    """

    consumer_id: int
    current_round: int  # the round that it is in, or begins next
    blocked_round: int | None = None  # the round that it stopped before


class RemoveTask(Command, frozen=True, kw_only=True):
    """All consumers wait for this task in this round, and give up its element. → LeaseLost …,
    TaskRemoved. An unknown task was removed already: no event.
    """

    task_id: int
    round: int


def _report_round(state: State, command: ReportRound) -> Decision:
    consumer = find_consumer(state, command.consumer_id)
    current, blocked = command.current_round, command.blocked_round
    if not (0 <= current <= MAX_ROUND and (blocked is None or 0 <= blocked <= MAX_ROUND)):
        raise InvalidArgument(
            f"consumer {consumer.consumer_id} reports round {current} and to be blocked before "
            f"{blocked}; rounds are from 0 to {MAX_ROUND}"
        )
    iteration = state.iterations[consumer.iteration_id]
    if kind_of(state.jobs[iteration.job_id]) is not ROUNDS_READ:
        return Decision([], None)
    events: Bodies = []
    if not consumer.began:
        events.append(ev.ConsumerBegan(consumer_id=consumer.consumer_id))
    barrier = iteration.barrier
    if barrier is None:
        return Decision(events, None)
    if consumer.consumer_id in barrier.blocked:
        return Decision([*events, *_start_if_all_are_blocked(state, iteration, consumer)], None)
    if blocked is not None and blocked <= barrier.target_round:
        events.append(ev.ConsumerBlocked(consumer_id=consumer.consumer_id))
        events += _start_if_all_are_blocked(state, iteration, consumer)
    elif current >= barrier.target_round:
        targeted = ev.RoundTargeted(
            iteration_id=iteration.iteration_id,
            target_round=current + (1 << min(barrier.targets, MAX_STEP_LOG2)),
        )
        events.append(targeted)
    return Decision(events, None)


def _start_if_all_are_blocked(state: State, iteration: Iteration, another: Consumer) -> Bodies:
    barrier = iteration.barrier
    assert barrier is not None
    blocked = barrier.blocked | {another.consumer_id}
    begun = {i for i in iteration.consumers if state.consumers[i].began}
    wanted = state.jobs[iteration.job_id].num_consumers
    assert wanted is not None
    if not begun <= blocked or len(blocked) < wanted:
        return []
    return [
        ev.TaskStarted(task_id=task_id, starting_round=barrier.target_round)
        for task_id in barrier.tasks
    ]


def _remove_task(state: State, command: RemoveTask) -> Decision:
    if (task := state.tasks.get(command.task_id)) is None:
        return Decision([], None)
    iteration = state.iterations[task.iteration_id]
    if kind_of(state.jobs[iteration.job_id]) is not ROUNDS_READ:
        raise FailedPrecondition(
            f"task {task.task_id} belongs to no coordinated read, so no round removes it"
        )
    if task.task_id not in iteration.tasks:
        raise FailedPrecondition(
            f"task {task.task_id} is pending: no consumer can have asked for its elements"
        )
    removed = ev.TaskRemoved(task_id=task.task_id, round=command.round)
    return Decision([*lost_leases(state, [task.task_id]), removed], None)


def _consumer_began(state: State, event: ev.ConsumerBegan) -> None:
    consumer = state.consumers[event.consumer_id]
    consumer.began = True
    if consumer.index is not None:
        state.iterations[consumer.iteration_id].begun_indices.add(consumer.index)


def _task_proposed(state: State, event: ev.TaskProposed) -> None:
    task_id = reserve_id(state, event.task_id)
    state.tasks[task_id] = Task(task_id, event.iteration_id, event.worker_id)
    iteration = state.iterations[event.iteration_id]
    if iteration.barrier is None:
        iteration.barrier = Barrier()
    iteration.barrier.tasks.append(task_id)
    iteration.version += 1
    worker = state.workers[event.worker_id]
    worker.tasks.add(task_id)
    worker.version += 1


def _round_targeted(state: State, event: ev.RoundTargeted) -> None:
    iteration = state.iterations[event.iteration_id]
    barrier = iteration.barrier
    assert barrier is not None
    barrier.target_round = event.target_round
    barrier.targets += 1
    iteration.version += 1


def _consumer_blocked(state: State, event: ev.ConsumerBlocked) -> None:
    barrier = state.iterations[state.consumers[event.consumer_id].iteration_id].barrier
    assert barrier is not None
    barrier.blocked.add(event.consumer_id)


def _task_started(state: State, event: ev.TaskStarted) -> None:
    task = state.tasks[event.task_id]
    task.starting_round = event.starting_round
    iteration = state.iterations[task.iteration_id]
    tasks.no_longer_pending(iteration, task.task_id)
    iteration.tasks.append(task.task_id)
    iteration.running_tasks += 1
    iteration.version += 1


def _task_removed(state: State, event: ev.TaskRemoved) -> None:
    task = state.tasks[event.task_id]
    iteration = state.iterations[task.iteration_id]
    is_listed = task.task_id in iteration.tasks
    tasks.remove(state, task)
    # A pending one is known to no consumer, and those of other reads need no round.
    if not (is_listed and kind_of(state.jobs[iteration.job_id]).has_rounds):
        return
    removed = iteration.removed
    removed[task.task_id] = event.round
    if len(removed) > MAX_REMOVED:
        del removed[next(iter(removed))]


DECIDE = {ReportRound: _report_round, RemoveTask: _remove_task}
EVENTS = {
    "consumer_began": EventKind(_consumer_began),
    "task_proposed": EventKind(_task_proposed),
    "round_targeted": EventKind(_round_targeted),
    "consumer_blocked": EventKind(_consumer_blocked),
    "task_started": EventKind(_task_started),
    "task_removed": EventKind(_task_removed),
}
