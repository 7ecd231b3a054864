"""In a child: looks at files with a library in C++, for who registers them.

It gets a path and answers with its facts, one file after another: each message is MessagePack
behind its length (u32).
"""

from __future__ import annotations

import socket
import struct
from typing import Any, BinaryIO

import msgspec

from ...errors import FailedPrecondition, InvalidArgument
from .formats import Damaged, Options
from .known_formats import FORMATS

_LENGTH = struct.Struct("<I")
_MOST_BYTES = 64 << 20  # of a message

ERRORS = {kind.__name__: kind for kind in (Damaged, InvalidArgument, FailedPrecondition)}


def serve(connection: socket.socket) -> None:
    """In the child: until the registration has ended."""
    stream: Any = connection.makefile("rwb")
    of, options = received(stream)
    send(stream, "begun")
    while (path := received(stream)) is not None:
        send(stream, _answer(of, options, path))


def _answer(of: str, options: Options, path: str) -> list[Any]:
    try:
        answer = ["facts", *FORMATS[of].inspect(path, options)]
        msgspec.msgpack.encode(answer)
        return answer
    except OSError as error:
        if error.errno:
            return ["error", error.errno, error.strerror, error.filename]
        return ["error", Damaged.__name__, str(error)]
    except (InvalidArgument, FailedPrecondition, Damaged) as error:
        kind = next(name for name, one in ERRORS.items() if isinstance(error, one))
        return ["error", kind, str(error)]
    except Exception as error:  # noqa: BLE001 - a library's reader may raise anything
        return ["error", Damaged.__name__, f"{type(error).__name__}: {error}"]


def send(stream: BinaryIO, message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def received(stream: BinaryIO) -> Any:
    """None at the end. Raises OSError."""
    head = stream.read(_LENGTH.size)
    size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else _MOST_BYTES + 1
    data = stream.read(size) if size <= _MOST_BYTES else b""
    return msgspec.msgpack.decode(data) if len(data) == size else None
