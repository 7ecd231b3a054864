"""The dispatcher's state: a pure function of the journal.

Only `apply` changes it (machine.py), so the live state equals the replayed one. It holds no clock,
no connection and no cache. `apply` also keeps redundant fields (an iteration's tasks, a worker's
tasks) consistent. The structs are msgspec's: compact and comparable. A snapshot is their encoding,
so there is no second schema (encoding.py).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Self

import msgspec
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from ...journal.datasets import content_fingerprint
from ...journal.proto import events_pb2 as ev
from ..ranges import Ranges
from .ledger import Ledger

MAX_ANSWERS = 1 << 17
"""Answers kept for retries, one a caller; the least recently answered caller is evicted."""

MAX_SKIPS = 10
"""The last skipped splits that an iteration keeps."""


MAX_DEPARTED = 1000
"""Departed workers and consumers remembered. Their late heartbeats and retries arrive within
seconds, if at all."""


MAX_LOST_TASKS = 10_000
"""Tasks remembered of workers that are presumed dead and may return."""

MAX_LOST_WORKERS = 100
"""Workers remembered that were presumed dead, by address."""

MAX_ENDED_SAVES = 1000
"""Ended saves remembered; the directories record how the earlier ones ended."""

MAX_RECENT = 1000
"""Recent events kept for error messages."""


STATIC = frozenset({ev.FILE, ev.DATA, ev.FILE_OR_DATA, ev.HINT})


class Struct(msgspec.Struct, forbid_unknown_fields=True):
    """A part of the state."""

    @classmethod
    def of(cls, message: Message, **others: Any) -> Self:
        """Make one of the message's fields of the same names, and of `others`."""
        return cls(**same_fields(cls, message) | others)


def same_fields(kind: type[msgspec.Struct], message: Message) -> dict[str, Any]:
    """The message's fields that the struct has, by name. A repeated field is a list, and an
    optional one that is not set is None."""
    found = {}
    for name, is_repeated, is_optional in _fields_of_both(kind, message.DESCRIPTOR):
        is_given = not is_optional or message.HasField(name)
        value: Any = getattr(message, name) if is_given else None
        found[name] = [*value] if is_repeated else value
    return found


def fields_of(one: object, *names: str) -> dict[str, Any]:
    """These fields of a struct or a message, by name."""
    return {name: getattr(one, name) for name in names}


@functools.cache
def _fields_of_both(
    kind: type[msgspec.Struct], message: Descriptor
) -> list[tuple[str, bool, bool]]:
    fields = [field for field in message.fields if field.name in kind.__struct_fields__]
    # Of a repeated field, the default is an empty list.
    return [(field.name, field.default_value == [], field.has_presence) for field in fields]


class Dataset(Struct, dict=True):
    dataset_id: str
    definition_bytes: bytes  # ev.DatasetDefinition
    compression_disabled: bool | None = None  # None: nobody asked yet
    graph_bytes: int = 0
    registered_ms: int = 0
    used_ms: int = 0  # when it was registered or read last
    lengths: dict[int, list[int]] = {}  # of bundles, by their size in splits; −1: not known

    @property
    def definition(self) -> ev.DatasetDefinition:
        """The whole definition, parsed on each access: slow for a million named splits."""
        return ev.DatasetDefinition.FromString(self.definition_bytes)

    @functools.cached_property
    def outline(self) -> ev.DatasetDefinition:
        """The definition with the count of named splits instead of their names; cached.

        Callers must not change it.
        """
        outline = self.definition
        for source in outline.sources:
            if source.HasField("explicit"):
                source.count = len(source.explicit.splits)
        return outline

    @functools.cached_property
    def sources(self) -> Sequence[ev.SplitSource]:
        """With the names of splits; cached."""
        return tuple(self.definition.sources)

    @functools.cached_property
    def content(self) -> str:
        """Its content_fingerprint; cached."""
        return content_fingerprint(self.definition)


class BundleSpec(Struct):
    """A job's order: how it is read in bundles (bundles.py). Events have it as ev.OrderSpec.

    The class has another name than the field `order`: it is in the snapshots' schema.
    """

    seed: int
    shuffle: bool
    cycle_length: int
    block_length: int
    bundle_splits: int
    bundles: int  # of an epoch
    claimed: bool = False  # read at least once, by claims; not in order
    source_bundle_splits: list[int] = []  # of a mixture, by source
    source_bundles: list[int] = []  # `bundles` is their sum


