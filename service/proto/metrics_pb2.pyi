from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Metric(_message.Message):
    __slots__ = ("namespace", "name", "counter", "distribution", "gauge")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    GAUGE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    name: str
    counter: int
    distribution: Distribution
    gauge: Gauge
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ..., counter: _Optional[int] = ..., distribution: _Optional[_Union[Distribution, _Mapping]] = ..., gauge: _Optional[_Union[Gauge, _Mapping]] = ...) -> None: ...

class Distribution(_message.Message):
    __slots__ = ("count", "sum", "min", "max")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    count: int
    sum: int
    min: int
    max: int
    def __init__(self, count: _Optional[int] = ..., sum: _Optional[int] = ..., min: _Optional[int] = ..., max: _Optional[int] = ...) -> None: ...

class Gauge(_message.Message):
    __slots__ = ("value", "time_ms")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    value: int
    time_ms: int
    def __init__(self, value: _Optional[int] = ..., time_ms: _Optional[int] = ...) -> None: ...

class Metrics(_message.Message):
    __slots__ = ("metrics", "more", "splits")
    METRICS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    more: bool
    splits: int
    def __init__(self, metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ..., more: bool = ..., splits: _Optional[int] = ...) -> None: ...

class TaskMetrics(_message.Message):
    __slots__ = ("iteration_id", "task_id", "run", "totals")
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    iteration_id: int
    task_id: int
    run: int
    totals: Metrics
    def __init__(self, iteration_id: _Optional[int] = ..., task_id: _Optional[int] = ..., run: _Optional[int] = ..., totals: _Optional[_Union[Metrics, _Mapping]] = ...) -> None: ...
