from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToWorker(_message.Message):
    __slots__ = ("hello", "read", "credit", "stop", "goodbye", "ping", "traceparent")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    read: Read
    credit: Credit
    stop: Stop
    goodbye: Goodbye
    ping: Ping
    traceparent: str
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., read: _Optional[_Union[Read, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "consumer_id", "worker_uid", "shares_memory", "codecs", "token", "credential")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_UID_FIELD_NUMBER: _ClassVar[int]
    SHARES_MEMORY_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    version: int
    consumer_id: int
    worker_uid: int
    shares_memory: bool
    codecs: _containers.RepeatedScalarFieldContainer[str]
    token: str
    credential: bytes
    def __init__(self, version: _Optional[int] = ..., consumer_id: _Optional[int] = ..., worker_uid: _Optional[int] = ..., shares_memory: bool = ..., codecs: _Optional[_Iterable[str]] = ..., token: _Optional[str] = ..., credential: _Optional[bytes] = ...) -> None: ...

class Read(_message.Message):
    __slots__ = ("task_id", "any", "slice", "rounds", "cached", "received", "subscription")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ANY_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    any: Any
    slice: Slice
    rounds: Rounds
    cached: Cached
    received: int
    subscription: int
    def __init__(self, task_id: _Optional[int] = ..., any: _Optional[_Union[Any, _Mapping]] = ..., slice: _Optional[_Union[Slice, _Mapping]] = ..., rounds: _Optional[_Union[Rounds, _Mapping]] = ..., cached: _Optional[_Union[Cached, _Mapping]] = ..., received: _Optional[int] = ..., subscription: _Optional[int] = ...) -> None: ...

class CutBlock(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Any(_message.Message):
    __slots__ = ("hands_back",)
    HANDS_BACK_FIELD_NUMBER: _ClassVar[int]
    hands_back: bool
    def __init__(self, hands_back: bool = ...) -> None: ...

class Slice(_message.Message):
    __slots__ = ("bundle", "place", "runs", "until", "keep", "floor", "reader", "readers", "enough", "position", "alone", "known")
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    ENOUGH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    bundle: int
    place: int
    runs: _containers.RepeatedScalarFieldContainer[int]
    until: int
    keep: int
    floor: int
    reader: int
    readers: int
    enough: int
    position: int
    alone: bool
    known: int
    def __init__(self, bundle: _Optional[int] = ..., place: _Optional[int] = ..., runs: _Optional[_Iterable[int]] = ..., until: _Optional[int] = ..., keep: _Optional[int] = ..., floor: _Optional[int] = ..., reader: _Optional[int] = ..., readers: _Optional[int] = ..., enough: _Optional[int] = ..., position: _Optional[int] = ..., alone: bool = ..., known: _Optional[int] = ...) -> None: ...

class Rounds(_message.Message):
    __slots__ = ("consumer", "of", "round")
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    consumer: int
    of: int
    round: int
    def __init__(self, consumer: _Optional[int] = ..., of: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class Cached(_message.Message):
    __slots__ = ("trainer_id",)
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    trainer_id: str
    def __init__(self, trainer_id: _Optional[str] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("bytes", "positions", "slabs", "abandoned_slabs", "elements")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_SLABS_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    positions: _containers.RepeatedCompositeFieldContainer[Position]
    slabs: _containers.RepeatedScalarFieldContainer[int]
    abandoned_slabs: _containers.RepeatedScalarFieldContainer[int]
    elements: int
    def __init__(self, bytes: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[Position, _Mapping]]] = ..., slabs: _Optional[_Iterable[int]] = ..., abandoned_slabs: _Optional[_Iterable[int]] = ..., elements: _Optional[int] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("task_id", "received", "subscription", "taken", "elements")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    received: int
    subscription: int
    taken: int
    elements: int
    def __init__(self, task_id: _Optional[int] = ..., received: _Optional[int] = ..., subscription: _Optional[int] = ..., taken: _Optional[int] = ..., elements: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("task_id", "subscription")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    subscription: int
    def __init__(self, task_id: _Optional[int] = ..., subscription: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("positions",)
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedCompositeFieldContainer[Position]
    def __init__(self, positions: _Optional[_Iterable[_Union[Position, _Mapping]]] = ...) -> None: ...

class ToConsumer(_message.Message):
    __slots__ = ("welcome", "block", "end_of_task", "task_failed", "task_unknown", "refused", "end_of_slice", "superseded", "end_pending", "farewell", "pong")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    END_OF_TASK_FIELD_NUMBER: _ClassVar[int]
    TASK_FAILED_FIELD_NUMBER: _ClassVar[int]
    TASK_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    END_OF_SLICE_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    END_PENDING_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    block: Block
    end_of_task: EndOfTask
    task_failed: TaskFailed
    task_unknown: TaskUnknown
    refused: Refused
    end_of_slice: EndOfSlice
    superseded: Superseded
    end_pending: EndPending
    farewell: Farewell
    pong: Pong
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., block: _Optional[_Union[Block, _Mapping]] = ..., end_of_task: _Optional[_Union[EndOfTask, _Mapping]] = ..., task_failed: _Optional[_Union[TaskFailed, _Mapping]] = ..., task_unknown: _Optional[_Union[TaskUnknown, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., end_of_slice: _Optional[_Union[EndOfSlice, _Mapping]] = ..., superseded: _Optional[_Union[Superseded, _Mapping]] = ..., end_pending: _Optional[_Union[EndPending, _Mapping]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Farewell(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("task_id", "number", "count", "components", "slab", "packed", "bundle", "index", "subscription", "skipped", "checksum")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    number: int
    count: int
    components: _containers.RepeatedCompositeFieldContainer[Component]
    slab: Slab
    packed: Packed
    bundle: int
    index: int
    subscription: int
    skipped: int
    checksum: int
    def __init__(self, task_id: _Optional[int] = ..., number: _Optional[int] = ..., count: _Optional[int] = ..., components: _Optional[_Iterable[_Union[Component, _Mapping]]] = ..., slab: _Optional[_Union[Slab, _Mapping]] = ..., packed: _Optional[_Union[Packed, _Mapping]] = ..., bundle: _Optional[int] = ..., index: _Optional[int] = ..., subscription: _Optional[int] = ..., skipped: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Packed(_message.Message):
    __slots__ = ("codec", "bytes")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    codec: str
    bytes: int
    def __init__(self, codec: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class Slab(_message.Message):
    __slots__ = ("number", "fresh", "keep_mapped")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    KEEP_MAPPED_FIELD_NUMBER: _ClassVar[int]
    number: int
    fresh: bool
    keep_mapped: bool
    def __init__(self, number: _Optional[int] = ..., fresh: bool = ..., keep_mapped: bool = ...) -> None: ...

class Component(_message.Message):
    __slots__ = ("dtype", "shape", "rank", "varying", "buffer_bytes")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    VARYING_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    rank: int
    varying: bool
    buffer_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., rank: _Optional[int] = ..., varying: bool = ..., buffer_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class EndOfTask(_message.Message):
    __slots__ = ("task_id", "subscription")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    subscription: int
    def __init__(self, task_id: _Optional[int] = ..., subscription: _Optional[int] = ...) -> None: ...

class EndPending(_message.Message):
    __slots__ = ("task_id", "subscription", "elements")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    subscription: int
    elements: int
    def __init__(self, task_id: _Optional[int] = ..., subscription: _Optional[int] = ..., elements: _Optional[int] = ...) -> None: ...

class EndOfSlice(_message.Message):
    __slots__ = ("task_id", "subscription", "bundle", "length", "complete")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    subscription: int
    bundle: int
    length: int
    complete: bool
    def __init__(self, task_id: _Optional[int] = ..., subscription: _Optional[int] = ..., bundle: _Optional[int] = ..., length: _Optional[int] = ..., complete: bool = ...) -> None: ...

class Superseded(_message.Message):
    __slots__ = ("task_id", "subscription")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    subscription: int
    def __init__(self, task_id: _Optional[int] = ..., subscription: _Optional[int] = ...) -> None: ...

class TaskFailed(_message.Message):
    __slots__ = ("task_id", "code", "message", "subscription")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    code: str
    message: str
    subscription: int
    def __init__(self, task_id: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., subscription: _Optional[int] = ...) -> None: ...

class TaskUnknown(_message.Message):
    __slots__ = ("task_id", "subscription")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    subscription: int
    def __init__(self, task_id: _Optional[int] = ..., subscription: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "broken", "unfit")
    REASON_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    broken: bool
    unfit: bool
    def __init__(self, reason: _Optional[str] = ..., broken: bool = ..., unfit: bool = ...) -> None: ...
