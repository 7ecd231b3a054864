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
    for records in trainers:
        audit.take(records)
    if job in history.jobs:
        for number in sorted(history.jobs[job].epochs):
            verdict.epochs += 1
            audit.check_epoch(history.jobs[job], number, elements, passes)
    audit.check_strays()
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
        # By epoch: how often each (task, id) was delivered.
        self._got: defaultdict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
        self._joined: Counter[int] = Counter()  # visits of trainers, by epoch
        self._stayed: Counter[int] = Counter()  # those that ended with the epoch
        self._left: Counter[int] = Counter()  # those that ended in order before it

    def take(self, records: Iterable[Record]) -> None:
        """Enter one trainer's records."""
        name = ""
        for record in records:
            match record:
                case Started():
                    name = record.name
                case Joined():
                    self._joined[record.epoch] += 1
                case Got():
                    self._got[record.epoch].update((record.task_id, i) for i in record.ids)
                    self.verdict.delivered += len(record.ids)
                    if record.damaged:
                        self.verdict.damaged += len(record.damaged)
                        self._broken(
                            f"epoch {record.epoch}: {listed(record.damaged)} damaged on the "
                            f"way to {name}"
                        )
                case ReadToEnd():
                    self._stayed[record.epoch] += 1
                case Left():
                    self._left[record.epoch] += 1

    def check_epoch(self, job: JobHistory, number: int, elements: int, passes: int) -> None:
        got = self._got.pop(number, Counter())
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
        if never:
            self._unexplained(number, never, "it finished without handing them out")
        self._check_losses(job, number, missing)

    def _check_losses(
        self, job: JobHistory, number: int, missing: Mapping[tuple[int, int], int]
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
        killed = self._joined[number] - self._stayed[number] - self._left[number]
        disturbed = self._joined[number] > self._stayed[number]
        in_hand = killed * self._in_hand
        for worker_id, ids in of_workers.items():
            name = self._history.workers[worker_id]
            if not (disturbed or self._was_disturbed(name)):
                self._unexplained(number, ids, f"{name} had them, and no fault hit it or a trainer")
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
            if rest:
                why = f"{name} had them, and the journal does not say that they were lost"
                self._unexplained(number, rest, why)

    def _was_disturbed(self, name: str) -> bool:
        """Whether the worker was killed, told to stop, paused or cut off, at any time."""
        life = self._lives.get(name)
        if life is None:
            return False
        told = life.killed_s is not None or life.terminated_s is not None
        cut_off = any(partition.cuts(life.host, "dispatcher") for partition in self._partitions)
        return told or bool(life.pauses) or cut_off

    def check_strays(self) -> None:
        """Check that no element came from an epoch that is not in the journal."""
        for number, got in self._got.items():
            ids = sorted(i for _, i in got)
            self._broken(f"epoch {number} is not in the journal, and {listed(ids)} came of it")

    def _count(self, reason: str, elements: int) -> None:
        if elements:
            self.verdict.lost[reason] = self.verdict.lost.get(reason, 0) + elements

    def _unexplained(self, number: int, ids: list[int], what: str) -> None:
        self.verdict.lost_unexplained += len(ids)
        self._broken(f"epoch {number}: {listed(sorted(ids))} lost: {what}")

    def _broken(self, promise: str) -> None:
        self.verdict.broken.append(promise)
