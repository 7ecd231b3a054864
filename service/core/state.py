"""The dispatcher's state: what follows from the journal, and nothing else.

It is changed by `apply` alone (apply.py), so that the live state and the replayed one are
the same; it holds no clock, no connection and no cache. Redundant fields (an iteration's
tasks, a worker's tasks) are kept in step by `apply` as well. The structs are msgspec's:
compact, comparable, and a snapshot is their encoding, with no second schema to keep. It says of
which structs: those of another version are decoded only if that is known to be right (EARLIER).
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from ...journal.proto import events_pb2 as ev
from .ranges import Ranges

MAX_ANSWERS = 1 << 17
"""Answers kept for retries, one a caller; the caller that was quiet longest goes first."""


MAX_DEPARTED = 1000
"""Goodbyes remembered. A late heartbeat of such a worker comes within seconds, if at all."""


class Struct(msgspec.Struct, forbid_unknown_fields=True):
    """A part of the state."""


MAX_LOST_TASKS = 10_000
"""Tasks remembered of workers that were given up, and may come back."""


class Dataset(Struct):
    dataset_id: str
    definition_bytes: bytes  # ev.DatasetDefinition
    compression_disabled: bool | None = None  # None: nobody asked yet

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
    iterations: dict[int, int] = {}  # repetition → iteration id


class Provider(Struct):
    """One source's splits in one iteration. Ranges are of the current repetition."""

    size: int  # splits a repetition
    shared_size: int | None = None  # of those, what all sources have that are leased with it
    leased_with: int | None = None  # the provider whose leases this one shares
    repetition: int = 0
    next: int = 0  # splits from here on were never leased
    returned: Ranges = []  # were leased, and handed back unstarted: leased again first
    completed: Ranges = []
    lost: Ranges = []
    left_over: dict[int, Ranges] = {}  # handed back, of earlier repetitions: leased before all else

    @property
    def size_together(self) -> int:
        """Of what is leased together."""
        return self.size if self.shared_size is None else self.shared_size


class Lease(Struct):
    lease_id: int
    iteration_id: int
    task_id: int
    provider: int
    repetition: int
    first: int
    count: int


class Iteration(Struct):
    iteration_id: int
    job_id: int
    repetition: int
    providers: list[Provider]  # empty unless the job's sharding is DYNAMIC
    leased_singly: bool | None = None  # zipped sources: by GetSplit, or (False) together; None: yet
    tasks: list[int] = []  # of workers that are not lost
    consumers: set[int] = set()
    running_tasks: int = 0  # of those
    completed_tasks: int = 0  # also of workers that were lost since
    finished: bool = False  # every task has ended and no further one will begin
    idle_since_ms: int = 0  # when the last consumer left
    version: int = 1  # grows with every change that a consumer wants to hear of


class Task(Struct):
    task_id: int
    iteration_id: int
    worker_id: int
    sweeps: bool = False  # made for splits that were handed back when all others had ended
    completed: bool = False
    leases: list[int] = []
    lost: list[Lease] = []  # its worker may come back for them


class LostTask(Struct):
    """A task whose worker was given up, and goes on with it if that process comes back."""

    uid: int  # of the process
    task: Task


class Consumer(Struct):
    consumer_id: int
    iteration_id: int


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


class Answer(Struct):
    """The event that answered a caller's last numbered command."""

    number: int
    event: bytes


class State(Struct):
    journal_id: str = ""
    born_ms: int = 0  # when the journal began; 0: not known
    predecessors: list[str] = []  # ids of before repairs, the latest last; "": not known
    term: int = 0
    leader: str = ""
    sequence: int = 0  # of the last applied event
    time_ms: int = 0  # of that event
    next_id: int = 0  # for datasets, jobs, iterations, consumers, workers, tasks, leases
    datasets: dict[str, Dataset] = {}
    dataset_by_fingerprint: dict[str, str] = {}
    jobs: dict[int, Job] = {}
    job_by_name: dict[str, int] = {}
    iterations: dict[int, Iteration] = {}
    consumers: dict[int, Consumer] = {}
    workers: dict[int, Worker] = {}
    worker_at: dict[str, int] = {}  # address → worker id
    departed: list[int] = []  # uids of workers that said goodbye, the latest last
    tasks: dict[int, Task] = {}
    lost_tasks: dict[int, LostTask] = {}  # of unfinished iterations, the latest lost last
    leases: dict[int, Lease] = {}
    answers: dict[str, Answer] = {}  # by caller, least recently answered first


MEANING = 1
"""Grows when a field comes to mean something else under its old name and type."""


def _schema() -> str:
    structs = {
        struct.__name__: dict(sorted(struct.__annotations__.items()))
        for struct in Struct.__subclasses__()
    }
    text = f"{MEANING} {sorted(structs.items())}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


SCHEMA = _schema()
"""What these structs' names, and their fields' names and types, are known by."""

EARLIER = frozenset({"unnamed"})
"""Schemas of which a snapshot is read as well: all that they lack may have its default.

So whoever adds a field whose default is true of every earlier state adds the schema before it
here. Any other change leaves out what can no longer be read, and must convert it in `decode_state`
if the events from before such snapshots may have been trimmed: without either, no dispatcher
could begin on them. "unnamed" is the schema of before snapshots said theirs.
"""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(State).decode
_decode_named = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw]).decode
_NAMED = b"\x92"  # an array of two; the state alone is a map


def encode_state(state: State) -> bytes:
    """What a snapshot holds: the schema and the state, as msgpack."""
    return _encode((SCHEMA, state))


def decode_state(data: bytes) -> State:
    """The state of a snapshot; raises ValueError for bytes that are none of a known schema."""
    named: tuple[str, Any] = _decode_named(data) if data[:1] == _NAMED else ("unnamed", data)
    schema, state = named
    if schema != SCHEMA and schema not in EARLIER:
        raise ValueError(
            f"its state has the schema {schema}, which this version of Forebay does not know: "
            "another one wrote it, and reads it"
        )
    return _decode(state)


def lease_caller(task_id: int, provider: int) -> str:
    """Who numbers the lease requests of a task's provider. Forgotten with the task."""
    return f"task/{task_id}/{provider}"
