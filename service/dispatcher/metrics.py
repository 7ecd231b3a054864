"""DispatcherMetrics: what a dispatcher says over HTTP of its role, its state and its journal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from ...journal.proto import events_pb2 as ev
from ...journal.snapshots import decode_snapshot
from ...storage import Storage, StorageError
from ...storage.durations import BOUNDS_S, Durations
from ..connections.admission import Denials
from ..core.job_states import STATES, job_state
from ..core.state import State
from ..http.families import MOST_LABELLED, OTHER, Buckets, Family, Measured, denied
from ..slicing import in_slices
from .candidate import NO_LEADER, Candidate
from .dispatcher import Dispatcher
from .event_counts import EventCounts
from .listener import StandbyHandler
from .loads import Loads

LEADS = Family("forebay_dispatcher_leads", "gauge", "1 on the dispatcher that leads, else 0.")
TERM = Family("forebay_dispatcher_term", "gauge", "Term of the journal's newest leader.")
DISPLACED = Family(
    "forebay_dispatcher_displaced_total", "counter",
    "How often this dispatcher was fenced, because another one leads.",
)  # fmt: skip
REFUSED = Family(
    "forebay_dispatcher_refused_requests_total", "counter",
    "Requests that this dispatcher refused, because it stood by.",
)  # fmt: skip
STRANGERS = Family(
    "forebay_dispatcher_strangers", "gauge",
    "Peers that were refused lately, because they claim to know another journal. With an access "
    "file, up to 16 of each token or certificate.",
)  # fmt: skip
WORKERS = Family(
    "forebay_dispatcher_workers", "gauge", "Registered workers: ready or draining.", ("state",)
)
CONSUMERS = Family("forebay_dispatcher_consumers", "gauge", "Consumers that read now.")
DATASETS = Family("forebay_dispatcher_datasets", "gauge", "Registered datasets.")
LEASES = Family("forebay_dispatcher_leases", "gauge", "Leases that workers hold.")
SAVES = Family("forebay_dispatcher_saves", "gauge", "Saves that are being written.")
EVENTS = Family(
    "forebay_dispatcher_events_total", "counter", "Journaled events, by their kind.", ("event",)
)
JOB = Family(
    "forebay_job_info", "gauge", "1; the labels say what the job is.",
    ("job_id", "job_name", "dataset_id", "sharding"),
)  # fmt: skip
JOB_CONSUMERS = Family("forebay_job_consumers", "gauge", "Consumers of the job.", ("job_id",))
JOB_TASKS = Family(
    "forebay_job_running_tasks", "gauge", "Tasks of the job that run on workers.", ("job_id",)
)
WANTED = Family(
    "forebay_wanted_workers", "gauge",
    "How many workers the trainers could use, held for six windows before it falls.",
)  # fmt: skip
WANTED_CAUSE = Family(
    "forebay_wanted_workers_info", "gauge", "1; the label says why so many: of few causes.",
    ("cause",),
)  # fmt: skip
JOB_WANTED = Family(
    "forebay_job_wanted_workers", "gauge", "The same for one job that is read.", ("job_id",)
)
JOB_WAITS = Family(
    "forebay_job_wait_ratio", "gauge",
    "Share of their time in which the job's consumers waited for elements, over a window.",
    ("job_id",),
)  # fmt: skip
JOB_WAITS_FOR = Family(
    "forebay_job_wait_cause_ratio", "gauge",
    "The same by what they waited for: workers, network, dispatcher, or no_task (a worker that has "
    "a task and has not ended).",
    ("job_id", "cause"),
)  # fmt: skip
JOB_BUSY = Family(
    "forebay_job_busy_workers", "gauge",
    "Workers that run the job, each counted by the share of its time in which it worked.",
    ("job_id",),
)  # fmt: skip
JOB_STATE = Family(
    "forebay_job_state", "gauge", f"1; the label says what the job does: {', '.join(STATES)}.",
    ("job_id", "state"),
)  # fmt: skip
JOB_ERRORS = Family(
    "forebay_job_read_errors", "gauge", "The last errors, 10 at most, that ended reads of the job.",
    ("job_id",),
)  # fmt: skip
SPLITS = {
    kind: Family(f"forebay_job_splits_{kind}_total", "counter", text, ("job_id",))
    for kind, text in (
        ("leased", "Splits that were leased to workers, each time that they were."),
        ("begun", "Splits that workers have begun to read."),
        ("returned", "Splits that workers handed back unstarted."),
        ("lost", "Splits that were lost with their worker; one that comes back still has them."),
        (
            "skipped",
            "Records that were left out, and splits whose rest was, because the dataset failed.",
        ),
    )
}
BUNDLES = {
    kind: Family(f"forebay_job_bundles_{kind}_total", "counter", text, ("job_id",))
    for kind, text in (
        ("claimed", "Bundles that consumers have claimed, in reads at least once."),
        ("done", "Bundles of which trainers were given all, in reads at least once."),
    )
}
SEQUENCE = Family("forebay_journal_sequence", "gauge", "Number of the journal's newest event.")
NOT_DURABLE = Family(
    "forebay_journal_undurable_events", "gauge", "Events that were decided and are not durable yet."
)
APPENDS = Family(
    "forebay_journal_append_seconds", "histogram",
    "Time of an append to the storage; one append has many events.",
)  # fmt: skip
SYNCS = Family(
    "forebay_journal_sync_seconds", "histogram",
    "Time of an append's fdatasync, for a journal in local files.",
)  # fmt: skip
SILENT = Family(
    "forebay_storage_silent_seconds", "gauge",
    "For how long the storage has not answered, so that all wait for it; 0: it answers.",
)  # fmt: skip
REPLAY = Family(
    "forebay_journal_replay_events", "gauge",
    "Events since the newest snapshot: what a restart has to replay.",
)  # fmt: skip
SNAPSHOT_AGE = Family(
    "forebay_journal_snapshot_age_seconds", "gauge",
    "Time between the newest snapshot and the newest event.",
)  # fmt: skip


class DispatcherMetrics:
    """Implements `HealthAndMetrics` (service/http/server.py)."""

    def __init__(
        self,
        storage: Storage,
        candidate: Candidate,
        standby: StandbyHandler,
        denials: Denials | None = None,
    ) -> None:
        self._storage = storage
        self._candidate = candidate
        self._standby = standby
        self._denials = denials
        self.dispatcher: Dispatcher | None = None  # while it leads
        self.counts = EventCounts()
        self._displaced = 0
        self._found = 0, 0  # the snapshot that was there when it began to lead, and its time in ms
        self._finding: asyncio.Task[None] | None = None

    def lead(self, dispatcher: Dispatcher) -> None:
        """It serves as the leader from now on."""
        self.dispatcher = dispatcher
        self._found = 0, 0
        self.counts.follow(dispatcher)
        finds = self._find_snapshot(dispatcher)
        self._finding = asyncio.create_task(finds, name="forebay-http-snapshot")

    def stop_leading(self) -> None:
        """It does not serve any more."""
        if self.dispatcher is not None:
            self._displaced += self.dispatcher.displaced
        self.dispatcher = None
        if self._finding is not None:
            self._finding.cancel()

    def unhealthy(self) -> str:
        return ""  # it is the event loop that answers

    def unready(self) -> str:
        dispatcher = self.dispatcher
        if dispatcher is None:
            leader = self._candidate.leader()
            # Not the trouble itself, which has the storage's URL: strangers ask here.
            hangs = ", and its storage does not answer" if self._candidate.trouble else ""
            return f"stands by, {f'leader {leader}' if leader else NO_LEADER}{hangs}"
        if dispatcher.stopped.is_set():
            return "stops: its log says why"  # not here, where strangers ask
        if silent_s := dispatcher.storage_watch.silent_s:
            return f"waits for its storage, which has not answered for {silent_s:.0f} s"
        if not dispatcher.leadership.known:
            return "the lease has expired, and is not renewed yet: the storage does not answer"
        return ""

    async def measured(self) -> list[Measured]:
        return [sample for sample in await in_slices(self._measured()) if sample is not None]

    def _measured(self) -> Iterator[Measured | None]:
        """With None in between, where other requests may run."""
        dispatcher = self.dispatcher
        state = self._candidate.state if dispatcher is None else dispatcher.state
        yield LEADS(dispatcher is not None)
        if state.term:  # else a standby has not read the journal yet
            yield TERM(state.term)
            yield SEQUENCE(state.sequence)
        yield DISPLACED(self._displaced)
        yield REFUSED(self._standby.refused)
        yield from denied(self._denials)
        for kind, count in [*self.counts.events.items()]:
            yield EVENTS(count, kind)
        yield from self.counts.splits.measured(SPLITS)
        yield from self.counts.bundles.measured(BUNDLES)
        if dispatcher is not None:
            yield STRANGERS(len(dispatcher.history.refused_peers()))
            yield from _totals(state)
            yield from _jobs(dispatcher)
            yield from _wanted(dispatcher.loads)
            yield from self._journal(dispatcher)

    def _journal(self, dispatcher: Dispatcher) -> Iterator[Measured]:
        journal, state = dispatcher.journal, dispatcher.state
        yield SILENT(dispatcher.storage_watch.silent_s)
        yield NOT_DURABLE(journal.sequence - journal.durable_sequence)
        yield APPENDS(_buckets(journal.appends))
        if dispatcher.writer.syncs is not None:
            yield SYNCS(_buckets(dispatcher.writer.syncs))
        sequence, time_ms = self.newest_snapshot(dispatcher)
        yield REPLAY(state.sequence - sequence)
        if sequence:
            yield SNAPSHOT_AGE(max(0, state.time_ms - time_ms) / 1000)

    def newest_snapshot(self, dispatcher: Dispatcher) -> tuple[int, int]:
        """Its event's number and time in ms; 0 and 0 without one."""
        journal = dispatcher.journal
        return max(self._found, (journal.snapshot_sequence, journal.snapshot_time_ms))

    async def _find_snapshot(self, dispatcher: Dispatcher) -> None:
        with contextlib.suppress(StorageError):  # then one that this dispatcher writes is the first
            self._found = await dispatcher.storage_threads.run(_newest_snapshot, self._storage)


