"""The audit: it checks the trainers' records against the journal and the injected faults.

Delivery is at most once. So no element may come twice, none may come that was not leased, and each
missing element needs an excuse (excuses.py). Anything else is a broken promise.

A pipeline passes several times over its source, so an epoch has each id several times: once for
each lease that was not returned, from the task with the lease. This module is pure: it uses no
process, storage or clock.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from .excuses import EPOCH_PAUSED, Excuses, Visit
from .history import Epoch, History, LeasedSplits, listed
from .members import TRAINERS, Life
from .partitions import Partition
from .records import Got, Joined, Left, ReadToEnd, Record, Started


class Verdict(msgspec.Struct):
    """The audit's findings. No promise was broken if `broken` is empty."""

    broken: list[str]
    epochs: int = 0
    delivered: int = 0
    twice: int = 0
    damaged: int = 0
    lost: dict[str, int] = {}  # elements with an excuse, by excuse
    lost_unexplained: int = 0


def check(
    history: History,
    job: str,
    trainers: Sequence[Iterable[Record]],
    lives: Mapping[str, Life],
    *,
    elements: int,
    passes: int,
    lost_with_a_trainer: int,
    wall_s: float = 0.0,
    partitions: Sequence[Partition] = (),
    cut_off: Collection[str] = (),
) -> Verdict:
    """Find every broken promise.

    `trainers` are the records of each reader of `job`, `lives` all processes by name. Ids of
    elements are 0 … `elements` − 1, each `passes` times in every epoch. `lost_with_a_trainer` is
    the most elements that one consumer can hold from one worker. `wall_s` is the Unix time at
    which CLOCK_MONOTONIC was 0. Processes that were `cut_off` may end by themselves
    (`failed_cut_off` in partitions.py).
    """
    verdict = Verdict(list(history.broken))
    excuses = Excuses(history, lives, lost_with_a_trainer, wall_s, partitions, verdict.lost)
    audit = _Audit(history, lives, excuses, verdict)
    for records in trainers:
        audit.take(records)
    for number, epoch in sorted(history.jobs.get(job, {}).items()):
        verdict.epochs += 1
        audit.check_epoch(number, epoch, elements, passes)
    audit.check_strays()
    audit.check_lives(cut_off)
    return verdict


class _Audit:
    """The audit of one job's readers."""

    def __init__(
        self, history: History, lives: Mapping[str, Life], excuses: Excuses, verdict: Verdict
    ) -> None:
        self.verdict = verdict
        self._history = history
        self._lives = lives
        self._excuses = excuses
        # By epoch: how often each (task, id) was delivered.
        self._got: defaultdict[int, Counter[tuple[int, int]]] = defaultdict(Counter)

    def take(self, records: Iterable[Record]) -> None:
        """Enter one trainer's records."""
        name, visit = "", None
        for record in records:
            match record:
                case Started():
                    name, visit = record.name, None
                case Joined():
                    life = self._lives[name]
                    gone_s = math.inf if life.ended_s is None else life.ended_s
                    visit = Visit(name, record.consumer_id, record.at_s, gone_s=gone_s)
                    self._excuses.visits[record.epoch].append(visit)
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
                    assert visit is not None, f"{name} ended what it had not joined"
                    visit.ended_s = record.at_s
                case Left():
                    assert visit is not None, f"{name} left what it had not joined"
                    visit.gone_s = record.at_s
                    visit.unheard = record.unheard

    def check_epoch(self, number: int, epoch: Epoch, elements: int, passes: int) -> None:
        got, lease_of = self._got.pop(number, Counter()), epoch.lease_of
        # By task and id.
        leases: defaultdict[tuple[int, int], list[LeasedSplits]] = defaultdict(list)
        for (_, i), lease in lease_of.items():
            leases[lease.task_id, i].append(lease)
        excess = {key: times - len(leases.get(key, ())) for key, times in got.items()}
        if twice := sorted({i for (task, i), n in excess.items() if n > 0 and (task, i) in leases}):
            self._broken(
                f"epoch {number}: {listed(twice)} delivered more often than they were leased"
            )
        if unleased := sorted({i for task, i in got if (task, i) not in leases}):
            self._broken(
                f"epoch {number}: {listed(unleased)} delivered by a task that had no lease of them"
            )
        self.verdict.twice += sum(n for key, n in excess.items() if n > 0 and key in leases)
        outside = [i for in_pass, i in lease_of if in_pass >= passes or i >= elements]
        if outside:
            self._broken(f"epoch {number}: {listed(outside)} leased that it does not have")
        # If a task had several leases of an id, nobody knows which one's element is missing.
        missing = [
            (i, lease)
            for (task, i), held in leases.items()
            for lease in sorted(held, key=lambda lease: -lease.at_ms)[got[task, i] :]
        ]
        leased = Counter(i for _, i in lease_of)
        never = [i for i in range(elements) for _ in range(passes - leased[i])]
        if not epoch.finished:
            undelivered = sorted({*never, *(i for i, _ in missing)})
            self._broken(
                f"epoch {number} never finished: {listed(undelivered)} had not been delivered"
            )
            return
        if never:
            self._unexplained(number, never, "it finished without handing them out")
        by_worker = defaultdict(list)
        for i, lease in missing:
            if self._excuses.was_paused_unread(number, epoch.paused_ms.get(lease.task_id)):
                self._excuses.count(EPOCH_PAUSED, 1)
            else:
                by_worker[self._history.worker_of[lease.task_id]].append((i, lease))
        for worker_id, lost in by_worker.items():
            if rest := self._excuses.excuse(number, worker_id, lost):
                name = self._history.workers[worker_id].name or worker_id
                self._unexplained(number, rest, f"{name} had them")

    def check_strays(self) -> None:
        """Check that no element came from an epoch that is not in the journal."""
        for number, got in self._got.items():
            ids = sorted({i for _, i in got})
            self._broken(f"epoch {number}: {listed(ids)} delivered, and it is not in the journal")

    def check_lives(self, cut_off: Collection[str]) -> None:
        """Check for process failures that no fault excuses."""
        for life in self._lives.values():
            if life.name in cut_off and not life.stuck:
                continue
            if life.role in ("worker", *TRAINERS) and life.ended_by_itself:
                self._broken(f"{life.name} ended by itself, with {life.code}")
            elif life.stopped_badly:
                how = "had to be killed" if life.stuck else f"ended with {life.code}"
                self._broken(f"{life.name} was told to stop, and {how}")

    def _unexplained(self, number: int, ids: list[int], what: str) -> None:
        self.verdict.lost_unexplained += len(ids)
        self._broken(f"epoch {number}: {listed(ids)} lost: {what}, and nothing excuses it")

    def _broken(self, promise: str) -> None:
        self.verdict.broken.append(promise)
