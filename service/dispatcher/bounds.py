"""Bounds of what requests say: how many parts, the lengths of texts, and the sizes of numbers.

They hold for each field of each request of both services, before anything is decided. So the
journal, the log and the status have no huge names, and sums of numbers fit the journal's 64 bits.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

from ..connections.grpc_server import parsed
from ..errors import InvalidArgument
from ..pipelines.definitions import metadata_of, python_dataset_of
from ..proto.forebay_pb2 import RegisterDatasetRequest
from ..proto.python_pb2 import PythonDataset

MAX_NAME = 1_000
"""Characters of ids, names, labels and addresses."""

MAX_LONG_NAME = 2 * MAX_NAME + 100
"""Characters of a job's whole name, which may have the dataset's id in it."""

MAX_PATH = 4_096
"""Characters of a path, as on Linux."""

MAX_REASON = 4_096
"""Characters of why a dataset is not to be divided, or what its reader should know."""

MAX_ERROR = 64 << 10
"""Characters of an error's text."""

MAX_STRUCTURE = 512 << 10
"""Characters of a dataset's structure: 2,000 components, whose names have 200 characters each."""

MAX_NUMBER = 2**62 - 1
"""Of numbers that are counted with, and of ids: epochs, rounds, splits, bundles, elements. A range
may have so many elements, and the sum of two such numbers fits 64 bits."""

MAX_BYTES = 64 << 10
"""Of bytes that are not a dataset's own."""

SMALL_BYTES = 16 << 10
"""A larger request is parsed in a thread, beside the event loop."""

MAX_PARTS = 100_000
"""Fields of a request, with those of the messages in it; more of what workers tell of all tasks."""

MAX_PARTS_OF = {"WorkerHeartbeatRequest": 500_000}

MAX_ENTRIES = 1_000
"""Of a repeated field of one message. A list of numbers is one entry, as it is packed."""

MAX_ENTRIES_OF = {
    **dict.fromkeys(("tags", "worker_tags", "transfer_servers"), 100),
    # of a dataset, of a worker's tasks and jobs, of the leases of a task, of lost workers
    **dict.fromkeys(("sources", "metrics", "checked", "loads", "returned", "held"), 5_000),
}

MAX_SAME = 2
"""Of a field of one message that is not repeated: a request may be two that were put together."""

MAX_UNKNOWN = 1_000
"""Fields of a request that this dispatcher does not know. Later versions have a few."""

MAX_NUMBERS = 100_000
"""Of the lists of a request; more where a dataset may have so many splits, and where a worker
reports bundles of all its jobs: a heartbeat that is refused would be sent again for ever."""

MAX_NUMBERS_OF = {"RegisterDatasetRequest": 10_000_000, "WorkerHeartbeatRequest": 4 << 20}

_TEXTS = {
    **dict.fromkeys(("path", "base_path"), MAX_PATH),
    "job_name": MAX_LONG_NAME,
    "structure": MAX_STRUCTURE,
    **dict.fromkeys(("unsplittable", "unleasable"), MAX_REASON),
    **dict.fromkeys(("reason", "message"), MAX_ERROR),
}

_ANY_NUMBER = {
    # made by chance, and only compared
    *("uid", "worker_uid", "refused", "never_answered", "seed", "number", "run"),
    # elements of a range, whose count is checked where it is registered
    *("start", "stop", "step"),
    # of users' metrics, which are not journaled
    *("counter", "sum", "min", "max", "value", "time_ms"),
    # of a time and of CRCs, within 32 bits
    *("wait_ms", "checksums"),
    # compared with one of the dispatcher's own
    *("version", "sequence"),
}
"""The names of fields whose numbers may have all 64 bits."""

_OF_DATASETS = {"graph", "python", "metadata", "splits", "function", "files"}
"""Bytes of which a dataset may have more: with the whole request they have a bound of their own."""

_INTEGERS = {
    *(Field.CPPTYPE_INT32, Field.CPPTYPE_INT64, Field.CPPTYPE_UINT32, Field.CPPTYPE_UINT64)
}


_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')  # of JSON


