"""The dispatcher's state: what follows from the journal, and nothing else.

It is changed by `apply` alone (machine.py), so that the live state and the replayed one are
the same; it holds no clock, no connection and no cache. Redundant fields (an iteration's
tasks, a worker's tasks) are kept in step by `apply` as well. The structs are msgspec's:
compact, comparable, and a snapshot is their encoding, with no second schema to keep (encoding.py).
"""

from __future__ import annotations

from collections import deque

import msgspec

from ...journal.proto import events_pb2 as ev
from .ledger import Ledger
from .ranges import Ranges

MAX_ANSWERS = 1 << 17
"""Answers kept for retries, one a caller; the caller that was quiet longest goes first."""

MAX_SKIPS = 10
"""Of an iteration's skipped splits, so many are told of."""


MAX_DEPARTED = 1000
"""Goodbyes remembered, of workers and of consumers. A late heartbeat of such a worker, or a late
retry of such a consumer's, comes within seconds, if at all."""


MAX_LOST_TASKS = 10_000
"""Tasks remembered of workers that were given up, and may come back."""

MAX_ENDED_SAVES = 1000
"""Saves remembered that have ended; their directories say what became of the others."""

MAX_RECENT = 1000
"""Events that an error can tell a story of."""


STATIC = frozenset({ev.FILE, ev.DATA, ev.FILE_OR_DATA, ev.HINT})


class Struct(msgspec.Struct, forbid_unknown_fields=True):
    """A part of the state."""


class Dataset(Struct):
    dataset_id: str
    definition_bytes: bytes  # ev.DatasetDefinition
    compression_disabled: bool | None = None  # None: nobody asked yet
    graph_bytes: int = 0  # 0: not known
    registered_ms: int = 0  # 0: not known
    used_ms: int = 0  # when it was registered or read last; 0: not known

    @property
    def definition(self) -> ev.DatasetDefinition:
        return ev.DatasetDefinition.FromString(self.definition_bytes)


class Job(Struct):
    job_id: int
    name: str  # empty: anonymous
    dataset_id: str
    sharding: int
    num_consumers: int | None
    cross_trainer_cache: bool
    target_workers: int
    iterations: dict[int, int] = {}  # epoch → iteration id
    summarized: Ranges = []  # epochs that are finished, and of which nothing else is kept
    lost_splits: int = 0  # of those
    skipped_splits: int = 0  # likewise
    used_ms: int = 0  # when it was made, joined or left last; 0: not known


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
    """Tasks that are pending until all consumers of a coordinated read stop before one round."""

    tasks: list[int] = []
    target_round: int = 0  # 0: none is chosen yet
    targets: int = 0  # how many were
    blocked: set[int] = set()  # consumers that do not begin the target round


class Skip(Struct):
    """A split whose rest was left out, since the dataset's function failed."""

    worker_address: str
    split: int
    element: int  # of the split, from which on it is left out
    reason: str


class Iteration(Struct):
    iteration_id: int
    job_id: int
    epoch: int
    ledgers: list[Ledger]  # one a source; empty unless the job's sharding is DYNAMIC
    leased_singly: bool | None = None  # zipped sources: by GetSplit, or (False) together; None: yet
    tasks: list[int] = []  # that consumers know: not pending, nor lost but for orphaned ones
    consumers: set[int] = set()
    running_tasks: int = 0  # of those
    completed_tasks: int = 0  # also of workers that were lost since
    shards_read: set[int] = set()  # to their end, under static sharding
    finished: bool = False  # every task has ended and no further one will begin
    idle_since_ms: int = 0  # when the last consumer left
    version: int = 1  # grows with every change that a consumer wants to hear of
    barrier: Barrier | None = None  # None: no task is pending
    begun_indices: set[int] = set()  # of consumers that began a coordinated read, gone or not
    removed: dict[int, int] = {}  # task → the round from which on consumers do without it
    skipped: int = 0  # splits
    skips: list[Skip] = []  # the last of them

    @property
    def all_tasks(self) -> list[int]:
        """The pending ones, too."""
        return self.tasks if self.barrier is None else self.tasks + self.barrier.tasks


class Orphan(Struct):
    """With whom a task was lost. If that process comes back, it goes on with it."""

    uid: int
    address: str = ""  # where consumers of a coordinated read ask for it; "": an early version's