class DecidedChange(Struct):
    """What a job reads is another from a place on (schedules.py): ev.ScheduleChange."""

    place: int
    shares: list[int]
    skipped: int
    reason: str
    who: str
    time_ms: int


class Fork(Struct):
    """The job begins with the changes of another one before a place: ev.Fork."""

    origin: int  # job_id; it may have been removed
    place: int
    reason: str
    who: str
    time_ms: int


class Job(Struct):
    job_id: int
    name: str  # empty: anonymous
    dataset_id: str
    sharding: int
    num_consumers: int | None
    cross_trainer_cache: bool
    target_workers: int
    order: BundleSpec | None = None  # None: it is not read in bundles
    iterations: dict[int, int] = {}  # epoch → iteration id
    summarized: Ranges = []  # finished epochs whose iterations were removed
    lost_splits: int = 0  # of summarized epochs
    skipped_splits: int = 0  # of summarized epochs; of an ordered job, by all iterations of before
    used_ms: int = 0  # when it was created, joined or left last
    checksums: dict[int, int] = {}  # bundle → of its first run; bundles count through all epochs
    differing: list[int] = []  # bundles with another checksum when run again (checksums.py)
    changes: list[DecidedChange] = []  # of what it reads, in the order of their decisions
    step: int = 0  # elements that the group that joined last reads at a time; of an ordered job
    drops_remainder: bool = False  # whether it reads whole steps only
    fork: Fork | None = None

    @property
    def user_name(self) -> str:
        """The name as its user gave it, or its id."""
        return (self.name or str(self.job_id)).removeprefix(f"dataset_id=/{self.dataset_id}/")

    @property
    def is_ordered(self) -> bool:
        return self.order is not None and not self.order.claimed

    @property
    def is_claimed(self) -> bool:
        return self.order is not None and self.order.claimed


class Lease(Struct):
    lease_id: int
    iteration_id: int
    task_id: int
    source: int
    pass_number: int
    first: int
    count: int

    @property
    def stop(self) -> int:
        return self.first + self.count


class Barrier(Struct):
    """Pending tasks of a coordinated read: they start once all consumers stop before one round."""

    tasks: list[int] = []
    target_round: int = 0  # 0: none is chosen yet
    targets: int = 0  # how many target rounds were chosen
    blocked: set[int] = set()  # consumers that stopped before the target round


class Skip(Struct):
    """A split whose rest, or of which records, were skipped."""

    worker_address: str
    split: int
    element: int  # the first skipped element of the split
    reason: str
    records: int = 0  # from there on; 0: the rest of the split


class Claims(Struct):
    """The bundles of an iteration that consumers claim. Consumers keep what they have claimed."""

    bundles: int
    next: int = 0  # places from here on were never claimed
    returned: dict[int, int] = {}  # place → cursor: claims of consumers that left
    done: Ranges = []

    @property
    def unclaimed(self) -> int:
        return self.bundles - self.next + len(self.returned)


class Iteration(Struct):
    iteration_id: int
    job_id: int
    epoch: int
    ledgers: list[Ledger]  # one a source; empty unless the job's sharding is DYNAMIC
    leased_singly: bool | None = None  # zipped sources: by GetSplit, or together; None: unleased
    tasks: list[int] = []  # listed to consumers: running, completed and orphaned ones
    consumers: set[int] = set()
    running_tasks: int = 0  # of `tasks`
    completed_tasks: int = 0  # including those of workers that were lost since
    shards_read: set[int] = set()  # completely, under static sharding
    finished: bool = False  # every task has ended and no further one will begin
    idle_since_ms: int = 0  # when the last consumer left
    version: int = 1  # grows with every change that matters to consumers
    barrier: Barrier | None = None  # None: no task is pending
    begun_indices: set[int] = set()  # of consumers that began a coordinated read, even if they left
    removed: dict[int, int] = {}  # task → the first round without it
    skipped: int = 0  # splits and records
    skips: list[Skip] = []  # the last of them
    left_out: dict[int, set[int]] = {}  # of skipped records, by split
    claims: Claims | None = None  # None: its consumers do not claim bundles

    @property
    def keeps_progress(self) -> bool:
        """Whether a consumer that joins later continues where the others stopped."""
        return bool(self.ledgers) or self.claims is not None

    def counts(self, ledger: Ledger) -> bool:
        """Whether it stands for itself: of sources that are leased together one counts for all."""
        return ledger.leased_with is None or bool(self.leased_singly)

    def size_of(self, ledger: Ledger) -> int:
        """In splits that are leased at a time."""
        return ledger.size if self.leased_singly else ledger.size_together

    @property
    def all_tasks(self) -> list[int]:
        """Listed and pending tasks."""
        return self.tasks if self.barrier is None else self.tasks + self.barrier.tasks


