"""Skipped splits and records: a Python dataset's function failed on them, or cannot read them.

A worker asks before it skips the rest of a split, or records of it. The limit applies to an
iteration, over all workers. It is registered with the function, which only workers read, so they
send the limit. A record may be read several times, as in each epoch of an ordered job: it counts
once.
"""

from __future__ import annotations

from ...journal.proto import events_pb2 as ev
from ...journal.splits import MAX_REASON
from .base import Command, Decision, EventKind, find_running_task
from .state import MAX_SKIPS, Skip, State, fields_of


class SkipSplit(Command, frozen=True, kw_only=True):
    """→ SplitSkipped, if the iteration has skipped fewer than `limit`; nothing for records that it
    has skipped before. Answers whether it may."""

    task_id: int
    split: int
    element: int  # the first skipped element of the split
    reason: str
    limit: int
    records: int = 0  # so many from there on; 0: the rest of the split


def _skip_split(state: State, command: SkipSplit) -> Decision:
    task = find_running_task(state, command.task_id)
    iteration = state.iterations[task.iteration_id]
    if command.records and command.element in iteration.left_out.get(command.split, ()):
        return Decision([], True)
    if iteration.skipped + max(1, command.records) > command.limit:
        return Decision([], False)
    skipped = ev.SplitSkipped(
        iteration_id=task.iteration_id,
        task_id=task.task_id,
        worker_address=state.workers[task.worker_id].address,
        reason=command.reason[:MAX_REASON],
        **fields_of(command, "split", "element", "records"),
    )
    return Decision([skipped], True)


def _split_skipped(state: State, event: ev.SplitSkipped) -> None:
    iteration = state.iterations[event.iteration_id]
    iteration.skipped += max(1, event.records)
    if event.records:
        iteration.left_out.setdefault(event.split, set()).add(event.element)
    iteration.skips = [*iteration.skips, Skip.of(event)][-MAX_SKIPS:]


DECIDE = {SkipSplit: _skip_split}
EVENTS = {"split_skipped": EventKind(_split_skipped, answer=lambda _: True)}