def check_dataset(request: RegisterDatasetRequest) -> None:
    """Check what is parsed of a request later: here and by readers. Raises InvalidArgument."""
    metadata_of(request.metadata)
    if request.structure:
        try:
            is_one = isinstance(json.loads(request.structure), dict)
        except (RecursionError, ValueError):
            is_one = False
        if not is_one:
            raise InvalidArgument(
                f"structure={request.structure[:40]!r} is no JSON object that describes elements"
            )
        if long := [name for name in _STRING.findall(request.structure) if len(name) > MAX_PATH]:
            raise InvalidArgument(
                f"structure has a name of {len(long[0])} characters, which begins with "
                f"{long[0][:40]!r}; give one of at most {MAX_PATH}"
            )
    if request.python:
        _count_parts(PythonDataset.DESCRIPTOR, request.python)
        check(python_dataset_of(request.python))


async def parse(kind: type[Message], data: bytes | bytearray) -> Message:
    """A serialized request. Raises InvalidArgument."""
    if len(data) <= SMALL_BYTES:
        return _parse(kind, data)
    return await asyncio.to_thread(_parse, kind, data)


def _parse(kind: type[Message], data: bytes | bytearray) -> Message:
    _count_parts(kind.DESCRIPTOR, data)
    request = parsed(kind, data)
    check(request)
    return request


def _count_parts(kind: Any, data: bytes | bytearray) -> None:
    """Two bytes of a request are a message of a hundred in memory, so they are counted before that.

    What is no message of that kind is left to the parser. Raises InvalidArgument.
    """
    parts, most_parts = 0, MAX_PARTS_OF.get(kind.name, MAX_PARTS)
    numbers, most_numbers = 0, MAX_NUMBERS_OF.get(kind.name, MAX_NUMBERS)
    unknown = 0
    begun = [(kind, 0, len(data))]
    while begun:
        message, at, end = begun.pop()
        known, counts = _parts_of(message), dict[int, int]()
        while at < end:
            parts += 1
            if parts > most_parts:
                raise InvalidArgument(
                    f"the {kind.name} has more than {most_parts} fields, those within its messages "
                    "counted; give fewer"
                )
            tag = data[at]
            at += 1
            if tag > 127:
                tag, at = _varint(data, at - 1, end)
            if tag < _LEAST_TAG:
                break  # the parser gets no further either
            if (part := known.get(tag >> 3)) is None:
                unknown += 1
                if unknown > MAX_UNKNOWN:
                    raise InvalidArgument(
                        f"the {kind.name} has more than {MAX_UNKNOWN} fields that are not known to "
                        "this dispatcher; upgrade it first"
                    )
            else:
                counts[tag] = count = counts.get(tag, 0) + 1
                if count > part.most:
                    raise InvalidArgument(
                        f"{message.name}.{part.name} has more than {part.most} entries; give fewer"
                    )
            if tag & 7 == _LENGTH:
                size, at = _varint(data, at, end)
                if part is not None and part.message is not None:
                    begun.append((part.message, at, min(at + size, end)))
                elif part is not None and part.width is not None:
                    listed = data[at : at + size]
                    if not part.width:
                        listed = listed.translate(None, _CONTINUED)
                    numbers += len(listed) // (part.width or 1)
                    if numbers > most_numbers:
                        raise InvalidArgument(
                            f"the lists of the {kind.name} have more than {most_numbers} numbers; "
                            "give fewer"
                        )
                at += size
            elif tag & 7 == _VARINT:
                _, at = _varint(data, at, end)
            else:
                at += _FIXED.get(tag & 7, end)


_LEAST_TAG = 8
"""Fields are numbered from 1."""

_VARINT, _LENGTH, _FIXED = 0, 2, {1: 8, 5: 4, 3: 0, 4: 0}
"""Wire types: those of fixed sizes by their bytes; groups begin and end without any."""