class Orphan(Struct):
    """The process that a task was lost with. If that process returns, it resumes the task."""

    uid: int
    address: str = ""  # listed to consumers of a coordinated read


class Task(Struct):
    task_id: int
    iteration_id: int
    worker_id: int
    shard: int | None = None  # under static sharding
    sweeps: bool = False  # created for returned splits after all others had ended
    completed: bool = False
    leases: list[int] = []
    lost: list[Lease] = []  # restored if its worker returns
    starting_round: int = 0  # the first round of a coordinated read that includes it
    orphan: Orphan | None = None  # None: its worker is registered

    @property
    def lost_with(self) -> int:
        """The uid of the process that it was lost with; 0 if its worker is registered."""
        return 0 if self.orphan is None else self.orphan.uid


class GroupMember(Struct):
    """A consumer's place in the group of an ordered read: ev.GroupMember."""

    index: int
    consumers: int
    start_position: int
    batch_size: int
    start_step: int | None = None
    drop_remainder: bool | None = None  # None: an earlier version's state, which has neither


class Consumer(Struct):
    consumer_id: int
    iteration_id: int
    began: bool = False  # to read, in a coordinated read
    caller: str = ""  # the caller of its numbered JoinIteration; "": not numbered
    stock: bool = False
    index: int | None = None  # of the consumers of a coordinated read; None: TensorFlow's
    member: GroupMember | None = None  # of an ordered read
    claims: dict[int, int] = {}  # place of a bundle → cursor: elements that its trainer was given
    position: int | None = None  # in an ordered read: its trainer was given all of its before it


class WorkerGrant(NamedTuple):
    """What a worker may run, by an access file: patterns of dataset ids and of jobs' names."""

    datasets: tuple[str, ...]
    jobs: tuple[str, ...]

    def covers(self, job: Job) -> bool:
        names = ((job.dataset_id, self.datasets), (job.user_name, self.jobs))
        return all(any(fnmatchcase(name, p) for p in patterns) for name, patterns in names)


Grants = tuple[WorkerGrant, ...]
"""Of which one must cover a job; without any, all jobs are covered."""


def covers(grants: Grants, job: Job) -> bool:
    return not grants or any(grant.covers(job) for grant in grants)


class Worker(Struct):
    worker_id: int
    address: str
    uid: int
    tags: list[str]
    transfer_servers: list[bytes]  # ev.TransferServer
    stock: bool
    replaced_uid: int = 0  # of the process that it took the address from
    tasks: set[int] = set()  # not completed
    version: int = 1  # grows when `tasks` changes
    draining: bool = False  # it gets no new tasks, and ends soon
    no_python: bool = False  # one of ours that does not run Python datasets
    grants: Grants = ()  # what it may run
    holder: bytes = b""  # a digest of who it has proved to be; empty: without an access file

    def is_of(self, grants: Grants, holder: bytes) -> bool:
        """Whether a worker with these may act for it: one that may run everything, itself, and
        others of its pool."""
        return not (grants and self.holder) or holder == self.holder or grants == self.grants


class Place(Struct):
    """One worker's entry in the fixed list of static sharding (places.py)."""

    configured: str  # host:port, host, or host:%port%
    address: str = ""  # of its current or last worker


class SplitRun(Struct):
    """A run of a stream's splits, consecutive both in their pass and in the save."""

    pass_number: int
    first: int
    place: int  # the first split's index among all assigned splits of the save
    count: int = 1


class StreamSource(Struct):
    """The splits of a source that a stock worker's stream got."""

    assigned: int = 0
    runs: list[SplitRun] = []  # all of them, until the stream is complete


