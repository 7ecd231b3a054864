"""Ordered reads: one global order of elements, dealt in batches to a group of consumers.

The order and the dealing are the client's arithmetic. The dispatcher checks who joins the group,
and journals how far each consumer's trainer has come: nothing but the audit depends on that. The
job has one iteration, which has all epochs.
"""

from __future__ import annotations

from collections.abc import Collection

from ...journal.proto import events_pb2 as ev
from ..errors import AlreadyExists, InvalidArgument
from .base import Command, Decision, EventKind
from .state import Iteration, Job, State

MAX_CONSUMERS = 1 << 16


class MoveConsumers(Command, frozen=True, kw_only=True):
    """→ ConsumersMoved of those whose trainers have come further, or nothing.

    Consumers that left, or that are of another iteration, are passed over.
    """

    iteration_id: int
    positions: dict[int, int]  # by consumer: elements of the training, over all consumers


def _move_consumers(state: State, command: MoveConsumers) -> Decision:
    moved = {
        number: position
        for number, position in sorted(command.positions.items())
        if (consumer := state.consumers.get(number)) is not None
        and consumer.iteration_id == command.iteration_id
        and consumer.member is not None
        and position > (consumer.position or 0)
    }
    event = ev.ConsumersMoved(
        iteration_id=command.iteration_id, consumers=moved.keys(), positions=moved.values()
    )
    return Decision([event] if moved else [], None)


def _consumers_moved(state: State, event: ev.ConsumersMoved) -> None:
    for number, position in zip(event.consumers, event.positions, strict=True):
        state.consumers[number].position = position


def check_member(job: Job, epoch: int, member: ev.GroupMember | None) -> None:
    """Raises InvalidArgument for a wrong member; an ordered job needs one, and others have none."""
    if not job.is_ordered or member is None:
        if job.is_ordered:
            raise InvalidArgument(
                f"job {job.user_name} is read in order: say which consumer of its group joins, or "
                "use another job_name"
            )
        if member is not None:
            raise InvalidArgument(
                f"job {job.user_name} is not read in order: leave out consumer {member.index} of "
                f"{member.consumers}, or use another job_name"
            )
        return
    if epoch != 0:
        raise InvalidArgument(
            f"epoch {epoch} of job {job.user_name}: an ordered read has all its epochs in one "
            "iteration; join epoch 0"
        )
    if not 1 <= member.consumers <= MAX_CONSUMERS:
        raise InvalidArgument(
            f"a group of {member.consumers} consumers; it must have from 1 to {MAX_CONSUMERS}"
        )
    if not 0 <= member.index < member.consumers:
        raise InvalidArgument(
            f"consumer_index={member.index} is none of the {member.consumers} consumers of the "
            "group; the first one is 0"
        )
    for field in ("start_position", "batch_size"):
        if (value := getattr(member, field)) < 0:
            raise InvalidArgument(f"{field}={value} is negative; it is a number of elements")


def evicted(
    state: State, job: Job, iteration: Iteration, member: ev.GroupMember, gone: Collection[int]
) -> list[int]:
    """The gone consumers whose place in the group the new member takes.

    Raises AlreadyExists if a consumer of another group, or one with the same index, still reads.
    """
    found = []
    for consumer_id in sorted(iteration.consumers):
        other = state.consumers[consumer_id].member
        assert other is not None
        if other.consumers == member.consumers and other.index != member.index:
            continue
        if consumer_id not in gone:
            raise AlreadyExists(
                f"job {job.user_name} is being read by consumer {consumer_id}, which has "
                f"consumer_index={other.index} of a group of {other.consumers}, so consumer_index="
                f"{member.index} of {member.consumers} cannot join: wait until it is given up, "
                "give each consumer its own consumer_index, or use another job_name for another "
                "training"
            )
        found.append(consumer_id)
    return found


DECIDE = {MoveConsumers: _move_consumers}
EVENTS = {"consumers_moved": EventKind(_consumers_moved, is_quiet=True)}
