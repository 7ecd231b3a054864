"""The audit: it checks the trainers' records against the journal and the injected faults.

Delivery is at most once. So no element may come twice, none may come that was not leased, and each
missing element needs an excuse (excuses.py). Anything else is a broken promise.

No fault but a partition hits a crowd, so only its workers' faults excuse elements that its readers
miss. Readers that share a job are checked against its leases, like trainers. Without sharding, each
worker's process gives a reader each element once; that is checked against the completed tasks. A
crowd that was cut off, so that a consumer of it was given up, may miss elements.

A pipeline passes several times over its source, so an epoch has each id several times: once for
each lease that was not returned, from the task with the lease. A split may have several elements,
and each counts: even if a function's process is killed within a split, every element comes exactly
once. This module is pure: it uses no process, storage or clock.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from .excuses import EPOCH_LEFT, EPOCH_PAUSED, HANDED_BACK_TO_NOBODY, Excuses, Visit
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
    audit = _Audit(history, lives, lost_with_a_trainer, wall_s, partitions, verdict)
    for records in trainers:
        audit.take(records)
    for number, epoch in audit.enter_epochs(job):
        audit.check_epoch(number, epoch, elements, passes)
    audit.check_strays()
    audit.check_lives(cut_off)
    return verdict


def check_crowd(
    history: History,
    readers: Mapping[str, Sequence[Iterable[Record]]],
    lives: Mapping[str, Life],
    *,
    elements: int,
    of_a_split: Mapping[str, int] = {},
    wall_s: float = 0.0,
    partitions: Sequence[Partition] = (),
    cut_off: bool = False,
) -> Verdict:
    """Find every broken promise to a crowd.

    `readers` are the records of each reader, by job: a job's readers share its elements, and a
    job's only reader reads all of them, unsharded. `of_a_split` is the number of elements of a
    split, by job; the default is one. A crowd that was `cut_off` may miss elements.
    For the other arguments, see `check`.
    """
    verdict = Verdict([])
    for job, of_job in readers.items():
        audit = _Audit(history, lives, 0, wall_s, partitions, verdict, f"{job}, ", not cut_off)
        for number, records in enumerate(of_job):
            audit.take(records)
            audit.check_end(number, records)
        for number, epoch in audit.enter_epochs(job):
            if len(of_job) > 1:
                audit.check_epoch(number, epoch, elements, 1, of_a_split.get(job, 1))
            else:
                audit.check_unsharded(number, epoch, elements)
        audit.check_strays()
    return verdict


class _Audit:
    """The audit of one job's readers. `prefix` begins its messages. Unless `whole`, elements
    may be missing.
    """

    def __init__(
        self,
        history: History,
        lives: Mapping[str, Life],
        lost_with_a_trainer: int,
        wall_s: float,
        partitions: Sequence[Partition],
        verdict: Verdict,
        prefix: str = "",
        whole: bool = True,
    ) -> None:
        self._history = history
        self._lives = lives
        self._excuses = Excuses(
            history, lives, lost_with_a_trainer, wall_s, partitions, verdict.lost
        )
        self._whole = whole
        # By epoch: how often each (task, id) was delivered.
        self._got: defaultdict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
        self._prefix = prefix
        self.verdict = verdict

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
                    visit.gone_s, visit.left_for_good = record.at_s, record.for_good
                    visit.unheard = record.unheard

    def enter_epochs(self, job: str) -> list[tuple[int, Epoch]]:
        """The job's epochs in the journal."""
        epochs = sorted(self._history.jobs.get(job, {}).items())
        self.verdict.epochs += len(epochs)
        return epochs

    def check_epoch(
        self, number: int, epoch: Epoch, elements: int, passes: int, of_a_split: int = 1
    ) -> None:
        """Check an epoch whose split n has `of_a_split` elements, from n × `of_a_split` on."""
        got = self._got.pop(number, Counter())
        lease_of = {
            (in_pass, i): lease
            for (in_pass, split), lease in epoch.lease_of.items()
            for i in range(of_a_split * split, of_a_split * (split + 1))
        }
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
        if not self._whole:
            return
        # If a task had several leases of an id, nobody knows which one's element is missing.
        missing = [
            (i, lease)
            for (task, i), held in leases.items()
            for lease in sorted(held, key=lambda lease: -lease.at_ms)[got[task, i] :]
        ]
        leased = Counter(i for _, i in lease_of)
        never = [i for i in range(elements) for _ in range(passes - leased[i])]
        if self._excuses.was_left(number):
            self._excuses.count(EPOCH_LEFT, len(missing) + len(never))
            return
        last_leavers = [] if epoch.finished else self._excuses.last_leavers(number)
        if not epoch.finished and (never or not missing or not last_leavers):
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
            rest = self._excuses.excuse_held(HANDED_BACK_TO_NOBODY, last_leavers, lost)
            self._check_lost(number, worker_id, rest)

    def check_unsharded(self, number: int, epoch: Epoch, elements: int) -> None:
        """Check that the only reader got each element once from each worker's process."""
        got = self._got.pop(number, Counter())
        if stray := sorted({i for task, i in got if task not in epoch.tasks or i >= elements}):
            self._broken(f"epoch {number}: {listed(stray)} delivered that it does not have")
        by_process: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for (task, i), times in got.items():
            by_process[self._process(task)][i] += times
        for process, counts in by_process.items():
            if twice := sorted(i for i, times in counts.items() if times > 1):
                self._broken(
                    f"epoch {number}: {listed(twice)} of {process} delivered more than once"
                )
                self.verdict.twice += sum(counts[i] - 1 for i in twice)
        if not self._whole:
            return
        if not epoch.completed:
            self._broken(f"epoch {number} ended, and no worker had read it to its end")
        for task in sorted(epoch.completed):
            lease = LeasedSplits(task, 0, 0, elements, 0)
            delivered = by_process[self._process(task)]
            if lost := [(i, lease) for i in range(elements) if i not in delivered]:
                self._check_lost(number, self._history.worker_of[task], lost)

    def _process(self, task: int) -> str:
        worker_id = self._history.worker_of.get(task, 0)
        return self._history.workers[worker_id].name if worker_id else ""

    def check_end(self, number: int, records: Iterable[Record]) -> None:
        """Check that the reader came to the end."""
        if self._whole and not any(isinstance(record, ReadToEnd) for record in records):
            self._broken(f"reader {number} did not come to the end")

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
            if life.role in ("worker", *TRAINERS, "crowd") and life.ended_by_itself:
                self._broken(f"{life.name} ended by itself, with {life.code}")
            elif life.stopped_badly:
                how = "had to be killed" if life.stuck else f"ended with {life.code}"
                self._broken(f"{life.name} was told to stop, and {how}")

    def _check_lost(
        self, number: int, worker_id: int, lost: list[tuple[int, LeasedSplits]]
    ) -> None:
        """Check that each missing element of one worker has an excuse."""
        if rest := self._excuses.excuse(number, worker_id, lost):
            name = self._history.workers[worker_id].name or worker_id
            self._unexplained(number, rest, f"{name} had them")

    def _unexplained(self, number: int, ids: list[int], what: str) -> None:
        self.verdict.lost_unexplained += len(ids)
        self._broken(f"epoch {number}: {listed(ids)} lost: {what}, and nothing excuses it")

    def _broken(self, promise: str) -> None:
        self.verdict.broken.append(self._prefix + promise)
