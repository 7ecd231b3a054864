"""The audit of trainers that read at most once: their records against the journal and the faults.

An element comes as often as its task leased it, or the journal says that it was lost: `forebay
audit` counts it among the lost or dropped ones. Only what a killed trainer had in its hands is
known to nobody: one block. Nothing is lost without a fault of a worker or trainer. A pipeline
passes several times over its source, so an epoch has each id several times. This module is pure: it
uses no process, storage or clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from ..service.core.job_history import JobHistory
from .history import History, listed
from .members import TRAINERS, Life
from .partitions import Partition
from .records import Got, Joined, Left, ReadToEnd, Record, Started

DROPPED = "made, and dropped by its worker"
IN_HAND = "in the hands of a trainer that was killed"


class Verdict(msgspec.Struct):
    """The audit's findings. No promise was broken if `broken` is empty."""

    broken: list[str]
    epochs: int = 0
    delivered: int = 0
    twice: int = 0
    damaged: int = 0
    lost: dict[str, int] = {}  # elements that the journal says are lost, by its reason
    lost_unexplained: int = 0

    def take(self, ids: Sequence[int], damaged: list[int], where: str) -> None:
        """Count elements that came, of which some may be damaged."""
        self.delivered += len(ids)
        if damaged:
            self.damaged += len(damaged)
            self.broken.append(f"{where}: {listed(damaged)} damaged on the way")

    def lose(self, ids: list[int], where: str, why: str = "") -> None:
        """Count elements that are missing without an excuse, if there are any."""
        if ids:
            self.lost_unexplained += len(ids)
            self.broken.append(f"{where}: {listed(sorted(ids))} lost{why and f': {why}'}")


@dataclass
class Visit:
    """One consumer, from joining an epoch until its end, or until its process was killed."""

    epoch: int
    consumer_id: int
    blocks: list[Got] = field(default_factory=list)
    end: ReadToEnd | Left | None = None  # None: it was killed

    @property
    def got(self) -> list[int]:
        """The ids of its elements."""
        return [i for block in self.blocks for i in block.ids]


def visits(trainers: Iterable[Iterable[Record]], job: str, verdict: Verdict) -> list[Visit]:
    """All visits in the trainers' records. Counts their elements."""
    found: list[Visit] = []
    name = ""
    for record in chain.from_iterable(trainers):
        match record:
            case Started():
                name = record.name
            case Joined():
                found.append(Visit(record.epoch, record.consumer_id))
            case Got():
                found[-1].blocks.append(record)
                verdict.take(record.ids, record.damaged, f"{job}: epoch {record.epoch}, {name}")
            case ReadToEnd() | Left():
                found[-1].end = record
    return found


def check(
    history: History,
    job: str,
    trainers: Sequence[Iterable[Record]],
    lives: Mapping[str, Life],
    *,
    elements: int,
    passes: int,
    in_hand: int,
    partitions: Sequence[Partition] = (),
) -> Verdict:
    """Find every broken promise to the readers of `job`, whose records `trainers` are.

    `lives` are all processes by name. Ids of elements are 0 … `elements` − 1, each `passes` times
    in every epoch. `in_hand` is the most elements of a block.
    """
    verdict = Verdict(list(history.broken))
    audit = _Audit(history, lives, partitions, in_hand, verdict)
    by_epoch: defaultdict[int, list[Visit]] = defaultdict(list)
    for visit in visits(trainers, job, verdict):
        by_epoch[visit.epoch].append(visit)
    if job in history.jobs:
        for number in sorted(history.jobs[job].epochs):
            verdict.epochs += 1
            of_epoch = by_epoch.pop(number, [])
            audit.check_epoch(history.jobs[job], number, of_epoch, elements, passes)
    for number, strays in by_epoch.items():
        ids = sorted(i for visit in strays for i in visit.got)
        verdict.broken.append(f"epoch {number} is not in the journal, and {listed(ids)} came of it")
    return verdict


def check_lives(lives: Iterable[Life], cut_off: Collection[str]) -> list[str]:
    """The failures of processes that no fault excuses. Processes that were `cut_off` may end by
    themselves (`failed_cut_off` in partitions.py).
    """
    broken = []
    for life in lives:
        if life.name in cut_off and not life.stuck:
            continue
        if life.role in ("worker", *TRAINERS) and life.ended_by_itself:
            broken.append(f"{life.name} ended by itself, with {life.code}")
        elif life.stopped_badly:
            how = "had to be killed" if life.stuck else f"ended with {life.code}"
            broken.append(f"{life.name} was told to stop, and {how}")
    return broken


