"""What the dispatcher can be asked to decide.

A command carries all that a decision depends on besides the state: the time, and the
request (caller, number) by which a retry is recognised. Whether a command was already
answered is the state's knowledge, not the command's.
"""

from __future__ import annotations

from msgspec import Struct

from ...journal.proto import events_pb2 as ev


class Command(Struct, frozen=True, kw_only=True):
    """The base of all commands."""

    request: tuple[str, int] | None = None  # (caller, number)


class ElectLeader(Command, frozen=True, kw_only=True):
    """A dispatcher has taken over. → LeaderElected"""

    term: int
    address: str
    version: str
    journal_id: str  # used if the journal has none yet


class RegisterDataset(Command, frozen=True, kw_only=True):
    """→ DatasetRegistered, unless an equal dataset is registered. Answers the dataset's id."""

    dataset_id: str  # empty: choose one
    definition: ev.DatasetDefinition
    restores: bool = False  # the graph of the dataset of that id is lost: this one takes its place


class DecideCompression(Command, frozen=True, kw_only=True):
    """The first answer for a dataset is final. → CompressionDecided"""

    dataset_id: str
    disable: bool


class GetOrCreateJob(Command, frozen=True, kw_only=True):
    """→ JobCreated, unless a job of that name exists, of whatever dataset. Answers its id."""

    dataset_id: str
    name: str  # empty: a new anonymous job
    sharding: int  # ev.Sharding
    num_consumers: int | None = None
    cross_trainer_cache: bool = False
    target_workers: int = 0


class JoinIteration(Command, frozen=True, kw_only=True):
    """→ (IterationCreated,) TaskCreated …, ConsumerJoined. Answers the ConsumerJoined event.

    Each worker that has no task of the iteration gets one, if that has not finished.
    """

    job_id: int
    repetition: int


class LeaveIteration(Command, frozen=True, kw_only=True):
    """→ ConsumerLeft, and IterationCollected if the job has no name and nobody is left.

    A consumer that is not known has left already.
    """

    consumer_id: int
    reason: str


class RegisterWorker(Command, frozen=True, kw_only=True):
    """→ (WorkerLost of an earlier process there,) WorkerRegistered, TaskCreated …

    It gets a task of each iteration that somebody reads, and those that it had before it was lost.
    Answers the worker's id. A worker that is registered stays as it is.
    """

    address: str
    uid: int
    tags: tuple[str, ...] = ()
    transfer_servers: tuple[ev.TransferServer, ...] = ()
    stock: bool = False


class LoseWorker(Command, frozen=True, kw_only=True):
    """→ LeaseLost …, WorkerLost, then for each iteration IterationFinished or TaskCreated."""

    worker_id: int
    reason: str
    left: bool = False  # it said goodbye, so its process does not come back


class CompleteTask(Command, frozen=True, kw_only=True):
    """→ LeaseCompleted …, TaskCompleted, (IterationFinished or TaskCreated).

    Unknown tasks are ignored.
    """

    task_id: int


class GetSplit(Command, frozen=True, kw_only=True):
    """TensorFlow's GetSplit. → SplitsLeased of one split, or RepetitionStarted.

    Answers the SplitsLeased event; at the end of the repetition one without splits, of the
    provider's present repetition, that is no event.
    """

    iteration_id: int
    repetition: int
    provider: int


class LeaseSplits(Command, frozen=True, kw_only=True):
    """→ LeaseCompleted …, LeaseReturned …, then SplitsLeased or RepetitionStarted.

    Answers as GetSplit does; None if want is 0.
    """

    task_id: int
    provider: int
    repetition: int
    want: int
    or_later: bool = False  # if that repetition is over, from the present one
    completed: tuple[int, ...] = ()
    returned: tuple[tuple[int, int], ...] = ()  # (lease id, count)


class CollectIteration(Command, frozen=True, kw_only=True):
    """Nobody has read it for long. → LeaseLost …, IterationCollected, or IterationPaused if its
    splits must not be given out again, should somebody join it later.
    """

    iteration_id: int
