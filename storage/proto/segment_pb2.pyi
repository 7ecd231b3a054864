from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Batch(_message.Message):
    __slots__ = ("format", "term", "first_sequence", "records")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    format: int
    term: int
    first_sequence: int
    records: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, format: _Optional[int] = ..., term: _Optional[int] = ..., first_sequence: _Optional[int] = ..., records: _Optional[_Iterable[bytes]] = ...) -> None: ...
