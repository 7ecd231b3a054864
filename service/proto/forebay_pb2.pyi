from forebay.journal.proto import events_pb2 as _events_pb2
from forebay.service.proto import metrics_pb2 as _metrics_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournalPosition(_message.Message):
    __slots__ = ("journal_id", "sequence", "lasting", "proof")
    JOURNAL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LASTING_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    journal_id: str
    sequence: int
    lasting: bool
    proof: bytes
    def __init__(self, journal_id: _Optional[str] = ..., sequence: _Optional[int] = ..., lasting: bool = ..., proof: _Optional[bytes] = ...) -> None: ...

class RegisterDatasetRequest(_message.Message):
    __slots__ = ("dataset_id", "graph", "sources", "unsplittable", "metadata", "structure", "compression", "python", "lengths", "mixture")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    UNSPLITTABLE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    MIXTURE_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    graph: bytes
    sources: _containers.RepeatedCompositeFieldContainer[_events_pb2.SplitSource]
    unsplittable: str
    metadata: bytes
    structure: str
    compression: _events_pb2.BlockCompression
    python: bytes
    lengths: _containers.RepeatedScalarFieldContainer[int]
    mixture: _containers.RepeatedCompositeFieldContainer[_events_pb2.MixtureSource]
    def __init__(self, dataset_id: _Optional[str] = ..., graph: _Optional[bytes] = ..., sources: _Optional[_Iterable[_Union[_events_pb2.SplitSource, _Mapping]]] = ..., unsplittable: _Optional[str] = ..., metadata: _Optional[bytes] = ..., structure: _Optional[str] = ..., compression: _Optional[_Union[_events_pb2.BlockCompression, str]] = ..., python: _Optional[bytes] = ..., lengths: _Optional[_Iterable[int]] = ..., mixture: _Optional[_Iterable[_Union[_events_pb2.MixtureSource, _Mapping]]] = ...) -> None: ...

class RegisterDatasetResponse(_message.Message):
    __slots__ = ("dataset_id", "differs")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    differs: str
    def __init__(self, dataset_id: _Optional[str] = ..., differs: _Optional[str] = ...) -> None: ...

