"""The dispatcher's state: what follows from the journal, and nothing else.

It is changed by `apply` alone (apply.py), so that the live state and the replayed one are
the same; it holds no clock, no connection and no cache. Redundant fields (an iteration's
tasks, a worker's tasks) are kept in step by `apply` as well. The structs are msgspec's:
compact, comparable, and a snapshot is their encoding, with no second schema to keep.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from ...journal.proto import events_pb2 as ev
from .ranges import Ranges

ENDLESS = 2**63 - 1
"""The size of a provider without an end."""

MAX_ANSWERS = 1 << 17
"""Answers kept for retries, one a caller; the caller that was quiet longest goes first."""


MAX_DEPARTED = 1000
"""Goodbyes remembered. A late heartbeat of such a worker comes within seconds, if at all."""


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
    repetition: int = 0
    next: int = 0  # splits from here on were never leased
    returned: Ranges = []  # were leased, and handed back unstarted: leased again first
    completed: Ranges = []
    lost: Ranges = []

    def waiting(self) -> int:
        """How many splits of this repetition can be leased."""
        return self.size - self.next + sum(stop - start for start, stop in self.returned)


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
    lost_tasks: dict[int, LostTask] = {}  # of unfinished iterations, not completed
    leases: dict[int, Lease] = {}
    answers: dict[str, Answer] = {}  # by caller, least recently answered first


encode_state = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(State)


def decode_state(data: bytes) -> State:
    """The state of a snapshot; raises ValueError for bytes that no snapshot holds."""
    return _decoder.decode(data)


def lease_caller(task_id: int, provider: int) -> str:
    """Who numbers the lease requests of a task's provider. Forgotten with the task."""
    return f"task/{task_id}/{provider}"