def _varint(data: bytes | bytearray, at: int, end: int) -> tuple[int, int]:
    """A number, and where it ends; the end of the data, if it is cut off or none."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= end:
            return 0, end
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
    return 0, end


_CONTINUED = bytes(range(128, 256))
"""Bytes that do not end a number of variable width."""

_WIDTHS = {
    **dict.fromkeys((Field.TYPE_FIXED32, Field.TYPE_SFIXED32, Field.TYPE_FLOAT), 4),
    **dict.fromkeys((Field.TYPE_FIXED64, Field.TYPE_SFIXED64, Field.TYPE_DOUBLE), 8),
}


def repeats(field: Field) -> bool:
    """As `field.is_repeated`, which older versions of protobuf lack."""
    return bool(field.default_value == [])


class _Part(NamedTuple):
    """A field, as it is on the wire."""

    name: str
    most: int
    message: Any  # its descriptor; None: it is no message
    width: int | None  # the bytes of a number of a list, or 0 if these vary; None: it is no list


@functools.cache
def _parts_of(kind: Any) -> dict[int, _Part]:
    """By number."""
    no_number = (Field.CPPTYPE_STRING, Field.CPPTYPE_MESSAGE)
    found = {}
    for field in kind.fields:
        most = MAX_ENTRIES_OF.get(field.name, MAX_ENTRIES) if repeats(field) else MAX_SAME
        is_list = repeats(field) and field.cpp_type not in no_number
        width = _WIDTHS.get(field.type, 0) if is_list else None
        found[field.number] = _Part(field.name, most, field.message_type, width)
    return found


Bound = Callable[[Message, str, Any], None]
"""Checks the values of a request's field of that name."""


def check(request: Message) -> None:
    """Raises InvalidArgument, and names the field, for what is out of bounds."""
    for field, value in request.ListFields():
        is_repeated, bound = _bound_of(field)
        if bound is not None:
            bound(request, field.name, value if is_repeated else (value,))


@functools.cache
def _bound_of(field: Field) -> tuple[bool, Bound | None]:
    """Whether the field is repeated, and what checks its values."""
    bound: Bound | None = None
    if field.message_type is not None:
        bound = _check_messages
        if field.message_type.GetOptions().map_entry:
            _, of_values = _bound_of(field.message_type.fields_by_name["value"])
            bound = partial(_check_map, of_values)
    elif field.enum_type is not None:
        bound = partial(_check_enum, frozenset(field.enum_type.values_by_number))
    elif field.type == Field.TYPE_STRING:
        bound = partial(_check_sizes, _TEXTS.get(field.name, MAX_NAME))
    elif field.type == Field.TYPE_BYTES and field.name not in _OF_DATASETS:
        bound = partial(_check_sizes, MAX_BYTES)
    elif field.cpp_type in _INTEGERS and field.name not in _ANY_NUMBER:
        bound = _check_numbers
    return repeats(field), bound


def _check_messages(_: Message, __: str, messages: Iterable[Message]) -> None:
    for message in messages:
        check(message)


def _check_map(of_values: Bound | None, request: Message, name: str, entries: Any) -> None:
    _check_sizes(MAX_PATH, request, name, entries)
    if of_values is not None:
        of_values(request, name, entries.values())


def _check_enum(known: frozenset[int], request: Message, name: str, values: Iterable[int]) -> None:
    for value in values:
        if value not in known:
            raise InvalidArgument(
                f"{_full(request, name)}={value} is not known to this dispatcher; upgrade it first"
            )


def _check_numbers(request: Message, name: str, numbers: Collection[int]) -> None:
    for number in (min(numbers), max(numbers)):
        if not -MAX_NUMBER <= number <= MAX_NUMBER:
            raise InvalidArgument(
                f"{_full(request, name)}={number} is out of bounds; give one within 2**62"
            )


def _check_sizes(most: int, request: Message, name: str, texts: Iterable[str | bytes]) -> None:
    for text in texts:
        if isinstance(text, str) and name.endswith("address") and not text.isprintable():
            raise InvalidArgument(
                f"{_full(request, name)}={text[:100]!r} has characters that are no part of an "
                "address"
            )
        if len(text) > most:
            what = "characters" if isinstance(text, str) else "bytes"
            raise InvalidArgument(
                f"{_full(request, name)} has {len(text)} {what}, and begins with {text[:40]!r}; "
                f"give one of at most {most}"
            )


def _full(request: Message, name: str) -> str:
    return f"{request.DESCRIPTOR.name}.{name}"
