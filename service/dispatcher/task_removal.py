"""Task removal in coordinated reads: all consumers must ask for it in the same round.

A consumer that asks cannot reach the task's worker, has no element of it in this round, and waits
in this round for the answer. So while all consumers ask, none has an element, and none gets one.
The votes are not state: after a change of leaders the consumers ask again. The removal is state.

If they ask in different rounds, some have an element that the others lack. They wait for the
worker, which catches up once it has returned. If it is presumed dead, they get an error: otherwise
they would read different rounds' elements in the same step.

Forebay's consumers prefetch elements of later rounds. For a task whose worker is lost, each reports
the round in which it stopped, and the last round that it has completely. The dispatcher removes the
task after the last round that all have, unless a consumer has passed that round. Then a journaled
decision ejects all consumers, so that none continues without the others.
"""

from __future__ import annotations

import collections
import logging
from dataclasses import dataclass, field

from ..core import commands as c
from ..core.state import Orphan, Task
from ..errors import FailedPrecondition, InvalidArgument
from ..proto import forebay_pb2 as pb
from .decider import Decider

log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""How long a consumer waits for the others before it tries to reach the worker again."""


def _lost(orphan: Orphan) -> str:
    return f"the worker at {orphan.address} was lost"


def _torn(what: str, round_: int) -> str:
    return (
        f"{what} within a round: some consumers have its element of round {round_}, and others do "
        "not, so they would be out of step. Start all consumers again"
    )


@dataclass(eq=False)
class _Vote:
    """The consumers that ask to remove a task in one round, and wait for the others."""

    round: int
    torn: str = ""  # why its consumers cannot continue
    asking: collections.Counter[int] = field(default_factory=collections.Counter)


class TaskRemovals:
    """The removals of one dispatcher. Everything runs on its event loop."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._votes: dict[int, _Vote] = {}  # by task
        # By task and lost worker (0: not lost): each consumer's report, by its index.
        self._held: dict[tuple[int, int], dict[int, pb.HeldTask]] = {}

    async def ask(self, task_id: int, consumer_index: int, round_: int) -> bool:
        """Wait for the other consumers; returns whether the task was removed.

        False if they do not ask in time, or one asks in another round. Raises InvalidArgument,
        FailedPrecondition, Unavailable.
        """
        state = self._decider.state
        if (task := state.tasks.get(task_id)) is None:
            return True
        num_consumers = self._check(task, consumer_index)
        vote = self._votes.get(task_id)
        if vote is None or (vote.torn and task.orphan is None):
            self._votes = {i: v for i, v in self._votes.items() if i in state.tasks}
            vote = self._votes[task_id] = _Vote(round_)
        if vote.round != round_:
            if task.orphan is None:
                self._end(task_id, vote)
                return False
            vote.torn = vote.torn or _torn(_lost(task.orphan), min(vote.round, round_))
            log.error("task %d: %s", task_id, vote.torn)
            self._decider.look_again()
        if vote.torn:
            raise FailedPrecondition(vote.torn)
        vote.asking[consumer_index] += 1
        is_last = len(vote.asking) == num_consumers

        def is_over() -> bool:
            has_ended = self._votes.get(task_id) is not vote
            return has_ended or bool(vote.torn) or task_id not in state.tasks

        try:
            if is_last:
                await self._decider.execute(c.RemoveTask(task_id=task_id, round=round_))
            else:
                await self._decider.wait_until(is_over, int(PATIENCE_S * 1000))
        finally:
            vote.asking -= collections.Counter([consumer_index])
            if is_last or not (vote.asking or vote.torn):
                self._end(task_id, vote)
        if vote.torn:
            raise FailedPrecondition(vote.torn)
        return task_id not in state.tasks

    async def hold(self, mine: pb.HeldTask, consumer_index: int) -> None:
        """Record where a consumer stopped, as the task's worker is lost or has ended the task. The
        last consumer's report removes the task.

        If some have passed a round of which others lack their element, ejects all. Raises
        InvalidArgument, Unavailable.
        """
        state = self._decider.state
        task = state.tasks.get(mine.task_id)
        if task is None or mine.lost != (task.worker_id if task.orphan is not None else 0):
            return
        num_consumers = self._check(task, consumer_index)
        self._held = {k: v for k, v in self._held.items() if k[0] in state.tasks}
        held = self._held.setdefault((mine.task_id, mine.lost), {})
        held[consumer_index] = mine
        if len(held) < num_consumers:
            return
        last = max(one.round for one in held.values())
        all_have = min(one.received for one in held.values())
        if last > all_have:
            if task.orphan is None:
                address = state.workers[task.worker_id].address
                ended = f"the worker at {address} has ended task {task.task_id}"
            else:
                ended = _lost(task.orphan)
            torn = _torn(ended, last)
            log.error("task %d: %s", mine.task_id, torn)
            eject = c.EjectConsumers(iteration_id=task.iteration_id, reason=torn)
            await self._decider.execute(eject)
            return
        await self._decider.execute(c.RemoveTask(task_id=mine.task_id, round=all_have))

    def _check(self, task: Task, consumer_index: int) -> int:
        """The read's number of consumers. Raises FailedPrecondition, InvalidArgument."""
        state = self._decider.state
        num_consumers = state.jobs[state.iterations[task.iteration_id].job_id].num_consumers
        if num_consumers is None:
            raise FailedPrecondition(
                f"task {task.task_id} belongs to no coordinated read, so no round removes it"
            )
        if not 0 <= consumer_index < num_consumers:
            raise InvalidArgument(
                f"consumer index {consumer_index} asks to remove task {task.task_id}, and its job "
                f"has {num_consumers} consumers: 0 to {num_consumers - 1}"
            )
        return num_consumers

    def _end(self, task_id: int, vote: _Vote) -> None:
        if self._votes.get(task_id) is vote:
            del self._votes[task_id]
            self._decider.look_again()
