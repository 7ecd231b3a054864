"""What the events of a journal tell about its jobs: who read them, how far, what was lost, and why.

`JobHistories` follows the events beside the state. It keeps what the state forgets: consumers that
left, lost leases, and jobs that were removed. Where events are missing, `JobHistory.missing` says
so: nothing that is a sum over all events is known then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import asdict

from ...journal.proto import events_pb2 as ev
from ...journal.reasons import UNREAD
from .. import ranges
from .jobs import readers_of
from .lengths import lengths_of
from .state import Consumer, Dataset, Job, Lease, State


@dataclass
class ConsumerStay:
    """A consumer of a job, from when it joined until it left."""

    consumer_id: int
    epoch: int  # of its iteration
    member: ev.GroupMember | None  # of an ordered read
    joined_ms: int | None  # None: before the history begins
    life: int = 0  # stays of one life know the same changes of the schedule
    changes: int | None = None  # how many it knew when it left; None: it is still there
    left_ms: int | None = None  # None: it is still there
    why: str | None = None
    position: int | None = None
    """Of an ordered read: the trainer was given all of its elements before this position of the
    training, at least. None: nothing was reported."""
    moved_ms: int | None = None  # when that was reported
    is_exact: bool = False  # it was given nothing behind that


@dataclass
class LostLease:
    """Splits that were lost with a worker, or when nobody read them any more."""

    epoch: int
    source: int
    splits: tuple[int, int]  # first and last
    worker: str  # its address
    worker_id: int
    lost_ms: int
    why: str | None = None
    found: bool = False  # the worker came back, and went on with them
    mixed: bool = False  # its pipeline had begun them, and does not tell which elements are whose


@dataclass
class DroppedElements:
    """Elements that a worker had made, and that no trainer got."""

    epoch: int
    elements: int
    worker: str  # its address
    dropped_ms: int
    why: str
    task_id: int


@dataclass
class BundleClaim:
    """A bundle that a consumer claimed, until it was done or returned."""

    epoch: int
    place: int
    consumer_id: int
    claimed_ms: int | None  # None: before the history begins
    start: int  # elements before this one were not its
    cursor: int  # of these its trainer was given those before this one, as it said
    done_ms: int | None = None
    returned_ms: int | None = None
    why: str | None = None  # it was returned


@dataclass
class EpochHistory:
    """One epoch of a job that is not read in order."""

    finished: bool = False
    done: int | None = 0  # bundles that were claimed, and read to their end
    """None: it was finished before the history begins, and the state keeps no more of it."""


@dataclass
class JobHistory:
    """One job. `job` and `dataset` are as they are now, or as they were when they were removed."""

    job: Job
    dataset: Dataset
    learned: dict[int, list[tuple[int, int]]]
    """By the size of bundles: when lengths of the dataset were learned (ms), and of how many."""
    missing: str = ""  # why some of its events are not in the journal; empty: all are
    epochs: dict[int, EpochHistory] = field(default_factory=dict)  # by number
    stays: list[ConsumerStay] = field(default_factory=list)
    lost: list[LostLease] = field(default_factory=list)
    dropped: list[DroppedElements] = field(default_factory=list)
    telling: set[int] = field(default_factory=set)
    """Tasks whose pipelines tell which splits were taken. Others mix the elements of splits."""
    leased_twice: list[ev.SplitsLeased] = field(default_factory=list)
    skipped: list[ev.SplitSkipped] = field(default_factory=list)
    life: int = 0  # as of a ConsumerStay that begins now
    first_present: int = 0  # of the stays, since somebody reads
    sources: list[Dataset] = field(default_factory=list)  # of a mixture
    claims: list[BundleClaim] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        """Of the bundles of an ordered job; -1 where nobody has learned one."""
        datasets = {each.dataset_id: each for each in (self.dataset, *self.sources)}
        return lengths_of(State(datasets=datasets), self.job)

    def groups(self) -> list[list[ConsumerStay]]:
        """The consumers of an ordered job that began at one position as one group, by time.

        A consumer that begins there again, after it was restarted, is of the same group: it is
        given the same batches, unless the schedule was changed while nobody read.
        """
        found: dict[tuple[int, bytes], list[ConsumerStay]] = {}
        for stay in self.stays:
            if stay.member is not None:
                shape = ev.GroupMember()
                shape.MergeFrom(stay.member)
                shape.index = 0
                key = stay.life, shape.SerializeToString(deterministic=True)
                found.setdefault(key, []).append(stay)
        return [*found.values()]

    @property
    def first_epoch(self) -> int:
        """The number that events have for the job's first epoch: 1 where tf.data service counts."""
        return 0 if self.job.is_ordered or 0 in self.epochs else 1


