"""What a child sends to its worker: blocks of the user's elements, and failures.

child.py lists the messages.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ....journal.splits import MAX_REASON
from ...blocks import BLOCK_BYTES
from ...errors import ForebayError, PipelineError, status_of
from ...proto import metrics_pb2 as pb
from ...shared import Lender, new_slab
from ...user_metrics import Totals
from .columns import LISTS, Column, Field, Misfit, column_of, fields_of, said, write

CREDIT = 3
"""Blocks that the child may send before the worker has taken them."""

SLABS = 8
"""Limit of slabs; each costs the worker a descriptor or two while the child lives. While all slabs
are in use, the worker copies further blocks."""

LINGER_S = 0.025
"""The approximate time that a block collects elements, and at most twice that. An element that took
this long to make is sent at once. A block of any size costs worker and consumer about 0.3 ms, so
more blocks would take time from other processes."""

IMMUTABLE = (int, float, complex, bytes, str, np.generic)
"""Types that a function cannot change once it has yielded them; others are copied at once."""

_UNCHANGING = {int, float, bytes, str, bool}
"""The most frequent of these types."""

MAX_ROWS = 1 << 16
MAX_TEXT = 20_000
MESSAGE_BYTES = 192 << 10

_CODES: dict[type[BaseException], str] = {
    NotImplementedError: "UNIMPLEMENTED",
    MemoryError: "RESOURCE_EXHAUSTED",
    StopIteration: "OUT_OF_RANGE",
    TypeError: "INVALID_ARGUMENT",
    ValueError: "INVALID_ARGUMENT",
}
"""TensorFlow's codes for exceptions of a py_function; all others are UNKNOWN."""

_OURS = {__name__, f"{__package__}.child"}
"""Modules that call users' functions; tracebacks leave them out."""

Counted = Sequence[tuple[int, pb.Metrics]]
"""Metrics by split."""


class FunctionFailed(Exception):
    """The user's function has failed; ends the request."""

    def __init__(self, code: str, text: str, split: int = -1, element: int = -1) -> None:
        text = text.encode(errors="backslashreplace").decode()  # file names may have any bytes
        super().__init__(code, text[: 2 * MAX_TEXT], split, element)

    def placed(self, split: int, element: int) -> FunctionFailed:
        """The same failure at this place."""
        code, text, *_ = self.args
        return FunctionFailed(code, text, split, element)


