"""The process in which a Python dataset's function runs.

It has a socket to the worker, which sends

    ["setup", bytes, bytes]                  with a file of so many bytes of a structure, and then
                                             so many of a PythonDataset; and one
                                             of three int64: the split and the element that it is
                                             at, and the split before which all has been sent
    ["run", first, count, start, seed, awaited]
                                             these splits, from element `start` on: of the first
                                             one, or, if there is a seed, of all of them; and
                                             whether somebody waits for the first element
    ["free", slabs, abandoned, blocks]       memory that is free again, and blocks that were taken
    ["teardown"]                             nothing more will come

and to which it sends

    ["block", count, bytes, header, slab, at, metrics]
                                             elements in a slab, or, if that is None, in a file
                                             of their own; the split and element behind them; and
                                             what was counted in splits that end with them, perhaps
    ["counted", at, metrics]                 that, of splits that end without elements, or where
                                             it does not fit into the block's message
    ["end"]                                  of what was to be run
    ["failed", code, text, split, element]   instead of that

Whatever the function does to its process, it does to this one.
"""

from __future__ import annotations

import bisect
import copy
import math
import mmap
import os
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np
from numpy import random as numpys_random

from ...blocks import BLOCK_BYTES
from ...errors import PipelineError
from ...metrics import Totals
from ...proto import metrics_pb2 as pb
from ...shared import Lender, new_slab
from .columns import Column, Field, Misfit, column_of, columns_of, fields_of, iterated, write

CREDIT = 3
"""Blocks that have not been taken, before it waits."""

SLABS = 8
"""Each costs the worker a descriptor or two, for as long as there is this process. What comes while
all of them are held by somebody is copied there."""

LINGER_S = 0.025
"""How long a block is made, about, and twice that at most; an element that took so long to make
waits for no company. For the worker and its consumer a block costs some 0.3 ms, whatever is in it:
what is sent more often keeps other processes from their work."""

IMMUTABLE = (int, float, complex, bytes, str, np.generic)
"""What a function cannot change once it has yielded it; anything else is copied at once."""

_UNCHANGING = {int, float, bytes, str, bool}
"""Of these, those that most elements are of."""

MAX_ROWS = 1 << 16
MAX_TEXT = 20_000
MESSAGE_BYTES = 192 << 10
PLACE_BYTES = 128  # at most, of all in a block's message but its header and metrics
PROGRESS_BYTES = 3 * 8

_CODES: dict[type[BaseException], str] = {
    NotImplementedError: "UNIMPLEMENTED",
    MemoryError: "RESOURCE_EXHAUSTED",
    StopIteration: "OUT_OF_RANGE",
    TypeError: "INVALID_ARGUMENT",
    ValueError: "INVALID_ARGUMENT",
}
"""As TensorFlow calls what a py_function raises; anything else is UNKNOWN."""


Counted = Sequence[tuple[int, pb.Metrics]]
"""By split."""


class Failed(Exception):
    """The user's function has; ends the request."""

    def __init__(self, code: str, text: str, split: int = -1, element: int = -1) -> None:
        text = text.encode(errors="backslashreplace").decode()  # names of files may be anything
        super().__init__(code, text[: 2 * MAX_TEXT], split, element)


