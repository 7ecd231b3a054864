"""*Addressed*: consumers read elements by name, (bundle, index).

n consumers that read together have a stride of n: *reader* i gets elements i, i + n, … of each
bundle. A bundle may run again after a reader asked for elements that were forgotten. Each run
produces the same elements, so blocks given earlier remain valid.

**Backpressure.** `begin` names the readers of a *run* of a bundle, and where each starts. The run
keeps a block until each of these readers has moved past it, whether the reader has subscribed yet
or not. Other readers don't hold it up. A reader that closes its subscription has moved past all
blocks. Therefore each reader opens a subscription to each bundle, even if it gets none of its
elements; so it also learns the bundle's length.

**End of a run.** A run without readers is forgotten with all its blocks, and its producer is told
to stop. A reader belongs to one run of a bundle, the latest that began for it. It has one
subscription, the latest that it opened. A newer *generation*, of an order or a run, ends everything
of older ones; orders of an older generation get Superseded.

**Missing bundles.** A consumer may hear of a bundle before the worker does. A subscription to a
bundle that has not begun in this generation therefore waits, until the task ends. If the bundle has
begun, but no run gives this reader elements from its index on, the answer is BundleForgotten: the
bundle must run again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from ..block_limits import check_block, cost
from ..blocks import Block, strided
from .base import (
    BundleForgotten,
    End,
    EndOfBundle,
    Listener,
    OutputCancelled,
    Part,
    Subscription,
    Superseded,
    TaskFailed,
    TaskOutput,
    TaskUnknown,
    refused,
)
from .orders import Addressed, BundleReader, Order


class AddressedOutput(TaskOutput):
    """One task's bundles, from any number of producers, each of which has a BundleRun.

    It buffers up to `max_bytes` of each run; the worker bounds the number of runs. An element is
    reported once for each reader that it was given to. If no reader got it, it is reported as
    dropped when it is forgotten.
    """

    def __init__(self, max_bytes: int = 64 << 20, listener: Listener | None = None) -> None:
        super().__init__(max_bytes, listener)
        self._generation = 0  # the newest; the fields below belong to it
        self._runs: dict[int, list[BundleRun]] = {}  # by bundle, those that have readers
        self._begun = 0  # bit set: the bundles that have begun
        self._waiting: dict[_AddressedSubscription, None] = {}  # until their bundles begin

    def begin(self, readers: Iterable[Addressed]) -> BundleRun:
        """Begin a run of a bundle for these readers, each from its own `index` on.

        Earlier runs that had some of these readers continue without them.

        Raises OutputCancelled if their generation is not the newest, or the task has ended;
        ValueError for readers of several bundles or generations, twice the same, or none.
        """
        with self.changed:
            run = BundleRun(self, tuple(readers))
            if self._end is not None:
                raise OutputCancelled("the task has ended")
            if not self._reach(run.generation):
                raise OutputCancelled(
                    f"bundle {run.bundle} was begun in generation {run.generation}, after "
                    f"{self._generation}"
                )
            for before in self._runs.get(run.bundle, ()):
                before.lose(run.at)
            self._sweep(run.bundle)
            self._runs.setdefault(run.bundle, []).append(run)
            self._begun |= 1 << run.bundle
            for subscription in [s for s in self._waiting if s.order.bundle == run.bundle]:
                del self._waiting[subscription]
                self._seat(subscription)
            self.changed.notify_all()
        self._notify()
        return run

    def put(self, block: Block) -> NoReturn:
        raise TypeError("blocks of bundles are put to a run: see begin()")

    def _open(self, order: Order) -> Subscription | End:
        if not isinstance(order, Addressed):
            return refused(order, "bundles that are addressed")
        with self.changed:
            if isinstance(self._end, TaskUnknown):
                return self._end
            if not self._reach(order.generation):
                return Superseded(self._generation)
            subscription = _AddressedSubscription(self, order)
            if self._begun >> order.bundle & 1:
                self._seat(subscription)
            else:
                self._waiting[subscription] = None
            self.changed.notify_all()
            return subscription.end or subscription

    @property
    def waiting_elements(self) -> int:
        with self.changed:
            return sum(run.waiting() for run in self._all_runs())

    def _holds(self) -> bool:
        return any(run.blocks for run in self._all_runs())

    def _clear(self) -> None:
        self._end_all(TaskUnknown())

    def _all_runs(self) -> Iterator[BundleRun]:
        return (run for runs in self._runs.values() for run in runs)

    def _reach(self, generation: int) -> bool:
        """Whether this is the newest generation. A newer one ends everything of older ones."""
        if generation > self._generation:
            self._generation = generation
            self._end_all(Superseded(generation))
            self._begun = 0
        return generation == self._generation

    def _end_all(self, end: End) -> None:
        for run in self._all_runs():
            run.lose(list(run.at), end)
        self._runs.clear()
        for subscription in self._waiting:
            subscription.end = end
        self._waiting.clear()

    def _seat(self, subscription: _AddressedSubscription) -> None:
        """Let the subscription join the run that began for its reader."""
        order = subscription.order
        for run in self._runs.get(order.bundle, ()):
            if order.reader in run.at and run.kept <= order.index:
                run.join(subscription)
                return
        subscription.end = BundleForgotten(order.bundle, order.index)

    def _leave(self, subscription: _AddressedSubscription) -> None:
        self._waiting.pop(subscription, None)
        if subscription.run is not None and subscription.end is None:
            subscription.run.lose([subscription.order.reader])
            self._sweep(subscription.order.bundle)

    def _sweep(self, bundle: int) -> None:
        """Forget the runs of the bundle that have no readers."""
        runs = [run for run in self._runs.pop(bundle, ()) if run.at]
        if runs:
            self._runs[bundle] = runs

    def _missed(self, part: Part) -> None:
        if self._listener is not None:
            self._listener.dropped(part)


class _Kept:
    """A block that some reader of its run has not moved past."""

    __slots__ = ("block", "cost", "given", "stop")

    def __init__(self, block: Block, size: int) -> None:
        self.block = replace(block, loan=None)  # several readers may get it
        self.cost = size
        self.stop = block.index + block.count
        self.given: npt.NDArray[np.bool_] = np.zeros(block.count, np.bool_)  # to any reader

    def missed(self) -> Iterator[Part]:
        """The elements that no reader got."""
        edges = np.flatnonzero(np.diff(self.given, prepend=True, append=True)).tolist()
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            yield Part(stop - start, self.block.bundle, self.block.index + start)


class BundleRun:
    """One run of a bundle. Its producer puts the elements from `index` on.

    The producer calls `put`, `finish`, `fail` and `cancel`; the policy calls the other methods,
    with the output's lock held. Once the run has no readers, `put`, `finish` and `fail` raise
    OutputCancelled and change nothing; after `finish` or `fail` they raise RuntimeError.
    """

    def __init__(self, output: AddressedOutput, orders: Sequence[Addressed]) -> None:
        self.at = {order.reader: order.index for order in orders}  # each reader's next element
        if len({(order.bundle, order.generation) for order in orders}) != 1:
            raise ValueError(f"a run is for readers of one bundle and generation, not {orders}")
        if len(self.at) != len(orders):
            raise ValueError(f"a reader has one place in a run: {orders}")
        self.bundle = orders[0].bundle
        self.generation = orders[0].generation
        self.index = min(self.at.values())
        self.blocks: list[_Kept] = []  # without gaps
        self._output = output
        self.kept = self._stop = self.index  # the elements in `blocks`: from, and up to
        self._bytes = 0
        self._behind = 0  # how many readers have not moved past the first of `blocks`
        self._open: dict[BundleReader, _AddressedSubscription] = {}  # that have joined
        self._end: End | None = None

    # -- the producer --------------------------------------------------------------------------

    def put(self, block: Block) -> None:
        """Add a block, waiting while the buffer is full.

        Raises ValueError if it does not follow the last block; as `check_block` does.
        """
        check_block(block)
        size = cost(block)
        output = self._output
        with output.changed:
            self._check()
            if (block.bundle, block.index) != (self.bundle, self._stop):
                raise ValueError(
                    f"elements from {block.index} on of bundle {block.bundle}, where those from "
                    f"{self._stop} on of bundle {self.bundle} are to be put"
                )
            while self.blocks and self._bytes + size > output._max_bytes:
                output.changed.wait()  # until readers move on, or the run ends
                self._check()
            if block.count:
                self.blocks.append(_Kept(block, size))
                self._bytes += size
                self._stop += block.count
                if len(self.blocks) == 1:
                    self._forget_read()
            output.changed.notify_all()
        output._notify()

    def finish(self, length: int | None = None) -> None:
        """The bundle has no more elements. `length` defaults to where the last block ended; it may
        be less if the run began behind the bundle's end. Raises ValueError for other lengths.
        """
        stop = self._stop
        if length is not None and length != stop and not (length < stop == self.index):
            raise ValueError(
                f"bundle {self.bundle} has {length} elements, and was put up to {stop}"
            )
        self._conclude(EndOfBundle(self.bundle, stop if length is None else length))

    def fail(self, code: str, message: str) -> None:
        """The bundle's pipeline raised. Readers get TaskFailed after the blocks before it."""
        self._conclude(TaskFailed(code, message))

    def cancel(self) -> None:
        """Abandon the run: its readers get BundleForgotten. Idempotent."""
        output = self._output
        with output.changed:
            self.lose(list(self.at))
            output._sweep(self.bundle)
            output.changed.notify_all()
        output._notify()

    def _conclude(self, end: End) -> None:
        with self._output.changed:
            self._check()
            self._end = end
            self._output.changed.notify_all()
        self._output._notify()

    def _check(self) -> None:
        if not self.at or self._output.ended:
            raise OutputCancelled(f"a run of bundle {self.bundle} that nobody reads any more")
        if self._end is not None:
            raise RuntimeError(f"a run of bundle {self.bundle} goes on after finish() or fail()")

    # -- readers -------------------------------------------------------------------------------

    def join(self, subscription: _AddressedSubscription) -> None:
        """Seat the subscription; an earlier one of the same reader gets Superseded."""
        reader = subscription.order.reader
        if (before := self._open.get(reader)) is not None:
            before.end = Superseded(self.generation)
        self._open[reader] = subscription
        subscription.run = self
        self.at[reader] = subscription.order.index
        self._forget_read()

    def lose(self, readers: Iterable[BundleReader], end: End | None = None) -> None:
        """Remove these readers. Their subscriptions get `end`; by default, BundleForgotten."""
        for reader in readers:
            index = self.at.pop(reader, None)
            subscription = self._open.pop(reader, None)
            if index is not None and subscription is not None:
                subscription.end = end or BundleForgotten(self.bundle, index)
        self._forget_read()

    def next(
        self, order: Addressed, credit: bool, max_elements: int | None
    ) -> tuple[Block, int] | End | None:
        """The reader's next block with its cost, or the end, or None."""
        index = self.at[order.reader]
        number = bisect_right(self.blocks, index, key=_stop)
        if number == len(self.blocks):
            return self._end or self._output._end
        if not credit:
            return None
        kept = self.blocks[number]
        stride = order.stride
        first = index - kept.block.index
        count = -((first - kept.block.count) // stride)
        if max_elements is not None:
            count = min(count, max_elements)
        block = strided(kept.block, first, stride, count)
        kept.given[first : first + (count - 1) * stride + 1 : stride] = True
        self.at[order.reader] = after = index + count * stride
        if number == 0 and after >= kept.stop:
            self._behind -= 1
            if not self._behind:
                self._forget_read()
        return block, cost(block)

    def _forget_read(self) -> None:
        """Count the readers that are behind the first block; forget it if none is."""
        while self.blocks:
            first = self.blocks[0]
            self._behind = sum(index < first.stop for index in self.at.values())
            if self._behind:
                return
            del self.blocks[0]
            self.kept = first.stop
            self._bytes -= first.cost
            for part in first.missed():
                self._output._missed(part)

    def waiting(self) -> int:
        return sum(k.block.count - int(np.count_nonzero(k.given)) for k in self.blocks)


def _stop(kept: _Kept) -> int:
    return kept.stop


class _AddressedSubscription(Subscription):
    output: AddressedOutput

    def __init__(self, output: AddressedOutput, order: Addressed) -> None:
        super().__init__(output)
        self.order = order  # as it was opened
        self.run: BundleRun | None = None  # once the bundle has begun
        self.end: End | None = None  # once it was removed from its run, or if no run fits

    def next(self, credit: bool, max_elements: int | None = None) -> tuple[Block, int] | End | None:
        output = self.output
        with output.changed:
            if self.end is not None:
                return self.end
            if self.run is None:
                return output._end
            item = self.run.next(self.order, credit, max_elements)
            if isinstance(item, tuple):
                output.changed.notify_all()
            return item

    def received(self, blocks: Sequence[Block]) -> None:
        self.output._acknowledged(blocks, self.order.stride)

    def close(self, lacking: Sequence[Block] = ()) -> None:
        with self.output.changed:
            self.output._leave(self)
            self.output.changed.notify_all()
        self.output._dropped(lacking, self.order.stride)
