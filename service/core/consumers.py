"""Consumers: the readers of an iteration."""

from __future__ import annotations

from msgspec.structs import replace

from ...journal.proto import events_pb2 as ev
from .. import ranges
from ..errors import FailedPrecondition, InvalidArgument, NotFound
from .base import Bodies, Command, Decision, EventKind, Ids, itself, reserve_id
from .claims import returned
from .iterations import collected, first_epoch, forget_tasks_nobody_reads, let_go, used
from .ordered import check_member, evicted
from .places import require_list
from .read_kinds import kind_of
from .state import MAX_DEPARTED, Consumer, GroupMember, Iteration, Job, State

STARTED_AGAIN = (
    "a consumer of this coordinated read was started again with consumer_index={}, or another one "
    "has it, and they cannot be in one round: start all consumers again, which begins with round 0"
)
REPLACED = (
    "another consumer of this coordinated read has joined with consumer_index={}, which is this "
    "one's, and took its place: give each of them its own"
)

EVICTED = "its connection broke, and another consumer took its place in the ordered read"


class JoinIteration(Command, frozen=True, kw_only=True):
    """→ (IterationCreated,) TaskCreated …, ConsumerJoined. Answers the ConsumerJoined event.

    For a summarized epoch: → IterationCreated, IterationFinished, ConsumerJoined.

    Each worker without a task of the iteration gets one if the read kind says so (read_kinds.py).
    Raises FailedPrecondition if the kind bars TensorFlow's and Forebay's consumers from sharing.

    In an ordered read, raises AlreadyExists if another consumer has that place in the group, or is
    of a group of another size. If it is one of `gone`: → ConsumerLeft, then the events above.

    An index that has begun to read means that its consumer was restarted, even if it has left. All
    consumers then leave, and the iteration restarts: → ConsumerLeft …, LeaseLost …,
    IterationCollected or IterationPaused, then the events above. If that index has not begun, only
    its earlier consumer leaves: → ConsumerLeft, then the events above.
    """

    job_id: int
    epoch: int
    stock: bool = False
    consumer_index: int | None = None  # of a coordinated read
    member: ev.GroupMember | None = None  # of an ordered read
    gone: tuple[int, ...] = ()  # consumers whose places a member may take


class LeaveIteration(Command, frozen=True, kw_only=True):
    """→ ConsumerLeft, and IterationCollected for the last consumer of a job without a name.

    The last consumer of a coordinated read or a read in bundles ends its tasks. Later consumers of
    a coordinated read begin with round 0. What the consumer had claimed returns (claims.py).
    An unknown consumer has already left: no event.
    """

    consumer_id: int
    reason: str
    position: int | None = None  # of a member of an ordered read: what its trainer was given ends


class EjectConsumers(Command, frozen=True, kw_only=True):
    """Remove all consumers from a coordinated read that is stuck; they rejoin at round 0.

    → ConsumerLeft …, LeaseLost …, IterationCollected or IterationPaused; nothing without consumers.
    """

    iteration_id: int
    reason: str


def _join_iteration(state: State, command: JoinIteration) -> Decision:
    if (job := state.jobs.get(command.job_id)) is None:
        raise NotFound(
            f"Job id {command.job_id} not found: it was collected, or this dispatcher lost its "
            "state; read the dataset again"
        )
    return join(state, job, command, Ids(state))


def join(state: State, job: Job, command: JoinIteration, ids: Ids) -> Decision:
    """As JoinIteration, but the state need not contain the job yet."""
    epoch, consumer_index, member = command.epoch, command.consumer_index, command.member
    require_list(state, job.sharding)
    if epoch < 0:
        raise InvalidArgument(f"epoch {epoch} is negative; the first one is 0")
    if consumer_index is not None and not 0 <= consumer_index < (job.num_consumers or 0):
        raise InvalidArgument(
            f"consumer_index={consumer_index} is none of the {job.num_consumers or 0} consumers "
            f"that wait for each other in job {job.user_name}; the first one is 0"
        )
    events: Bodies = []
    iteration = state.iterations.get(job.iterations.get(epoch, -1))
    check_member(job, epoch, member)
    if iteration is not None and member is not None:
        events += [left(i, EVICTED) for i in evicted(state, job, iteration, member, command.gone)]
    if iteration is not None and consumer_index is not None:
        anew = consumer_index in iteration.begun_indices
        for consumer_id in sorted(iteration.consumers):
            if state.consumers[consumer_id].index == consumer_index:
                events.append(left(consumer_id, REPLACED.format(consumer_index)))
            elif anew:
                events.append(left(consumer_id, STARTED_AGAIN.format(consumer_index)))
        if anew:
            events += let_go(state, iteration)
            kept = replace(iteration, tasks=[], consumers=set(), barrier=None, begun_indices=set())
            iteration = kept if iteration.ledgers else None
    if iteration is None:
        iteration = Iteration(ids.new(), job.job_id, epoch, [])
        begun = ev.IterationCreated(
            iteration_id=iteration.iteration_id, job_id=job.job_id, epoch=epoch
        )
        events.append(begun)
        if ranges.holds(job.summarized, epoch):
            iteration.finished = True
            events.append(ev.IterationFinished(iteration_id=iteration.iteration_id))
    if kind_of(job).has_rounds:
        _require_same_kind(state, job, iteration, command.stock)
    events += kind_of(job).on_consumer_joined(state, job, iteration, ids)
    joined = ev.ConsumerJoined(
        consumer_id=ids.new(),
        iteration_id=iteration.iteration_id,
        stock=command.stock,
        consumer_index=consumer_index,
        member=member,
    )
    return Decision([*events, joined], joined)