class Task(Struct):
    task_id: int
    iteration_id: int
    worker_id: int
    shard: int | None = None  # under static sharding
    sweeps: bool = False  # made for splits that were handed back when all others had ended
    completed: bool = False
    leases: list[int] = []
    lost: list[Lease] = []  # its worker may come back for them
    starting_round: int = 0  # in a coordinated read: the first one in which it is asked
    orphan: Orphan | None = None  # None: its worker is there

    @property
    def lost_with(self) -> int:
        """The uid of the process that it was lost with; 0 if its worker is there."""
        return 0 if self.orphan is None else self.orphan.uid


class Consumer(Struct):
    consumer_id: int
    iteration_id: int
    began: bool = False  # to read, in a coordinated read
    caller: str = ""  # who asked to join, if that was numbered
    stock: bool = False
    index: int | None = None  # of the consumers of a coordinated read; None: TensorFlow's, or old


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
    draining: bool = False  # it gets nothing new, and ends soon
    no_python: bool = False  # one of ours that does not run Python datasets


class Place(Struct):
    """For one worker of the fixed list that static sharding needs."""

    configured: str  # host:port, host, or host:%port%
    address: str = ""  # of the worker that has it, or had it last


class SplitRun(Struct):
    """Splits of a stream that follow each other in their pass, and in the save."""

    pass_number: int
    first: int
    place: int  # of the first of them, among all that were assigned of the save
    count: int = 1


class StreamSource(Struct):
    """What a stock worker was given of a source, for one stream."""

    assigned: int = 0
    runs: list[SplitRun] = []  # all of it, until the stream is complete


class Stream(Struct):
    """A part of a save, written by one worker at a time."""

    address: str  # of the worker that writes it, or wrote it last
    uid: int  # of its process
    first: int = 0  # of Forebay's workers: the splits first … first + count − 1
    count: int = 0
    sources: list[StreamSource] = []  # of TensorFlow's
    chunks: int = 0  # of Forebay's: that were committed
    elements: int = 0  # in all of them
    last_elements: int = 0  # in the last of them
    last_file: str = ""  # its name until it is renamed
    completed: bool = False
    assignments: int = 1  # the worker says which it writes for: an earlier one's is stale


class SaveSource(Struct):
    """How far a source was given out, split by split."""

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
    stock: bool | None = None  # whose workers write it; None: nobody has begun yet
    streams: list[Stream] = []
    assigned: int = 0  # splits, one by one, over all sources

    @property
    def definition(self) -> ev.DatasetDefinition:
        return ev.DatasetDefinition.FromString(self.definition_bytes)


class EndedSave(Struct):
    """What may yet be asked of a save that is over."""

    save_id: int
    path: str
    prepared: str
    streams: int = 0
    completed: Ranges = []  # of these, by their numbers
    assigned: int = 0  # splits
    elements: int = 0  # of Forebay's workers, that were committed
    finished: bool = False
    failed: str = ""  # the canonical name of an error's status
    message: str = ""  # of that error


class Answer(Struct):
    """The event that answered a caller's last numbered command."""

    number: int
    event: bytes


class State(Struct, dict=True):
    journal_id: str = ""
    born_ms: int = 0  # when the journal began; 0: not known
    predecessors: list[str] = []  # ids of before repairs, the latest last; "": not known
    cut: bool = False  # the last repair's loss is known to nobody who worked with the journal
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
    departed: list[int] = []  # uids of workers that said goodbye, the latest last
    tasks: dict[int, Task] = {}
    lost_tasks: dict[int, Task] = {}  # listed no more; of unfinished iterations, the latest last
    leases: dict[int, Lease] = {}
    saves: dict[int, Save] = {}  # that are being written
    ended_saves: dict[int, EndedSave] = {}  # the latest last
    save_at: dict[str, int] = {}  # path → save id
    answers: dict[str, Answer] = {}  # by caller, least recently answered first
    departed_callers: list[str] = []  # whose consumers left, the latest last
    unused_blobs: list[str] = []  # no dataset has them, and they are to be deleted

    def __post_init__(self) -> None:
        self.recent: deque[tuple[int, ev.Event]] = deque(maxlen=MAX_RECENT)
        """What was applied last, for the story of an error. No part of what is compared or kept."""


def skip_caller(task_id: int) -> str:
    """Who numbers a task's requests to skip splits. Forgotten with the task."""
    return f"task/{task_id}/skips"


def lease_caller(task_id: int, source: int) -> str:
    """Who numbers a task's lease requests of a source. Forgotten with the task."""
    return f"task/{task_id}/{source}"
