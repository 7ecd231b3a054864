"""Excuses for missing elements: what happened to a worker's process, or to those who read from it.

A missing element has an excuse if:

- the worker that it was leased to was killed before the epoch had been read;
- that worker was given up, after it had been paused or cut off from a dispatcher;
- that worker stopped while it was cut off from a dispatcher, and so could not hand it back;
- a trainer may have had it in its buffers, and was killed in the midst of the epoch, or left when
  the worker could not hear what it handed back;
- a trainer may have handed it back to a worker that had been told to stop;
- its worker was told to stop while no trainer read from it, or while a trainer was cut off from it;
- the dispatcher stopped its task, while nobody read the epoch.

"May have had" has limits: the element was leased before the trainer left, and of one worker a
trainer holds no more elements than its credit allows. This module is pure: it uses no process,
storage or clock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .history import History, LeasedSplits, WorkerProcess
from .members import Life
from .partitions import SILENT_S, Partition, periods

WORKER_KILLED = "its worker was killed"
WORKER_GIVEN_UP = "its worker was paused or cut off, and given up"
TRAINER_GONE = "in the buffers of a trainer that left"
HANDED_BACK_LATE = "handed back to a worker that was stopping"
NOBODY_READ = "its worker stopped while nobody read"
EPOCH_PAUSED = "its epoch was paused while nobody read"
CUT_OFF = "its worker stopped, and a trainer was cut off from it"

HANDING_BACK_S = 1.0
"""The longest time from a trainer's leaving until the workers know of it."""


@dataclass
class Visit:
    """One consumer's visit: from joining an epoch to the epoch's end, or to its process's."""

    name: str
    consumer_id: int
    joined_s: float
    ended_s: float | None = None  # when it had everything
    gone_s: float = math.inf  # when it left before that
    unheard: Collection[int] | None = None  # tasks whose workers did not hear of its return

    @property
    def until_s(self) -> float:
        return self.gone_s if self.ended_s is None else self.ended_s


