"""Looks at files to register, and finds what they have together.

It does so in processes of their own where a library in C++ reads them, or there are many. Damaged
bytes, or such as are made to harm, can end such a process (SIGABRT); they are not to end this one.

The processes are forks of a fork server that ends with the registration.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from ....storage.errors import Corrupt
from ...errors import FailedPrecondition, InvalidArgument
from ...structure import describe
from ..files import manifest, partitions
from ..files.byte_sources import AHEAD_BYTES, opened_now
from ..files.formats import Damaged, Facts, Options, dict_of, few, is_utf8, named, written
from ..files.inspecting import AT_ONCE, ERRORS, inspected, reads_ends, received, send
from ..files.known_formats import format_of
from ..files.manifest import FileEntry
from ..files.stores import is_url
from ..python.fork_server import ForkServer, ended
from .file_paths import errors_named

log = logging.getLogger(__name__)

_MOST_BYTES = 8 * AHEAD_BYTES
"""Of files that are read as a whole at a time, each of which is read ahead."""

_MOST_PROCESSES = 4
_IN_A_ROW = 4
"""Files that one process looks at before another one gets some."""

_MANY, _MANY_OBJECTS = 1000, 16
"""So many are worth a process, which starts within a second."""

_FILLS = {"b": bool, "i": int, "u": int, "f": int | float, "O": str | bytes}
"""What stands for a null, by the kind of dtype."""

_SENT = range(-(1 << 63), 1 << 64)

_State = tuple[FileEntry, int | None]
"""What a file is, and when it was changed, if it is a local one."""

_fork_server = ForkServer("..files.preloaded")
_lock = threading.Lock()
_users = 0


@contextlib.contextmanager
def fork_server_kept() -> Iterator[None]:
    """It ends with the last context of these, in whatever threads they are."""
    global _users
    with _lock:
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _fork_server.close()


def inspected_together(
    files: Sequence[FileEntry], of: str, options: dict[str, Any], outside: partitions.Partitions
) -> tuple[list[FileEntry], Facts]:
    """The files, of which only objects of stores are looked at already, and what they have
    together. Raises InvalidArgument, Corrupt, NotFound."""
    if outside.nodes:
        options = options | {"outside": [*outside.nodes]}
    with contextlib.closing(_looked_at(of, options, files)) as looked:
        return _together(files, of, options, outside, looked)


def _together(
    files: Sequence[FileEntry],
    of: str,
    options: dict[str, Any],
    outside: partitions.Partitions,
    looked: Iterator[tuple[FileEntry, Facts]],
) -> tuple[list[FileEntry], Facts]:
    entries: list[FileEntry] = []
    cuts: list[int] = []
    of_first: tuple[str, Any] | None = None
    times: Mapping[str, str] = {}
    fill = options.get("fill", {})
    wanted = options.get("columns", outside.nodes)
    nodes = {name: node for name, node in outside.nodes.items() if name in wanted}
    of_read = {name: fill[name] for name in fill if name in nodes or name not in outside.nodes}
    left_out = 0
    absent: set[str] | None = None  # columns that no file has
    is_cut = False  # of some files, a split cannot begin anywhere
    first = [entry.path for entry in files[: manifest.MANY]]
    for number, listed in enumerate(files):
        path = listed.path
        with errors_named(path):
            try:
                entry, facts = next(looked)
                of_file = nodes if facts.records else {}
                if of_file:
                    structure = dict_of({**dict(facts.structure["dict"]), **of_file})
                    facts = facts._replace(structure=structure)
                if odd := [name for name in named(facts.structure) if not is_utf8(name)]:
                    raise InvalidArgument(
                        f"{path} has columns {few(odd)}, whose names are no UTF-8: rename them, or "
                        "read others by `columns`"
                    )
                _require_fill(path, facts, of_read)
                values = outside.values_of(number, path, of_file, fill)
            except OverflowError as error:
                raise InvalidArgument(
                    f"fill={fill!r:.100} does not fit the columns of {path}: {error}"
                ) from error
            cuts_of = [*facts.cuts] if options.get("nulls") == "drop" else []
            now = {"packed": facts.packed, "beside": facts.beside, "cuts": cuts_of}
            entries.append(
                msgspec.structs.replace(entry, records=facts.records, values=values, **now)
            )
        left_out += facts.left_out
        if facts.absent is not None:
            absent = {*facts.absent} if absent is None else absent & {*facts.absent}
        of_earlier = sum(cuts[-1:])
        cuts += [of_earlier + cut for cut in facts.cuts or (0, facts.records)]
        is_cut |= bool(facts.cuts)
        if not facts.records:
            continue
        if of_first is None:
            of_first, times = (path, facts.structure), facts.times
            if facts.warning:
                log.warning("%s", facts.warning)
        both: Any = of_first[1]
        if facts.structure != both:
            both = _common(facts.structure, both, widens=of == "jsonl")
        if both is None:
            ours, others = _differing(facts.structure, of_first[1])
            raise InvalidArgument(
                f"{path} has records {ours:.300}, and {of_first[0]} {others:.300}: register files "
                "of one schema together, or `columns` that they have in common"
            )
        of_first = of_first[0], both
        if facts.times != times:
            raise InvalidArgument(
                f"{path} has columns of time {facts.times}, and {of_first[0]} {times}: write one "
                "type, or read others by `columns`"
            )
    if absent:
        raise InvalidArgument(
            f"no sample of {first} has an extension of columns "
            f"{few(sorted(absent))}: correct `columns`"
        )
    if of_first is None:
        raise InvalidArgument(f"{first} have no records: give files that have some")
    total = sum(entry.records for entry in entries)
    if left_out and of == "tokens":
        log.warning("%d tokens are behind the last whole windows of their files", left_out)
    elif left_out:
        log.warning(
            "%d of %d %s lack a column, and are no records",
            left_out, left_out + total, "samples" if of == "webdataset" else "rows",
        )  # fmt: skip
    return entries, Facts(total, of_first[1], cuts if is_cut else ())


def _require_fill(path: str, facts: Facts, fill: dict[str, Any]) -> None:
    """Raises InvalidArgument for a value that would be converted to another one, or is of a column
    that is not read."""
    nodes = named(facts.structure)
    for name, value in fill.items() if facts.records else ():
        if (node := nodes.get(name)) is None:
            raise InvalidArgument(
                f"fill has column {name!r}, and of {path} are read {few(sorted(nodes))}: leave it "
                "out, or read that column. A Parquet file has it: `fill` stands for nulls of it"
            )
        dtype = node.get("tensor") or node["ragged"]
        kind = "O" if dtype == "string" else np.dtype(dtype).kind
        is_right = isinstance(value, _FILLS[kind]) and (kind == "b" or not isinstance(value, bool))
        if is_right and kind in "iu":
            about = np.iinfo(dtype)
            is_right = about.min <= value <= about.max
        if not is_right:
            raise InvalidArgument(
                f"fill={{{name!r}: {value!r:.50}}} is no {dtype}, which that column of "
                f"{path} is: give one"
            )


def _common(one: Any, other: Any, *, widens: bool) -> Any:
    """What two structures have in common, where sizes that differ are unknown, and integers may
    be floats; or None."""
    if "dict" in one and "dict" in other:
        columns, others = dict(one["dict"]), dict(other["dict"])
        if columns.keys() != others.keys():
            return None
        both = {n: _common(node, others[n], widens=widens) for n, node in columns.items()}
        return None if None in both.values() else dict_of(both)
    if widens and {one.get("tensor"), other.get("tensor")} == {"int64", "float64"}:
        one, other = one | {"tensor": "float64"}, other | {"tensor": "float64"}
    shapes = one.get("shape", ()), other.get("shape", ())
    if one | {"shape": ()} != other | {"shape": ()} or len({*map(len, shapes)}) > 1:
        return None
    return one | {"shape": [a if a == b else None for a, b in zip(*shapes, strict=True)]}


def _differing(one: Any, other: Any) -> tuple[str, str]:
    """Two structures in words, of which only the columns that differ."""
    if "dict" not in one or "dict" not in other:
        return f"of {describe(written(one))}", f"of {describe(written(other))}"
    mine, others = named(one), named(other)
    return _those(mine, others), _those(others, mine)


def _those(columns: dict[str, Any], others: dict[str, Any]) -> str:
    differ = {name: node for name, node in columns.items() if node != others.get(name)}
    lacks = sorted(others.keys() - columns.keys())
    said = [f"of {describe(written(dict_of(differ)))}"] if differ else []
    return " ".join([*said, f"without {few(lacks)}"] if lacks else said)


def _looked_at(
    of: str, options: Options, files: Sequence[FileEntry]
) -> Generator[tuple[FileEntry, Facts], None, None]:
    """Each file of a format as it is now, and what it has. Close it. Raises of the next file
    Corrupt, OSError, InvalidArgument, OverflowError, and FailedPrecondition if it was changed
    meanwhile, or the library is not installed."""
    kind = format_of(of)
    is_far, in_parts = is_url(files[0].path), reads_ends(kind, options)
    here = not kind.native and len(files) < (_MANY_OBJECTS if is_far else _MANY)
    count = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)), -(-len(files) // _IN_A_ROW))
    upcoming, asked = iter(files), deque[tuple[_State | OSError, _Process, int]]()
    with contextlib.ExitStack() as closing:
        processes = [_Process(of, options, closing) for _ in range(count)]
        turns = itertools.cycle(p for p in processes for _ in range(_IN_A_ROW))
        for listed in files:
            while (
                len(asked) < (1 if here else AT_ONCE)
                and sum(size for *_, size in asked) < _MOST_BYTES
                and (following := next(upcoming, None))
            ):
                asked.append(_asked(following, next(turns), here=here, in_parts=in_parts))
            state, process, _ = asked.popleft()
            if isinstance(state, OSError):
                raise state
            try:
                facts = inspected(of, options, state[0]) if here else process.answer()
            except Damaged as error:
                _require_unchanged(listed, state)
                raise Corrupt(f"{listed.path} cannot be registered as {of}: {error}") from error
            _require_unchanged(listed, state)
            yield state[0], facts


def _asked(
    listed: FileEntry, process: _Process, *, here: bool, in_parts: bool
) -> tuple[_State | OSError, _Process, int]:
    """Begins to look at a file: what it is before, or why that is not known, who looks, and at how
    many bytes. Raises FailedPrecondition, OverflowError."""
    try:
        state = _state(listed)
        if not here:
            process.ask(state[0])
    except OSError as error:  # of those before it, there may be others
        return error, process, 0
    return state, process, 0 if in_parts else min(state[0].size, AHEAD_BYTES)


def _state(listed: FileEntry) -> _State:
    """What shows a change; an object's bytes are compared when they are read. Raises OSError."""
    if is_url(listed.path):
        return listed, 0
    with contextlib.closing(opened_now(listed.path, {})) as file:
        return file.entry, file.changed_ns


