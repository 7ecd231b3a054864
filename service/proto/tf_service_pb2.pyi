from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OK: _ClassVar[Code]
    CANCELLED: _ClassVar[Code]
    UNKNOWN: _ClassVar[Code]
    INVALID_ARGUMENT: _ClassVar[Code]
    DEADLINE_EXCEEDED: _ClassVar[Code]
    NOT_FOUND: _ClassVar[Code]
    ALREADY_EXISTS: _ClassVar[Code]
    PERMISSION_DENIED: _ClassVar[Code]
    RESOURCE_EXHAUSTED: _ClassVar[Code]
    FAILED_PRECONDITION: _ClassVar[Code]
    ABORTED: _ClassVar[Code]
    OUT_OF_RANGE: _ClassVar[Code]
    UNIMPLEMENTED: _ClassVar[Code]
    INTERNAL: _ClassVar[Code]
    UNAVAILABLE: _ClassVar[Code]
    DATA_LOSS: _ClassVar[Code]
    UNAUTHENTICATED: _ClassVar[Code]

class TargetWorkers(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TARGET_WORKERS_UNSPECIFIED: _ClassVar[TargetWorkers]
    TARGET_WORKERS_AUTO: _ClassVar[TargetWorkers]
    TARGET_WORKERS_ANY: _ClassVar[TargetWorkers]
    TARGET_WORKERS_LOCAL: _ClassVar[TargetWorkers]

class DeploymentMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEPLOYMENT_MODE_UNSPECIFIED: _ClassVar[DeploymentMode]
    DEPLOYMENT_MODE_COLOCATED: _ClassVar[DeploymentMode]
    DEPLOYMENT_MODE_REMOTE: _ClassVar[DeploymentMode]
    DEPLOYMENT_MODE_HYBRID: _ClassVar[DeploymentMode]
OK: Code
CANCELLED: Code
UNKNOWN: Code
INVALID_ARGUMENT: Code
DEADLINE_EXCEEDED: Code
NOT_FOUND: Code
ALREADY_EXISTS: Code
PERMISSION_DENIED: Code
RESOURCE_EXHAUSTED: Code
FAILED_PRECONDITION: Code
ABORTED: Code
OUT_OF_RANGE: Code
UNIMPLEMENTED: Code
INTERNAL: Code
UNAVAILABLE: Code
DATA_LOSS: Code
UNAUTHENTICATED: Code
TARGET_WORKERS_UNSPECIFIED: TargetWorkers
TARGET_WORKERS_AUTO: TargetWorkers
TARGET_WORKERS_ANY: TargetWorkers
TARGET_WORKERS_LOCAL: TargetWorkers
DEPLOYMENT_MODE_UNSPECIFIED: DeploymentMode
DEPLOYMENT_MODE_COLOCATED: DeploymentMode
DEPLOYMENT_MODE_REMOTE: DeploymentMode
DEPLOYMENT_MODE_HYBRID: DeploymentMode

class ActiveTask(_message.Message):
    __slots__ = ("task_id", "processing_time_nsec")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESSING_TIME_NSEC_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    processing_time_nsec: float
    def __init__(self, task_id: _Optional[int] = ..., processing_time_nsec: _Optional[float] = ...) -> None: ...

class WorkerHeartbeatRequest(_message.Message):
    __slots__ = ("worker_address", "transfer_servers", "worker_tags", "worker_uid", "current_tasks", "snapshot_task_progress", "active_tasks")
    class SnapshotTaskProgressEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: SnapshotTaskProgress
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[SnapshotTaskProgress, _Mapping]] = ...) -> None: ...
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SERVERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_TAGS_FIELD_NUMBER: _ClassVar[int]
    WORKER_UID_FIELD_NUMBER: _ClassVar[int]
    CURRENT_TASKS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_TASK_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_TASKS_FIELD_NUMBER: _ClassVar[int]
    worker_address: str
    transfer_servers: _containers.RepeatedCompositeFieldContainer[DataTransferServerInfo]
    worker_tags: _containers.RepeatedScalarFieldContainer[str]
    worker_uid: int
    current_tasks: _containers.RepeatedScalarFieldContainer[int]
    snapshot_task_progress: _containers.MessageMap[str, SnapshotTaskProgress]
    active_tasks: _containers.RepeatedCompositeFieldContainer[ActiveTask]
    def __init__(self, worker_address: _Optional[str] = ..., transfer_servers: _Optional[_Iterable[_Union[DataTransferServerInfo, _Mapping]]] = ..., worker_tags: _Optional[_Iterable[str]] = ..., worker_uid: _Optional[int] = ..., current_tasks: _Optional[_Iterable[int]] = ..., snapshot_task_progress: _Optional[_Mapping[str, SnapshotTaskProgress]] = ..., active_tasks: _Optional[_Iterable[_Union[ActiveTask, _Mapping]]] = ...) -> None: ...

