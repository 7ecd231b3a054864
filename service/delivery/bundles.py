"""*Bundles*: consumers read slices of bundles by name, in whatever order they need them.

A *bundle* is a range of splits that runs on an iterator of its own. Any worker that runs it makes
the same elements. So this output is a cache: what it has dropped, it has made again. Nothing here
is leased, acknowledged or journaled.

**Runs.** The worker asks `next_run` what to run next. A *run* makes a bundle's elements from
`start` on. A slice joins a run that still has, or will make, its next element. If there is none,
a new run begins: at the reader's `keep`, as that is about where the others of its group are, too.
The run whose slices ask for what comes first in the order begins first. Runs that nobody needs yet
come last. They begin one at a time, whatever the others do. At most `max_runs` have begun: beyond
that, one that waits is dropped for one that is needed before what its slices ask for.

**Backpressure.** A run makes what its slices ask for, and some more, so that the next slices find
it here. It then waits. It never waits if a slice lacks an element, so that a reader can always go
on. If there is no room, it waits although slices ask for more, while each reader still has enough
to be given. A query lacks an element if its reader has planned (`until`) all that it knows.

**Forgetting.** A block is dropped once each reader of the group has said that it needs none of its
elements (`keep`, `floor`). If the blocks exceed `max_bytes` for each reader, those that some reader
has passed are dropped earlier: a reader that is far behind the others has its elements made again.
But if one is far behind and still reads, runs make only what it lacks, and the others wait for it.
If a reader begins again before where it was, all that no slice has joined is dropped.
What a slice that has joined still needs is never dropped. If the only reader is *alone*, a block is
dropped once it was given. After that reader has left, the rest may be dropped, too.

**Lengths.** A slice ends with how many elements the bundle is known to have. A slice without runs
is a query: its end comes when the bundle has ended, or when there is news, and there are `enough`
elements, or its run waits, or ANSWER_S have passed. A query that *counts* has a run of its own,
which keeps nothing. If a bundle is run again and has another length, the pipeline is not
deterministic, and its readers get TaskFailed.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np

from ..block_limits import check_block, cost
from ..blocks import Array, Block, picked
from ..checksums import Checksum
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
from .memory import MemoryBudget
from .orders import MAX_INDEX, UNNEEDED, Order, Slice, runs_after

FIRST_AHEAD_BYTES, AHEAD_BYTES = 256 << 10, 2 << 20
"""How much a run makes beyond what was asked for: as much as it has given, within these bounds. So
bundles that are only opened do not hold up those that are read."""

ANSWER_S = 0.02
"""How long a query waits for further elements once there is news."""

ROOM_S = 0.5
"""How often a run that nobody needs now looks whether there is memory for it."""

STILL_READS_S = 2.0
"""For so long after a reader was given something, others that are far ahead wait for it."""

LOOK_S = 0.02
"""How often they look where it is."""

MAX_RUNS = 1024
"""Of a task, that have begun. Each has a thread, and its pipeline a process or another thread."""

MAX_SHARES = 8
"""An output may hold `max_bytes` for each reader of a group, for at most so many."""

MAX_KNOWN = 10_000
"""Of about so many bundles that are not run the lengths are remembered."""


class _Kept:
    """A block of a run."""

    __slots__ = ("block", "cost", "start", "stop")

    def __init__(self, block: Block, size: int) -> None:
        # Several readers may get it.
        self.block = block if block.loan is None else replace(block, loan=None)
        self.cost = size
        self.start = block.index
        self.stop = block.index + block.count


class BundleRun:
    """One run of a bundle. Its producer calls `put`, and `finish` or `fail`."""

    def __init__(
        self,
        output: BundlesOutput,
        bundle: _BundleState,
        start: int,
        position: int,
        counts: bool,
    ) -> None:
        self.number = bundle.number
        self.position = position  # the first one that its slices asked for
        self.start = self.stop = start  # the next element to put
        self.counts = counts  # it keeps nothing
        self._checksum = Checksum() if start == 0 else None  # of all elements; its producer's
        self.wanted = start  # elements before this one were asked for
        self.enough = start  # elements before this one are made if there is room
        self.given_bytes = 0
        self.used = 0  # when a slice was last given something of it; a number
        self.kept: list[_Kept] = []  # without gaps, up to `stop`
        self.slices: set[_SliceSubscription] = set()  # that have joined
        self.begun = False
        self.busy = False  # makes elements
        self.waits = False  # its producer waits for readers
        self._told: list[_SliceSubscription] = []  # that may have something new; its producer's
        self.ended = False
        self.failed: TaskFailed | None = None
        self.dropped = False  # nobody needs it
        self.room = threading.Condition(output.lock)  # its producer may go on
        self._bundle = bundle
        self._output = output

    @property
    def is_ahead(self) -> bool:
        """Whether nobody needs it yet."""
        return self.position == UNNEEDED

    @property
    def asked(self) -> int:
        """The first position that a slice asks it for now."""
        return min((each.order.position for each in self.slices), default=UNNEEDED)

    def put(self, block: Block) -> None:
        """Add the next block; waits while readers are far behind.

        Raises OutputCancelled once nobody needs the run; as `check_block` does; ValueError for a
        block that does not follow the last one.
        """
        check_block(block)
        if self._checksum is not None and block.count:
            self._checksum.add(block)
        # Carriers are told without the lock: they take their own one first.
        while self._put(block):
            self._output._notify(self._told)
        self._output._notify(self._told)

    def _put(self, block: Block) -> bool:
        """Whether it begins to wait for readers: `_told` hear of it, and it is called again."""
        with self._output.lock:
            if (block.bundle, block.index) != (self.number, self.stop):
                raise ValueError(
                    f"elements from {block.index} on of bundle {block.bundle}, where those from "
                    f"{self.stop} on of bundle {self.number} come next"
                )
            self._check()
            begins_to_wait = block.count > 0 and not self._add(block)
            self._told = list(self._bundle.subscriptions)
            return begins_to_wait

    def _add(self, block: Block) -> bool:
        output, bundle = self._output, self._bundle
        kept = _Kept(block, 0 if self.counts else cost(block))
        if not self.counts:
            if not self._wait_for_room(kept.cost):
                return False
            self.kept.append(kept)
            output._bytes += kept.cost
            output._put_bytes += kept.cost
            output._put_elements += block.count
        self.stop = kept.stop
        if bundle.length is not None and self.stop > bundle.length:
            self._differ(f"at least {self.stop}")
        bundle.at_least = max(bundle.at_least, self.stop)
        output._forget(bundle)
        output.changed.notify_all()
        return True

    def _wait_for_room(self, size: int) -> bool:
        """Wait until the block is needed, or there is room for it. False before it waits, once: a
        query may be answered, and a slice may join then."""
        output, begins = self._output, False
        try:
            while True:
                self._check()
                is_wanted = bool(self.slices) and self.stop < self.wanted
                ahead = 0 if is_wanted or self.stop < self.enough else self._ahead()
                # What nobody asked for must not hold up what somebody waits for.
                most_ahead = min(max(FIRST_AHEAD_BYTES, self.given_bytes), AHEAD_BYTES)
                is_needed = is_wanted and self._is_lacked(most_ahead)
                is_held_up = output._is_run_needed()
                may_grow = is_wanted or (
                    not is_held_up and (not ahead or ahead + size <= most_ahead)
                )
                behind = output._reader_to_wait_for(size)
                if behind is None:
                    goes_on = (output._make_room(size) and may_grow) or is_needed
                else:
                    goes_on = is_needed and any(s.order.reader == behind for s in self.slices)
                if goes_on:
                    if output._memory.take(size, force=is_needed):
                        output._set_busy(self, True)
                        return True
                    output._memory.wait_no_more()
                if begins := not self.waits:
                    output._set_busy(self, False)
                    return False
                polls_s = ROOM_S if may_grow or is_held_up else None
                self.room.wait(polls_s if behind is None else LOOK_S)
        finally:
            self.waits = begins

    def _is_lacked(self, few_bytes: int) -> bool:
        """Whether a reader has asked for more, and has at most so few bytes to be given here."""
        firsts: dict[int, int] = {}  # by reader: what it is given next
        for each in self.slices:
            if each.runs:
                reader, first = each.order.reader, each.runs[0]
                firsts[reader] = min(first, firsts.get(reader, first))
            elif not each.order.runs and self.stop < each.wanted:
                return True
        first, here = max(firsts.values(), default=self.stop), 0
        for kept in reversed(self.kept):
            if kept.stop <= first or here > few_bytes:
                break
            here += kept.cost
        return here <= few_bytes

    def _ahead(self) -> int:
        """The bytes that nobody has asked for."""
        total = 0
        for kept in reversed(self.kept):
            if kept.start < max(self.wanted, self.enough):
                break
            total += kept.cost
        return total

    def finish(self) -> int | None:
        """The bundle has no more elements. Returns their checksum, if the run made all of them.
        Raises OutputCancelled.
        """
        output, bundle = self._output, self._bundle
        with output.lock:
            self._check()
            self.ended = True
            output._is_over(self)
            if self.stop == self.start > bundle.at_least:
                output._count(self)  # it has at most `start` elements
            elif bundle.length is None and self.stop >= bundle.at_least:
                bundle.length = self.stop
            elif self.stop != bundle.length:
                self._differ(str(self.stop))
            output._forget(bundle)
            output.changed.notify_all()
            changed = list(bundle.subscriptions)
        output._notify(changed)
        return None if self._checksum is None else self._checksum.value

    def fail(self, code: str, message: str) -> None:
        """The pipeline raised: readers get TaskFailed behind the blocks. Raises OutputCancelled."""
        output = self._output
        with output.lock:
            self._check()
            self.failed = TaskFailed(code, message)
            output._is_over(self)
            output._forget(self._bundle)
            output.changed.notify_all()
            changed = list(self._bundle.subscriptions)
        output._notify(changed)

    def _differ(self, now: str) -> None:
        bundle = self._bundle
        known = bundle.at_least if bundle.length is None else bundle.length
        bundle.failed = TaskFailed(
            "FAILED_PRECONDITION",
            f"bundle {bundle.number} had {known} elements when it was run first, and {now} "
            "now: the pipeline is not deterministic, so its elements have no names; give its "
            "random operations seeds, or read it without ordered=True and delivery",
        )
        for run in list(bundle.runs):
            self._output._drop(run)

    def _check(self) -> None:
        if self.dropped or self.failed is not None or self._output.ended:
            raise OutputCancelled(f"a run of bundle {self.number} that nobody needs any more")

    def at(self, index: int) -> _Kept | None:
        """The block that has this element."""
        at = bisect_left(self.kept, index + 1, key=lambda kept: kept.stop)
        found = self.kept[at] if at < len(self.kept) else None
        return found if found is not None and found.start <= index else None

    def has(self, index: int) -> bool:
        """Whether it has this element, or will make it."""
        first = self.kept[0].start if self.kept else self.stop
        return index >= first and not (self.counts or self.dropped)

    def needed(self) -> int:
        """No slice that has joined needs an element before this one."""
        return min((s.runs[0] for s in self.slices if s.runs), default=MAX_INDEX)


class _BundleState:
    """What is known of a bundle, and its runs."""

    def __init__(self, number: int, place: int) -> None:
        self.number = number
        self.place = place
        self.at_least = 0  # elements
        self.length: int | None = None  # once it has ended
        self.failed: TaskFailed | None = None  # its length is not always the same
        self.keeps: dict[int, int] = {}  # by reader: it needs no element before this one
        self.alone = False  # nobody else reads it
        self.runs: list[BundleRun] = []
        self.subscriptions: dict[_SliceSubscription, None] = {}  # in order: a run can be replayed


class BundlesOutput(TaskOutput):
    """The bundles of a task, from any number of producers."""

    def __init__(
        self,
        max_bytes: int = 64 << 20,
        listener: Listener | None = None,
        budget: MemoryBudget | None = None,
        max_runs: int = MAX_RUNS,
    ) -> None:
        super().__init__(max_bytes, listener, budget)
        self._max_runs = max_runs
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self._may_begin = threading.Condition(self.lock)  # another run may
        self._bundles: dict[int, _BundleState] = {}
        self._pending: list[tuple[int, int, BundleRun]] = []  # a heap, by position
        self._begun: dict[BundleRun, None] = {}  # and neither over nor dropped; in order
        self._numbers = itertools.count()
        self._busy = 0  # runs that make elements
        self._ahead = 0  # of them, those that nobody needs yet
        self._most_busy = 0  # see `next_run`
        self._busy_s, self._busy_from_s = 0.0, 0.0  # counts each moment by the share that is busy
        self._readers = 1
        self._floors: dict[int, int] = {}  # by reader: it needs nothing of bundles at places before
        self._floor = 0  # nobody does
        self._asked: dict[int, int] = {}  # by reader: the last position in the order
        self._given_s: dict[int, float] = {}  # by reader: when it was given something
        self._bytes = 0  # of all blocks that are kept
        self._put_bytes, self._put_elements = 0, 0  # of all blocks so far
        self._look_above = max_bytes  # fewer bytes: there is nothing to drop
        self._most_known = MAX_KNOWN

    # -- the worker ----------------------------------------------------------------------------

    def next_run(self, most: int, timeout_s: float) -> BundleRun | None:
        """Wait for a run to begin, if fewer than `most` runs that are needed are making elements,
        or for one that is not needed yet, if no other such one is. None after `timeout_s`. Raises
        OutputCancelled."""

        def may_begin() -> bool:
            if self._end is not None:
                return True
            if (run := self._first_pending()) is None:
                return False
            if self._ahead if run.is_ahead else self._busy - self._ahead >= most:
                return False
            return not self._is_full or self._to_drop_for(run) is not None

        with self._may_begin:
            self._most_busy = most
            if not self._may_begin.wait_for(may_begin, timeout_s):
                return None
            if self._end is not None:
                raise OutputCancelled("the task has ended")
            run = heapq.heappop(self._pending)[2]
            if self._is_full and (other := self._to_drop_for(run)) is not None:
                self._drop(other)
                for each in [s for s in other._bundle.subscriptions if s in other.slices]:
                    self._join(each)
            self._begun[run] = None
            if not self._is_run_needed():  # others may make more than was asked for
                for other in [r for b in self._bundles.values() for r in b.runs if r.waits]:
                    other.room.notify_all()
            run.begun = True
            self._set_busy(run, True)
            return run

    @property
    def _is_full(self) -> bool:
        return len(self._begun) >= self._max_runs

    def _to_drop_for(self, run: BundleRun) -> BundleRun | None:
        """What waits, is asked for only later than the run, and will be for the longest time."""
        waiting = [each for each in self._begun if each.waits]
        last = max(waiting, key=lambda each: (each.asked, each.used), default=None)
        return last if last is not None and last.asked > run.position else None

    def _is_over(self, run: BundleRun) -> None:
        """It makes no more elements."""
        self._set_busy(run, False)
        if run in self._begun:
            del self._begun[run]
            self._may_begin.notify_all()

    def _first_pending(self) -> BundleRun | None:
        """The run that begins next."""
        while self._pending and self._pending[0][2].dropped:
            heapq.heappop(self._pending)
        return self._pending[0][2] if self._pending else None

    def _is_run_needed(self) -> bool:
        """Whether a reader needs a run that is to begin."""
        run = self._first_pending()
        return run is not None and not run.is_ahead

    def put(self, block: Block) -> NoReturn:
        raise TypeError("blocks of bundles are put to a run: see next_run()")

    @property
    def waiting_elements(self) -> int:
        return 0  # whatever is lost here is made again

    @property
    def busy_s(self) -> float:
        """The time in which as many runs made elements as may, or a part of it if fewer did."""
        with self.lock:
            return self._busy_until_now()

    def _busy_until_now(self) -> float:
        share = min(self._busy / self._most_busy, 1) if self._most_busy else 0.0
        return self._busy_s + share * (time.monotonic() - self._busy_from_s)

    def _set_busy(self, run: BundleRun, busy: bool) -> None:
        if busy != run.busy:
            self._busy_s, self._busy_from_s = self._busy_until_now(), time.monotonic()
            self._busy += 1 if busy else -1
            run.busy = busy
            if run.is_ahead:
                self._ahead += 1 if busy else -1
            if not busy and self._pending:
                self._may_begin.notify_all()

    # -- the policy ----------------------------------------------------------------------------

    def _open(self, order: Order) -> Subscription | End:
        if not isinstance(order, Slice):
            return refused(order, "slices of bundles")
        with self.changed:
            if self._end is not None:
                return self._end
            bundle = self._bundles.get(order.bundle)
            if bundle is None:
                self._bound_known()
                bundle = self._bundles[order.bundle] = _BundleState(order.bundle, order.place)
            subscription = _SliceSubscription(self, order, bundle)
            bundle.subscriptions[subscription] = None
            self._join(subscription)
            self._hear(order, bundle)
            self._forget(bundle)
            self.changed.notify_all()
            return subscription

    def _join(self, subscription: _SliceSubscription) -> None:
        """Have it join a run, or begin one for it."""
        bundle, needed = subscription.bundle, subscription.needed()
        if needed is None:
            return
        if subscription.order.counts:
            runs = [run for run in bundle.runs if run.counts and run.failed is None]
        else:
            runs = [run for run in bundle.runs if run.has(needed)]
        run = max(runs, key=lambda run: run.stop, default=None)
        if run is None:
            order = subscription.order
            if order.alone:  # what an earlier reader left
                for left in [run for run in bundle.runs if not run.slices]:
                    self._drop(left)
            start = needed if order.counts else min(needed, order.keep)
            run = self._add_run(bundle, start, order.position, order.counts)
        subscription.run = run
        run.slices.add(subscription)
        self._hurry(run, subscription.order.position)
        run.used = next(self._numbers)
        run.wanted = max(run.wanted, subscription.wanted)
        run.enough = max(run.enough, subscription.order.enough)
        run.room.notify_all()

    def _add_run(self, bundle: _BundleState, start: int, position: int, counts: bool) -> BundleRun:
        run = BundleRun(self, bundle, start, position, counts)
        bundle.runs.append(run)
        heapq.heappush(self._pending, (run.position, next(self._numbers), run))
        self._may_begin.notify_all()
        return run

    def _hurry(self, run: BundleRun, position: int) -> None:
        """This position is asked of the run, perhaps an earlier one than before."""
        if position >= run.position:
            return
        if run.is_ahead:
            self._ahead -= run.busy
            self._may_begin.notify_all()
        run.position = position
        if not run.begun:
            self._pending = [
                (pending.position, number, pending) for _, number, pending in self._pending
            ]
            heapq.heapify(self._pending)

    def _count(self, run: BundleRun) -> None:
        """The run began behind the end of its bundle: count that for its slices."""
        counting = next((r for r in run._bundle.runs if r.counts and r.failed is None), None)
        counting = counting or self._add_run(run._bundle, 0, run.position, counts=True)
        for subscription in run.slices:
            subscription.run = counting
        counting.slices |= run.slices
        run.slices.clear()

    def _hear(self, order: Slice, bundle: _BundleState) -> None:
        """Note what the reader needs no more."""
        if order.floor < self._floors.get(order.reader, self._floor):
            self._drop_left_ahead()
        if order.readers != self._readers:  # another group
            self._readers, self._floor, self._look_above = order.readers, 0, 0
            self._floors.clear()
            self._asked.clear()
            self._given_s.clear()
            for each in self._bundles.values():
                each.keeps.clear()
        bundle.alone = order.alone
        if not order.counts:
            bundle.keeps[order.reader] = order.keep
        if order.runs:
            self._asked[order.reader] = order.position
        self._floors[order.reader] = order.floor
        before = self._floor
        self._floor = min(self._floors.values()) if len(self._floors) >= self._readers else 0
        if self._floor > before:
            for each in [b for b in self._bundles.values() if b.place < self._floor]:
                self._forget(each)

    def _forget(self, bundle: _BundleState) -> None:
        """Drop the blocks and runs that no reader needs."""
        keeps, is_passed = bundle.keeps, bundle.place < self._floor
        keep = min(keeps.values()) if len(keeps) >= self._readers else 0
        if is_passed:
            keep = MAX_INDEX
        for run in list(bundle.runs):
            self._release(run, keep)
            is_over = run.ended or run.failed is not None or not run.begun
            is_over |= run.counts or is_passed
            if is_over and not (run.kept or run.slices):
                self._drop(run)
        if is_passed and not bundle.runs and self._bundles.get(bundle.number) is bundle:
            del self._bundles[bundle.number]

    @property
    def _most_bytes(self) -> int:
        return self._max_bytes * min(self._readers, MAX_SHARES)

    def _make_room(self, size: int) -> bool:
        """Whether there is room for so many bytes, of `max_bytes` for each reader. Drops blocks
        that some reader has passed, if need be."""
        most = self._most_bytes
        if self._bytes + size <= most:
            self._look_above = most
            return True
        if self._bytes + size > self._look_above:
            self._drop_passed(most - size - most // 8)
            self._look_above = max(most, self._bytes + size + most // 16)
        return self._bytes + size <= most

    def _reader_to_wait_for(self, size: int) -> int | None:
        """If there is no room: the reader that asks for what comes first, if it was given something
        lately, and another asks for what is a quarter of what all may hold behind that. None if the
        run that it needs may be unable to begin."""
        most, asked = self._most_bytes, self._asked
        if self._bytes + size <= most or len(asked) < 2 or self._is_full:
            return None
        last = min(asked, key=asked.__getitem__)
        if (max(asked.values()) - asked[last]) * self._put_bytes <= most // 4 * self._put_elements:
            return None
        return last if time.monotonic() - self._given_s.get(last, 0.0) < STILL_READS_S else None

    def _drop_left_ahead(self) -> None:
        """A reader begins again before where it was: drop what has no slice. It was made for later
        positions, and would leave no room for those that are read now."""
        for bundle in self._bundles.values():
            for run in [run for run in bundle.runs if run.kept and not run.slices]:
                self._drop(run)

    def _drop_passed(self, most_bytes: int) -> None:
        """Drop blocks that some reader has passed, until there are at most so many bytes. What was
        used last goes last: a reader that is behind may need what follows."""
        runs = [run for bundle in self._bundles.values() for run in bundle.runs if run.kept]
        for run in sorted(runs, key=lambda run: run.used):
            if self._bytes <= most_bytes:
                return
            bundle = run._bundle
            passed = max(bundle.keeps.values(), default=0)
            if bundle.alone and not run.slices:
                passed = MAX_INDEX
            self._release(run, passed, most_bytes)
            self._forget(bundle)

    def _release(self, run: BundleRun, index: int, most_bytes: int = -1) -> None:
        """Drop the run's blocks before this element, as far as no slice needs them, until there are
        at most so many bytes."""
        if not run.kept or run.kept[0].stop > index:
            return
        index = min(index, run.needed())
        dropped = size = 0
        for kept in run.kept:
            if kept.stop > index or self._bytes - size <= most_bytes:
                break
            dropped += 1
            size += kept.cost
        del run.kept[:dropped]
        self._bytes -= size
        self._memory.release(size)

    def _drop(self, run: BundleRun) -> None:
        run.dropped = True
        run._bundle.runs.remove(run)
        size = sum(kept.cost for kept in run.kept)
        run.kept.clear()
        self._bytes -= size
        self._memory.release(size)
        self._is_over(run)
        if not run.begun:
            self._may_begin.notify_all()  # it may have kept others from beginning
        run.room.notify_all()

    def _bound_known(self) -> None:
        """Forget the lengths of bundles if there are too many: if they are run again, they are not
        compared."""
        if len(self._bundles) < self._most_known:
            return
        idle = [number for number, bundle in self._bundles.items() if not bundle.runs]
        for number in idle[: -MAX_KNOWN // 2]:
            del self._bundles[number]
        self._most_known = max(MAX_KNOWN, 2 * len(self._bundles))

    def _holds(self) -> bool:
        return False

    def _finish(self, end: End) -> None:
        super()._finish(end)
        with self.changed:
            self._clear()  # nobody gets it any more

    def _clear(self) -> None:
        self._may_begin.notify_all()
        for bundle in self._bundles.values():
            for run in list(bundle.runs):
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
        if not order.runs and order.known <= order.until:
            self.wanted = max(self.wanted, order.known + 1)
        self.run: BundleRun | None = None
        self._opened_s = time.monotonic()
        self._end: End | None = None

    def needed(self) -> int | None:
        """From which element on a run must go for it; None if it needs none."""
        bundle, order = self.bundle, self.order
        if bundle.failed is not None:
            return None
        if self.runs:
            first = self.runs[0]
            return first if bundle.length is None or first < bundle.length else None
        if bundle.length is not None or bundle.at_least > order.known:
            return None
        return 0 if order.counts else order.keep

    def next(self, credit: bool, max_elements: int | None = None) -> tuple[Block, int] | End | None:
        with self.output.lock:
            return self.next_locked(credit, max_elements)

    def next_locked(self, credit: bool, max_elements: int | None) -> tuple[Block, int] | End | None:
        if self.output._end is not None:
            return self.output._end
        item = self._end or self._next(credit, max_elements)
        if self._end is None and item is not None and not isinstance(item, tuple):
            self._end = item
            self._leave()
        return item

    def _next(self, credit: bool, max_elements: int | None) -> tuple[Block, int] | End | None:
        bundle, run = self.bundle, self.run
        if bundle.failed is not None:
            return bundle.failed
        if not self.runs:
            return self._answer()
        first = self.runs[0]
        if bundle.length is not None and first >= bundle.length:
            return EndOfSlice(bundle.number, bundle.length, True)
        assert run is not None, "needed() is None only with one of these"
        kept = run.at(first)
        if kept is None:
            return run.failed
        if not credit:
            return None
        block = picked(kept.block, _within(self.runs, kept, max_elements))
        size = kept.cost if block is kept.block else cost(block)
        self.runs = runs_after(self.runs, block.count)
        run.used = next(self.output._numbers)
        self.output._given_s[self.order.reader] = time.monotonic()
        if run.given_bytes < AHEAD_BYTES:
            run.given_bytes += size
            run.room.notify_all()  # it may make more ahead
        elif run.waits and run.stop < run.wanted:
            run.room.notify_all()
        if bundle.alone:
            reader, end = self.order.reader, block.index + block.count
            bundle.keeps[reader] = max(bundle.keeps.get(reader, 0), end)
            self.output._forget(bundle)
        return block, size

    def _answer(self) -> End | None:
        bundle, run = self.bundle, self.run
        if bundle.length is not None:
            return EndOfSlice(bundle.number, bundle.length, True)
        if self.order.runs or self._is_due():
            return EndOfSlice(bundle.number, bundle.at_least, False)
        return run.failed if run is not None else None

    def _is_due(self) -> bool:
        """Whether a query that does not know the bundle's end is answered now."""
        if self.bundle.at_least <= self.order.known:
            return False
        run = self.run
        if self.bundle.at_least >= self.order.enough:
            return True
        if run is not None and (run.waits or run.failed is not None):
            return True
        return time.monotonic() - self._opened_s >= ANSWER_S

    def retry_s(self) -> float | None:
        if self.order.runs or self.bundle.at_least <= self.order.known:
            return None
        return max(0.001, self._opened_s + ANSWER_S - time.monotonic())

    @property
    def sleeps(self) -> bool:
        return self.retry_s() is None

    def received(self, blocks: Sequence[Block]) -> None:
        self.output._acknowledged(blocks)

    def close(self, lacking: Sequence[Block] = ()) -> None:
        with self.output.changed:
            self._leave()

    def _leave(self) -> None:
        self.bundle.subscriptions.pop(self, None)
        run, self.run = self.run, None
        if run is not None:
            run.slices.discard(self)
            self.output._forget(self.bundle)
            if self.output._is_full:
                self.output._may_begin.notify_all()  # perhaps instead of it


def _within(runs: tuple[int, ...], kept: _Kept, most: int | None) -> range | Array:
    """Which elements of the block belong to the runs, whose first element is in it; at most `most`.
    A range if they have no gaps."""
    first, count = runs[0] - kept.start, runs[1]
    if most is not None and most <= count:
        count = most
    elif len(runs) > 2 and runs[2] < kept.stop:
        return _indexes(runs, kept.stop, most) - kept.start
    return range(first, min(first + count, kept.stop - kept.start))


def _indexes(runs: tuple[int, ...], stop: int, most: int | None) -> Array:
    """The elements of these runs before `stop`, at most `most`."""
    cut = bisect_left(range(0, len(runs), 2), stop, key=lambda at: runs[at])
    starts, counts = np.array(runs[: 2 * cut]).reshape(-1, 2).T
    shift = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    found = shift + np.arange(len(shift))
    return found[: int(np.searchsorted(found, stop))][:most]
