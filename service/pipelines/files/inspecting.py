"""In a child: looks at files with a library in C++, for who registers them.

It gets files' entries, and answers with the facts of each in the same order. Messages are
MessagePack.
"""

from __future__ import annotations

import contextlib
import json
import operator
import queue
import socket
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from ....storage.thread_pool import ThreadPool
from ...block_limits import DTYPES
from ...errors import FailedPrecondition, ForebayError, InvalidArgument
from .byte_sources import opened
from .formats import Damaged, Facts, Format, Options, named, written
from .known_formats import format_of
from .manifest import FileEntry

_MOST_BYTES = 64 << 20  # of a message

AT_ONCE = 64
"""Files that are looked at together."""

ERRORS = {kind.__name__: kind for kind in (Damaged, InvalidArgument, FailedPrecondition)}


def serve(connection: socket.socket) -> None:
    """In the child: until the registration has ended."""
    channel = Connection(connection.detach())
    of, options = received(channel)
    send(channel, "begun")
    pool = ThreadPool(AT_ONCE, "forebay-inspect")
    answers: queue.SimpleQueue[Future[bytes]] = queue.SimpleQueue()

    def answer() -> None:
        with contextlib.suppress(OSError):  # the registration has ended
            while True:
                channel.send_bytes(answers.get().result())

    threading.Thread(target=answer, name="forebay-answer", daemon=True).start()
    while (entry := received(channel)) is not None:
        answers.put(pool.submit(_answer, of, options, FileEntry(*entry)))


def _answer(of: str, options: Options, entry: FileEntry) -> bytes:
    try:
        return msgspec.msgpack.encode(["facts", *inspected(of, options, entry)])
    except Exception as error:  # noqa: BLE001 - a library's reader may raise anything
        return msgspec.msgpack.encode(["error", *_said(error)])


def _said(error: Exception) -> list[Any]:
    if isinstance(error, OSError) and error.errno:
        return [error.errno, error.strerror, error.filename]
    kind = next((name for name, one in ERRORS.items() if isinstance(error, one)), "")
    said = str(error) if kind or isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return [kind or Damaged.__name__, said]


def reads_ends(kind: Format, options: Options) -> bool:
    """Whether of a file little is read, as columns have statistics."""
    return kind.reads_ends and options.get("nulls") != "drop"


def inspected(of: str, options: Options, entry: FileEntry) -> Facts:
    """Raises Damaged, OSError, InvalidArgument, and FailedPrecondition where the format's library
    is not installed, or another package's format is wrong."""
    kind, storage = format_of(of), options.get("storage", {})
    with contextlib.closing(opened(entry, storage, in_parts=reads_ends(kind, options))) as source:
        if not (package := options.get("package")):
            return kind.inspect(source, options)
        try:
            return _facts(kind.inspect(source, options))
        except (Damaged, OSError, ForebayError):
            raise
        except Exception as error:
            raise FailedPrecondition(
                f"the format {of!r} of the package {package} cannot tell what {entry.path} has: "
                f"{type(error).__name__}: {error}; mend that package, or leave the file out"
            ) from error


def _facts(found: Any) -> Facts:
    """What a package's `inspect` returned. Raises whatever says what is wrong with it."""
    facts = Facts(*found)
    records, cuts = operator.index(facts.records), [*map(operator.index, facts.cuts)]
    structure = json.loads(written(facts.structure))
    columns = named(structure) if "dict" in structure else {"": structure}
    is_right = [*columns] == sorted(columns) and all(
        node.get("tensor", node.get("ragged")) in {*DTYPES, "string"}
        and isinstance(node["shape"], list)
        for node in columns.values()
    )
    if not is_right or records < 0 or cuts not in ([], sorted({0, *cuts, records})):
        raise ValueError(f"{found!r:.300} is not what a file has")
    return facts._replace(records=records, structure=structure, cuts=cuts)


def send(channel: Connection, message: Any) -> None:
    """Raises OSError."""
    channel.send_bytes(msgspec.msgpack.encode(message))


def received(channel: Connection) -> Any:
    """None at the end, also of the other process."""
    try:
        return msgspec.msgpack.decode(channel.recv_bytes(_MOST_BYTES))
    except (EOFError, OSError):
        return None