class JobHistories:
    """The histories of all jobs, from a state on (of a new journal: the empty one)."""

    def __init__(self, state: State) -> None:
        self.jobs: dict[int, JobHistory] = {}
        self._learned: dict[str, dict[int, list[tuple[int, int]]]] = {}  # by dataset
        self._stays: dict[int, ConsumerStay] = {}
        self._lost: dict[int, LostLease] = {}  # by lease
        self._unexplained: list[LostLease] = []  # the next event says why
        self._mixed: dict[int, list[tuple[int, int, int, int]]] = {}
        """By task: (source, pass, first, stop) of splits that it has begun, of which nobody knows
        whether their elements were taken."""
        self._lost_mixed: dict[int, list[tuple[LostLease, tuple[int, int, int, int]]]] = {}
        """By task: what `_mixed` had of it when its worker was given up."""
        self._claims: dict[int, dict[int, BundleClaim]] = {}  # by consumer and place
        for job in state.jobs.values():
            history = self._of_job(state, job.job_id)
            history.missing = f"what came before event {state.sequence + 1} was removed"
            for first, stop in job.summarized:
                history.epochs |= {epoch: EpochHistory(True, None) for epoch in range(first, stop)}
            for number in job.iterations.values():
                each = state.iterations[number]
                done = None if each.finished else 0
                if each.claims is not None and not each.finished:
                    done = ranges.total(each.claims.done)
                history.epochs[each.epoch] = EpochHistory(each.finished, done)
        for consumer in state.consumers.values():
            self._begin_with(state, consumer)

    def _begin_with(self, state: State, consumer: Consumer) -> None:
        """A consumer that was there before the history begins."""
        known, member = consumer.member, None
        if known is not None and known.drop_remainder is not None:
            member = ev.GroupMember(**asdict(known))
        self._join(state, consumer.iteration_id, consumer.consumer_id, member, None)
        self._stays[consumer.consumer_id].position = consumer.position
        for place, cursor in consumer.claims.items():
            self._claim(state, consumer.consumer_id, place, cursor, None)

    def observe(self, state: State, event: ev.Event) -> None:
        """The next event, which will be applied to the state."""
        kind, now = event.WhichOneof("event"), event.time_ms
        body = getattr(event, kind or "")
        match kind:
            case "leader_elected":
                if body.after_repair:
                    for job_id in state.jobs:
                        history = self._of_job(state, job_id)
                        history.missing = f"a repair cut off what came after event {state.sequence}"
            case "dataset_removed":
                self._learned.pop(body.dataset_id, None)  # another one may get its id
            case "iteration_created":
                self._of_job(state, body.job_id).epochs.setdefault(body.epoch, EpochHistory())
            case "iteration_finished":
                self._epoch(state, body.iteration_id).finished = True
            case "consumers_moved":
                for number, position in zip(body.consumers, body.positions, strict=True):
                    stay = self._stays[number]
                    stay.position, stay.moved_ms = position, now
            case "consumer_joined":
                member = body.member if body.HasField("member") else None
                self._join(state, body.iteration_id, body.consumer_id, member, now)
            case "consumer_left":
                stay = self._stays.pop(body.consumer_id)
                stay.left_ms, stay.why = now, body.reason
                iteration_id = state.consumers[body.consumer_id].iteration_id
                stay.changes = len(self._of(state, iteration_id).job.changes)
                if body.HasField("position"):
                    stay.position, stay.moved_ms, stay.is_exact = body.position, now, True
                for claim in self._claims.pop(body.consumer_id, {}).values():
                    claim.returned_ms, claim.why = now, body.reason
            case "bundles_claimed":
                iteration = state.iterations[state.consumers[body.consumer_id].iteration_id]
                returned = iteration.claims.returned if iteration.claims is not None else {}
                for place in body.places:
                    self._claim(state, body.consumer_id, place, returned.get(place, 0), now)
            case "claims_moved":
                claims = self._claims[body.consumer_id]
                for place, cursor in zip(body.places, body.cursors, strict=True):
                    claims[place].cursor = cursor
                for place in body.done:
                    claims.pop(place).done_ms = now
                iteration_id = state.consumers[body.consumer_id].iteration_id
                epoch = self._epoch(state, iteration_id)
                epoch.done = (epoch.done or 0) + len(body.done)
            case "schedule_changed":
                history = self._of_job(state, body.job_id)
                history.life += 1  # what who reads now knows when it ends, an earlier group did not
                if readers_of(state, history.job):
                    for stay in history.stays[history.first_present :]:
                        is_before = stay.is_exact and (stay.position or 0) <= body.change.place
                        if stay.left_ms is None or is_before:
                            stay.life = history.life
            case "lengths_learned":
                learned = self._learned.setdefault(body.dataset_id, {})
                learned.setdefault(body.bundle_splits, []).append((now, len(body.bundles)))
            case "split_skipped":
                self._of(state, body.iteration_id).skipped.append(body)
            case "splits_leased":
                self._check(state, body)
            case "lease_begun":
                lease = state.leases[body.lease_id]
                if body.taken:
                    self._of(state, lease.iteration_id).telling.add(lease.task_id)
                else:
                    self._begin(lease, lease.stop)
            case "lease_returned":
                lease = state.leases[body.lease_id]
                self._begin(lease, lease.stop - body.count)
            case "lease_lost":
                self._lose(state, state.leases[body.lease_id], now, body.reason)
            case "delivery_reported":
                self._report(state, body, now)
            case "task_completed":
                self._mixed.pop(body.task_id, None)
            case "worker_lost":
                for task_id in sorted(state.workers[body.worker_id].tasks):
                    self._lose_mixed(state, task_id, now)
                self._explain(body.reason, body.worker_id)
            case "iteration_paused" | "iteration_collected":
                for task_id in state.iterations[body.iteration_id].tasks:
                    self._lose_mixed(state, task_id, now)
                self._explain(UNREAD)
            case "task_created":
                known = state.tasks.get(body.task_id) or state.lost_tasks.get(body.task_id)
                back = [self._lost.get(lease.lease_id) for lease in known.lost] if known else []
                for lost, begun in self._lost_mixed.pop(body.task_id, ()):
                    back.append(lost)
                    self._mixed.setdefault(body.task_id, []).append(begun)
                for each in back:
                    if each is not None:
                        each.found = True

    def follow_end(self, state: State) -> None:
        """The last event was applied: add the jobs that nobody has read."""
        for job in state.jobs.values():  # whose dataset may have been registered anew
            history, dataset = self._of_job(state, job.job_id), state.datasets[job.dataset_id]
            history.dataset, history.sources = dataset, _sources(state, dataset)

    def _of_job(self, state: State, job_id: int) -> JobHistory:
        if job_id not in self.jobs:
            job = state.jobs[job_id]
            learned = self._learned.setdefault(job.dataset_id, {})
            dataset = state.datasets[job.dataset_id]
            history = JobHistory(job, dataset, learned, sources=_sources(state, dataset))
            self.jobs[job_id] = history
        return self.jobs[job_id]

    def _epoch(self, state: State, iteration_id: int) -> EpochHistory:
        return self._of(state, iteration_id).epochs[state.iterations[iteration_id].epoch]

    def _of(self, state: State, iteration_id: int) -> JobHistory:
        return self._of_job(state, state.iterations[iteration_id].job_id)

    def _join(
        self, state: State, iteration_id: int, who: int, member: ev.GroupMember | None,
        now: int | None,
    ) -> None:  # fmt: skip
        history = self._of(state, iteration_id)
        if not state.iterations[iteration_id].consumers:
            history.first_present = len(history.stays)
        stay = ConsumerStay(who, state.iterations[iteration_id].epoch, member, now, history.life)
        self._stays[who] = stay
        history.stays.append(stay)

    def _claim(self, state: State, who: int, place: int, start: int, now: int | None) -> None:
        iteration_id = state.consumers[who].iteration_id
        epoch = state.iterations[iteration_id].epoch
        claim = BundleClaim(epoch, place, who, now, start, start)
        self._claims.setdefault(who, {})[place] = claim
        self._of(state, iteration_id).claims.append(claim)

    def _check(self, state: State, leased: ev.SplitsLeased) -> None:
        """Splits are leased that never were, or that were returned."""
        ledger = state.iterations[leased.iteration_id].ledgers[leased.source]
        first, stop, free = leased.first, leased.first + leased.count, ledger.left_over
        if leased.pass_number == ledger.pass_number:
            free = {ledger.pass_number: [*ledger.returned, (ledger.next, ledger.size)]}
        if not any(a <= first and stop <= b for a, b in free.get(leased.pass_number, [])):
            self._of(state, leased.iteration_id).leased_twice.append(leased)

    def _lose(self, state: State, lease: Lease, now: int, why: str = "") -> LostLease:
        worker_id = state.tasks[lease.task_id].worker_id
        lost = LostLease(
            state.iterations[lease.iteration_id].epoch, lease.source,
            (lease.first, lease.stop - 1), _address(state, worker_id), worker_id, now, why or None,
        )  # fmt: skip
        if lease.lease_id:
            self._lost[lease.lease_id] = lost
        history = self._of(state, lease.iteration_id)
        history.lost.append(lost)
        if why:
            history.telling.add(lease.task_id)
        else:
            self._unexplained.append(lost)
        return lost

    def _begin(self, lease: Lease, stop: int) -> None:
        """A pipeline has begun its splits before `stop`. Of a `repeat`, two passes are kept."""
        known = self._mixed.get(lease.task_id, [])
        if stop > lease.first:
            new = (lease.source, lease.pass_number, lease.first, stop)
            if known and known[-1][:2] == new[:2] and known[-1][3] == lease.first:
                new = (*known.pop()[:3], stop)
            known = [each for each in known if each[1] >= lease.pass_number - 1] + [new]
            self._mixed[lease.task_id] = known

    def _lose_mixed(self, state: State, task_id: int, now: int) -> None:
        task = state.tasks[task_id]
        for begun in self._mixed.pop(task_id, ()):
            source, pass_number, first, stop = begun
            lease = Lease(0, task.iteration_id, task_id, source, pass_number, first, stop - first)
            lost = self._lose(state, lease, now)
            lost.mixed = True
            self._lost_mixed.setdefault(task_id, []).append((lost, begun))

    def _report(self, state: State, report: ev.DeliveryReported, now: int) -> None:
        task = state.tasks[report.task_id]
        if report.all_taken:
            self._mixed.pop(report.task_id, None)
        if report.dropped:
            epoch = state.iterations[task.iteration_id].epoch
            address = _address(state, task.worker_id)
            dropped = DroppedElements(
                epoch, report.dropped, address, now, report.reason, report.task_id
            )
            self._of(state, task.iteration_id).dropped.append(dropped)

    def _explain(self, why: str, worker_id: int | None = None) -> None:
        for lost in self._unexplained:
            if worker_id in (None, lost.worker_id):
                lost.why = why
        self._unexplained = [lost for lost in self._unexplained if lost.why is None]


def _sources(state: State, dataset: Dataset) -> list[Dataset]:
    return [state.datasets[source.dataset_id] for source in dataset.outline.mixture.sources]


def _address(state: State, worker_id: int) -> str:
    worker = state.workers.get(worker_id)
    return worker.address if worker else "?"
