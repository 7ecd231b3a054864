"""The audit: it checks the trainers' records against the journal and the injected faults.

Delivery is at most once. So no element may come twice, none may come that was not leased, and each
missing element needs an excuse:

- the worker that it was leased to was killed before the epoch had been read;
- that worker was removed for its silence, after it had been paused or cut off from a dispatcher;
- that worker stopped while it was cut off from a dispatcher, and so could not hand it back;
- a trainer was killed in the midst of the epoch, or left it and the worker did not hear what it
  hands back, and the element may have been in its buffers: that is, it was leased before, and there
  are no more of them than that trainer's credit with that worker allows;
- as many that a trainer may have handed back to a worker that had been told to stop;
- as many that who left for good may have handed back when all others had come to the end: the epoch
  waits for somebody who joins it;
- its worker was told to stop at a time when no trainer was there to take what it had made, or all
  were cut off from it; as many as a trainer can hold, if that one was cut off from it;
- the dispatcher stopped its task, while nobody read the epoch;
- every trainer left the epoch for good, so that nobody asked for the rest.

No fault but a partition hits a crowd, so only its workers' faults excuse elements that its readers
miss. Readers that share a job are checked against its leases, like trainers. Without sharding, each
worker's process gives a reader each element once; that is checked against the completed tasks. A
crowd of which a consumer was given up, because it was cut off from a dispatcher, may miss elements.

Anything else is a broken promise. A pipeline passes several times over its source, so an epoch has
each id several times: once for each lease that was not returned, from the task with the lease. A
split may have several elements, and each counts: even if a function's process is killed within a
split, every element comes exactly once. This module is pure: it uses no process, storage or clock.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from .history import Epoch, History, LeasedSplits, WorkerProcess, listed
from .members import Life
from .partitions import SILENT_S, Partition, periods
from .records import Got, Joined, Left, ReadToEnd, Record, Started

WORKER_KILLED = "its worker was killed"
WORKER_GIVEN_UP = "its worker was paused or cut off, and given up"
TRAINER_GONE = "in the buffers of a trainer that left"
HANDED_BACK_LATE = "handed back to a worker that was stopping"
NOBODY_READ = "its worker stopped while nobody read"
EPOCH_PAUSED = "its epoch was paused while nobody read"
EPOCH_LEFT = "of an epoch that every trainer left"
CUT_OFF = "its worker stopped, and a trainer was cut off from it"
HANDED_BACK_TO_NOBODY = "handed back when all others had come to the end"

HANDING_BACK_S = 1.0
"""The longest time from a trainer's leaving until the workers know of it."""


class Verdict(msgspec.Struct):
    """The audit's findings. No promise was broken if `broken` is empty."""

    broken: list[str]
    epochs: int = 0
    delivered: int = 0
    twice: int = 0
    damaged: int = 0
    lost: dict[str, int] = {}  # elements with an excuse, by excuse
    lost_unexplained: int = 0


