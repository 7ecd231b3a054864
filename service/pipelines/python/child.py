"""The process in which a Python dataset's function runs.

It has a socket to the worker, which sends

    ["setup", bytes, bytes, bytes]           with two descriptors: a file of a structure, a
                                             PythonDataset without its files, and those files, of
                                             these sizes; and a file of PROGRESS_BYTES
    ["run", first, count, start, seed, awaited]
                                             run these splits; with a seed, as a bundle. Leave out
                                             the first `start` elements: of the first split, or of
                                             the bundle. If `awaited`, send the first element alone
    ["free", slabs, abandoned, blocks]       memory that is free again, and credit for blocks
    ["answer", allowed]                      the answer to a "skip"
    ["teardown"]                             the last message

and to which it sends

    ["block", count, bytes, header, slab, at, metrics]
                                             elements in a slab, or in a file of their own if slab
                                             is None; the split and element behind them; perhaps
                                             what was counted in splits that end with them
    ["counted", at, metrics]                 metrics of splits that end without elements
    ["skip", split, element, records, reason]
                                             a request to leave out so many records, or with 0 the
                                             rest of the split; answered by a bool
    ["end"]                                  the request has been run
    ["failed", code, text, split, element]   the request has failed

Whatever the function does to its process affects only this one.
"""

from __future__ import annotations

import math
import mmap
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from numpy import random as numpys_random

from ... import generators
from ...blocks import part
from ...errors import ForebayError, status_of
from ...proto import metrics_pb2 as pb
from ...proto.python_pb2 import SKIP, PythonDataset
from .child_blocks import (
    LINGER_S,
    MAX_ROWS,
    MESSAGE_BYTES,
    Blocks,
    FunctionFailed,
    Sender,
    code_of,
    failures,
    no_more,
    shown,
    traceback_of,
)
from .columns import Misfit, columns_of, iterated

if TYPE_CHECKING:
    from ..files.reading import FileRecords

PROGRESS_BYTES = 6 * 8
"""Split and element that it is at, the split before which it has sent all, and the file; bytes that
it has fetched from object stores, and those that it found in the cache."""


