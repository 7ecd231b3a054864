from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OnError(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RAISE: _ClassVar[OnError]
    SKIP: _ClassVar[OnError]
    RETRY: _ClassVar[OnError]
RAISE: OnError
SKIP: OnError
RETRY: OnError

class PythonDataset(_message.Message):
    __slots__ = ("function", "splits", "python", "packages", "on_error", "limit", "timeout_s", "files", "iteration", "batched", "far", "cache_directory", "cache_bytes", "inferred", "varies", "lengths")
    class PackagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    PACKAGES_FIELD_NUMBER: _ClassVar[int]
    ON_ERROR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    BATCHED_FIELD_NUMBER: _ClassVar[int]
    FAR_FIELD_NUMBER: _ClassVar[int]
    CACHE_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    INFERRED_FIELD_NUMBER: _ClassVar[int]
    VARIES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    function: bytes
    splits: bytes
    python: str
    packages: _containers.ScalarMap[str, str]
    on_error: OnError
    limit: int
    timeout_s: float
    files: bytes
    iteration: int
    batched: bool
    far: bool
    cache_directory: str
    cache_bytes: int
    inferred: bool
    varies: bool
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, function: _Optional[bytes] = ..., splits: _Optional[bytes] = ..., python: _Optional[str] = ..., packages: _Optional[_Mapping[str, str]] = ..., on_error: _Optional[_Union[OnError, str]] = ..., limit: _Optional[int] = ..., timeout_s: _Optional[float] = ..., files: _Optional[bytes] = ..., iteration: _Optional[int] = ..., batched: bool = ..., far: bool = ..., cache_directory: _Optional[str] = ..., cache_bytes: _Optional[int] = ..., inferred: bool = ..., varies: bool = ..., lengths: _Optional[_Iterable[int]] = ...) -> None: ...