class Sender:
    """The connection to the worker, with the available memory and credit. For one thread at a
    time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._process = os.getpid()
        self._lender = Lender(SLABS)
        self._credit = CREDIT

    def told(self) -> list[Any]:
        """The next request, or answer; waits for it."""
        while True:
            message = self._receive()
            if message[0] != "free":
                return message
            self._free(*message[1:])

    def send(self, message: list[Any], descriptor: int | None = None) -> None:
        """Raises FunctionFailed if the message is too large."""
        self.require_process()
        given = [] if descriptor is None else [descriptor]
        data = msgspec.msgpack.encode(message)
        if len(data) > MESSAGE_BYTES:
            raise FunctionFailed(
                "RESOURCE_EXHAUSTED", f"a message of {len(data)} bytes cannot be sent"
            )
        try:
            socket.send_fds(self._connection, [data], given)
        except OSError:
            os._exit(0)  # the worker has gone

    def send_columns(
        self, count: int, columns: list[Column], behind: tuple[int, int], counted: Counted = ()
    ) -> None:
        """Send a block of these columns, once there is credit. Raises FunctionFailed and errors of
        shared memory."""
        size = max(1, sum(column.size for column in columns))
        self.require_process()  # before a fork takes or writes what is the original's
        self._wait_for_credit()
        slab: int | None = None
        descriptor: int | None
        if (reserved := self._lender.reserve(size)) is not None:
            lent, payload = reserved
            slab, descriptor = lent.slab, lent.descriptor
        else:
            descriptor, payload = new_slab(size)
        try:
            header = write(columns, payload)
            block = ["block", count, size, header, slab, behind, totals(counted)]
            try:
                self.send(block, descriptor)
            except FunctionFailed as failed:
                raise FunctionFailed(
                    failed.args[0],
                    f"an element of {len(columns)} tensors cannot be described: stack them",
                ) from None
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._credit -= 1

    def may_skip(self, split: int, element: int, records: int, reason: str) -> bool:
        """Ask whether so many records from this place on, or with 0 the rest of the split, may be
        left out; waits for the answer."""
        reason = reason.encode(errors="backslashreplace").decode()[:MAX_REASON]
        self.send(["skip", split, element, records, reason])
        _, allowed = self.told()
        return bool(allowed)

    def require_process(self) -> None:
        if os.getpid() != self._process:
            os._exit(0)  # this is a fork of the child

    def _receive(self, flags: int = 0) -> list[Any]:
        try:
            data = self._connection.recv(MESSAGE_BYTES, flags)
        except ConnectionResetError:  # the worker has left messages unread
            data = b""
        if not data:
            os._exit(0)  # the worker has gone
        message: list[Any] = msgspec.msgpack.decode(data)
        return message

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


class Blocks:
    """Collects the function's elements into blocks. Hold `lock` to use the current block, and to
    send within a request."""

    def __init__(
        self,
        sender: Sender,
        structure: str,
        at: memoryview,
        failed: Callable[..., FunctionFailed],
        *,
        inferred: bool = False,
    ) -> None:
        """`at` is child.py's file of three int64. `failed` makes an error from split, element. Of
        an `inferred` structure elements may have other sizes."""
        self.lock = threading.RLock()
        self.at_once = False  # the worker waits for the next element
        self.broken: BaseException | None = None  # an error of the thread that sends
        self._sender = sender
        self._at = at
        self._failed = failed
        fields, self._flatten = fields_of(structure)
        self._fields = [field._replace(inferred=inferred) for field in fields]
        sizes = [field.bytes for field in self._fields]
        self._element_bytes = None if None in sizes else sum(n or 0 for n in sizes)
        self._making = threading.Event()  # set within a request
        self._lingers = threading.Thread(target=self._linger, name="forebay-linger", daemon=True)
        self.begin_block()

    def linger(self) -> None:
        """Start the thread that sends waiting elements while the function is busy. Idempotent."""
        if not self._lingers.is_alive():
            self._lingers.start()

    def begin(self, at_once: bool) -> None:
        """Begin a request; end it."""
        with self.lock:
            self.begin_block()
            self.broken = None
        self.at_once = at_once
        self._making.set()

    def end(self) -> None:
        self._making.clear()

    def leaves(self, value: Any) -> list[Any]:
        """Of an element that can be sent, numbers as `column_of` converts them. Raises Misfit."""
        leaves: list[Any] = []
        self._flatten(value, leaves)
        for at, field in enumerate(self._fields):
            column = column_of(field, leaves[at : at + 1])
            if not column.strings:
                ((_, shape, (array,)),) = column.arrays
                leaves[at] = array.reshape(shape)[0]
        return leaves

    def add(
        self, value: Any, split: int, element: int, took_s: float, leaves: list[Any] | None = None
    ) -> None:
        """Add an element, which took `took_s` to make; its `leaves`, if they are known. Raises
        FunctionFailed."""
        try:
            if leaves is None:
                self._flatten(value, leaves := [])
            for at, leaf in enumerate(leaves):
                if type(leaf) not in _UNCHANGING:
                    leaves[at] = _copied(self._fields[at], leaf)
        except Misfit as misfit:
            self.flush()
            raise self._failed(split, element, str(misfit)) from None
        size = self._element_bytes
        if size is None:
            size = sum(map(_bytes, leaves))
        if self.rows and self._bytes + size > BLOCK_BYTES:
            self.flush()
        if not self.rows:
            self.began_s = time.monotonic() - took_s
        if not self._places or self._places[-1][1] != split:
            self._places.append((self.rows, split, element))
        for at, leaf in enumerate(leaves):
            self._columns[at].append(leaf)
        self.rows += 1
        self._bytes += size

    def end_split(self, split: int, counted: pb.Metrics | None) -> None:
        """All elements of the split were added. Raises FunctionFailed."""
        self._sender.require_process()
        with self.lock:
            self.raise_broken()
            if counted is not None:
                self._counted.append((split, counted))
            if not self.rows:
                if self._counted:
                    self._sender.send(["counted", (split + 1, 0), totals(self._counted)])
                    self._counted.clear()
                self._at[2] = split + 1

    def begin_block(self) -> None:
        self._columns: list[list[Any]] = [[] for _ in self._fields]
        self.rows = self._bytes = 0
        self._places: list[tuple[int, int, int]] = []  # each split's first row, split, element
        # Metrics of ended splits that still have elements in this block.
        self._counted: list[tuple[int, pb.Metrics]] = []
        self.began_s = 0.0  # when its first element was made

    def flush(self) -> None:
        """Send the block; if an element does not fit, those before it. Raises FunctionFailed, also
        after having sent all elements before the one that failed."""
        self._sender.require_process()
        with self.lock:
            self.raise_broken()
            self.flush_block()

    def raise_broken(self) -> None:
        broken, self.broken = self.broken, None
        if broken is not None:
            raise broken

    def flush_block(self) -> None:
        count, columns, places = self.rows, self._columns, self._places
        if not count:
            return
        counted = self._counted
        self.begin_block()

        def place(row: int) -> tuple[int, int]:
            begins, split, element = places[bisect.bisect([r for r, _, _ in places], row) - 1]
            return split, element + row - begins

        split, element = place(count - 1)
        behind = (split, element + 1)
        if counted and counted[-1][0] >= split:
            behind = (counted[-1][0] + 1, 0)  # behind its end, so that it counts once
        try:
            self._send(place(0), count, columns, behind, counted)
            self._at[2] = self._at[0]
        except Misfit as misfit:
            split, element = place(misfit.row)
            if misfit.row:
                before = [column[: misfit.row] for column in columns]
                counted = [each for each in counted if each[0] < split]
                self._send(place(0), misfit.row, before, (split, element), counted)
            raise self._failed(split, element, str(misfit)) from None

    def _linger(self) -> None:
        while self._making.wait():
            time.sleep(LINGER_S)
            with self.lock:
                if self.rows and time.monotonic() - self.began_s >= LINGER_S:
                    try:
                        self.flush_block()
                    except BaseException as error:  # noqa: BLE001 - raised by the next `add`
                        self.broken = error

    def send_batch(self, count: int, made: Any, split: int, had: int, start: int) -> None:
        """Send what `map_batch` made of `count` records, which come behind `had` others of the
        split, but for elements before `start`. Raises Misfit, and FunctionFailed."""
        leaves: list[Any] = []
        self._flatten(made, leaves)
        for field, leaf in zip(self._fields, leaves, strict=True):
            is_array = isinstance(leaf, np.ndarray)
            if not (
                leaf.shape[:1] == (count,)
                if is_array
                else isinstance(leaf, list) and len(leaf) == count
            ):
                raise Misfit(
                    f"{field.path} of what `map_batch` returned is {said(leaf)}, for {count} "
                    "records: return an array or a list with a row for each"
                )
        size = sum(
            leaf.nbytes if isinstance(leaf, np.ndarray) else sum(map(_bytes, leaf))
            for leaf in leaves
        )
        rows = max(1, BLOCK_BYTES * count // max(1, size))
        for at in range(max(0, start - had), count, rows):
            stop = min(count, at + rows)
            part = [leaf[at:stop] for leaf in leaves]
            self._send((split, had + at), stop - at, part, (split, had + stop), ())

    def _send(
        self,
        first: tuple[int, int],
        count: int,
        values: list[list[Any]],
        behind: tuple[int, int],
        counted: Counted,
    ) -> None:
        """Raises Misfit, and FunctionFailed at the first element if all are lost."""
        try:
            columns = [column_of(f, column) for f, column in zip(self._fields, values, strict=True)]
            self._sender.send_columns(count, columns, behind, counted)
        except Misfit:
            raise
        except FunctionFailed as failed:
            raise failed.placed(*first) from None
        except BaseException as error:  # noqa: BLE001 - mostly no descriptors or memory
            code = "RESOURCE_EXHAUSTED" if isinstance(error, OSError) else code_of(error)
            what = f"it could not be sent: {traceback_of(error)}"
            raise self._failed(*first, what, code) from None


@contextlib.contextmanager
def failures(at: Sequence[int]) -> Iterator[None]:
    """Whatever is raised is FunctionFailed, at the place that `at` has then: split, element."""
    try:
        yield
    except FunctionFailed as failed:
        raise failed.placed(at[0], at[1]) from None
    except PipelineError as error:
        raise FunctionFailed(error.code, error.message, at[0], at[1]) from None
    except ForebayError as error:
        raise FunctionFailed(status_of(error), str(error), at[0], at[1]) from None
    except BaseException as error:  # noqa: BLE001 - the child survives whatever it raises
        raise FunctionFailed(code_of(error), traceback_of(error), at[0], at[1]) from None


def totals(counted: Counted) -> bytes:
    return Totals(part for _, part in counted).told().SerializeToString()


def _copied(field: Field, leaf: Any) -> Any:
    """A copy that the function cannot change. Raises Misfit."""
    if isinstance(leaf, IMMUTABLE):
        return leaf
    if type(leaf) is np.ndarray and leaf.dtype != object:
        return leaf.copy()  # as deepcopy does, in a fifth of the time
    try:
        if not isinstance(leaf, (np.ndarray, tuple, Mapping, *LISTS)):
            array = np.asarray(leaf)  # supports any buffer, such as a bytearray
            leaf = leaf if array.dtype == object else array
        return copy.deepcopy(leaf)
    except Exception as error:
        raise Misfit(f"{field.path} cannot be copied: {shown(error)}") from error


def _bytes(leaf: Any) -> int:
    size = getattr(leaf, "nbytes", None)
    if isinstance(size, int):
        return size
    return len(leaf) if isinstance(leaf, bytes | str) else 8


def no_more(limit: int) -> str:
    return f"(no more than {limit} splits are skipped in an epoch, or records)"


def code_of(error: BaseException) -> str:
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), "UNKNOWN")


def traceback_of(error: BaseException) -> str:
    """The traceback without Forebay's own frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _OURS:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    return f"{shown(error)}\n{text[-MAX_TEXT:]}"


def shown(value: object) -> str:
    """A short repr; a user's class may raise anything in it."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001
        text = object.__repr__(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