class WorkerHeartbeatResponse(_message.Message):
    __slots__ = ("new_tasks", "tasks_to_delete", "snapshot_tasks")
    NEW_TASKS_FIELD_NUMBER: _ClassVar[int]
    TASKS_TO_DELETE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_TASKS_FIELD_NUMBER: _ClassVar[int]
    new_tasks: _containers.RepeatedCompositeFieldContainer[TaskDef]
    tasks_to_delete: _containers.RepeatedScalarFieldContainer[int]
    snapshot_tasks: _containers.RepeatedCompositeFieldContainer[SnapshotTaskDef]
    def __init__(self, new_tasks: _Optional[_Iterable[_Union[TaskDef, _Mapping]]] = ..., tasks_to_delete: _Optional[_Iterable[int]] = ..., snapshot_tasks: _Optional[_Iterable[_Union[SnapshotTaskDef, _Mapping]]] = ...) -> None: ...

class TaskProgress(_message.Message):
    __slots__ = ("task_id", "completed")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    completed: bool
    def __init__(self, task_id: _Optional[int] = ..., completed: bool = ...) -> None: ...

class WorkerUpdateRequest(_message.Message):
    __slots__ = ("worker_address", "updates")
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    worker_address: str
    updates: _containers.RepeatedCompositeFieldContainer[TaskProgress]
    def __init__(self, worker_address: _Optional[str] = ..., updates: _Optional[_Iterable[_Union[TaskProgress, _Mapping]]] = ...) -> None: ...

class WorkerUpdateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDatasetDefRequest(_message.Message):
    __slots__ = ("dataset_id",)
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    def __init__(self, dataset_id: _Optional[str] = ...) -> None: ...

class GetDatasetDefResponse(_message.Message):
    __slots__ = ("dataset_def",)
    DATASET_DEF_FIELD_NUMBER: _ClassVar[int]
    dataset_def: DatasetDef
    def __init__(self, dataset_def: _Optional[_Union[DatasetDef, _Mapping]] = ...) -> None: ...

class GetSplitRequest(_message.Message):
    __slots__ = ("iteration_id", "repetition", "split_provider_index")
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    REPETITION_FIELD_NUMBER: _ClassVar[int]
    SPLIT_PROVIDER_INDEX_FIELD_NUMBER: _ClassVar[int]
    iteration_id: int
    repetition: int
    split_provider_index: int
    def __init__(self, iteration_id: _Optional[int] = ..., repetition: _Optional[int] = ..., split_provider_index: _Optional[int] = ...) -> None: ...

class GetSplitResponse(_message.Message):
    __slots__ = ("split", "end_of_splits")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    END_OF_SPLITS_FIELD_NUMBER: _ClassVar[int]
    split: bytes
    end_of_splits: bool
    def __init__(self, split: _Optional[bytes] = ..., end_of_splits: bool = ...) -> None: ...

class GetVersionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetVersionResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class GetOrRegisterDatasetRequest(_message.Message):
    __slots__ = ("dataset", "metadata", "dataset_id")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    dataset: DatasetDef
    metadata: bytes
    dataset_id: str
    def __init__(self, dataset: _Optional[_Union[DatasetDef, _Mapping]] = ..., metadata: _Optional[bytes] = ..., dataset_id: _Optional[str] = ...) -> None: ...

class GetOrRegisterDatasetResponse(_message.Message):
    __slots__ = ("dataset_id",)
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    def __init__(self, dataset_id: _Optional[str] = ...) -> None: ...

class GetDataServiceMetadataRequest(_message.Message):
    __slots__ = ("dataset_id",)
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    def __init__(self, dataset_id: _Optional[str] = ...) -> None: ...

class GetDataServiceMetadataResponse(_message.Message):
    __slots__ = ("metadata",)
    METADATA_FIELD_NUMBER: _ClassVar[int]
    metadata: bytes
    def __init__(self, metadata: _Optional[bytes] = ...) -> None: ...

class GetDataServiceConfigRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDataServiceConfigResponse(_message.Message):
    __slots__ = ("config",)
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    config: DataServiceConfig
    def __init__(self, config: _Optional[_Union[DataServiceConfig, _Mapping]] = ...) -> None: ...

class GetOrCreateJobRequest(_message.Message):
    __slots__ = ("dataset_id", "processing_mode_def", "job_name", "num_consumers", "use_cross_trainer_cache", "target_workers")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESSING_MODE_DEF_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    USE_CROSS_TRAINER_CACHE_FIELD_NUMBER: _ClassVar[int]
    TARGET_WORKERS_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    processing_mode_def: ProcessingModeDef
    job_name: str
    num_consumers: int
    use_cross_trainer_cache: bool
    target_workers: TargetWorkers
    def __init__(self, dataset_id: _Optional[str] = ..., processing_mode_def: _Optional[_Union[ProcessingModeDef, _Mapping]] = ..., job_name: _Optional[str] = ..., num_consumers: _Optional[int] = ..., use_cross_trainer_cache: bool = ..., target_workers: _Optional[_Union[TargetWorkers, str]] = ...) -> None: ...

class GetOrCreateJobResponse(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    def __init__(self, job_id: _Optional[int] = ...) -> None: ...

class GetOrCreateIterationRequest(_message.Message):
    __slots__ = ("job_id", "repetition")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REPETITION_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    repetition: int
    def __init__(self, job_id: _Optional[int] = ..., repetition: _Optional[int] = ...) -> None: ...

class GetOrCreateIterationResponse(_message.Message):
    __slots__ = ("iteration_client_id",)
    ITERATION_CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    iteration_client_id: int
    def __init__(self, iteration_client_id: _Optional[int] = ...) -> None: ...

class MaybeRemoveTaskRequest(_message.Message):
    __slots__ = ("task_id", "consumer_index", "round")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_INDEX_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    consumer_index: int
    round: int
    def __init__(self, task_id: _Optional[int] = ..., consumer_index: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class MaybeRemoveTaskResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: bool
    def __init__(self, removed: bool = ...) -> None: ...

class ReleaseIterationClientRequest(_message.Message):
    __slots__ = ("iteration_client_id",)
    ITERATION_CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    iteration_client_id: int
    def __init__(self, iteration_client_id: _Optional[int] = ...) -> None: ...

class ReleaseIterationClientResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClientHeartbeatRequest(_message.Message):
    __slots__ = ("iteration_client_id", "current_round", "blocked_round", "target_processing_time_nsec")
    ITERATION_CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    CURRENT_ROUND_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_ROUND_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROCESSING_TIME_NSEC_FIELD_NUMBER: _ClassVar[int]
    iteration_client_id: int
    current_round: int
    blocked_round: int
    target_processing_time_nsec: float
    def __init__(self, iteration_client_id: _Optional[int] = ..., current_round: _Optional[int] = ..., blocked_round: _Optional[int] = ..., target_processing_time_nsec: _Optional[float] = ...) -> None: ...

class ClientHeartbeatResponse(_message.Message):
    __slots__ = ("task_info", "block_round", "iteration_finished", "deployment_mode")
    TASK_INFO_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ROUND_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FINISHED_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENT_MODE_FIELD_NUMBER: _ClassVar[int]
    task_info: _containers.RepeatedCompositeFieldContainer[TaskInfo]
    block_round: int
    iteration_finished: bool
    deployment_mode: DeploymentMode
    def __init__(self, task_info: _Optional[_Iterable[_Union[TaskInfo, _Mapping]]] = ..., block_round: _Optional[int] = ..., iteration_finished: bool = ..., deployment_mode: _Optional[_Union[DeploymentMode, str]] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class GetWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("dataset", "path", "metadata")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    dataset: DatasetDef
    path: str
    metadata: bytes
    def __init__(self, dataset: _Optional[_Union[DatasetDef, _Mapping]] = ..., path: _Optional[str] = ..., metadata: _Optional[bytes] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSnapshotSplitRequest(_message.Message):
    __slots__ = ("worker_address", "base_path", "stream_index", "source_index", "repetition_index")
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BASE_PATH_FIELD_NUMBER: _ClassVar[int]
    STREAM_INDEX_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    REPETITION_INDEX_FIELD_NUMBER: _ClassVar[int]
    worker_address: str
    base_path: str
    stream_index: int
    source_index: int
    repetition_index: int
    def __init__(self, worker_address: _Optional[str] = ..., base_path: _Optional[str] = ..., stream_index: _Optional[int] = ..., source_index: _Optional[int] = ..., repetition_index: _Optional[int] = ...) -> None: ...

class GetSnapshotSplitResponse(_message.Message):
    __slots__ = ("split", "end_of_splits", "local_split_index")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    END_OF_SPLITS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_SPLIT_INDEX_FIELD_NUMBER: _ClassVar[int]
    split: bytes
    end_of_splits: bool
    local_split_index: int
    def __init__(self, split: _Optional[bytes] = ..., end_of_splits: bool = ..., local_split_index: _Optional[int] = ...) -> None: ...

class GetSnapshotStreamsRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class GetSnapshotStreamsResponse(_message.Message):
    __slots__ = ("streams",)
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    streams: _containers.RepeatedCompositeFieldContainer[SnapshotStreamInfo]
    def __init__(self, streams: _Optional[_Iterable[_Union[SnapshotStreamInfo, _Mapping]]] = ...) -> None: ...

class DisableCompressionAtRuntimeRequest(_message.Message):
    __slots__ = ("dataset_id", "disable_compression_at_runtime")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    DISABLE_COMPRESSION_AT_RUNTIME_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    disable_compression_at_runtime: bool
    def __init__(self, dataset_id: _Optional[str] = ..., disable_compression_at_runtime: bool = ...) -> None: ...

class DisableCompressionAtRuntimeResponse(_message.Message):
    __slots__ = ("compression_disabled_at_runtime", "no_compression_to_disable")
    COMPRESSION_DISABLED_AT_RUNTIME_FIELD_NUMBER: _ClassVar[int]
    NO_COMPRESSION_TO_DISABLE_FIELD_NUMBER: _ClassVar[int]
    compression_disabled_at_runtime: bool
    no_compression_to_disable: bool
    def __init__(self, compression_disabled_at_runtime: bool = ..., no_compression_to_disable: bool = ...) -> None: ...

class ProcessTaskRequest(_message.Message):
    __slots__ = ("task",)
    TASK_FIELD_NUMBER: _ClassVar[int]
    task: TaskDef
    def __init__(self, task: _Optional[_Union[TaskDef, _Mapping]] = ...) -> None: ...

class ProcessTaskResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetElementRequest(_message.Message):
    __slots__ = ("task_id", "consumer_index", "round_index", "skipped_previous_round", "allow_skip", "trainer_id")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_INDEX_FIELD_NUMBER: _ClassVar[int]
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_PREVIOUS_ROUND_FIELD_NUMBER: _ClassVar[int]
    ALLOW_SKIP_FIELD_NUMBER: _ClassVar[int]
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    consumer_index: int
    round_index: int
    skipped_previous_round: bool
    allow_skip: bool
    trainer_id: str
    def __init__(self, task_id: _Optional[int] = ..., consumer_index: _Optional[int] = ..., round_index: _Optional[int] = ..., skipped_previous_round: bool = ..., allow_skip: bool = ..., trainer_id: _Optional[str] = ...) -> None: ...

class GetElementResponse(_message.Message):
    __slots__ = ("compressed", "uncompressed", "element_index", "end_of_sequence", "skip_task")
    COMPRESSED_FIELD_NUMBER: _ClassVar[int]
    UNCOMPRESSED_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    END_OF_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SKIP_TASK_FIELD_NUMBER: _ClassVar[int]
    compressed: bytes
    uncompressed: UncompressedElement
    element_index: int
    end_of_sequence: bool
    skip_task: bool
    def __init__(self, compressed: _Optional[bytes] = ..., uncompressed: _Optional[_Union[UncompressedElement, _Mapping]] = ..., element_index: _Optional[int] = ..., end_of_sequence: bool = ..., skip_task: bool = ...) -> None: ...

class GetWorkerTasksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWorkerTasksResponse(_message.Message):
    __slots__ = ("tasks",)
    TASKS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[TaskInfo]
    def __init__(self, tasks: _Optional[_Iterable[_Union[TaskInfo, _Mapping]]] = ...) -> None: ...

class GetSnapshotTaskProgressesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSnapshotTaskProgressesResponse(_message.Message):
    __slots__ = ("snapshot_task_progresses",)
    SNAPSHOT_TASK_PROGRESSES_FIELD_NUMBER: _ClassVar[int]
    snapshot_task_progresses: _containers.RepeatedCompositeFieldContainer[SnapshotTaskProgress]
    def __init__(self, snapshot_task_progresses: _Optional[_Iterable[_Union[SnapshotTaskProgress, _Mapping]]] = ...) -> None: ...

class DatasetDef(_message.Message):
    __slots__ = ("graph",)
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    graph: bytes
    def __init__(self, graph: _Optional[bytes] = ...) -> None: ...

class TaskDef(_message.Message):
    __slots__ = ("dataset_def", "path", "dataset_id", "task_id", "iteration_id", "num_split_providers", "worker_address", "processing_mode_def", "num_consumers", "num_workers", "worker_index", "use_cross_trainer_cache")
    DATASET_DEF_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SPLIT_PROVIDERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROCESSING_MODE_DEF_FIELD_NUMBER: _ClassVar[int]
    NUM_CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_INDEX_FIELD_NUMBER: _ClassVar[int]
    USE_CROSS_TRAINER_CACHE_FIELD_NUMBER: _ClassVar[int]
    dataset_def: DatasetDef
    path: str
    dataset_id: str
    task_id: int
    iteration_id: int
    num_split_providers: int
    worker_address: str
    processing_mode_def: ProcessingModeDef
    num_consumers: int
    num_workers: int
    worker_index: int
    use_cross_trainer_cache: bool
    def __init__(self, dataset_def: _Optional[_Union[DatasetDef, _Mapping]] = ..., path: _Optional[str] = ..., dataset_id: _Optional[str] = ..., task_id: _Optional[int] = ..., iteration_id: _Optional[int] = ..., num_split_providers: _Optional[int] = ..., worker_address: _Optional[str] = ..., processing_mode_def: _Optional[_Union[ProcessingModeDef, _Mapping]] = ..., num_consumers: _Optional[int] = ..., num_workers: _Optional[int] = ..., worker_index: _Optional[int] = ..., use_cross_trainer_cache: bool = ...) -> None: ...

class TaskInfo(_message.Message):
    __slots__ = ("worker_address", "transfer_servers", "worker_tags", "task_id", "iteration_id", "worker_uid", "starting_round")
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SERVERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_TAGS_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_UID_FIELD_NUMBER: _ClassVar[int]
    STARTING_ROUND_FIELD_NUMBER: _ClassVar[int]
    worker_address: str
    transfer_servers: _containers.RepeatedCompositeFieldContainer[DataTransferServerInfo]
    worker_tags: _containers.RepeatedScalarFieldContainer[str]
    task_id: int
    iteration_id: int
    worker_uid: int
    starting_round: int
    def __init__(self, worker_address: _Optional[str] = ..., transfer_servers: _Optional[_Iterable[_Union[DataTransferServerInfo, _Mapping]]] = ..., worker_tags: _Optional[_Iterable[str]] = ..., task_id: _Optional[int] = ..., iteration_id: _Optional[int] = ..., worker_uid: _Optional[int] = ..., starting_round: _Optional[int] = ...) -> None: ...

class SnapshotTaskDef(_message.Message):
    __slots__ = ("base_path", "stream_index", "num_sources", "metadata")
    BASE_PATH_FIELD_NUMBER: _ClassVar[int]
    STREAM_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_SOURCES_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    base_path: str
    stream_index: int
    num_sources: int
    metadata: bytes
    def __init__(self, base_path: _Optional[str] = ..., stream_index: _Optional[int] = ..., num_sources: _Optional[int] = ..., metadata: _Optional[bytes] = ...) -> None: ...

class SnapshotTaskProgress(_message.Message):
    __slots__ = ("snapshot_task", "completed", "status")
    SNAPSHOT_TASK_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    snapshot_task: SnapshotTaskDef
    completed: bool
    status: StatusProto
    def __init__(self, snapshot_task: _Optional[_Union[SnapshotTaskDef, _Mapping]] = ..., completed: bool = ..., status: _Optional[_Union[StatusProto, _Mapping]] = ...) -> None: ...

class DistributedSnapshotMetadata(_message.Message):
    __slots__ = ("element_spec", "compression")
    ELEMENT_SPEC_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    element_spec: bytes
    compression: str
    def __init__(self, element_spec: _Optional[bytes] = ..., compression: _Optional[str] = ...) -> None: ...

class StatusProto(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: Code
    message: str
    def __init__(self, code: _Optional[_Union[Code, str]] = ..., message: _Optional[str] = ...) -> None: ...

class SnapshotStreamInfo(_message.Message):
    __slots__ = ("index", "state")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[SnapshotStreamInfo.State]
        ASSIGNED: _ClassVar[SnapshotStreamInfo.State]
        ORPHAN: _ClassVar[SnapshotStreamInfo.State]
        UNKNOWN: _ClassVar[SnapshotStreamInfo.State]
        DONE: _ClassVar[SnapshotStreamInfo.State]
    UNSPECIFIED: SnapshotStreamInfo.State
    ASSIGNED: SnapshotStreamInfo.State
    ORPHAN: SnapshotStreamInfo.State
    UNKNOWN: SnapshotStreamInfo.State
    DONE: SnapshotStreamInfo.State
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    index: int
    state: SnapshotStreamInfo.State
    def __init__(self, index: _Optional[int] = ..., state: _Optional[_Union[SnapshotStreamInfo.State, str]] = ...) -> None: ...

class DataTransferServerInfo(_message.Message):
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

class ProcessingModeDef(_message.Message):
    __slots__ = ("sharding_policy",)
    class ShardingPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OFF: _ClassVar[ProcessingModeDef.ShardingPolicy]
        DYNAMIC: _ClassVar[ProcessingModeDef.ShardingPolicy]
        FILE: _ClassVar[ProcessingModeDef.ShardingPolicy]
        DATA: _ClassVar[ProcessingModeDef.ShardingPolicy]
        FILE_OR_DATA: _ClassVar[ProcessingModeDef.ShardingPolicy]
        HINT: _ClassVar[ProcessingModeDef.ShardingPolicy]
    OFF: ProcessingModeDef.ShardingPolicy
    DYNAMIC: ProcessingModeDef.ShardingPolicy
    FILE: ProcessingModeDef.ShardingPolicy
    DATA: ProcessingModeDef.ShardingPolicy
    FILE_OR_DATA: ProcessingModeDef.ShardingPolicy
    HINT: ProcessingModeDef.ShardingPolicy
    SHARDING_POLICY_FIELD_NUMBER: _ClassVar[int]
    sharding_policy: ProcessingModeDef.ShardingPolicy
    def __init__(self, sharding_policy: _Optional[_Union[ProcessingModeDef.ShardingPolicy, str]] = ...) -> None: ...

class DataServiceMetadata(_message.Message):
    __slots__ = ("element_spec", "compression", "cardinality")
    class Compression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        COMPRESSION_UNSPECIFIED: _ClassVar[DataServiceMetadata.Compression]
        COMPRESSION_OFF: _ClassVar[DataServiceMetadata.Compression]
        COMPRESSION_SNAPPY: _ClassVar[DataServiceMetadata.Compression]
        COMPRESSION_FORCED_SNAPPY: _ClassVar[DataServiceMetadata.Compression]
    COMPRESSION_UNSPECIFIED: DataServiceMetadata.Compression
    COMPRESSION_OFF: DataServiceMetadata.Compression
    COMPRESSION_SNAPPY: DataServiceMetadata.Compression
    COMPRESSION_FORCED_SNAPPY: DataServiceMetadata.Compression
    ELEMENT_SPEC_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    CARDINALITY_FIELD_NUMBER: _ClassVar[int]
    element_spec: bytes
    compression: DataServiceMetadata.Compression
    cardinality: int
    def __init__(self, element_spec: _Optional[bytes] = ..., compression: _Optional[_Union[DataServiceMetadata.Compression, str]] = ..., cardinality: _Optional[int] = ...) -> None: ...

class DataServiceConfig(_message.Message):
    __slots__ = ("deployment_mode",)
    DEPLOYMENT_MODE_FIELD_NUMBER: _ClassVar[int]
    deployment_mode: DeploymentMode
    def __init__(self, deployment_mode: _Optional[_Union[DeploymentMode, str]] = ...) -> None: ...

class UncompressedElement(_message.Message):
    __slots__ = ("components",)
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    components: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, components: _Optional[_Iterable[bytes]] = ...) -> None: ...