class Excuses:
    """Finds excuses for missing elements, and counts them in `counts`.

    `lost_with_a_trainer` is the most elements that one consumer can hold from one worker. `wall_s`
    is the Unix time at which CLOCK_MONOTONIC was 0.
    """

    def __init__(
        self,
        history: History,
        lives: Mapping[str, Life],
        lost_with_a_trainer: int,
        wall_s: float,
        partitions: Sequence[Partition],
        counts: dict[str, int],
    ) -> None:
        self.visits: defaultdict[int, list[Visit]] = defaultdict(list)  # by epoch
        self._history = history
        self._lives = lives
        self._lost_with_a_trainer = lost_with_a_trainer
        self._wall_s = wall_s
        self._partitions = partitions
        self._counts = counts

    def count(self, excuse: str, elements: int) -> None:
        """Note that so many elements have this excuse."""
        self._counts[excuse] = self._counts.get(excuse, 0) + elements

    def was_paused_unread(self, number: int, paused_ms: int | None) -> bool:
        """Whether the dispatcher stopped a task then, and no trainer read the epoch."""
        if paused_ms is None:
            return False
        at_s = paused_ms / 1000 - self._wall_s
        return not any(v.joined_s <= at_s < self._member_until_s(v) for v in self.visits[number])

    def _member_until_s(self, visit: Visit) -> float:
        """When it had the end or left, or was given up because it was cut off."""
        at_ms = self._history.given_up_ms.get(visit.consumer_id)
        if at_ms is None or not self._was_cut_off(self._lives[visit.name], at_ms):
            return visit.until_s
        return min(visit.until_s, at_ms / 1000 - self._wall_s)

    def excuse(
        self, number: int, worker_id: int, lost: list[tuple[int, LeasedSplits]]
    ) -> list[int]:
        """Excuse elements of one worker that are missing in an epoch; return those that it cannot.

        An element is given by its id, with the lease that it belongs to.
        """
        visits = self.visits[number]
        worker = self._history.workers[worker_id]
        life = self._lives.get(worker.name)
        read_until_s = max((visit.until_s for visit in visits), default=0.0)
        if life is not None and life.killed_s is not None and life.killed_s <= read_until_s:
            self.count(WORKER_KILLED, len(lost))
            return []
        if self._was_lost_to_a_fault(worker, life):
            self.count(WORKER_GIVEN_UP, len(lost))
            return []
        worker_of = self._history.worker_of
        gone = [
            visit
            for visit in visits
            if visit.ended_s is None
            and (visit.unheard is None or worker_id in map(worker_of.get, visit.unheard))
        ]
        lost = self.excuse_held(TRAINER_GONE, gone, lost)
        stops_s = math.inf if life is None or life.terminated_s is None else life.terminated_s
        late = [v for v in visits if v.unheard is not None and v.gone_s + HANDING_BACK_S >= stops_s]
        lost = self.excuse_held(HANDED_BACK_LATE, late, lost)
        reading = [period for visit in visits for period in self._reads(visit, life)]
        if lost and life is not None and _stopped_unread(life, reading, read_until_s):
            self.count(NOBODY_READ, len(lost))
            return []
        lost = self.excuse_held(CUT_OFF, self._cut_off_from_stopping(life, visits), lost)
        return sorted(i for i, _ in lost)

    def excuse_held(
        self, excuse: str, visits: list[Visit], lost: list[tuple[int, LeasedSplits]]
    ) -> list[tuple[int, LeasedSplits]]:
        """Excuse elements that these trainers may have held when they left; return the rest."""
        gone_ms = max((1000 * (visit.gone_s + self._wall_s) for visit in visits), default=0.0)
        most = len(visits) * self._lost_with_a_trainer
        rest, held = [], 0
        for i, lease in lost:
            if lease.at_ms <= gone_ms and held < most:
                held += 1
            else:
                rest.append((i, lease))
        if held:
            self.count(excuse, held)
        return rest

    def _was_lost_to_a_fault(self, worker: WorkerProcess, life: Life | None) -> bool:
        """Whether it was given up after a pause or a partition, or stopped in a partition, so that
        no dispatcher heard its goodbye.
        """
        if life is None or worker.lost_ms is None:
            return False
        silent = worker.given_up_ms is not None
        if self._was_cut_off(life, worker.lost_ms):
            return silent or life.terminated_s is not None
        return silent and self._was_paused(life, worker.lost_ms)

    def _was_paused(self, life: Life, at_ms: int) -> bool:
        at_s = at_ms / 1000 - self._wall_s
        return any(since_s <= at_s <= until_s + SILENT_S for since_s, until_s in life.pauses)

    def _was_cut_off(self, life: Life, at_ms: int) -> bool:
        """Whether it was cut off from a dispatcher then, or SILENT_S before."""
        at_s = at_ms / 1000 - self._wall_s
        away = periods(self._partitions, life.host, "dispatcher")
        return any(since_s <= at_s <= until_s for since_s, until_s in away)

    def _away(self, visit: Visit, worker: Life | None) -> list[tuple[float, float]]:
        """When the visitor was cut off from the worker, or not yet back."""
        if worker is None:
            return []
        return sorted(periods(self._partitions, self._lives[visit.name].host, worker.host))

    def _reads(self, visit: Visit, worker: Life | None) -> list[tuple[float, float]]:
        """When the visitor could read from the worker."""
        found, from_s = [], visit.joined_s
        for since_s, until_s in self._away(visit, worker):
            if from_s < min(since_s, visit.until_s):
                found.append((from_s, min(since_s, visit.until_s)))
            from_s = max(from_s, until_s)
        return [*found, (from_s, visit.until_s)] if from_s < visit.until_s else found

    def _cut_off_from_stopping(self, worker: Life | None, visits: list[Visit]) -> list[Visit]:
        """The visitors that were cut off from the worker while it stopped."""
        if worker is None or worker.terminated_s is None:
            return []
        stops_s, ends_s = worker.terminated_s, worker.ended_s or math.inf
        return [
            visit
            for visit in visits
            if any(since_s < ends_s and stops_s < until_s
                   for since_s, until_s in self._away(visit, worker))
        ]  # fmt: skip


def _stopped_unread(
    life: Life, reading: Iterable[tuple[float, float]], read_until_s: float
) -> bool:
    """Whether the worker was stopping at a time when nobody read the unfinished epoch."""
    if life.terminated_s is None or life.terminated_s > read_until_s:
        return False
    reached_s, stop_s = life.terminated_s, min(life.ended_s or math.inf, read_until_s)
    for since_s, until_s in sorted(reading):
        if since_s > reached_s:
            return True
        reached_s = max(reached_s, until_s)
    return reached_s < stop_s