def _newest_snapshot(storage: Storage) -> tuple[int, int]:
    if not (sequence := max(storage.snapshots(), default=0)):
        return 0, 0
    return sequence, decode_snapshot(sequence, storage.read_snapshot(sequence)).time_ms


def _totals(state: State) -> Iterator[Measured]:
    draining = sum(worker.draining for worker in state.workers.values())
    yield WORKERS(len(state.workers) - draining, "ready")
    yield WORKERS(draining, "draining")
    yield CONSUMERS(len(state.consumers))
    yield DATASETS(len(state.datasets))
    yield LEASES(len(state.leases))
    yield SAVES(len(state.saves))


def _jobs(dispatcher: Dispatcher) -> Iterator[Measured | None]:
    """Of the jobs that were used last, and the sums of the others."""
    state = dispatcher.state
    jobs = sorted(state.jobs.values(), key=lambda job: job.used_ms, reverse=True)
    consumers = tasks = 0
    for number, job in enumerate(jobs):
        # Some may be gone by now, as other requests run between slices.
        found = (state.iterations.get(i) for i in [*job.iterations.values()])
        its = [iteration for iteration in found if iteration is not None]
        its_consumers = sum(len(iteration.consumers) for iteration in its)
        its_tasks = sum(iteration.running_tasks for iteration in its)
        if number < MOST_LABELLED:
            sharding = "BUNDLES" if job.order is not None else ev.Sharding.Name(job.sharding)
            yield JOB(1, job.job_id, job.user_name, job.dataset_id, sharding)
            yield JOB_CONSUMERS(its_consumers, job.job_id)
            yield JOB_TASKS(its_tasks, job.job_id)
            observations = dispatcher.observations(job.job_id)
            yield JOB_STATE(1, job.job_id, job_state(job, its, observations))
            yield JOB_ERRORS(len(observations.errors), job.job_id)
        else:
            consumers += its_consumers
            tasks += its_tasks
            yield None
    if len(jobs) > MOST_LABELLED:
        yield JOB_CONSUMERS(consumers, OTHER)
        yield JOB_TASKS(tasks, OTHER)


def _wanted(loads: Loads) -> Iterator[Measured]:
    if loads.wanted is not None:
        yield WANTED(loads.wanted.workers)
        yield WANTED_CAUSE(1, loads.wanted.cause)
    for job_id, job in loads.jobs()[:MOST_LABELLED]:
        yield JOB_WANTED(job.wanted.workers, job_id)
        if job.load is not None:
            yield JOB_WAITS(job.load.waits, job_id)
            for cause, share in job.waits_for.items():
                yield JOB_WAITS_FOR(share, job_id, cause)
            yield JOB_BUSY(job.load.busy, job_id)


def _buckets(durations: Durations) -> Buckets:
    cumulative, total = [], 0
    for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), [*durations.counts], strict=True):
        total += count
        cumulative.append((bound, float(total)))
    return Buckets(cumulative, durations.sum_s)
