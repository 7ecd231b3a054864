"""*Bundles*: consumers read slices of bundles by name, in whatever order they need them.

A *bundle* is a range of splits that runs on an iterator of its own. Any worker that runs it makes
the same elements. So this output is a cache: what it has dropped, it has made again. Nothing here
is leased, acknowledged or journaled.

**Runs.** The worker asks `next_run` what to run next. A *run* makes a bundle's elements from
`start` on. A slice joins a run that still has, or will make, its next element; if there is none,
a new run begins there. Bundles whose place in the order comes first are run first.

**Backpressure.** A run makes what its slices ask for, and up to AHEAD_BYTES more, so that the next
slices find it here. It then waits. It never waits if a slice lacks an element, so that a reader can
always go on.

**Forgetting.** A block is dropped once each reader of the group has said that it needs none of its
elements (`keep`, `floor`). If the blocks exceed `max_bytes`, those that some reader has passed are
dropped earlier: a reader that is far behind the others has its elements made again.

**Lengths.** A slice ends with how many elements the bundle is known to have. A slice without runs
is a query: its end comes when the bundle has ended, when its run waits, or ANSWER_S after there is
news. If a bundle is run again and has another length, the pipeline is not deterministic, and its
readers get TaskFailed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np

from ..block_limits import check_block, cost
from ..blocks import Array, Block, picked
from .base import (
    End,
    EndOfSlice,
    Listener,
    OutputCancelled,
    Subscription,
    TaskFailed,
    TaskOutput,
    refused,
)
from .memory import LOOK_S, MemoryBudget
from .orders import MAX_INDEX, Order, Slice, runs_after

AHEAD_BYTES = 4 << 20
"""How much a run makes beyond what was asked for."""

ANSWER_S = 0.02
"""How long a query waits for further elements once there is news."""


class _Kept:
    """A block of a run."""

    __slots__ = ("block", "cost", "start", "stop")

    def __init__(self, block: Block, size: int) -> None:
        self.block = replace(block, loan=None)  # several readers may get it
        self.cost = size
        self.start = block.index
        self.stop = block.index + block.count


class BundleRun:
    """One run of a bundle. Its producer calls `put`, and `finish` or `fail`."""

    def __init__(self, output: BundlesOutput, bundle: _BundleState, start: int) -> None:
        self.number = bundle.number
        self.place = bundle.place
        self.start = self.stop = start  # the next element to put
        self.wanted = start  # elements before this one were asked for
        self.kept: list[_Kept] = []  # without gaps, up to `stop`
        self.slices: set[_SliceSubscription] = set()  # that have joined
        self.ended = False
        self.failed: TaskFailed | None = None
        self.dropped = False  # nobody needs it
        self.waits = False  # its producer waits for readers
        self._bundle = bundle
        self._output = output

    def put(self, block: Block) -> None:
        """Add the next block; waits while readers are far behind.

        Raises OutputCancelled once nobody needs the run; as `check_block` does; ValueError for a
        block that does not follow the last one.
        """
        check_block(block)
        size = cost(block)
        output = self._output
        with output.changed:
            if (block.bundle, block.index) != (self.number, self.stop):
                raise ValueError(
                    f"elements from {block.index} on of bundle {block.bundle}, where those from "
                    f"{self.stop} on of bundle {self.number} come next"
                )
            try:
                self._wait_for_room(size)
            finally:
                self.waits = False
            if block.count:
                self.kept.append(_Kept(block, size))
                self.stop += block.count
                self._bundle.at_least = max(self._bundle.at_least, self.stop)
                output._bytes += size
                output._forget(self._bundle)
            output.changed.notify_all()
        output._notify()

    def _wait_for_room(self, size: int) -> None:
        output = self._output
        while True:
            self._check()
            is_needed = self.stop < self.wanted
            ahead = sum(kept.cost for kept in self.kept if kept.start >= self.wanted)
            has_room = is_needed or not ahead or ahead + size <= AHEAD_BYTES
            if has_room and output._take(size, force=is_needed):
                return
            if not self.waits:
                self.waits = True
                output.changed.notify_all()  # another run may begin
                output._notify_unlocked()
            output.changed.wait(LOOK_S if has_room else None)

    def finish(self) -> None:
        """The bundle has no more elements. Raises OutputCancelled."""
        with self._output.changed:
            self._check()
            self.ended = True
            bundle = self._bundle
            if bundle.length is None and self.stop >= bundle.at_least:
                bundle.length = self.stop
            elif self.stop != bundle.length:
                known = bundle.at_least if bundle.length is None else bundle.length
                self.failed = TaskFailed(
                    "FAILED_PRECONDITION",
                    f"a bundle of the ordered read had {known} elements when it was run first, and "
                    f"{self.stop} now: the pipeline is not deterministic, so no order of it can be "
                    "kept; give its random operations seeds, or read it without ordered=True",
                )
            self._output._forget(bundle)
            self._output.changed.notify_all()
        self._output._notify()

    def fail(self, code: str, message: str) -> None:
        """The pipeline raised: readers get TaskFailed behind the blocks. Raises OutputCancelled."""
        with self._output.changed:
            self._check()
            self.failed = TaskFailed(code, message)
            self._output.changed.notify_all()
        self._output._notify()

    def _check(self) -> None:
        if self.dropped or self._output.ended:
            raise OutputCancelled(f"a run of bundle {self.number} that nobody needs any more")

    def at(self, index: int) -> _Kept | None:
        """The block that has this element."""
        low, high = 0, len(self.kept)
        while low < high:
            middle = (low + high) // 2
            if self.kept[middle].stop <= index:
                low = middle + 1
            else:
                high = middle
        found = self.kept[low] if low < len(self.kept) else None
        return found if found is not None and found.start <= index else None

    def has(self, index: int) -> bool:
        """Whether it has this element, or will make it."""
        first = self.kept[0].start if self.kept else self.stop
        return not self.dropped and index >= first


class _BundleState:
    """What is known of a bundle, and its runs."""

    def __init__(self, number: int, place: int) -> None:
        self.number = number
        self.place = place
        self.at_least = 0  # elements
        self.length: int | None = None  # once it has ended
        self.keeps: dict[int, int] = {}  # by reader: it needs no element before this one
        self.runs: list[BundleRun] = []  # the latest last


class BundlesOutput(TaskOutput):
    """The bundles of a task of an ordered read, from any number of producers."""

    def __init__(
        self,
        max_bytes: int = 64 << 20,
        listener: Listener | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        super().__init__(max_bytes, listener, budget)
        self._bundles: dict[int, _BundleState] = {}
        self._pending: list[BundleRun] = []  # not begun
        self._begun: list[BundleRun] = []  # neither ended nor failed nor dropped
        self._readers = 1
        self._floors: dict[int, int] = {}  # by reader: it needs nothing of bundles at places before
        self._bytes = 0  # of all blocks that are kept

    # -- the worker ----------------------------------------------------------------------------

    def next_run(self, most: int, timeout_s: float) -> BundleRun | None:
        """Wait for a run to begin, if fewer than `most` runs are making elements; None after
        `timeout_s`. Raises OutputCancelled."""

        def may_begin() -> bool:
            self._begun = [r for r in self._begun if not (r.ended or r.failed or r.dropped)]
            busy = sum(not run.waits for run in self._begun)
            return self._end is not None or (bool(self._pending) and busy < most)

        with self.changed:
            self.changed.wait_for(may_begin, timeout_s)
            if self._end is not None:
                raise OutputCancelled("the task has ended")
            if not may_begin():
                return None
            run = min(self._pending, key=lambda run: run.place)
            self._pending.remove(run)
            self._begun.append(run)
            return run

    def put(self, block: Block) -> NoReturn:
        raise TypeError("blocks of bundles are put to a run: see next_run()")

    @property
    def waiting_elements(self) -> int:
        return 0  # whatever is lost here is made again

    # -- the policy ----------------------------------------------------------------------------

    def _open(self, order: Order) -> Subscription | End:
        if not isinstance(order, Slice):
            return refused(order, "slices of bundles")
        with self.changed:
            if self._end is not None:
                return self._end
            if order.readers != self._readers:  # another group
                self._readers = order.readers
                self._floors.clear()
                for bundle in self._bundles.values():
                    bundle.keeps.clear()
            if order.floor > self._floors.get(order.reader, 0):
                self._floors[order.reader] = order.floor
                self._forget_below_floor()
            bundle = self._bundles.setdefault(order.bundle, _BundleState(order.bundle, order.place))
            before = bundle.keeps.get(order.reader, 0)
            if before == MAX_INDEX:  # it was only counted for this reader
                before = 0
            bundle.keeps[order.reader] = max(before, order.keep)
            subscription = _SliceSubscription(self, order, bundle)
            self._forget(bundle)
            self._join(subscription)
            self.changed.notify_all()
            return subscription

    def _join(self, subscription: _SliceSubscription) -> None:
        """Have it join a run, or begin one for it."""
        bundle = subscription.bundle
        needed = subscription.needed()
        if needed is None:
            return
        run = next((run for run in reversed(bundle.runs) if run.has(needed)), None)
        if run is None:
            run = BundleRun(self, bundle, needed)
            bundle.runs.append(run)
            self._pending.append(run)
        subscription.run = run
        run.slices.add(subscription)
        run.wanted = max(run.wanted, subscription.wanted)

    def _forget_below_floor(self) -> None:
        if len(self._floors) < self._readers:
            return
        floor = min(self._floors.values())
        for bundle in [b for b in self._bundles.values() if b.place < floor]:
            for run in bundle.runs:
                self._drop(run)
            del self._bundles[bundle.number]

    def _forget(self, bundle: _BundleState) -> None:
        """Drop blocks that no reader needs; under pressure, those that some reader has passed."""
        keeps = bundle.keeps
        floor = min(keeps.values()) if len(keeps) >= self._readers else 0
        for run in bundle.runs:
            self._forget_before(run, floor)
        bundle.runs = [run for run in bundle.runs if not self._is_over(run)]
        if self._bytes > self._max_bytes:
            for each in sorted(self._bundles.values(), key=lambda b: b.place):
                passed = max(each.keeps.values(), default=0)
                for run in each.runs:
                    self._forget_before(run, passed, self._max_bytes)

    def _forget_before(self, run: BundleRun, index: int, most_bytes: int = -1) -> None:
        """Drop blocks with elements before this one, while there are more bytes; but none that an
        open slice still lacks."""
        needed = min((s.runs[0] for s in run.slices if s.runs), default=MAX_INDEX)
        index = min(index, needed)
        while run.kept and run.kept[0].stop <= index and self._bytes > most_bytes:
            self._release(run.kept.pop(0))

    @staticmethod
    def _is_over(run: BundleRun) -> bool:
        return not (run.kept or run.slices) and (run.ended or run.failed is not None)

    def _release(self, kept: _Kept) -> None:
        self._bytes -= kept.cost
        self._memory.release(kept.cost)

    def _drop(self, run: BundleRun) -> None:
        run.dropped = True
        for kept in run.kept:
            self._release(kept)
        run.kept.clear()
        if run in self._pending:
            self._pending.remove(run)

    def _take(self, size: int, force: bool) -> bool:
        return self._memory.take(size, force=force)

    def _notify_unlocked(self) -> None:
        """Tell carriers that a query may be answered. The caller has the lock: see `_notify`."""
        self.changed.release()
        try:
            self._notify()
        finally:
            self.changed.acquire()

    def _holds(self) -> bool:
        return False

    def _clear(self) -> None:
        for bundle in self._bundles.values():
            for run in bundle.runs:
                self._drop(run)
        self._bundles.clear()
        self._pending.clear()


class _SliceSubscription(Subscription):
    output: BundlesOutput

    def __init__(self, output: BundlesOutput, order: Slice, bundle: _BundleState) -> None:
        super().__init__(output)
        self.order = order
        self.bundle = bundle
        self.runs = order.runs  # still to be given
        self.wanted = max(order.stop, order.until)
        self.run: BundleRun | None = None
        self._opened_s = time.monotonic()
        self._closed = False

    def needed(self) -> int | None:
        """From which element on a run must go for it; None if it has all."""
        if self.runs:
            return self.runs[0]
        if self.bundle.length is not None or self.bundle.at_least > self.order.known:
            return None
        return self.order.keep if self.order.keep < MAX_INDEX else 0

    def next(self, credit: bool, max_elements: int | None = None) -> tuple[Block, int] | End | None:
        output = self.output
        with output.changed:
            if output._end is not None:
                return output._end
            item = self._next(credit, max_elements)
            if isinstance(item, End):
                self._leave()
            return item

    def _next(self, credit: bool, max_elements: int | None) -> tuple[Block, int] | End | None:
        if not self.runs:
            return self._answer()
        run, first = self.run, self.runs[0]
        if run is None or not run.has(first):  # it was forgotten meanwhile
            self._leave()
            self.output._join(self)
            self.output.changed.notify_all()
            return None
        kept = run.at(first)
        if kept is None:
            if run.failed is not None:
                return run.failed
            return EndOfSlice(self.bundle.number, run.stop, True) if run.ended else None
        if not credit:
            return None
        indexes = _indexes(self.runs, kept.stop, max_elements) - kept.start
        whole = indexes[-1] - indexes[0] == len(indexes) - 1
        chosen = range(int(indexes[0]), int(indexes[-1]) + 1) if whole else indexes
        block = picked(kept.block, chosen)
        self.runs = runs_after(self.runs, block.count)
        return block, cost(block)

    def _answer(self) -> End | None:
        bundle, run = self.bundle, self.run
        if bundle.length is not None:
            return EndOfSlice(bundle.number, bundle.length, True)
        if run is not None and run.failed is not None:
            return run.failed
        if self.order.runs or self._is_due():
            return EndOfSlice(bundle.number, bundle.at_least, False)
        return None

    def _is_due(self) -> bool:
        """Whether a query that does not know the bundle's end is answered now."""
        if self.bundle.at_least <= self.order.known:
            return False
        waits = self.run is not None and self.run.waits
        return waits or time.monotonic() - self._opened_s >= ANSWER_S

    def retry_s(self) -> float | None:
        if self.order.runs or self.bundle.at_least <= self.order.known:
            return None
        return max(0.001, self._opened_s + ANSWER_S - time.monotonic())

    def received(self, blocks: Sequence[Block]) -> None:
        self.output._acknowledged(blocks)

    def close(self, lacking: Sequence[Block] = ()) -> None:
        with self.output.changed:
            self._closed = True
            self._leave()
            self.output.changed.notify_all()

    def _leave(self) -> None:
        if self.run is not None:
            self.run.slices.discard(self)
            self.output._forget(self.bundle)
        self.run = None


def _indexes(runs: tuple[int, ...], stop: int, most: int | None) -> Array:
    """The elements of these runs before `stop`, at most `most`."""

    def cut() -> Iterator[Array]:
        left = most if most is not None else stop
        for first, count in zip(runs[::2], runs[1::2], strict=True):
            if first >= stop or not left:
                return
            count = min(count, stop - first, left)
            left -= count
            yield np.arange(first, first + count)

    return np.concatenate(list(cut()))
