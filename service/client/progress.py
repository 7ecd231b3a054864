"""An epoch's iterator for a trainer, by element or by batch, which knows its progress.

So a consumer can hand back the elements of a block that the trainer did not get
(open_iterations.py). C code counts the elements. `EpochIterator` and its parts form no reference
cycle, so that an iterator that is dropped is left soon (deferred_closer.py).
"""

from __future__ import annotations

import copy
import itertools
import logging
import operator
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any, Self

from ..blocks import Block
from ..errors import FailedPrecondition
from .deferred_closer import deferred_closer
from .open_iterations import Taker, could_close, open_consumers

log = logging.getLogger(__name__)

Blocks = Generator[Block, None, None]


class Progress(Taker):
    """How far a trainer has come with its current block."""

    def __init__(self, taking: EpochIterator) -> None:
        self._taking = weakref.ref(taking)
        self._rest = itertools.repeat(True, 0)  # its length hint is the number of elements left

    def counted(self, elements: Iterator[Any], count: int) -> Iterator[Any]:
        """Starts a new block: an element counts as given when it is taken from the result."""
        self._rest = itertools.repeat(True, count)
        self.begun += 1
        return itertools.compress(elements, self._rest)

    def set_left(self, count: int) -> None:
        """Sets how many elements of the current block are left."""
        self._rest = itertools.repeat(True, count)

    def left(self) -> int:
        return operator.length_hint(self._rest)

    def leave(self) -> None:
        if (taking := self._taking()) is not None:
            taking.leave()

    def close(self) -> None:
        if (taking := self._taking()) is not None:
            taking.close_here()

    def leave_elsewhere(self) -> None:
        """Another thread reads, or waits for a block: its iteration ends."""
        self.is_left = True
        for consumer in open_consumers():
            if consumer.taker is self:
                consumer.leave()


ASKED_OFTEN = 100
SLOWED_S = 0.1


def failing(error: BaseException) -> Iterator[Any]:
    """The rest of a failed iteration: an iterator that raises the error each time.

    As in tf.data service, it does not end: a program that catches errors would take the epoch for
    complete.
    """
    if not isinstance(error, Exception):
        error = FailedPrecondition(
            f"the iteration was broken off by a {type(error).__name__}: begin another one"
        )
    kept = _copy(error)  # without tracebacks, whose frames refer to the caller
    asked = itertools.count(1)

    def fail() -> None:
        times = next(asked)
        if times == ASKED_OFTEN:
            log.warning(
                "an iteration that has failed was asked for %d more elements, and fails for good: "
                "an ignore_errors() belongs into the dataset that is registered; it was %r",
                times, kept,
            )  # fmt: skip
        if times >= ASKED_OFTEN:
            time.sleep(SLOWED_S)
        raise _copy(kept)

    return iter(fail, object())


def _copy(error: Exception) -> Exception:
    """The same error, without tracebacks."""
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001 - its class takes other arguments than `args`
        copied = type(error).__new__(type(error), *error.args)
        copied.__dict__.update(error.__dict__)
    copied.__cause__ = copied.__context__ = None  # tblib, once imported, has `copy` keep both
    return copied.with_traceback(None)


class Runs(Iterator[Iterator[Any]]):
    """Iterators of elements that come one after another, each of a block."""

    def __init__(self, runs: Iterator[Iterator[Any]]) -> None:
        self._runs = runs

    def __next__(self) -> Iterator[Any]:
        return next(self._runs)


class _RepeatsErrors:
    """An iterator over `_items` that repeats its error on every later call.

    Of `_items` that are iterators themselves (`Runs`), it gives what those have. Threads share them
    without a lock, as C code takes an element: a lock costs more than a small element does.
    """

    _items: Iterator[Any]
    _run: Iterator[Any] = iter(())
    at_end: Callable[[], None] = staticmethod(lambda: None)
    """Called when the iteration has ended, unless it was left before."""

    def __init__(self) -> None:
        self._asked = threading.Lock()
        """Held by the thread that asks `_items`, in which there may be a generator."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._run)
        except StopIteration:
            pass
        except BaseException as error:
            self.fail(error)
            raise
        with self._asked:
            try:
                return self._ask()
            except StopIteration:
                self.at_end()
                raise
            except BaseException as error:
                self.fail(error)
                raise

    def _ask(self) -> Any:
        while True:
            for item in self._run:  # perhaps another thread has just begun it
                return item
            self._run = iter(())  # frees the last one's memory, which the next one takes again
            items = self._items
            found = next(items)
            if not isinstance(items, Runs):
                return found
            self._run = found
            if self._items is not items:  # replaced by another thread
                self._run = iter(())

    def fail(self, error: BaseException) -> None:
        self._replace(failing(error))

    def _replace(self, items: Iterator[Any]) -> None:
        """Give these instead of all others."""
        self._items = items
        self._run = iter(())


class StaysFailed(_RepeatsErrors):
    """A generator that repeats its error on every later call; a plain one would end."""

    _is_left = False

    def __init__(self, generator: Generator[Any, None, None]) -> None:
        super().__init__()
        self._generator = self._items = generator

    def fail(self, error: BaseException) -> None:
        """Closes the generator; later calls raise this error."""
        self._generator.close()
        super().fail(error)

    def __next__(self) -> Any:
        try:
            return super().__next__()
        finally:
            if self._is_left:
                self._generator.close()

    def close(self) -> None:
        """Leave it early. A thread that waits for an element gets that one first."""
        self._replace(iter(()))
        if not could_close(self._generator.close):
            self._is_left = True


def _behind_dropped_ones(blocks: Blocks) -> Blocks:
    deferred_closer.wait()
    yield from blocks


class EpochIterator(_RepeatsErrors):
    """Iterates over what `give` makes of an epoch's blocks. Threads that share it take turns."""

    def __init__(
        self, iterate: Callable[[Taker], Blocks], give: Callable[[Blocks, Progress], Iterator[Any]]
    ) -> None:
        """`iterate` begins the epoch, as Reader.iterate does; `give` reports to the Progress."""
        super().__init__()
        self._progress = progress = Progress(self)
        self._blocks = _behind_dropped_ones(iterate(progress))
        self._items = give(self._blocks, progress)
        deferred_closer.start()
        # It keeps the generator alive: else the garbage collector might close that first.
        weakref.finalize(self, deferred_closer.later, self._blocks).atexit = False

    def leave(self) -> None:
        """Leave the iteration when the next element is asked for. Called by any thread."""
        self.at_end = lambda: None
        self._replace(iter(self.close, None))  # calls `close`, and ends because it returns None

    def close(self) -> None:
        """Leave the iteration. Other readers of a shared job get the rest. If another thread waits
        for an element, its iteration ends. Idempotent."""
        if not could_close(self.close_here):
            self._progress.leave_elsewhere()

    def close_here(self) -> None:
        """As `close`. Raises ValueError if another thread is executing the iteration."""
        self.at_end = lambda: None
        self._replace(iter(()))
        self._blocks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._progress.failed = error is not None and not issubclass(error, GeneratorExit)
        if error is GeneratorExit:  # perhaps of a generator that is garbage
            self._replace(iter(()))
            deferred_closer.later(self._blocks)
        else:
            self.close()
