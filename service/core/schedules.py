"""Schedules: decisions on what an ordered job reads, each from a place on (service/schedule.py).

The dispatcher asks all who read the job before it decides (service/dispatcher/changes.py), so here
nobody has given anything behind the place. Of two changes the later one holds, from its place on.
"""

from __future__ import annotations

from msgspec.structs import asdict

from ...journal.datasets import MAX_POSITION, SHARES
from ...journal.proto import events_pb2 as ev
from ..errors import AlreadyExists, FailedPrecondition, InvalidArgument
from .base import Command, Decision, EventKind
from .jobs import ordered_job, readers_of
from .state import DecidedChange, Job, State

MAX_CHANGES = 2_000
"""Of a job: each of its readers has all of them."""


class ChangeSchedule(Command, frozen=True, kw_only=True):
    """→ ScheduleChanged. Answers its place.

    Raises AlreadyExists if the job has a change at this place, and FailedPrecondition if one of its
    `readers`, who agree, has left since, or another one has come.
    """

    job_id: int
    change: ev.ScheduleChange
    readers: tuple[int, ...]


def named(state: State, name: str) -> list[Job]:
    """The jobs that have this name to their users, or this whole name or id."""
    jobs = state.jobs.values()
    return [job for job in jobs if name and name in (job.name, str(job.job_id), job.user_name)]


def _change_schedule(state: State, command: ChangeSchedule) -> Decision:
    job, change = ordered_job(state, command.job_id), command.change
    if len(job.changes) >= MAX_CHANGES:
        raise FailedPrecondition(
            f"job {job.user_name} has {MAX_CHANGES} changes, and may have no more: go on with a "
            "job of another name, from its position"
        )
    if sorted(readers_of(state, job)) != sorted(command.readers):
        raise FailedPrecondition(
            f"a trainer of job {job.user_name} came or left just now: change it again"
        )
    is_one = bool(change.shares) != bool(change.skipped)
    ends = (change.place, change.skipped, change.place + change.skipped)
    if not is_one or not all(0 <= number <= MAX_POSITION for number in ends):
        raise InvalidArgument(
            f"a change at place {change.place} with {len(change.shares)} shares and "
            f"skipped={change.skipped}: give a place from 0 to {MAX_POSITION}, and either shares "
            "or a skipped above 0"
        )
    if change.shares:
        sources = len(state.datasets[job.dataset_id].outline.mixture.sources)
        shares = [*change.shares]
        if len(shares) != sources or sum(shares) != SHARES or min(shares) < 0:
            raise InvalidArgument(
                f"shares {shares}: give {sources} numbers of at least 0 that add up to {SHARES}"
            )
    for other in job.changes:
        if other.place == change.place and bool(other.shares) == bool(change.shares):
            raise AlreadyExists(
                f"job {job.user_name} has a change there already"
                + (f", {other.reason!r}" if other.reason else "")
                + ": give another step"
            )
    return Decision([ev.ScheduleChanged(job_id=job.job_id, change=change)], change.place)


def _schedule_changed(state: State, event: ev.ScheduleChanged) -> None:
    job, change = state.jobs[event.job_id], event.change
    job.changes.append(
        DecidedChange(
            change.place, [*change.shares], change.skipped, change.reason, change.who, state.time_ms
        )
    )
    for iteration_id in job.iterations.values():
        state.iterations[iteration_id].version += 1


def change_message(change: DecidedChange) -> ev.ScheduleChange:
    """As events and messages have it."""
    fields = asdict(change)
    del fields["time_ms"]  # of the event
    return ev.ScheduleChange(**fields)


DECIDE = {ChangeSchedule: _change_schedule}
EVENTS = {"schedule_changed": EventKind(_schedule_changed, answer=lambda body: body.change.place)}