def _require_unchanged(listed: FileEntry, before: _State) -> None:
    if _state(listed) != before:
        raise FailedPrecondition(
            f"{listed.path} was changed while it was being registered: register again, when it is "
            "no longer written"
        )


class _Process:
    """Looks at files in a process of its own, which starts with the first one."""

    def __init__(self, of: str, options: Options, kept: contextlib.ExitStack) -> None:
        """It is there until `kept` is closed."""
        self._of, self._options, self._kept = of, options, kept
        self._asked: deque[FileEntry] = deque()  # without an answer yet
        self._channel: Connection | None = None
        self._control: socket.socket

    def ask(self, entry: FileEntry) -> None:
        """Raises FailedPrecondition, OverflowError."""
        self._asked.append(entry)
        self._send(entry)

    def answer(self) -> Facts:
        """Of the file that was asked about first. Raises Damaged, OSError, InvalidArgument, and
        FailedPrecondition where the library is not installed."""
        entry = self._asked.popleft()
        assert self._channel is not None
        told = received(self._channel)
        if told is None and self._asked:  # perhaps because of another one
            self._channel = None
            told = received(self._send(entry))
            for other in self._asked if told else ():
                self._send(other)
        match told:
            case ["facts", *facts]:
                return Facts(*facts)
            case ["error", int(number), said, name]:
                raise OSError(number, said, name)
            case ["error", str(kind), said]:
                raise ERRORS[kind](said)
        raise Damaged(
            f"the process that looked at it ended ({ended(self._control)}), so it is damaged, or "
            "memory was short. Write it again, or leave it out"
        )

    def _send(self, entry: FileEntry) -> Connection:
        """Raises FailedPrecondition, OverflowError."""
        if self._channel is None:
            self._channel = self._started()
        with contextlib.suppress(OSError):  # the process has ended
            send(self._channel, [entry.path, entry.size, entry.fingerprint, 0])
        return self._channel

    def _started(self) -> Connection:
        """Raises FailedPrecondition, OverflowError."""
        fill = {  # integers that cannot be sent fit no column
            name: float(value) if isinstance(value, int) and value not in _SENT else value
            for name, value in self._options.get("fill", {}).items()
        }
        about = [self._of, {**self._options, "fill": fill}]
        self._kept.enter_context(fork_server_kept())
        ours, theirs = socket.socketpair()
        channel = self._kept.enter_context(Connection(ours.detach()))
        try:
            with theirs:
                self._control = self._kept.enter_context(_fork_server.fork(theirs))
            send(channel, about)
            answer = received(channel)
        except OSError as error:
            raise FailedPrecondition(
                f"no process can be started to look at files: {error}"
            ) from error
        if answer is None:
            raise FailedPrecondition(
                f"the process that looks at files has not started: {ended(self._control)}"
            )
        return channel