class GetDatasetRequest(_message.Message):
    __slots__ = ("dataset_id", "with_graph", "known", "job_name", "piece_bytes", "offset", "digest")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    WITH_GRAPH_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    with_graph: bool
    known: JournalPosition
    job_name: str
    piece_bytes: int
    offset: int
    digest: bytes
    def __init__(self, dataset_id: _Optional[str] = ..., with_graph: bool = ..., known: _Optional[_Union[JournalPosition, _Mapping]] = ..., job_name: _Optional[str] = ..., piece_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class GetDatasetResponse(_message.Message):
    __slots__ = ("definition", "graph", "colocated", "epochs_over", "graph_bytes", "digest", "elements")
    DEFINITION_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    COLOCATED_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_OVER_FIELD_NUMBER: _ClassVar[int]
    GRAPH_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    definition: _events_pb2.DatasetDefinition
    graph: bytes
    colocated: bool
    epochs_over: int
    graph_bytes: int
    digest: bytes
    elements: int
    def __init__(self, definition: _Optional[_Union[_events_pb2.DatasetDefinition, _Mapping]] = ..., graph: _Optional[bytes] = ..., colocated: bool = ..., epochs_over: _Optional[int] = ..., graph_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ..., elements: _Optional[int] = ...) -> None: ...

class Training(_message.Message):
    __slots__ = ("replicas", "fingerprint")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    replicas: int
    fingerprint: str
    def __init__(self, replicas: _Optional[int] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class ListDatasetsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDatasetsResponse(_message.Message):
    __slots__ = ("datasets",)
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    datasets: str
    def __init__(self, datasets: _Optional[str] = ...) -> None: ...

class RemoveDatasetRequest(_message.Message):
    __slots__ = ("dataset_id", "force", "request")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    force: bool
    request: _events_pb2.Request
    def __init__(self, dataset_id: _Optional[str] = ..., force: bool = ..., request: _Optional[_Union[_events_pb2.Request, _Mapping]] = ...) -> None: ...

class RemoveDatasetResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, jobs: _Optional[_Iterable[str]] = ...) -> None: ...

class GetOrCreateJobRequest(_message.Message):
    __slots__ = ("request", "dataset_id", "job_name", "sharding", "target_workers", "known", "num_consumers", "cross_trainer_cache", "order", "content", "one_dataset", "within_bundles", "schedules", "schedule_of")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    SHARDING_FIELD_NUMBER: _ClassVar[int]
    TARGET_WORKERS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    NUM_CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    CROSS_TRAINER_CACHE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    ONE_DATASET_FIELD_NUMBER: _ClassVar[int]
    WITHIN_BUNDLES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_OF_FIELD_NUMBER: _ClassVar[int]
    request: _events_pb2.Request
    dataset_id: str
    job_name: str
    sharding: _events_pb2.Sharding
    target_workers: int
    known: JournalPosition
    num_consumers: int
    cross_trainer_cache: bool
    order: _events_pb2.OrderSpec
    content: str
    one_dataset: bool
    within_bundles: bool
    schedules: bool
    schedule_of: str
    def __init__(self, request: _Optional[_Union[_events_pb2.Request, _Mapping]] = ..., dataset_id: _Optional[str] = ..., job_name: _Optional[str] = ..., sharding: _Optional[_Union[_events_pb2.Sharding, str]] = ..., target_workers: _Optional[int] = ..., known: _Optional[_Union[JournalPosition, _Mapping]] = ..., num_consumers: _Optional[int] = ..., cross_trainer_cache: bool = ..., order: _Optional[_Union[_events_pb2.OrderSpec, _Mapping]] = ..., content: _Optional[str] = ..., one_dataset: bool = ..., within_bundles: bool = ..., schedules: bool = ..., schedule_of: _Optional[str] = ...) -> None: ...

class GetOrCreateJobResponse(_message.Message):
    __slots__ = ("job_id", "dataset_id", "journal")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    dataset_id: str
    journal: JournalPosition
    def __init__(self, job_id: _Optional[int] = ..., dataset_id: _Optional[str] = ..., journal: _Optional[_Union[JournalPosition, _Mapping]] = ...) -> None: ...

class JoinIterationRequest(_message.Message):
    __slots__ = ("request", "job_id", "epoch", "known", "job", "consumer_index", "member")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_INDEX_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    request: _events_pb2.Request
    job_id: int
    epoch: int
    known: JournalPosition
    job: GetOrCreateJobRequest
    consumer_index: int
    member: _events_pb2.GroupMember
    def __init__(self, request: _Optional[_Union[_events_pb2.Request, _Mapping]] = ..., job_id: _Optional[int] = ..., epoch: _Optional[int] = ..., known: _Optional[_Union[JournalPosition, _Mapping]] = ..., job: _Optional[_Union[GetOrCreateJobRequest, _Mapping]] = ..., consumer_index: _Optional[int] = ..., member: _Optional[_Union[_events_pb2.GroupMember, _Mapping]] = ...) -> None: ...

class JoinIterationResponse(_message.Message):
    __slots__ = ("iteration_id", "consumer_id", "journal", "job_id", "dataset_id", "news", "order", "lengths", "epoch", "doubts")
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    NEWS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DOUBTS_FIELD_NUMBER: _ClassVar[int]
    iteration_id: int
    consumer_id: int
    journal: JournalPosition
    job_id: int
    dataset_id: str
    news: ConsumerHeartbeatResponse
    order: _events_pb2.OrderSpec
    lengths: _containers.RepeatedScalarFieldContainer[int]
    epoch: int
    doubts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, iteration_id: _Optional[int] = ..., consumer_id: _Optional[int] = ..., journal: _Optional[_Union[JournalPosition, _Mapping]] = ..., job_id: _Optional[int] = ..., dataset_id: _Optional[str] = ..., news: _Optional[_Union[ConsumerHeartbeatResponse, _Mapping]] = ..., order: _Optional[_Union[_events_pb2.OrderSpec, _Mapping]] = ..., lengths: _Optional[_Iterable[int]] = ..., epoch: _Optional[int] = ..., doubts: _Optional[_Iterable[str]] = ...) -> None: ...