@dataclass
class Visit:
    """One consumer's visit: from joining an epoch to the epoch's end, or to its process's."""

    name: str
    consumer_id: int
    joined_s: float
    ended_s: float | None = None  # when it had everything
    gone_s: float = math.inf  # when it left before that
    left_for_good: bool = False
    unheard: Collection[int] | None = None  # tasks whose workers did not hear of its return

    @property
    def until_s(self) -> float:
        return self.gone_s if self.ended_s is None else self.ended_s


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
    given_up: Collection[str] = (),
) -> Verdict:
    """Find every broken promise.

    `trainers` are the records of each reader of `job`, `lives` all processes by name. Ids of
    elements are 0 … `elements` − 1, each `passes` times in every epoch. `lost_with_a_trainer` is
    the most elements that one consumer can hold from one worker. `wall_s` is the Unix time at
    which CLOCK_MONOTONIC was 0. Processes that were `given_up` because they were cut off may end by
    themselves (partitions.py).
    """
    verdict = Verdict(list(history.broken))
    audit = _Audit(history, lives, lost_with_a_trainer, wall_s, partitions, verdict)
    for records in trainers:
        audit.take(records)
    for number, epoch in audit.enter_epochs(job):
        audit.check_epoch(number, epoch, elements, passes)
    audit.check_strays()
    audit.check_lives(given_up)
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
    given_up: bool = False,
) -> Verdict:
    """Find every broken promise to a crowd.

    `readers` are the records of each reader, by job: a job's readers share its elements, and a
    job's only reader reads all of them, unsharded. `of_a_split` is the number of elements of a
    split, by job; the default is one. A crowd of which a consumer was `given_up` may miss elements.
    For the other arguments, see `check`.
    """
    verdict = Verdict([])
    for job, of_job in readers.items():
        audit = _Audit(history, lives, 0, wall_s, partitions, verdict, f"{job}, ", not given_up)
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
        self._lost_with_a_trainer = lost_with_a_trainer
        self._wall_s = wall_s
        self._partitions = partitions
        self._whole = whole
        # By epoch: how often each (task, id) was delivered.
        self._got: defaultdict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
        self._visits: defaultdict[int, list[Visit]] = defaultdict(list)
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
                    self._visits[record.epoch].append(visit)
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
        if self._was_left(number):
            self._excused(EPOCH_LEFT, len(missing) + len(never))
            return
        last_leavers = [] if epoch.finished else self._last_leavers(number)
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
            if self._was_paused_unread(number, epoch.paused_ms.get(lease.task_id)):
                self._excused(EPOCH_PAUSED, 1)
            else:
                by_worker[self._history.worker_of[lease.task_id]].append((i, lease))
        for worker_id, lost in by_worker.items():
            rest = self._excuse_held(HANDED_BACK_TO_NOBODY, last_leavers, lost)
            self._excuse(number, worker_id, rest)

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
                self._excuse(number, self._history.worker_of[task], lost)

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

    def check_lives(self, given_up: Collection[str]) -> None:
        """Check for process failures that no fault excuses."""
        for life in self._lives.values():
            if life.name in given_up and not life.stuck:
                continue
            if life.role in ("worker", "trainer", "claimer", "crowd") and life.ended_by_itself:
                self._broken(f"{life.name} ended by itself, with {life.code}")
            elif life.stopped_badly:
                how = "had to be killed" if life.stuck else f"ended with {life.code}"
                self._broken(f"{life.name} was told to stop, and {how}")

    def _last_visits(self, number: int) -> list[Visit]:
        """The last visit of each trainer."""
        return list({self._lives[v.name].number: v for v in self._visits[number]}.values())

    def _was_left(self, number: int) -> bool:
        """Whether every trainer that read it left it for good."""
        return all(visit.left_for_good for visit in self._last_visits(number))

    def _last_leavers(self, number: int) -> list[Visit]:
        """The visits that left it for good, if all others had come to its end by then."""
        last = self._last_visits(number)
        leavers = [visit for visit in last if visit.left_for_good]
        left_s = max((visit.gone_s for visit in leavers), default=0.0)
        others = [visit.ended_s for visit in last if not visit.left_for_good]
        if all(ended_s is not None and ended_s < left_s + HANDING_BACK_S for ended_s in others):
            return leavers
        return []

    def _was_paused_unread(self, number: int, paused_ms: int | None) -> bool:
        if paused_ms is None:
            return False
        at_s = paused_ms / 1000 - self._wall_s
        return not any(v.joined_s <= at_s < self._member_until_s(v) for v in self._visits[number])

    def _member_until_s(self, visit: Visit) -> float:
        """When it had the end or left, or was given up because it was cut off."""
        at_ms = self._history.given_up_ms.get(visit.consumer_id)
        if at_ms is None or not self._was_cut_off(self._lives[visit.name], at_ms):
            return visit.until_s
        return min(visit.until_s, at_ms / 1000 - self._wall_s)

    def _excuse(self, number: int, worker_id: int, lost: list[tuple[int, LeasedSplits]]) -> None:
        """Find excuses for the missing elements of one worker."""
        visits = self._visits[number]
        worker = self._history.workers[worker_id]
        life = self._lives.get(worker.name)
        read_until_s = max((visit.until_s for visit in visits), default=0.0)
        if life is not None and life.killed_s is not None and life.killed_s <= read_until_s:
            self._excused(WORKER_KILLED, len(lost))
            return
        if self._was_given_up(worker, life):
            self._excused(WORKER_GIVEN_UP, len(lost))
            return
        worker_of = self._history.worker_of
        gone = [
            visit
            for visit in visits
            if visit.ended_s is None
            and (visit.unheard is None or worker_id in map(worker_of.get, visit.unheard))
        ]
        lost = self._excuse_held(TRAINER_GONE, gone, lost)
        stops_s = math.inf if life is None or life.terminated_s is None else life.terminated_s
        late = [v for v in visits if v.unheard is not None and v.gone_s + HANDING_BACK_S >= stops_s]
        lost = self._excuse_held(HANDED_BACK_LATE, late, lost)
        reading = [period for visit in visits for period in self._attends(visit, life)]
        if lost and life is not None and _unattended(life, reading, read_until_s):
            self._excused(NOBODY_READ, len(lost))
            return
        lost = self._excuse_held(CUT_OFF, self._cut_off_from_stopping(life, visits), lost)
        rest = sorted(i for i, _ in lost)
        if rest:
            self._unexplained(number, rest, f"{worker.name or worker_id} had them")

    def _excuse_held(
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
            self._excused(excuse, held)
        return rest

    def _was_given_up(self, worker: WorkerProcess, life: Life | None) -> bool:
        """Whether it was paused or cut off, and removed for its silence; or removed because it
        could not say goodbye, as it stopped while it was cut off.
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

    def _attends(self, visit: Visit, worker: Life | None) -> list[tuple[float, float]]:
        """When the visitor could read from the worker."""
        found, from_s = [], visit.joined_s
        for since_s, until_s in self._away(visit, worker):
            if from_s < min(since_s, visit.until_s):
                found.append((from_s, min(since_s, visit.until_s)))
            from_s = max(from_s, until_s)
        return [*found, (from_s, visit.until_s)] if from_s < visit.until_s else found

    def _cut_off_from_stopping(self, worker: Life | None, visits: list[Visit]) -> list[Visit]:
        if worker is None or worker.terminated_s is None:
            return []
        stops_s, ends_s = worker.terminated_s, worker.ended_s or math.inf
        return [
            visit
            for visit in visits
            if any(since_s < ends_s and stops_s < until_s
                   for since_s, until_s in self._away(visit, worker))
        ]  # fmt: skip

    def _excused(self, excuse: str, count: int) -> None:
        self.verdict.lost[excuse] = self.verdict.lost.get(excuse, 0) + count

    def _unexplained(self, number: int, ids: list[int], what: str) -> None:
        self.verdict.lost_unexplained += len(ids)
        self._broken(f"epoch {number}: {listed(ids)} lost: {what}, and nothing excuses it")

    def _broken(self, promise: str) -> None:
        self.verdict.broken.append(self._prefix + promise)


def _unattended(life: Life, reading: Iterable[tuple[float, float]], read_until_s: float) -> bool:
    """Whether the worker was stopping at a time when nobody read the unfinished epoch."""
    if life.terminated_s is None or life.terminated_s > read_until_s:
        return False
    reached_s, stop_s = life.terminated_s, min(life.ended_s or math.inf, read_until_s)
    for since_s, until_s in sorted(reading):
        if since_s > reached_s:
            return True
        reached_s = max(reached_s, until_s)
    return reached_s < stop_s