class Stream(Struct):
    """A part of a save, written by one worker at a time."""

    address: str  # of its current or last worker
    uid: int  # of that worker's process
    first: int = 0  # Forebay's workers: the splits first … first + count − 1
    count: int = 0
    sources: list[StreamSource] = []  # TensorFlow's workers
    chunks: int = 0  # Forebay's workers: committed chunks
    elements: int = 0  # in all committed chunks
    last_elements: int = 0  # in the last committed chunk
    last_file: str = ""  # the last chunk's file name until it is renamed
    completed: bool = False
    assignments: int = 1  # a fencing token: commits under an earlier assignment are stale


class SaveSource(Struct):
    """A source's position in its assignment, split by split."""

    size: int
    pass_number: int = 0
    next: int = 0


class Save(Struct):
    """A dataset that is being written to a directory, in streams (saves.py)."""

    save_id: int
    path: str
    prepared: str  # the directory's name before it was renamed to `path`
    metadata: bytes  # DistributedSnapshotMetadata of TensorFlow's
    indivisible: str  # why Forebay's workers cannot write it
    definition_bytes: bytes = b""  # ev.DatasetDefinition
    sources: list[SaveSource] = []
    stock: bool | None = None  # whose workers write it; None: none has begun yet
    streams: list[Stream] = []
    assigned: int = 0  # splits assigned one by one, over all sources

    @property
    def definition(self) -> ev.DatasetDefinition:
        return ev.DatasetDefinition.FromString(self.definition_bytes)


class EndedSave(Struct):
    """The summary of a save that has ended."""

    save_id: int
    path: str
    prepared: str
    streams: int = 0
    completed: Ranges = []  # the completed streams' numbers
    assigned: int = 0  # splits
    elements: int = 0  # committed by Forebay's workers
    finished: bool = False
    failed: str = ""  # the canonical name of an error's status
    message: str = ""  # of that error


class LostWorker(Struct):
    """Why a worker was presumed dead, and when."""

    reason: str
    time_ms: int


class Answer(Struct):
    """The event that answered a caller's last numbered command."""

    number: int
    event: bytes


class State(Struct, dict=True):
    journal_id: str = ""
    born_ms: int = 0  # when the journal began
    predecessors: list[str] = []  # journal ids before repairs, the latest last; "": not known
    cut: bool = False  # the last repair cut events off, and no leader has handled that yet
    term: int = 0
    leader: str = ""
    sequence: int = 0  # of the last applied event
    time_ms: int = 0  # of that event
    next_id: int = 0  # for datasets, jobs, iterations, consumers, workers, tasks, leases, saves
    datasets: dict[str, Dataset] = {}
    dataset_by_fingerprint: dict[str, str] = {}
    jobs: dict[int, Job] = {}
    job_by_name: dict[str, int] = {}
    iterations: dict[int, Iteration] = {}
    consumers: dict[int, Consumer] = {}
    workers: dict[int, Worker] = {}
    worker_at: dict[str, int] = {}  # address → worker id
    places: list[Place] = []  # by the shard's number
    lost_workers: dict[str, LostWorker] = {}  # by address; did not leave; the latest last
    departed: list[int] = []  # uids of workers that deregistered, the latest last
    tasks: dict[int, Task] = {}
    lost_tasks: dict[int, Task] = {}  # not listed; of unfinished iterations, the latest last
    leases: dict[int, Lease] = {}
    saves: dict[int, Save] = {}  # running
    ended_saves: dict[int, EndedSave] = {}  # the latest last
    save_at: dict[str, int] = {}  # path → save id
    answers: dict[str, Answer] = {}  # by caller, least recently answered first
    departed_callers: list[str] = []  # callers whose consumers left, the latest last
    unused_blobs: list[str] = []  # blobs without a dataset, to be deleted
    position_key: bytes = b""  # proves positions; empty: of an earlier version's journal
    dashboard: str = ""  # the leader's, as a URL; empty: none that is known

    def __post_init__(self) -> None:
        self.recent: deque[tuple[int, ev.Event]] = deque(maxlen=MAX_RECENT)
        """Recent events for error messages; neither compared nor kept in snapshots."""


def skip_caller(task_id: int) -> str:
    """The caller name of a task's requests to skip splits. Forgotten with the task."""
    return f"task/{task_id}/skips"


def lease_caller(task_id: int, source: int) -> str:
    """The caller name of a task's lease requests for a source. Forgotten with the task."""
    return f"task/{task_id}/{source}"
