from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockCompression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEASURED: _ClassVar[BlockCompression]
    NEVER: _ClassVar[BlockCompression]
    ZSTD: _ClassVar[BlockCompression]
    LZ4: _ClassVar[BlockCompression]

class Sharding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OFF: _ClassVar[Sharding]
    DYNAMIC: _ClassVar[Sharding]
    FILE: _ClassVar[Sharding]
    DATA: _ClassVar[Sharding]
    FILE_OR_DATA: _ClassVar[Sharding]
    HINT: _ClassVar[Sharding]
MEASURED: BlockCompression
NEVER: BlockCompression
ZSTD: BlockCompression
LZ4: BlockCompression
OFF: Sharding
DYNAMIC: Sharding
FILE: Sharding
DATA: Sharding
FILE_OR_DATA: Sharding
HINT: Sharding

class Event(_message.Message):
    __slots__ = ("time_ms", "request", "leader_elected", "dataset_registered", "compression_decided", "job_created", "iteration_created", "iteration_finished", "iteration_collected", "consumer_joined", "consumer_left", "worker_registered", "worker_lost", "task_created", "task_completed", "splits_leased", "lease_begun", "lease_returned", "lease_lost", "pass_started", "iteration_paused", "splits_found", "consumer_began", "task_proposed", "round_targeted", "consumer_blocked", "task_started", "task_removed", "worker_drains", "split_skipped", "iteration_summarized", "job_removed", "dataset_used", "dataset_removed", "blob_deleted", "lengths_learned", "bundles_claimed", "claims_moved", "bundles_checked", "consumers_moved", "save_started", "stream_assigned", "save_split_assigned", "chunk_committed", "stream_completed", "save_finished", "save_failed", "delivery_reported", "schedule_changed", "mixture_registered", "job_forked")
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    LEADER_ELECTED_FIELD_NUMBER: _ClassVar[int]
    DATASET_REGISTERED_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_DECIDED_FIELD_NUMBER: _ClassVar[int]
    JOB_CREATED_FIELD_NUMBER: _ClassVar[int]
    ITERATION_CREATED_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FINISHED_FIELD_NUMBER: _ClassVar[int]
    ITERATION_COLLECTED_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_JOINED_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_LEFT_FIELD_NUMBER: _ClassVar[int]
    WORKER_REGISTERED_FIELD_NUMBER: _ClassVar[int]
    WORKER_LOST_FIELD_NUMBER: _ClassVar[int]
    TASK_CREATED_FIELD_NUMBER: _ClassVar[int]
    TASK_COMPLETED_FIELD_NUMBER: _ClassVar[int]
    SPLITS_LEASED_FIELD_NUMBER: _ClassVar[int]
    LEASE_BEGUN_FIELD_NUMBER: _ClassVar[int]
    LEASE_RETURNED_FIELD_NUMBER: _ClassVar[int]
    LEASE_LOST_FIELD_NUMBER: _ClassVar[int]
    PASS_STARTED_FIELD_NUMBER: _ClassVar[int]
    ITERATION_PAUSED_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FOUND_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_BEGAN_FIELD_NUMBER: _ClassVar[int]
    TASK_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ROUND_TARGETED_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_BLOCKED_FIELD_NUMBER: _ClassVar[int]
    TASK_STARTED_FIELD_NUMBER: _ClassVar[int]
    TASK_REMOVED_FIELD_NUMBER: _ClassVar[int]
    WORKER_DRAINS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    ITERATION_SUMMARIZED_FIELD_NUMBER: _ClassVar[int]
    JOB_REMOVED_FIELD_NUMBER: _ClassVar[int]
    DATASET_USED_FIELD_NUMBER: _ClassVar[int]
    DATASET_REMOVED_FIELD_NUMBER: _ClassVar[int]
    BLOB_DELETED_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_LEARNED_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_CLAIMED_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_MOVED_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_CHECKED_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_MOVED_FIELD_NUMBER: _ClassVar[int]
    SAVE_STARTED_FIELD_NUMBER: _ClassVar[int]
    STREAM_ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    SAVE_SPLIT_ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    STREAM_COMPLETED_FIELD_NUMBER: _ClassVar[int]
    SAVE_FINISHED_FIELD_NUMBER: _ClassVar[int]
    SAVE_FAILED_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_REPORTED_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_CHANGED_FIELD_NUMBER: _ClassVar[int]
    MIXTURE_REGISTERED_FIELD_NUMBER: _ClassVar[int]
    JOB_FORKED_FIELD_NUMBER: _ClassVar[int]
    time_ms: int
    request: Request
    leader_elected: LeaderElected
    dataset_registered: DatasetRegistered
    compression_decided: CompressionDecided
    job_created: JobCreated
    iteration_created: IterationCreated
    iteration_finished: IterationFinished
    iteration_collected: IterationCollected
    consumer_joined: ConsumerJoined
    consumer_left: ConsumerLeft
    worker_registered: WorkerRegistered
    worker_lost: WorkerLost
    task_created: TaskCreated
    task_completed: TaskCompleted
    splits_leased: SplitsLeased
    lease_begun: LeaseBegun
    lease_returned: LeaseReturned
    lease_lost: LeaseLost
    pass_started: PassStarted
    iteration_paused: IterationPaused
    splits_found: SplitsFound
    consumer_began: ConsumerBegan
    task_proposed: TaskProposed
    round_targeted: RoundTargeted
    consumer_blocked: ConsumerBlocked
    task_started: TaskStarted
    task_removed: TaskRemoved
    worker_drains: WorkerDrains
    split_skipped: SplitSkipped
    iteration_summarized: IterationSummarized
    job_removed: JobRemoved
    dataset_used: DatasetUsed
    dataset_removed: DatasetRemoved
    blob_deleted: BlobDeleted
    lengths_learned: LengthsLearned
    bundles_claimed: BundlesClaimed
    claims_moved: ClaimsMoved
    bundles_checked: BundlesChecked
    consumers_moved: ConsumersMoved
    save_started: SaveStarted
    stream_assigned: StreamAssigned
    save_split_assigned: SaveSplitAssigned
    chunk_committed: ChunkCommitted
    stream_completed: StreamCompleted
    save_finished: SaveFinished
    save_failed: SaveFailed
    delivery_reported: DeliveryReported
    schedule_changed: ScheduleChanged
    mixture_registered: DatasetRegistered
    job_forked: JobCreated
    def __init__(self, time_ms: _Optional[int] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., leader_elected: _Optional[_Union[LeaderElected, _Mapping]] = ..., dataset_registered: _Optional[_Union[DatasetRegistered, _Mapping]] = ..., compression_decided: _Optional[_Union[CompressionDecided, _Mapping]] = ..., job_created: _Optional[_Union[JobCreated, _Mapping]] = ..., iteration_created: _Optional[_Union[IterationCreated, _Mapping]] = ..., iteration_finished: _Optional[_Union[IterationFinished, _Mapping]] = ..., iteration_collected: _Optional[_Union[IterationCollected, _Mapping]] = ..., consumer_joined: _Optional[_Union[ConsumerJoined, _Mapping]] = ..., consumer_left: _Optional[_Union[ConsumerLeft, _Mapping]] = ..., worker_registered: _Optional[_Union[WorkerRegistered, _Mapping]] = ..., worker_lost: _Optional[_Union[WorkerLost, _Mapping]] = ..., task_created: _Optional[_Union[TaskCreated, _Mapping]] = ..., task_completed: _Optional[_Union[TaskCompleted, _Mapping]] = ..., splits_leased: _Optional[_Union[SplitsLeased, _Mapping]] = ..., lease_begun: _Optional[_Union[LeaseBegun, _Mapping]] = ..., lease_returned: _Optional[_Union[LeaseReturned, _Mapping]] = ..., lease_lost: _Optional[_Union[LeaseLost, _Mapping]] = ..., pass_started: _Optional[_Union[PassStarted, _Mapping]] = ..., iteration_paused: _Optional[_Union[IterationPaused, _Mapping]] = ..., splits_found: _Optional[_Union[SplitsFound, _Mapping]] = ..., consumer_began: _Optional[_Union[ConsumerBegan, _Mapping]] = ..., task_proposed: _Optional[_Union[TaskProposed, _Mapping]] = ..., round_targeted: _Optional[_Union[RoundTargeted, _Mapping]] = ..., consumer_blocked: _Optional[_Union[ConsumerBlocked, _Mapping]] = ..., task_started: _Optional[_Union[TaskStarted, _Mapping]] = ..., task_removed: _Optional[_Union[TaskRemoved, _Mapping]] = ..., worker_drains: _Optional[_Union[WorkerDrains, _Mapping]] = ..., split_skipped: _Optional[_Union[SplitSkipped, _Mapping]] = ..., iteration_summarized: _Optional[_Union[IterationSummarized, _Mapping]] = ..., job_removed: _Optional[_Union[JobRemoved, _Mapping]] = ..., dataset_used: _Optional[_Union[DatasetUsed, _Mapping]] = ..., dataset_removed: _Optional[_Union[DatasetRemoved, _Mapping]] = ..., blob_deleted: _Optional[_Union[BlobDeleted, _Mapping]] = ..., lengths_learned: _Optional[_Union[LengthsLearned, _Mapping]] = ..., bundles_claimed: _Optional[_Union[BundlesClaimed, _Mapping]] = ..., claims_moved: _Optional[_Union[ClaimsMoved, _Mapping]] = ..., bundles_checked: _Optional[_Union[BundlesChecked, _Mapping]] = ..., consumers_moved: _Optional[_Union[ConsumersMoved, _Mapping]] = ..., save_started: _Optional[_Union[SaveStarted, _Mapping]] = ..., stream_assigned: _Optional[_Union[StreamAssigned, _Mapping]] = ..., save_split_assigned: _Optional[_Union[SaveSplitAssigned, _Mapping]] = ..., chunk_committed: _Optional[_Union[ChunkCommitted, _Mapping]] = ..., stream_completed: _Optional[_Union[StreamCompleted, _Mapping]] = ..., save_finished: _Optional[_Union[SaveFinished, _Mapping]] = ..., save_failed: _Optional[_Union[SaveFailed, _Mapping]] = ..., delivery_reported: _Optional[_Union[DeliveryReported, _Mapping]] = ..., schedule_changed: _Optional[_Union[ScheduleChanged, _Mapping]] = ..., mixture_registered: _Optional[_Union[DatasetRegistered, _Mapping]] = ..., job_forked: _Optional[_Union[JobCreated, _Mapping]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("caller", "number")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    caller: str
    number: int
    def __init__(self, caller: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class LeaderElected(_message.Message):
    __slots__ = ("term", "address", "format", "version", "journal_id", "after_repair", "next_id", "places", "position_key", "dashboard")
    TERM_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_REPAIR_FIELD_NUMBER: _ClassVar[int]
    NEXT_ID_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    POSITION_KEY_FIELD_NUMBER: _ClassVar[int]
    DASHBOARD_FIELD_NUMBER: _ClassVar[int]
    term: int
    address: str
    format: int
    version: str
    journal_id: str
    after_repair: bool
    next_id: int
    places: _containers.RepeatedCompositeFieldContainer[Place]
    position_key: bytes
    dashboard: str
    def __init__(self, term: _Optional[int] = ..., address: _Optional[str] = ..., format: _Optional[int] = ..., version: _Optional[str] = ..., journal_id: _Optional[str] = ..., after_repair: bool = ..., next_id: _Optional[int] = ..., places: _Optional[_Iterable[_Union[Place, _Mapping]]] = ..., position_key: _Optional[bytes] = ..., dashboard: _Optional[str] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("configured", "address")
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    configured: str
    address: str
    def __init__(self, configured: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class SplitSource(_message.Message):
    __slots__ = ("arithmetic", "count", "explicit", "endless", "saved_chunks", "leased_with", "unleasable", "singly")
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    EXPLICIT_FIELD_NUMBER: _ClassVar[int]
    ENDLESS_FIELD_NUMBER: _ClassVar[int]
    SAVED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_WITH_FIELD_NUMBER: _ClassVar[int]
    UNLEASABLE_FIELD_NUMBER: _ClassVar[int]
    SINGLY_FIELD_NUMBER: _ClassVar[int]
    arithmetic: Arithmetic
    count: int
    explicit: ExplicitSplits
    endless: Endless
    saved_chunks: SavedChunks
    leased_with: int
    unleasable: str
    singly: bool
    def __init__(self, arithmetic: _Optional[_Union[Arithmetic, _Mapping]] = ..., count: _Optional[int] = ..., explicit: _Optional[_Union[ExplicitSplits, _Mapping]] = ..., endless: _Optional[_Union[Endless, _Mapping]] = ..., saved_chunks: _Optional[_Union[SavedChunks, _Mapping]] = ..., leased_with: _Optional[int] = ..., unleasable: _Optional[str] = ..., singly: bool = ...) -> None: ...

class Arithmetic(_message.Message):
    __slots__ = ("start", "stop", "step")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    step: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class ExplicitSplits(_message.Message):
    __slots__ = ("splits",)
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    splits: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, splits: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Endless(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SavedChunks(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class DatasetDefinition(_message.Message):
    __slots__ = ("tf_data_graph", "python_function", "mixture", "sources", "unsplittable", "metadata", "structure", "compression")
    TF_DATA_GRAPH_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FUNCTION_FIELD_NUMBER: _ClassVar[int]
    MIXTURE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    UNSPLITTABLE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    tf_data_graph: TfDataGraph
    python_function: PythonFunction
    mixture: Mixture
    sources: _containers.RepeatedCompositeFieldContainer[SplitSource]
    unsplittable: str
    metadata: bytes
    structure: str
    compression: BlockCompression
    def __init__(self, tf_data_graph: _Optional[_Union[TfDataGraph, _Mapping]] = ..., python_function: _Optional[_Union[PythonFunction, _Mapping]] = ..., mixture: _Optional[_Union[Mixture, _Mapping]] = ..., sources: _Optional[_Iterable[_Union[SplitSource, _Mapping]]] = ..., unsplittable: _Optional[str] = ..., metadata: _Optional[bytes] = ..., structure: _Optional[str] = ..., compression: _Optional[_Union[BlockCompression, str]] = ...) -> None: ...

class TfDataGraph(_message.Message):
    __slots__ = ("blob", "fingerprint", "named")
    BLOB_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    blob: str
    fingerprint: str
    named: bool
    def __init__(self, blob: _Optional[str] = ..., fingerprint: _Optional[str] = ..., named: bool = ...) -> None: ...

class PythonFunction(_message.Message):
    __slots__ = ("blob", "fingerprint", "named", "no_code")
    BLOB_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    NO_CODE_FIELD_NUMBER: _ClassVar[int]
    blob: str
    fingerprint: str
    named: bool
    no_code: bool
    def __init__(self, blob: _Optional[str] = ..., fingerprint: _Optional[str] = ..., named: bool = ..., no_code: bool = ...) -> None: ...

class Mixture(_message.Message):
    __slots__ = ("blob", "fingerprint", "named", "sources")
    BLOB_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    blob: str
    fingerprint: str
    named: bool
    sources: _containers.RepeatedCompositeFieldContainer[MixtureSource]
    def __init__(self, blob: _Optional[str] = ..., fingerprint: _Optional[str] = ..., named: bool = ..., sources: _Optional[_Iterable[_Union[MixtureSource, _Mapping]]] = ...) -> None: ...

class MixtureSource(_message.Message):
    __slots__ = ("name", "dataset_id", "share", "content")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    dataset_id: str
    share: int
    content: str
    def __init__(self, name: _Optional[str] = ..., dataset_id: _Optional[str] = ..., share: _Optional[int] = ..., content: _Optional[str] = ...) -> None: ...

class DatasetRegistered(_message.Message):
    __slots__ = ("dataset_id", "definition", "graph_bytes")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    DEFINITION_FIELD_NUMBER: _ClassVar[int]
    GRAPH_BYTES_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    definition: DatasetDefinition
    graph_bytes: int
    def __init__(self, dataset_id: _Optional[str] = ..., definition: _Optional[_Union[DatasetDefinition, _Mapping]] = ..., graph_bytes: _Optional[int] = ...) -> None: ...

class DatasetUsed(_message.Message):
    __slots__ = ("dataset_id",)
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    def __init__(self, dataset_id: _Optional[str] = ...) -> None: ...

class DatasetRemoved(_message.Message):
    __slots__ = ("dataset_id", "jobs")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    jobs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, dataset_id: _Optional[str] = ..., jobs: _Optional[_Iterable[str]] = ...) -> None: ...

class BlobDeleted(_message.Message):
    __slots__ = ("blob",)
    BLOB_FIELD_NUMBER: _ClassVar[int]
    blob: str
    def __init__(self, blob: _Optional[str] = ...) -> None: ...

class CompressionDecided(_message.Message):
    __slots__ = ("dataset_id", "disabled")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    DISABLED_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    disabled: bool
    def __init__(self, dataset_id: _Optional[str] = ..., disabled: bool = ...) -> None: ...

class JobCreated(_message.Message):
    __slots__ = ("job_id", "name", "dataset_id", "sharding", "num_consumers", "cross_trainer_cache", "target_workers", "order", "fork")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    SHARDING_FIELD_NUMBER: _ClassVar[int]
    NUM_CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    CROSS_TRAINER_CACHE_FIELD_NUMBER: _ClassVar[int]
    TARGET_WORKERS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    name: str
    dataset_id: str
    sharding: Sharding
    num_consumers: int
    cross_trainer_cache: bool
    target_workers: int
    order: OrderSpec
    fork: Fork
    def __init__(self, job_id: _Optional[int] = ..., name: _Optional[str] = ..., dataset_id: _Optional[str] = ..., sharding: _Optional[_Union[Sharding, str]] = ..., num_consumers: _Optional[int] = ..., cross_trainer_cache: bool = ..., target_workers: _Optional[int] = ..., order: _Optional[_Union[OrderSpec, _Mapping]] = ..., fork: _Optional[_Union[Fork, _Mapping]] = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("origin", "place", "reason", "who")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    origin: int
    place: int
    reason: str
    who: str
    def __init__(self, origin: _Optional[int] = ..., place: _Optional[int] = ..., reason: _Optional[str] = ..., who: _Optional[str] = ...) -> None: ...

class OrderSpec(_message.Message):
    __slots__ = ("seed", "shuffle", "cycle_length", "block_length", "bundle_splits", "bundles", "claimed", "source_bundle_splits", "source_bundles")
    SEED_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_FIELD_NUMBER: _ClassVar[int]
    CYCLE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LENGTH_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_SPLITS_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BUNDLE_SPLITS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BUNDLES_FIELD_NUMBER: _ClassVar[int]
    seed: int
    shuffle: bool
    cycle_length: int
    block_length: int
    bundle_splits: int
    bundles: int
    claimed: bool
    source_bundle_splits: _containers.RepeatedScalarFieldContainer[int]
    source_bundles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seed: _Optional[int] = ..., shuffle: bool = ..., cycle_length: _Optional[int] = ..., block_length: _Optional[int] = ..., bundle_splits: _Optional[int] = ..., bundles: _Optional[int] = ..., claimed: bool = ..., source_bundle_splits: _Optional[_Iterable[int]] = ..., source_bundles: _Optional[_Iterable[int]] = ...) -> None: ...

class ScheduleChanged(_message.Message):
    __slots__ = ("job_id", "change")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    change: ScheduleChange
    def __init__(self, job_id: _Optional[int] = ..., change: _Optional[_Union[ScheduleChange, _Mapping]] = ...) -> None: ...

class ScheduleChange(_message.Message):
    __slots__ = ("place", "shares", "skipped", "reason", "who")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    place: int
    shares: _containers.RepeatedScalarFieldContainer[int]
    skipped: int
    reason: str
    who: str
    def __init__(self, place: _Optional[int] = ..., shares: _Optional[_Iterable[int]] = ..., skipped: _Optional[int] = ..., reason: _Optional[str] = ..., who: _Optional[str] = ...) -> None: ...

class JobRemoved(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    def __init__(self, job_id: _Optional[int] = ...) -> None: ...

class IterationCreated(_message.Message):
    __slots__ = ("iteration_id", "job_id", "epoch")
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    iteration_id: int
    job_id: int
    epoch: int
    def __init__(self, iteration_id: _Optional[int] = ..., job_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class IterationFinished(_message.Message):
    __slots__ = ("iteration_id",)
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    iteration_id: int
    def __init__(self, iteration_id: _Optional[int] = ...) -> None: ...

class IterationSummarized(_message.Message):
    __slots__ = ("iteration_id",)
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    iteration_id: int
    def __init__(self, iteration_id: _Optional[int] = ...) -> None: ...

class IterationCollected(_message.Message):
    __slots__ = ("iteration_id",)
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    iteration_id: int
    def __init__(self, iteration_id: _Optional[int] = ...) -> None: ...

class IterationPaused(_message.Message):
    __slots__ = ("iteration_id",)
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    iteration_id: int
    def __init__(self, iteration_id: _Optional[int] = ...) -> None: ...

class ConsumerJoined(_message.Message):
    __slots__ = ("consumer_id", "iteration_id", "stock", "consumer_index", "member")
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    STOCK_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_INDEX_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    consumer_id: int
    iteration_id: int
    stock: bool
    consumer_index: int
    member: GroupMember
    def __init__(self, consumer_id: _Optional[int] = ..., iteration_id: _Optional[int] = ..., stock: bool = ..., consumer_index: _Optional[int] = ..., member: _Optional[_Union[GroupMember, _Mapping]] = ...) -> None: ...

class GroupMember(_message.Message):
    __slots__ = ("index", "consumers", "start_position", "batch_size", "start_step", "drop_remainder")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    START_POSITION_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    START_STEP_FIELD_NUMBER: _ClassVar[int]
    DROP_REMAINDER_FIELD_NUMBER: _ClassVar[int]
    index: int
    consumers: int
    start_position: int
    batch_size: int
    start_step: int
    drop_remainder: bool
    def __init__(self, index: _Optional[int] = ..., consumers: _Optional[int] = ..., start_position: _Optional[int] = ..., batch_size: _Optional[int] = ..., start_step: _Optional[int] = ..., drop_remainder: bool = ...) -> None: ...

class ConsumerLeft(_message.Message):
    __slots__ = ("consumer_id", "reason", "position")
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    consumer_id: int
    reason: str
    position: int
    def __init__(self, consumer_id: _Optional[int] = ..., reason: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class ConsumersMoved(_message.Message):
    __slots__ = ("iteration_id", "consumers", "positions")
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    iteration_id: int
    consumers: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, iteration_id: _Optional[int] = ..., consumers: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ...) -> None: ...

class ConsumerBegan(_message.Message):
    __slots__ = ("consumer_id",)
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    consumer_id: int
    def __init__(self, consumer_id: _Optional[int] = ...) -> None: ...

class TaskProposed(_message.Message):
    __slots__ = ("task_id", "iteration_id", "worker_id")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    iteration_id: int
    worker_id: int
    def __init__(self, task_id: _Optional[int] = ..., iteration_id: _Optional[int] = ..., worker_id: _Optional[int] = ...) -> None: ...

class RoundTargeted(_message.Message):
    __slots__ = ("iteration_id", "target_round")
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_ROUND_FIELD_NUMBER: _ClassVar[int]
    iteration_id: int
    target_round: int
    def __init__(self, iteration_id: _Optional[int] = ..., target_round: _Optional[int] = ...) -> None: ...

class ConsumerBlocked(_message.Message):
    __slots__ = ("consumer_id",)
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    consumer_id: int
    def __init__(self, consumer_id: _Optional[int] = ...) -> None: ...

class TaskStarted(_message.Message):
    __slots__ = ("task_id", "starting_round")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    STARTING_ROUND_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    starting_round: int
    def __init__(self, task_id: _Optional[int] = ..., starting_round: _Optional[int] = ...) -> None: ...

class TaskRemoved(_message.Message):
    __slots__ = ("task_id", "round")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    round: int
    def __init__(self, task_id: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class TransferServer(_message.Message):
    __slots__ = ("protocol", "address", "compatibility_info", "fall_back_to_grpc_at_client_creation_time", "fall_back_to_grpc_at_get_element_time")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_INFO_FIELD_NUMBER: _ClassVar[int]
    FALL_BACK_TO_GRPC_AT_CLIENT_CREATION_TIME_FIELD_NUMBER: _ClassVar[int]
    FALL_BACK_TO_GRPC_AT_GET_ELEMENT_TIME_FIELD_NUMBER: _ClassVar[int]
    protocol: str
    address: str
    compatibility_info: bytes
    fall_back_to_grpc_at_client_creation_time: bool
    fall_back_to_grpc_at_get_element_time: bool
    def __init__(self, protocol: _Optional[str] = ..., address: _Optional[str] = ..., compatibility_info: _Optional[bytes] = ..., fall_back_to_grpc_at_client_creation_time: bool = ..., fall_back_to_grpc_at_get_element_time: bool = ...) -> None: ...

class WorkerRegistered(_message.Message):
    __slots__ = ("worker_id", "address", "uid", "tags", "transfer_servers", "stock", "replaced_uid", "place", "draining", "no_python", "grants", "holder")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SERVERS_FIELD_NUMBER: _ClassVar[int]
    STOCK_FIELD_NUMBER: _ClassVar[int]
    REPLACED_UID_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NO_PYTHON_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    address: str
    uid: int
    tags: _containers.RepeatedScalarFieldContainer[str]
    transfer_servers: _containers.RepeatedCompositeFieldContainer[TransferServer]
    stock: bool
    replaced_uid: int
    place: int
    draining: bool
    no_python: bool
    grants: _containers.RepeatedCompositeFieldContainer[WorkerGrant]
    holder: bytes
    def __init__(self, worker_id: _Optional[int] = ..., address: _Optional[str] = ..., uid: _Optional[int] = ..., tags: _Optional[_Iterable[str]] = ..., transfer_servers: _Optional[_Iterable[_Union[TransferServer, _Mapping]]] = ..., stock: bool = ..., replaced_uid: _Optional[int] = ..., place: _Optional[int] = ..., draining: bool = ..., no_python: bool = ..., grants: _Optional[_Iterable[_Union[WorkerGrant, _Mapping]]] = ..., holder: _Optional[bytes] = ...) -> None: ...

class WorkerGrant(_message.Message):
    __slots__ = ("datasets", "jobs")
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    datasets: _containers.RepeatedScalarFieldContainer[str]
    jobs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, datasets: _Optional[_Iterable[str]] = ..., jobs: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerDrains(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    def __init__(self, worker_id: _Optional[int] = ...) -> None: ...

class WorkerLost(_message.Message):
    __slots__ = ("worker_id", "reason", "left", "for_good")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    FOR_GOOD_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    reason: str
    left: bool
    for_good: bool
    def __init__(self, worker_id: _Optional[int] = ..., reason: _Optional[str] = ..., left: bool = ..., for_good: bool = ...) -> None: ...

class TaskCreated(_message.Message):
    __slots__ = ("task_id", "iteration_id", "worker_id", "sweeps", "shard")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SWEEPS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    iteration_id: int
    worker_id: int
    sweeps: bool
    shard: int
    def __init__(self, task_id: _Optional[int] = ..., iteration_id: _Optional[int] = ..., worker_id: _Optional[int] = ..., sweeps: bool = ..., shard: _Optional[int] = ...) -> None: ...

class TaskCompleted(_message.Message):
    __slots__ = ("task_id",)
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    def __init__(self, task_id: _Optional[int] = ...) -> None: ...

class SplitsLeased(_message.Message):
    __slots__ = ("lease_id", "iteration_id", "task_id", "source", "pass_number", "first", "count")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    iteration_id: int
    task_id: int
    source: int
    pass_number: int
    first: int
    count: int
    def __init__(self, lease_id: _Optional[int] = ..., iteration_id: _Optional[int] = ..., task_id: _Optional[int] = ..., source: _Optional[int] = ..., pass_number: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class LeaseBegun(_message.Message):
    __slots__ = ("lease_id", "taken")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    taken: bool
    def __init__(self, lease_id: _Optional[int] = ..., taken: bool = ...) -> None: ...

class LeaseReturned(_message.Message):
    __slots__ = ("lease_id", "count")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    count: int
    def __init__(self, lease_id: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class LeaseLost(_message.Message):
    __slots__ = ("lease_id", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    reason: str
    def __init__(self, lease_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class DeliveryReported(_message.Message):
    __slots__ = ("task_id", "dropped", "reason", "all_taken")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ALL_TAKEN_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    dropped: int
    reason: str
    all_taken: bool
    def __init__(self, task_id: _Optional[int] = ..., dropped: _Optional[int] = ..., reason: _Optional[str] = ..., all_taken: bool = ...) -> None: ...

class PassStarted(_message.Message):
    __slots__ = ("iteration_id", "source", "pass_number")
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    iteration_id: int
    source: int
    pass_number: int
    def __init__(self, iteration_id: _Optional[int] = ..., source: _Optional[int] = ..., pass_number: _Optional[int] = ...) -> None: ...

class SplitsFound(_message.Message):
    __slots__ = ("iteration_id", "source", "names", "complete")
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    iteration_id: int
    source: int
    names: _containers.RepeatedScalarFieldContainer[str]
    complete: bool
    def __init__(self, iteration_id: _Optional[int] = ..., source: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., complete: bool = ...) -> None: ...

class LengthsLearned(_message.Message):
    __slots__ = ("dataset_id", "bundle_splits", "bundles", "lengths")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_SPLITS_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    bundle_splits: int
    bundles: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dataset_id: _Optional[str] = ..., bundle_splits: _Optional[int] = ..., bundles: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class BundlesChecked(_message.Message):
    __slots__ = ("job_id", "bundles", "differing", "checksums")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    bundles: _containers.RepeatedScalarFieldContainer[int]
    differing: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job_id: _Optional[int] = ..., bundles: _Optional[_Iterable[int]] = ..., differing: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class BundlesClaimed(_message.Message):
    __slots__ = ("consumer_id", "places")
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    consumer_id: int
    places: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, consumer_id: _Optional[int] = ..., places: _Optional[_Iterable[int]] = ...) -> None: ...

class ClaimsMoved(_message.Message):
    __slots__ = ("consumer_id", "places", "cursors", "done")
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    CURSORS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    consumer_id: int
    places: _containers.RepeatedScalarFieldContainer[int]
    cursors: _containers.RepeatedScalarFieldContainer[int]
    done: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, consumer_id: _Optional[int] = ..., places: _Optional[_Iterable[int]] = ..., cursors: _Optional[_Iterable[int]] = ..., done: _Optional[_Iterable[int]] = ...) -> None: ...

class SplitSkipped(_message.Message):
    __slots__ = ("iteration_id", "task_id", "worker_address", "split", "element", "reason", "records")
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    iteration_id: int
    task_id: int
    worker_address: str
    split: int
    element: int
    reason: str
    records: int
    def __init__(self, iteration_id: _Optional[int] = ..., task_id: _Optional[int] = ..., worker_address: _Optional[str] = ..., split: _Optional[int] = ..., element: _Optional[int] = ..., reason: _Optional[str] = ..., records: _Optional[int] = ...) -> None: ...

class SaveStarted(_message.Message):
    __slots__ = ("save_id", "path", "definition", "metadata", "prepared", "indivisible")
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DEFINITION_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    INDIVISIBLE_FIELD_NUMBER: _ClassVar[int]
    save_id: int
    path: str
    definition: DatasetDefinition
    metadata: bytes
    prepared: str
    indivisible: str
    def __init__(self, save_id: _Optional[int] = ..., path: _Optional[str] = ..., definition: _Optional[_Union[DatasetDefinition, _Mapping]] = ..., metadata: _Optional[bytes] = ..., prepared: _Optional[str] = ..., indivisible: _Optional[str] = ...) -> None: ...

class StreamAssigned(_message.Message):
    __slots__ = ("save_id", "stream", "worker_address", "worker_uid", "stock", "first", "count")
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORKER_UID_FIELD_NUMBER: _ClassVar[int]
    STOCK_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    save_id: int
    stream: int
    worker_address: str
    worker_uid: int
    stock: bool
    first: int
    count: int
    def __init__(self, save_id: _Optional[int] = ..., stream: _Optional[int] = ..., worker_address: _Optional[str] = ..., worker_uid: _Optional[int] = ..., stock: bool = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class SaveSplitAssigned(_message.Message):
    __slots__ = ("save_id", "stream", "source", "pass_number", "number")
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    save_id: int
    stream: int
    source: int
    pass_number: int
    number: int
    def __init__(self, save_id: _Optional[int] = ..., stream: _Optional[int] = ..., source: _Optional[int] = ..., pass_number: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class ChunkCommitted(_message.Message):
    __slots__ = ("save_id", "stream", "elements", "file")
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    save_id: int
    stream: int
    elements: int
    file: str
    def __init__(self, save_id: _Optional[int] = ..., stream: _Optional[int] = ..., elements: _Optional[int] = ..., file: _Optional[str] = ...) -> None: ...

class StreamCompleted(_message.Message):
    __slots__ = ("save_id", "stream")
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    save_id: int
    stream: int
    def __init__(self, save_id: _Optional[int] = ..., stream: _Optional[int] = ...) -> None: ...

class SaveFinished(_message.Message):
    __slots__ = ("save_id",)
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    save_id: int
    def __init__(self, save_id: _Optional[int] = ...) -> None: ...

class SaveFailed(_message.Message):
    __slots__ = ("save_id", "code", "message")
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    save_id: int
    code: str
    message: str
    def __init__(self, save_id: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("format", "time_ms", "state")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    format: int
    time_ms: int
    state: bytes
    def __init__(self, format: _Optional[int] = ..., time_ms: _Optional[int] = ..., state: _Optional[bytes] = ...) -> None: ...