class FunctionProcess:
    """Serves the worker's requests until the worker has gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._ended_s = -math.inf  # when the last request ended
        self._forked = False  # cheaper to ask than the process's id, for each element
        os.register_at_fork(after_in_child=self._mark_fork)
        message, (definition, progress), _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
        _, told, size, files = msgspec.msgpack.decode(message)
        stored = mmap.mmap(definition, told + size + files, mmap.MAP_PRIVATE, mmap.PROT_READ)
        self._structure = stored[:told].decode()
        self._dataset = PythonDataset.FromString(stored[told : told + size])
        self._manifest = memoryview(stored)[told + size :]  # of memory that all children share
        self._at = memoryview(mmap.mmap(progress, PROGRESS_BYTES)).cast("q")
        os.close(definition)
        os.close(progress)
        self.sender = Sender(connection)
        self._function: Callable[..., Any]
        self._generators: generators.Generators  # pickled with the function
        self._splits: Sequence[Any] = ()
        self._files: FileRecords | None = None
        self._skips = self._dataset.on_error == SKIP and self._dataset.limit > 0
        self._refused = False  # the worker has refused to leave something out
        self.blocks: Blocks

    def _mark_fork(self) -> None:
        self._forked = True

    def serve(self) -> NoReturn:
        try:
            self.load()
        except FunctionFailed as failed:
            self.sender.send(["failed", *failed.args])
            sys.exit(1)
        while True:
            try:
                match self.sender.told():
                    case ["run", *what]:
                        self.run(*what)
                    case _:
                        getattr(self._function, "teardown", _nothing)()
                        if self._files and not (self._files.maps or self._files.batched):
                            os._exit(0)  # no code of a user's: freeing shared pages copies them
                        sys.exit(0)
                self.sender.send(["end"])
            except FunctionFailed as failed:
                self.sender.send(["failed", *failed.args])

    def load(self) -> None:
        import cloudpickle

        try:
            self.blocks = Blocks(
                self.sender, self._structure, self._at, self._failed,
                inferred=self._dataset.inferred,
            )  # fmt: skip
            if self._manifest:
                from ..files import byte_cache
                from ..files.reading import FileRecords

                byte_cache.use(self._dataset.cache_directory, self._dataset.cache_bytes)
                byte_cache.count_into(self._at[4:])
                files = FileRecords(self._dataset, self._leave_out, self._manifest)
                self._function = self._files = files
                files.tell_files(self._at[3:4])
                self._splits, self._generators = files.splits, generators.Generators([])
            else:
                self._splits = cloudpickle.loads(self._dataset.splits)
                self._function, self._generators = generators.loads(self._dataset.function)
            self._dataset.ClearField("splits")
            self._dataset.ClearField("function")
            getattr(self._function, "setup", _nothing)()
        except ModuleNotFoundError as error:
            raise FunctionFailed(
                "FAILED_PRECONDITION",
                f"the dataset needs the module {error.name!r}, which is not there on the worker: "
                "install it there",
            ) from error
        except BaseException as error:
            raise FunctionFailed(
                "FAILED_PRECONDITION",
                f"the dataset's function cannot be unpickled, or set up, on the worker:\n"
                f"{traceback_of(error)}",
            ) from error

    def run(self, first: int, count: int, start: int, seed: str | None, awaited: bool) -> None:
        self._refused = False
        random.seed(seed)
        numpys_random.seed(None if seed is None else random.getrandbits(32))
        self._generators.seed(seed)
        getattr(self._function, "seed_generators", _nothing)(seed)  # a chain seeds its DoFns
        # After an idle time, the worker needs the first element soon as well.
        self.blocks.begin(awaited or time.monotonic() - self._ended_s >= LINGER_S)
        try:
            self._run_splits(first, count, start, seed)
        finally:
            self.blocks.end()
            self._ended_s = time.monotonic()

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
            self.blocks.end_split(split, counted)
        self.blocks.flush()

    def _run_split(self, split: int, start: int) -> tuple[int, pb.Metrics | None]:
        """Run all of it but the first `start` elements; returns its number of elements, and what
        it has counted."""
        self.sender.require_process()
        if self._files is not None and not self._files.maps:
            send = self._send_batches if self._files.batched else self._send_records
            return send(self._files, split, start), None
        blocks = self.blocks
        blocks.linger()
        with blocks.lock:
            self._at[0], self._at[1] = split, 0
        element = 0 if self._files is None else self._files.seek(split, start)
        seen = element  # with what was left out
        skips = self._skips
        length = self._dataset.lengths[split] if self._dataset.lengths else None
        counted: pb.Metrics | None = None
        last_s = time.monotonic()
        failed: FunctionFailed | None = None

        # Local names are faster in the loop over elements.
        lock, now = blocks.lock, time.monotonic

        def take(value: Any) -> None:
            nonlocal element, seen, last_s, failed
            took_s = now() - last_s  # excludes the time in `add`, which may wait
            if self._forked:  # don't wait for a thread that a fork doesn't have
                self.sender.require_process()
            leaves: list[Any] | None = None
            with lock:
                try:
                    if element == length:
                        raise self._of_wrong_length(split, element, length, "at least one more")
                    if skips:
                        seen += 1
                        if (leaves := self._leaves(value, split, seen - 1)) is None:
                            return
                    if element >= start:
                        if blocks.broken is not None:
                            blocks.raise_broken()
                        blocks.add(value, split, element, took_s, leaves)
                        last_s = now()
                        due = last_s - blocks.began_s >= LINGER_S
                        if due or blocks.at_once or blocks.rows >= MAX_ROWS:
                            blocks.flush()
                            blocks.at_once = False
                            last_s = now()
                except FunctionFailed as error:
                    failed = error  # even if the function catches it
                    raise
                element += 1
                self._at[1] = element

        def surviving(found: Iterator[Any]) -> Iterator[Any]:
            """What is left of it; it goes on behind an exception unless it has ended, as a
            generator has."""
            nonlocal seen
            broken: Exception | None = None
            while True:
                try:
                    value = next(found)
                except StopIteration:
                    break
                except Exception as error:  # noqa: BLE001 - a user's
                    fault: Exception | None = error
                else:
                    fault = None
                if broken is not None:
                    if not self._leave_out(split, seen, 1, self._named(split, seen, broken)):
                        break
                    seen += 1
                broken = fault
                if broken is None:
                    yield value
            if broken is not None:
                raise broken

        try:
            if (run := getattr(self._function, "run_bundle", None)) is not None:
                counted = run(self._splits[split], take)
            else:
                try:
                    found = iterated(self._function(self._splits[split]))
                except Misfit as misfit:
                    raise self._failed(split, 0, str(misfit)) from None
                for value in surviving(found) if skips and self._files is None else found:
                    take(value)
            if length is not None and element < length:
                raise self._of_wrong_length(split, element, length, f"{element}")
        except FunctionFailed:
            raise
        except BaseException as error:  # noqa: BLE001 - the child survives whatever it raises
            if failed is not None:
                raise failed from None
            blocks.flush()
            if self._files is not None and error is self._files.fault:  # it names its record
                failure = FunctionFailed(status_of(error), self._told(error), split, element)
                raise failure from None
            where = seen if skips else element
            asks = skips and self._files is None and not self._refused
            if asks and self._leave_out(split, where, 0, self._named(split, where, error)):
                return element, counted
            raise self._failed(split, where, traceback_of(error), code_of(error)) from None
        return element, counted

    def _of_wrong_length(self, split: int, element: int, length: int, found: str) -> FunctionFailed:
        self.blocks.flush()
        return self._failed(
            split, element, f"lengths= says that the split has {length} elements, and it has "
            f"{found}: correct the lengths, or register without them",
        )  # fmt: skip

    def _leaves(self, value: Any, split: int, record: int) -> list[Any] | None:
        """The element's leaves; None if it does not fit, and is left out. Raises FunctionFailed."""
        try:
            return self.blocks.leaves(value)
        except Misfit as misfit:
            if self._files is not None:
                allowed = self._files.leave_out_record(str(misfit))
            else:
                allowed = self._leave_out(split, record, 1, self._named(split, record, misfit))
            if not allowed:
                self.blocks.flush()
                raise self._failed(split, record, str(misfit)) from None
            return None

    def _leave_out(self, split: int, record: int, records: int, reason: str) -> bool:
        """Ask the worker, once all before has been sent."""
        self.blocks.flush()
        with self.blocks.lock:
            allowed = self._skips and self.sender.may_skip(split, record, records, reason)
        self._refused |= not allowed
        return allowed

    def _named(self, split: int, record: int, what: BaseException) -> str:
        said = str(what) if isinstance(what, Misfit) else shown(what)
        return str(self._failed(split, record, said).args[1]).partition("\n")[0]

    def _told(self, what: object) -> str:
        """In words, with the limit if that was reached."""
        refused = self._refused and self._skips
        return f"{what}\n{no_more(self._dataset.limit)}" if refused else str(what)

    def _send_records(self, files: FileRecords, split: int, start: int) -> int:
        """Send blocks of a split's records, as they are; returns its number of records."""
        had = files.seek(split, start)
        self._at[0], self._at[1] = split, had
        with failures(self._at):
            try:
                for block in files.blocks(split, had):
                    had += block.count
                    if (new := min(block.count, had - start)) <= 0:
                        continue
                    sent = part(block, block.count - new, new)
                    self.sender.send_columns(new, columns_of(sent), (split, had))
                    self._at[1] = had
            except ForebayError as error:
                if not self._refused:
                    raise
                raise FunctionFailed(status_of(error), self._told(error)) from error
        return had

    def _send_batches(self, files: FileRecords, split: int, start: int) -> int:
        """Send what `map_batch` makes of a split's records; returns their number."""
        had = files.seek(split, start)
        self._at[0], self._at[1] = split, had
        batches = files.batches(split, had)
        while True:
            try:
                if (batch := next(batches, None)) is None:
                    return had
                self.blocks.send_batch(*batch, split, had, start)
            except Misfit as misfit:
                raise self._failed(split, had + misfit.row, str(misfit)) from None
            except FunctionFailed:
                raise
            except BaseException as error:  # noqa: BLE001 - the child survives whatever it raises
                if error is files.fault:  # it names its record
                    raise FunctionFailed(status_of(error), str(error), split, had) from None
                raise self._failed(split, had, traceback_of(error), code_of(error)) from None
            had += batch[0]
            self._at[1] = had

    def _failed(
        self, split: int, element: int, what: str, code: str = "INVALID_ARGUMENT"
    ) -> FunctionFailed:
        if self._files is not None:
            name = f" ({self._files.place(split, element)})"
        elif hasattr(self._function, "run_bundle"):  # a chain takes pickled splits
            name = ""
        else:
            name = f" ({shown(self._splits[split])})"
        return FunctionFailed(
            code, f"split {split}{name}, element {element}: {self._told(what)}", split, element
        )


def _nothing(*_: object) -> None: ...


def main(connection: socket.socket) -> None:
    """Serve a worker, or who registers files (a stream); the process must be this function's
    alone."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # what the function prints goes to the worker's log
    numpys_random.seed()  # or all forks would draw the same; `random` handles forks itself
    if connection.type == socket.SOCK_STREAM:
        from ..files.inspecting import serve

        serve(connection)
        sys.exit(0)
    FunctionProcess(connection).serve()