def _require_same_kind(state: State, job: Job, iteration: Iteration, stock: bool) -> None:
    others = [i for i in sorted(iteration.consumers) if state.consumers[i].stock != stock]
    if others:
        mine, theirs = ("TensorFlow's", "Forebay's") if stock else ("Forebay's", "TensorFlow's")
        raise FailedPrecondition(
            f"epoch {iteration.epoch - first_epoch(job)} of job {job.user_name}, a coordinated "
            f"read, is being read by {theirs} consumers {others}, and {mine} agree on rounds in "
            "another way: have those leave, or use one kind"
        )


def _consumer_joined(state: State, event: ev.ConsumerJoined) -> None:
    consumer_id = reserve_id(state, event.consumer_id)
    index = event.consumer_index if event.HasField("consumer_index") else None
    member = GroupMember.of(event.member) if event.HasField("member") else None
    state.consumers[consumer_id] = Consumer(
        consumer_id, event.iteration_id, stock=event.stock, index=index, member=member
    )
    iteration = state.iterations[event.iteration_id]
    iteration.consumers.add(consumer_id)
    if member is not None:
        job = state.jobs[iteration.job_id]
        job.step = member.batch_size * member.consumers
        job.drops_remainder = event.member.drop_remainder
    used(state, iteration)


def _leave_iteration(state: State, command: LeaveIteration) -> Decision:
    if command.consumer_id not in state.consumers:
        return Decision([], None)
    consumer = state.consumers[command.consumer_id]
    position = command.position if consumer.member is not None else None
    events = [left(command.consumer_id, command.reason, position)]
    iteration = state.iterations[consumer.iteration_id]
    if len(iteration.consumers) > 1:
        return Decision(events, None)
    job = state.jobs[iteration.job_id]
    if not job.name:
        events += collected(state, iteration)  # nobody can find it again
    elif not kind_of(job).tasks_complete and not iteration.finished:
        events += let_go(state, iteration)
    return Decision(events, None)


def _eject_consumers(state: State, command: EjectConsumers) -> Decision:
    iteration = state.iterations.get(command.iteration_id)
    if iteration is None or not iteration.consumers:
        return Decision([], None)
    gone = [left(consumer_id, command.reason) for consumer_id in sorted(iteration.consumers)]
    return Decision([*gone, *let_go(state, iteration)], None)


def left(consumer_id: int, reason: str, position: int | None = None) -> ev.ConsumerLeft:
    """The consumer left by itself, or is presumed dead."""
    return ev.ConsumerLeft(consumer_id=consumer_id, reason=reason, position=position)


def _consumer_left(state: State, event: ev.ConsumerLeft) -> None:
    consumer = state.consumers.pop(event.consumer_id)
    if consumer.caller:
        state.departed_callers.append(consumer.caller)
        for caller in state.departed_callers[:-MAX_DEPARTED]:
            state.answers.pop(caller, None)
        del state.departed_callers[:-MAX_DEPARTED]
    iteration = state.iterations[consumer.iteration_id]
    iteration.consumers.discard(consumer.consumer_id)
    returned(iteration, consumer)
    if iteration.barrier is not None:
        iteration.barrier.blocked.discard(consumer.consumer_id)
    iteration.idle_since_ms = state.time_ms
    used(state, iteration)
    forget_tasks_nobody_reads(state, iteration)


DECIDE = {
    JoinIteration: _join_iteration,
    LeaveIteration: _leave_iteration,
    EjectConsumers: _eject_consumers,
}
EVENTS = {
    "consumer_joined": EventKind(_consumer_joined, answer=itself),
    "consumer_left": EventKind(_consumer_left),
}