class FunctionProcess:
    """Answers the worker, until it has gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._process = os.getpid()
        self._lender = Lender(SLABS)
        # Of the block that is being made, and of what is said to the worker within a request.
        self._lock = threading.RLock()
        self._making = threading.Event()  # within a request
        self._broken: BaseException | None = None  # of what was sent behind the function's back
        self._credit = CREDIT
        self._ended_s = -math.inf  # the request before
        message, (definition, progress), _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
        _, told, size = msgspec.msgpack.decode(message)
        with mmap.mmap(definition, told + size, prot=mmap.PROT_READ) as stored:
            self._structure = stored[:told].decode()
            self._definition = stored[told : told + size]
        self._at = memoryview(mmap.mmap(progress, PROGRESS_BYTES)).cast("q")
        os.close(definition)
        os.close(progress)
        self._function: Callable[..., Any]
        self._splits: Sequence[Any] | None  # None: the function builds a dataset

    def serve(self) -> NoReturn:
        try:
            self._load()
        except Failed as failed:
            self._send(["failed", *failed.args])
            sys.exit(1)
        lingers: threading.Thread | None = None
        while True:
            message = self._receive()
            if message[0] == "free":
                self._free(*message[1:])
                continue
            if message[0] == "run" and lingers is None and self._splits is not None:
                lingers = threading.Thread(target=self._linger, name="forebay-linger", daemon=True)
                lingers.start()
            if message[0] == "teardown":
                getattr(self._function, "teardown", _nothing)()
                sys.exit(0)
            try:
                self._run(*message[1:])
                self._send(["end"])
            except Failed as failed:
                self._send(["failed", *failed.args])

    def _load(self) -> None:
        import cloudpickle

        from ...proto.python_pb2 import PythonDataset

        dataset = PythonDataset.FromString(self._definition)
        del self._definition
        self._splits = None
        try:
            if dataset.splits:
                self._fields, self._flatten = fields_of(self._structure)
                sizes = [field.bytes for field in self._fields]
                self._element_bytes = None if None in sizes else sum(n or 0 for n in sizes)
                self._splits = cloudpickle.loads(dataset.splits)
            self._function = cloudpickle.loads(dataset.function)
            getattr(self._function, "setup", _nothing)()
        except ModuleNotFoundError as error:
            raise Failed(
                "FAILED_PRECONDITION",
                f"the dataset needs the module {error.name!r}, which is not there on the worker: "
                "install it there",
            ) from error
        except BaseException as error:
            raise Failed(
                "FAILED_PRECONDITION",
                f"the dataset's function cannot be unpickled, or set up, on the worker:\n"
                f"{_traceback(error)}",
            ) from error

    # -- the worker ------------------------------------------------------------------------------

    def _receive(self, flags: int = 0) -> list[Any]:
        data = self._connection.recv(MESSAGE_BYTES, flags)
        if not data:
            os._exit(0)  # the worker has gone
        message: list[Any] = msgspec.msgpack.decode(data)
        return message

    def _send(self, message: list[Any], descriptor: int | None = None) -> None:
        self._require_process()
        given = [] if descriptor is None else [descriptor]
        data = msgspec.msgpack.encode(message)
        if len(data) > MESSAGE_BYTES:
            raise Failed(
                "RESOURCE_EXHAUSTED",
                f"an element of {len(self._fields)} tensors cannot be described: stack them",
                *self._at[:2].tolist(),
            )
        try:
            socket.send_fds(self._connection, [data], given)
        except OSError:
            os._exit(0)

    def _require_process(self) -> None:
        if os.getpid() != self._process:
            os._exit(0)  # the user's function has forked, and this is the other one

    def _free(self, slabs: list[int], abandoned: list[int], blocks: int) -> None:
        self._lender.take_back(slabs, abandoned)
        self._credit += blocks

    def _wait_for_credit(self) -> None:
        while True:
            try:
                message = self._receive(socket.MSG_DONTWAIT if self._credit else 0)
            except BlockingIOError:
                return
            self._free(*message[1:])

    # -- elements --------------------------------------------------------------------------------

    def _run(self, first: int, count: int, start: int, seed: str | None, awaited: bool) -> None:
        if self._splits is None:
            return self._run_built()
        random.seed(seed)
        numpys_random.seed(None if seed is None else random.getrandbits(32))
        with self._lock:
            self._begin_block()
            self._broken = None
        # Where there were none for a while, somebody waits as well.
        self._at_once = awaited or time.monotonic() - self._ended_s >= LINGER_S
        self._making.set()
        try:
            self._run_splits(first, count, start, seed)
        finally:
            self._making.clear()
            self._ended_s = time.monotonic()
        return None

    def _run_splits(self, first: int, count: int, start: int, seed: str | None) -> None:
        for split in range(first, first + count):
            had, counted = self._run_split(split, start)
            if seed is not None:
                start -= had
            elif had < start:
                raise self._failed(
                    split,
                    had,
                    f"it has {had} elements now, and {start} had come before it was run again: "
                    "the function must yield the same again",
                )
            else:
                start = 0
            self._require_process()
            with self._lock:
                self._raise_broken()
                if counted is not None:
                    self._counted.append((split, counted))
                if not self._rows:
                    if self._counted:
                        self._send(["counted", (split + 1, 0), _totals(self._counted)])
                        self._counted.clear()
                    self._at[2] = split + 1
        self._flush()

    def _run_built(self) -> None:
        from .built import blocks

        self._at[0], self._at[1] = 0, 0
        try:
            for block in blocks(self._function, self._structure):
                self._at[1] += block.count
                self._send_columns(block.count, columns_of(block), (0, self._at[1]))
        except PipelineError as error:
            raise Failed(error.code, error.message, 0, self._at[1]) from None
        except BaseException as error:  # noqa: BLE001 - whatever it raises, this goes on
            raise Failed(_code(error), _traceback(error), 0, self._at[1]) from None

    def _run_split(self, split: int, start: int) -> tuple[int, pb.Metrics | None]:
        """All of it but the first `start` elements; how many it has, and what it has counted."""
        assert self._splits is not None
        self._require_process()
        with self._lock:
            self._at[0], self._at[1] = split, 0
        element = 0
        counted: pb.Metrics | None = None
        last_s = time.monotonic()
        failed: Failed | None = None

        # Its own names, as it is called for each element.
        lock, process, pid_of, now = self._lock, self._process, os.getpid, time.monotonic

        def take(value: Any) -> None:
            nonlocal element, last_s, failed
            took_s = now() - last_s  # without what is waited for from here on
            if pid_of() != process:  # before it waits for a thread that a fork has not
                self._require_process()
            with lock:
                if element >= start:
                    try:
                        if self._broken is not None:
                            self._raise_broken()
                        self._add(value, split, element, took_s)
                        last_s = now()
                        due = last_s - self._began_s >= LINGER_S
                        if due or self._at_once or self._rows >= MAX_ROWS:
                            self._flush()
                            self._at_once = False
                            last_s = now()
                    except Failed as error:
                        failed = error  # whatever the function makes of it
                        raise
                element += 1
                self._at[1] = element

        try:
            if (run := getattr(self._function, "run_bundle", None)) is not None:
                counted = run(self._splits[split], take)
            else:
                try:
                    found = iterated(self._function(self._splits[split]))
                except Misfit as misfit:
                    raise self._failed(split, 0, str(misfit)) from None
                for value in found:
                    take(value)
        except Failed:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it raises, this goes on
            if failed is not None:
                raise failed from None
            self._flush()
            raise self._failed(split, element, _traceback(error), _code(error)) from None
        return element, counted

    def _add(self, value: Any, split: int, element: int, took_s: float) -> None:
        leaves: list[Any] = []
        try:
            self._flatten(value, leaves)
            for at, leaf in enumerate(leaves):
                if type(leaf) not in _UNCHANGING:
                    leaves[at] = _copied(self._fields[at], leaf)
        except Misfit as misfit:
            self._flush()
            raise self._failed(split, element, str(misfit)) from None
        size = self._element_bytes
        if size is None:
            size = sum(map(_bytes, leaves))
        if self._rows and self._bytes + size > BLOCK_BYTES:
            self._flush()
        if not self._rows:
            self._began_s = time.monotonic() - took_s
        if not self._places or self._places[-1][1] != split:
            self._places.append((self._rows, split, element))
        for at, leaf in enumerate(leaves):
            self._columns[at].append(leaf)
        self._rows += 1
        self._bytes += size

    def _begin_block(self) -> None:
        self._columns: list[list[Any]] = [[] for _ in self._fields]
        self._rows = self._bytes = 0
        self._places: list[tuple[int, int, int]] = []  # where a split begins: row, split, element
        # Of splits that have ended, and of which some elements are still here.
        self._counted: list[tuple[int, pb.Metrics]] = []
        self._began_s = 0.0  # to be made

    def _flush(self) -> None:
        """Send what is there; if one does not fit, what is before it. Raises Failed, and then, too,
        all that is before the element that failed was sent."""
        self._require_process()
        with self._lock:
            self._raise_broken()
            self._flush_block()

    def _linger(self) -> None:
        """Send what waits while the function makes nothing, in a thread of its own."""
        while self._making.wait():
            time.sleep(LINGER_S)
            with self._lock:
                if self._rows and time.monotonic() - self._began_s >= LINGER_S:
                    try:
                        self._flush_block()
                    except BaseException as error:  # noqa: BLE001 - for who runs the function
                        self._broken = error

    def _raise_broken(self) -> None:
        broken, self._broken = self._broken, None
        if broken is not None:
            raise broken

    def _flush_block(self) -> None:
        count, columns, places = self._rows, self._columns, self._places
        if not count:
            return
        counted = self._counted
        self._begin_block()

        def place(row: int) -> tuple[int, int]:
            begins, split, element = places[bisect.bisect([r for r, _, _ in places], row) - 1]
            return split, element + row - begins

        split, element = place(count - 1)
        behind = (split, element + 1)
        if counted and counted[-1][0] >= split:
            behind = (counted[-1][0] + 1, 0)  # it has ended, and counts once
        try:
            self._send_block(place(0), count, columns, behind, counted)
            self._at[2] = self._at[0]
        except Misfit as misfit:
            split, element = place(misfit.row)
            if misfit.row:
                before = [column[: misfit.row] for column in columns]
                counted = [each for each in counted if each[0] < split]
                self._send_block(place(0), misfit.row, before, (split, element), counted)
            raise self._failed(split, element, str(misfit)) from None

    def _send_block(
        self,
        first: tuple[int, int],
        count: int,
        values: list[list[Any]],
        behind: tuple[int, int],
        counted: Counted,
    ) -> None:
        """Raises Misfit; and Failed at the first element, as all of them are lost then."""
        try:
            columns = [column_of(f, column) for f, column in zip(self._fields, values, strict=True)]
            self._send_columns(count, columns, behind, counted)
        except Misfit:
            raise
        except Failed as failed:
            code, text, *_ = failed.args
            raise Failed(code, text, *first) from None
        except BaseException as error:  # noqa: BLE001 - descriptors or memory, mostly
            code = "RESOURCE_EXHAUSTED" if isinstance(error, OSError) else _code(error)
            what = f"it could not be sent: {_traceback(error)}"
            raise self._failed(*first, what, code) from None

    def _send_columns(
        self, count: int, columns: list[Column], behind: tuple[int, int], counted: Counted = ()
    ) -> None:
        size = max(1, sum(column.size for column in columns))
        self._require_process()  # before it takes or writes what is the other one's
        self._wait_for_credit()
        slab: int | None = None
        descriptor: int | None
        if (reserved := self._lender.reserve(size)) is not None:
            (slab, descriptor), payload = reserved
        else:
            descriptor, payload = new_slab(size)
        try:
            header = write(columns, payload)
            metrics, apart = _totals(counted), b""
            told = metrics and msgspec.msgpack.encode([header, metrics])
            if len(told) > MESSAGE_BYTES - PLACE_BYTES:
                metrics, apart = b"", metrics
            self._send(["block", count, size, header, slab, behind, metrics], descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._credit -= 1
        if apart:
            self._send(["counted", behind, apart])

    def _failed(
        self, split: int, element: int, what: str, code: str = "INVALID_ARGUMENT"
    ) -> Failed:
        assert self._splits is not None
        is_bundle = hasattr(self._function, "run_bundle")  # its splits are pickled
        name = "" if is_bundle else f" ({_repr(self._splits[split])})"
        return Failed(code, f"split {split}{name}, element {element}: {what}", split, element)


def _nothing() -> None: ...


def _totals(counted: Counted) -> bytes:
    return Totals(part for _, part in counted).told().SerializeToString()


def _copied(field: Field, leaf: Any) -> Any:
    """What stays as it is, whatever the function does to the leaf. Raises Misfit."""
    if isinstance(leaf, IMMUTABLE):
        return leaf
    try:
        if not isinstance(leaf, np.ndarray) and hasattr(leaf, "__array__"):
            leaf = np.asarray(leaf)
        return copy.deepcopy(leaf)
    except Exception as error:
        raise Misfit(f"{field.path} cannot be copied: {_repr(error)}") from error


def _bytes(leaf: Any) -> int:
    size = getattr(leaf, "nbytes", None)
    if isinstance(size, int):
        return size
    return len(leaf) if isinstance(leaf, bytes | str) else 8


def _code(error: BaseException) -> str:
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), "UNKNOWN")


def _traceback(error: BaseException) -> str:
    """The user's own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    return f"{_repr(error)}\n{text[-MAX_TEXT:]}"


def _repr(value: object) -> str:
    """In short; of a user's class it may raise anything."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001
        text = object.__repr__(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def main(connection: socket.socket) -> None:
    """Called in a process that is its own."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # what the function prints is the worker's log
    numpys_random.seed()  # or all forks would draw the same; `random` sees to that itself
    FunctionProcess(connection).serve()