class ConsumerHeartbeatRequest(_message.Message):
    __slots__ = ("consumer_id", "version", "wait_ms", "known", "refused", "rounds", "never_answered", "bundles", "lengths", "load", "answer", "changes", "position")
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NEVER_ANSWERED_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    consumer_id: int
    version: int
    wait_ms: int
    known: JournalPosition
    refused: _containers.RepeatedScalarFieldContainer[int]
    rounds: RoundReport
    never_answered: _containers.RepeatedScalarFieldContainer[int]
    bundles: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    load: ConsumerLoad
    answer: Proposal
    changes: int
    position: int
    def __init__(self, consumer_id: _Optional[int] = ..., version: _Optional[int] = ..., wait_ms: _Optional[int] = ..., known: _Optional[_Union[JournalPosition, _Mapping]] = ..., refused: _Optional[_Iterable[int]] = ..., rounds: _Optional[_Union[RoundReport, _Mapping]] = ..., never_answered: _Optional[_Iterable[int]] = ..., bundles: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., load: _Optional[_Union[ConsumerLoad, _Mapping]] = ..., answer: _Optional[_Union[Proposal, _Mapping]] = ..., changes: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class ConsumerLoad(_message.Message):
    __slots__ = ("open_ms", "waited_ms", "elements", "network_ms", "dispatcher_ms", "no_task_ms", "bytes")
    OPEN_MS_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_MS_FIELD_NUMBER: _ClassVar[int]
    DISPATCHER_MS_FIELD_NUMBER: _ClassVar[int]
    NO_TASK_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    open_ms: int
    waited_ms: int
    elements: int
    network_ms: int
    dispatcher_ms: int
    no_task_ms: int
    bytes: int
    def __init__(self, open_ms: _Optional[int] = ..., waited_ms: _Optional[int] = ..., elements: _Optional[int] = ..., network_ms: _Optional[int] = ..., dispatcher_ms: _Optional[int] = ..., no_task_ms: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class ClaimBundlesRequest(_message.Message):
    __slots__ = ("consumer_id", "most", "places", "cursors", "done", "known")
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    CURSORS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    consumer_id: int
    most: int
    places: _containers.RepeatedScalarFieldContainer[int]
    cursors: _containers.RepeatedScalarFieldContainer[int]
    done: _containers.RepeatedScalarFieldContainer[int]
    known: JournalPosition
    def __init__(self, consumer_id: _Optional[int] = ..., most: _Optional[int] = ..., places: _Optional[_Iterable[int]] = ..., cursors: _Optional[_Iterable[int]] = ..., done: _Optional[_Iterable[int]] = ..., known: _Optional[_Union[JournalPosition, _Mapping]] = ...) -> None: ...

class ClaimBundlesResponse(_message.Message):
    __slots__ = ("places", "cursors", "unclaimed", "version", "journal")
    PLACES_FIELD_NUMBER: _ClassVar[int]
    CURSORS_FIELD_NUMBER: _ClassVar[int]
    UNCLAIMED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    places: _containers.RepeatedScalarFieldContainer[int]
    cursors: _containers.RepeatedScalarFieldContainer[int]
    unclaimed: int
    version: int
    journal: JournalPosition
    def __init__(self, places: _Optional[_Iterable[int]] = ..., cursors: _Optional[_Iterable[int]] = ..., unclaimed: _Optional[int] = ..., version: _Optional[int] = ..., journal: _Optional[_Union[JournalPosition, _Mapping]] = ...) -> None: ...

class RoundReport(_message.Message):
    __slots__ = ("current", "blocked", "consumer_index", "held")
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_INDEX_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    current: int
    blocked: int
    consumer_index: int
    held: _containers.RepeatedCompositeFieldContainer[HeldTask]
    def __init__(self, current: _Optional[int] = ..., blocked: _Optional[int] = ..., consumer_index: _Optional[int] = ..., held: _Optional[_Iterable[_Union[HeldTask, _Mapping]]] = ...) -> None: ...

class HeldTask(_message.Message):
    __slots__ = ("task_id", "lost", "round", "received")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    lost: int
    round: int
    received: int
    def __init__(self, task_id: _Optional[int] = ..., lost: _Optional[int] = ..., round: _Optional[int] = ..., received: _Optional[int] = ...) -> None: ...

class ConsumerHeartbeatResponse(_message.Message):
    __slots__ = ("version", "tasks", "finished", "journal", "block_round", "removed", "no_task", "warning", "data_credential", "proposal", "changes")
    class RemovedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ROUND_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    NO_TASK_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    DATA_CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    version: int
    tasks: _containers.RepeatedCompositeFieldContainer[TaskInfo]
    finished: bool
    journal: JournalPosition
    block_round: int
    removed: _containers.ScalarMap[int, int]
    no_task: str
    warning: str
    data_credential: bytes
    proposal: Proposal
    changes: _containers.RepeatedCompositeFieldContainer[_events_pb2.ScheduleChange]
    def __init__(self, version: _Optional[int] = ..., tasks: _Optional[_Iterable[_Union[TaskInfo, _Mapping]]] = ..., finished: bool = ..., journal: _Optional[_Union[JournalPosition, _Mapping]] = ..., block_round: _Optional[int] = ..., removed: _Optional[_Mapping[int, int]] = ..., no_task: _Optional[str] = ..., warning: _Optional[str] = ..., data_credential: _Optional[bytes] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., changes: _Optional[_Iterable[_Union[_events_pb2.ScheduleChange, _Mapping]]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("number", "place")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    number: int
    place: int
    def __init__(self, number: _Optional[int] = ..., place: _Optional[int] = ...) -> None: ...

class TaskInfo(_message.Message):
    __slots__ = ("task_id", "completed", "worker_address", "worker_uid", "transfer_servers", "worker_tags", "stock", "starting_round", "lost")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORKER_UID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SERVERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_TAGS_FIELD_NUMBER: _ClassVar[int]
    STOCK_FIELD_NUMBER: _ClassVar[int]
    STARTING_ROUND_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    completed: bool
    worker_address: str
    worker_uid: int
    transfer_servers: _containers.RepeatedCompositeFieldContainer[_events_pb2.TransferServer]
    worker_tags: _containers.RepeatedScalarFieldContainer[str]
    stock: bool
    starting_round: int
    lost: int
    def __init__(self, task_id: _Optional[int] = ..., completed: bool = ..., worker_address: _Optional[str] = ..., worker_uid: _Optional[int] = ..., transfer_servers: _Optional[_Iterable[_Union[_events_pb2.TransferServer, _Mapping]]] = ..., worker_tags: _Optional[_Iterable[str]] = ..., stock: bool = ..., starting_round: _Optional[int] = ..., lost: _Optional[int] = ...) -> None: ...

class LeaveIterationRequest(_message.Message):
    __slots__ = ("consumer_id", "known", "position", "error")
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    consumer_id: int
    known: JournalPosition
    position: int
    error: str
    def __init__(self, consumer_id: _Optional[int] = ..., known: _Optional[_Union[JournalPosition, _Mapping]] = ..., position: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class LeaveIterationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerHeartbeatRequest(_message.Message):
    __slots__ = ("address", "uid", "tags", "transfer_servers", "version", "wait_ms", "known", "draining", "no_python", "metrics", "checked", "loads", "memory_budget", "errors", "host", "cache")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SERVERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NO_PYTHON_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BUDGET_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    address: str
    uid: int
    tags: _containers.RepeatedScalarFieldContainer[str]
    transfer_servers: _containers.RepeatedCompositeFieldContainer[_events_pb2.TransferServer]
    version: int
    wait_ms: int
    known: JournalPosition
    draining: bool
    no_python: bool
    metrics: _containers.RepeatedCompositeFieldContainer[_metrics_pb2.TaskMetrics]
    checked: _containers.RepeatedCompositeFieldContainer[BundleChecksums]
    loads: _containers.RepeatedCompositeFieldContainer[JobLoad]
    memory_budget: int
    errors: _containers.RepeatedCompositeFieldContainer[ReadError]
    host: HostLoad
    cache: CacheLoad
    def __init__(self, address: _Optional[str] = ..., uid: _Optional[int] = ..., tags: _Optional[_Iterable[str]] = ..., transfer_servers: _Optional[_Iterable[_Union[_events_pb2.TransferServer, _Mapping]]] = ..., version: _Optional[int] = ..., wait_ms: _Optional[int] = ..., known: _Optional[_Union[JournalPosition, _Mapping]] = ..., draining: bool = ..., no_python: bool = ..., metrics: _Optional[_Iterable[_Union[_metrics_pb2.TaskMetrics, _Mapping]]] = ..., checked: _Optional[_Iterable[_Union[BundleChecksums, _Mapping]]] = ..., loads: _Optional[_Iterable[_Union[JobLoad, _Mapping]]] = ..., memory_budget: _Optional[int] = ..., errors: _Optional[_Iterable[_Union[ReadError, _Mapping]]] = ..., host: _Optional[_Union[HostLoad, _Mapping]] = ..., cache: _Optional[_Union[CacheLoad, _Mapping]] = ...) -> None: ...

class CacheLoad(_message.Message):
    __slots__ = ("held_bytes", "limit_bytes", "hit_bytes", "missed_bytes")
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MISSED_BYTES_FIELD_NUMBER: _ClassVar[int]
    held_bytes: int
    limit_bytes: int
    hit_bytes: int
    missed_bytes: int
    def __init__(self, held_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., hit_bytes: _Optional[int] = ..., missed_bytes: _Optional[int] = ...) -> None: ...

class HostLoad(_message.Message):
    __slots__ = ("memory_bytes", "memory_used_bytes", "busy_permille", "processors")
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_PERMILLE_FIELD_NUMBER: _ClassVar[int]
    PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    memory_bytes: int
    memory_used_bytes: int
    busy_permille: int
    processors: int
    def __init__(self, memory_bytes: _Optional[int] = ..., memory_used_bytes: _Optional[int] = ..., busy_permille: _Optional[int] = ..., processors: _Optional[int] = ...) -> None: ...

class ReadError(_message.Message):
    __slots__ = ("job_id", "task_id", "code", "message", "ago_ms", "times", "for_good")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    AGO_MS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    FOR_GOOD_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    task_id: int
    code: str
    message: str
    ago_ms: int
    times: int
    for_good: bool
    def __init__(self, job_id: _Optional[int] = ..., task_id: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., ago_ms: _Optional[int] = ..., times: _Optional[int] = ..., for_good: bool = ...) -> None: ...

class JobLoad(_message.Message):
    __slots__ = ("job_id", "working_ms", "backpressured_ms", "no_split_ms", "held_bytes", "shed_elements", "parked_tasks", "elements")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    WORKING_MS_FIELD_NUMBER: _ClassVar[int]
    BACKPRESSURED_MS_FIELD_NUMBER: _ClassVar[int]
    NO_SPLIT_MS_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHED_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    PARKED_TASKS_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    working_ms: int
    backpressured_ms: int
    no_split_ms: int
    held_bytes: int
    shed_elements: int
    parked_tasks: int
    elements: int
    def __init__(self, job_id: _Optional[int] = ..., working_ms: _Optional[int] = ..., backpressured_ms: _Optional[int] = ..., no_split_ms: _Optional[int] = ..., held_bytes: _Optional[int] = ..., shed_elements: _Optional[int] = ..., parked_tasks: _Optional[int] = ..., elements: _Optional[int] = ...) -> None: ...

class BundleChecksums(_message.Message):
    __slots__ = ("job_id", "bundles", "checksums", "lengths")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    bundles: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job_id: _Optional[int] = ..., bundles: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerHeartbeatResponse(_message.Message):
    __slots__ = ("worker_id", "version", "tasks", "journal", "streams", "data_keys", "streams_are_partial")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    DATA_KEYS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_ARE_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    version: int
    tasks: _containers.RepeatedCompositeFieldContainer[Task]
    journal: JournalPosition
    streams: _containers.RepeatedCompositeFieldContainer[Stream]
    data_keys: _containers.RepeatedScalarFieldContainer[bytes]
    streams_are_partial: bool
    def __init__(self, worker_id: _Optional[int] = ..., version: _Optional[int] = ..., tasks: _Optional[_Iterable[_Union[Task, _Mapping]]] = ..., journal: _Optional[_Union[JournalPosition, _Mapping]] = ..., streams: _Optional[_Iterable[_Union[Stream, _Mapping]]] = ..., data_keys: _Optional[_Iterable[bytes]] = ..., streams_are_partial: bool = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("task_id", "iteration_id", "dataset_id", "sharding", "num_sources", "num_shards", "shard", "num_consumers", "cross_trainer_cache", "graph", "order", "job_id")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    SHARDING_FIELD_NUMBER: _ClassVar[int]
    NUM_SOURCES_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    CROSS_TRAINER_CACHE_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    iteration_id: int
    dataset_id: str
    sharding: _events_pb2.Sharding
    num_sources: int
    num_shards: int
    shard: int
    num_consumers: int
    cross_trainer_cache: bool
    graph: str
    order: _events_pb2.OrderSpec
    job_id: int
    def __init__(self, task_id: _Optional[int] = ..., iteration_id: _Optional[int] = ..., dataset_id: _Optional[str] = ..., sharding: _Optional[_Union[_events_pb2.Sharding, str]] = ..., num_sources: _Optional[int] = ..., num_shards: _Optional[int] = ..., shard: _Optional[int] = ..., num_consumers: _Optional[int] = ..., cross_trainer_cache: bool = ..., graph: _Optional[str] = ..., order: _Optional[_Union[_events_pb2.OrderSpec, _Mapping]] = ..., job_id: _Optional[int] = ...) -> None: ...

class LeaseSplitsRequest(_message.Message):
    __slots__ = ("request", "task_id", "source", "pass_number", "want", "begun", "returned", "known", "or_later", "taken", "lost", "dropped", "all_taken")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    OR_LATER_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    ALL_TAKEN_FIELD_NUMBER: _ClassVar[int]
    request: _events_pb2.Request
    task_id: int
    source: int
    pass_number: int
    want: int
    begun: _containers.RepeatedScalarFieldContainer[int]
    returned: _containers.RepeatedCompositeFieldContainer[ReturnedLease]
    known: JournalPosition
    or_later: bool
    taken: _containers.RepeatedScalarFieldContainer[int]
    lost: _containers.RepeatedScalarFieldContainer[int]
    dropped: int
    all_taken: bool
    def __init__(self, request: _Optional[_Union[_events_pb2.Request, _Mapping]] = ..., task_id: _Optional[int] = ..., source: _Optional[int] = ..., pass_number: _Optional[int] = ..., want: _Optional[int] = ..., begun: _Optional[_Iterable[int]] = ..., returned: _Optional[_Iterable[_Union[ReturnedLease, _Mapping]]] = ..., known: _Optional[_Union[JournalPosition, _Mapping]] = ..., or_later: bool = ..., taken: _Optional[_Iterable[int]] = ..., lost: _Optional[_Iterable[int]] = ..., dropped: _Optional[int] = ..., all_taken: bool = ...) -> None: ...

class ReturnedLease(_message.Message):
    __slots__ = ("lease_id", "count")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    count: int
    def __init__(self, lease_id: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class LeaseSplitsResponse(_message.Message):
    __slots__ = ("lease_id", "first", "count", "end_of_splits", "journal", "pass_number", "names", "not_yet")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    END_OF_SPLITS_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    NOT_YET_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    first: int
    count: int
    end_of_splits: bool
    journal: JournalPosition
    pass_number: int
    names: _containers.RepeatedScalarFieldContainer[str]
    not_yet: bool
    def __init__(self, lease_id: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., end_of_splits: bool = ..., journal: _Optional[_Union[JournalPosition, _Mapping]] = ..., pass_number: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., not_yet: bool = ...) -> None: ...

class SkipSplitRequest(_message.Message):
    __slots__ = ("request", "task_id", "split", "element", "reason", "limit", "known", "records")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    request: _events_pb2.Request
    task_id: int
    split: int
    element: int
    reason: str
    limit: int
    known: JournalPosition
    records: int
    def __init__(self, request: _Optional[_Union[_events_pb2.Request, _Mapping]] = ..., task_id: _Optional[int] = ..., split: _Optional[int] = ..., element: _Optional[int] = ..., reason: _Optional[str] = ..., limit: _Optional[int] = ..., known: _Optional[_Union[JournalPosition, _Mapping]] = ..., records: _Optional[int] = ...) -> None: ...

class SkipSplitResponse(_message.Message):
    __slots__ = ("skipped", "journal")
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    skipped: bool
    journal: JournalPosition
    def __init__(self, skipped: bool = ..., journal: _Optional[_Union[JournalPosition, _Mapping]] = ...) -> None: ...

class CompleteTaskRequest(_message.Message):
    __slots__ = ("task_id", "known", "metrics")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    known: JournalPosition
    metrics: _metrics_pb2.TaskMetrics
    def __init__(self, task_id: _Optional[int] = ..., known: _Optional[_Union[JournalPosition, _Mapping]] = ..., metrics: _Optional[_Union[_metrics_pb2.TaskMetrics, _Mapping]] = ...) -> None: ...

class CompleteTaskResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveServiceRequest(_message.Message):
    __slots__ = ("worker_id", "known", "metrics")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    known: JournalPosition
    metrics: _containers.RepeatedCompositeFieldContainer[_metrics_pb2.TaskMetrics]
    def __init__(self, worker_id: _Optional[int] = ..., known: _Optional[_Union[JournalPosition, _Mapping]] = ..., metrics: _Optional[_Iterable[_Union[_metrics_pb2.TaskMetrics, _Mapping]]] = ...) -> None: ...

class LeaveServiceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FindGoneConsumersRequest(_message.Message):
    __slots__ = ("consumer_ids", "known", "left", "task_ids")
    CONSUMER_IDS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    consumer_ids: _containers.RepeatedScalarFieldContainer[int]
    known: JournalPosition
    left: bool
    task_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, consumer_ids: _Optional[_Iterable[int]] = ..., known: _Optional[_Union[JournalPosition, _Mapping]] = ..., left: bool = ..., task_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class FindGoneConsumersResponse(_message.Message):
    __slots__ = ("gone", "journal", "unread_task_ids")
    GONE_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    UNREAD_TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    gone: _containers.RepeatedScalarFieldContainer[int]
    journal: JournalPosition
    unread_task_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, gone: _Optional[_Iterable[int]] = ..., journal: _Optional[_Union[JournalPosition, _Mapping]] = ..., unread_task_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Stream(_message.Message):
    __slots__ = ("save_id", "path", "stream", "sources", "first", "count", "compression", "chunks", "elements", "last_elements", "last_file", "assignment")
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    LAST_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FILE_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    save_id: int
    path: str
    stream: int
    sources: _containers.RepeatedCompositeFieldContainer[_events_pb2.SplitSource]
    first: int
    count: int
    compression: str
    chunks: int
    elements: int
    last_elements: int
    last_file: str
    assignment: int
    def __init__(self, save_id: _Optional[int] = ..., path: _Optional[str] = ..., stream: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[_events_pb2.SplitSource, _Mapping]]] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., compression: _Optional[str] = ..., chunks: _Optional[int] = ..., elements: _Optional[int] = ..., last_elements: _Optional[int] = ..., last_file: _Optional[str] = ..., assignment: _Optional[int] = ...) -> None: ...

class StartSaveRequest(_message.Message):
    __slots__ = ("request", "path", "graph", "sources", "metadata")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    request: _events_pb2.Request
    path: str
    graph: bytes
    sources: _containers.RepeatedCompositeFieldContainer[_events_pb2.SplitSource]
    metadata: bytes
    def __init__(self, request: _Optional[_Union[_events_pb2.Request, _Mapping]] = ..., path: _Optional[str] = ..., graph: _Optional[bytes] = ..., sources: _Optional[_Iterable[_Union[_events_pb2.SplitSource, _Mapping]]] = ..., metadata: _Optional[bytes] = ...) -> None: ...

class StartSaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitChunkRequest(_message.Message):
    __slots__ = ("save_id", "stream", "worker_uid", "chunk", "elements", "file", "known", "assignment")
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    WORKER_UID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    save_id: int
    stream: int
    worker_uid: int
    chunk: int
    elements: int
    file: str
    known: JournalPosition
    assignment: int
    def __init__(self, save_id: _Optional[int] = ..., stream: _Optional[int] = ..., worker_uid: _Optional[int] = ..., chunk: _Optional[int] = ..., elements: _Optional[int] = ..., file: _Optional[str] = ..., known: _Optional[_Union[JournalPosition, _Mapping]] = ..., assignment: _Optional[int] = ...) -> None: ...

class CommitChunkResponse(_message.Message):
    __slots__ = ("journal",)
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    journal: JournalPosition
    def __init__(self, journal: _Optional[_Union[JournalPosition, _Mapping]] = ...) -> None: ...

class EndStreamRequest(_message.Message):
    __slots__ = ("save_id", "stream", "worker_uid", "code", "message", "known", "assignment")
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    WORKER_UID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    save_id: int
    stream: int
    worker_uid: int
    code: str
    message: str
    known: JournalPosition
    assignment: int
    def __init__(self, save_id: _Optional[int] = ..., stream: _Optional[int] = ..., worker_uid: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., known: _Optional[_Union[JournalPosition, _Mapping]] = ..., assignment: _Optional[int] = ...) -> None: ...

class EndStreamResponse(_message.Message):
    __slots__ = ("journal",)
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    journal: JournalPosition
    def __init__(self, journal: _Optional[_Union[JournalPosition, _Mapping]] = ...) -> None: ...

class GetScheduleRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class GetScheduleResponse(_message.Message):
    __slots__ = ("dataset_id", "order", "step", "drops_remainder", "journal")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DROPS_REMAINDER_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    order: _events_pb2.OrderSpec
    step: int
    drops_remainder: bool
    journal: JournalPosition
    def __init__(self, dataset_id: _Optional[str] = ..., order: _Optional[_Union[_events_pb2.OrderSpec, _Mapping]] = ..., step: _Optional[int] = ..., drops_remainder: bool = ..., journal: _Optional[_Union[JournalPosition, _Mapping]] = ...) -> None: ...

class ChangeScheduleRequest(_message.Message):
    __slots__ = ("request", "job", "weights", "from_step", "stop", "reason", "fork")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    request: _events_pb2.Request
    job: str
    weights: _containers.RepeatedCompositeFieldContainer[SourceWeight]
    from_step: int
    stop: int
    reason: str
    fork: str
    def __init__(self, request: _Optional[_Union[_events_pb2.Request, _Mapping]] = ..., job: _Optional[str] = ..., weights: _Optional[_Iterable[_Union[SourceWeight, _Mapping]]] = ..., from_step: _Optional[int] = ..., stop: _Optional[int] = ..., reason: _Optional[str] = ..., fork: _Optional[str] = ...) -> None: ...

class SourceWeight(_message.Message):
    __slots__ = ("source", "weight")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    source: str
    weight: float
    def __init__(self, source: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class ChangeScheduleResponse(_message.Message):
    __slots__ = ("step", "place")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    step: int
    place: int
    def __init__(self, step: _Optional[int] = ..., place: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("workers_only", "unproved")
    WORKERS_ONLY_FIELD_NUMBER: _ClassVar[int]
    UNPROVED_FIELD_NUMBER: _ClassVar[int]
    workers_only: bool
    unproved: bool
    def __init__(self, workers_only: bool = ..., unproved: bool = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: str
    def __init__(self, status: _Optional[str] = ...) -> None: ...