class _Audit:
    """The audit of one job's readers."""

    def __init__(
        self,
        history: History,
        lives: Mapping[str, Life],
        partitions: Sequence[Partition],
        in_hand: int,
        verdict: Verdict,
    ) -> None:
        self.verdict = verdict
        self._history = history
        self._lives = lives
        self._partitions = partitions
        self._in_hand = in_hand

    def check_epoch(
        self, job: JobHistory, number: int, seen: Sequence[Visit], elements: int, passes: int
    ) -> None:
        got = Counter((block.task_id, i) for v in seen for block in v.blocks for i in block.ids)
        leased = self._history.leased[self._history.iterations[job.job.job_id, number]]
        where = f"epoch {number}"
        if twice := {i: n - leased[t, i] for (t, i), n in got.items() if n > leased[t, i] > 0}:
            self.verdict.twice += sum(twice.values())
            self._broken(
                f"{where}: {listed(sorted(twice))} delivered more often than they were leased"
            )
        if strays := sorted({i for (task, i) in got if leased[task, i] <= 0}):
            self._broken(f"{where}: {listed(strays)} delivered by a task that had no lease of them")
        times = Counter[int]()
        for (_, i), n in leased.items():
            times[i] += n
        if outside := sorted(i for i, n in times.items() if n > passes or i >= elements):
            self._broken(f"{where}: {listed(outside)} leased that it does not have")
        missing = {key: n - got[key] for key, n in leased.items() if n > got[key]}
        never = [i for i in range(elements) for _ in range(passes - times[i])]
        if not job.epochs[number].finished:
            undelivered = sorted({*never, *(i for _, i in missing)})
            self._broken(f"{where} never finished: {listed(undelivered)} had not been delivered")
            return
        self.verdict.lose(never, where, "it finished without handing them out")
        self._check_losses(job, number, seen, missing)

    def _check_losses(
        self,
        job: JobHistory,
        number: int,
        seen: Sequence[Visit],
        missing: Mapping[tuple[int, int], int],
    ) -> None:
        """Whether the journal says of all that is missing that it was lost."""
        worker_of, of_workers = self._history.worker_of, defaultdict[int, list[int]](list)
        for (task, i), n in missing.items():
            of_workers[worker_of[task]] += n * [i]
        known: defaultdict[tuple[int, int], list[str]] = defaultdict(list)  # by worker and id
        for lost in job.lost:
            if lost.epoch == number and not lost.found:
                for i in range(lost.splits[0], lost.splits[1] + 1):
                    known[lost.worker_id, i].append(lost.why or "")
        dropped = Counter[int]()
        for drop in job.dropped:
            if drop.epoch == number:
                dropped[worker_of[drop.task_id]] += drop.elements
        disturbed = not all(isinstance(visit.end, ReadToEnd) for visit in seen)
        in_hand = sum(visit.end is None for visit in seen) * self._in_hand
        for worker_id, ids in of_workers.items():
            name = self._history.workers[worker_id]
            if not (disturbed or self._was_disturbed(name)):
                why = f"{name} had them, and no fault hit it or a trainer"
                self.verdict.lose(ids, f"epoch {number}", why)
                continue
            rest = []
            for i in ids:
                if known[worker_id, i]:
                    self._count(known[worker_id, i].pop(), 1)
                else:
                    rest.append(i)
            self._count(DROPPED, min(len(rest), dropped[worker_id]))
            rest = rest[dropped[worker_id] :]
            self._count(IN_HAND, min(len(rest), in_hand))
            rest, in_hand = rest[in_hand:], max(0, in_hand - len(rest))
            why = f"{name} had them, and the journal does not say that they were lost"
            self.verdict.lose(rest, f"epoch {number}", why)

    def _was_disturbed(self, name: str) -> bool:
        """Whether the worker was killed, told to stop, paused or cut off, at any time."""
        life = self._lives.get(name)
        if life is None:
            return False
        told = life.killed_s is not None or life.terminated_s is not None
        cut_off = any(partition.cuts(life.host, "dispatcher") for partition in self._partitions)
        return told or bool(life.pauses) or cut_off

    def _count(self, reason: str, elements: int) -> None:
        if elements:
            self.verdict.lost[reason] = self.verdict.lost.get(reason, 0) + elements

    def _broken(self, promise: str) -> None:
        self.verdict.broken.append(promise)
