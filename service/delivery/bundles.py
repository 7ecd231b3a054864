"""*Bundles*: consumers read slices of bundles by name, in whatever order they need them.

A *bundle* is a range of splits that runs on an iterator of its own. Any worker that runs it makes
the same elements. So this output is a cache: what it has dropped, it has made again. Nothing here
is leased, acknowledged or journaled.

**Runs.** The worker asks `next_run` what to run next. A *run* makes a bundle's elements from
`start` on. A slice joins a run that still has, or will make, its next element. If there is none,
a new run begins: at the reader's `keep`, as that is about where the others of its group are, too.
run_queue.py says which run begins next.

**Backpressure.** A run makes what its slices ask for, and some more, so that the next slices find
it here. It then waits. It never waits if a slice lacks an element, so that a reader can always go
on. When memory is full, it waits, unless some reader has nothing left to receive. A query lacks an
element if its reader has planned (`until`) all that it knows.

**Forgetting.** A block is dropped once each reader of the group has said that it needs none of its
elements (`keep`, `floor`); or those that it was given to, if all of it was given: an element is one
reader's, and some never come to the bundle. If the blocks exceed `max_bytes` for each reader, those
that some reader has passed are dropped earlier: a reader that is far behind the others has its
elements made again. But if one is far behind and still reads, runs make only what it lacks, and the
others wait for it. If a reader begins again before where it was, all that no slice has joined is
dropped. What a slice that has joined still needs is never dropped. If the only reader is *alone*, a
block is dropped once it was given. After that reader has left, the rest may be dropped, too.

**Lengths.** A slice ends with how many elements the bundle is known to have. A slice without runs
is a query: its end comes when the bundle has ended, or when there is news, and there are `enough`
elements, or its run waits, or ANSWER_S have passed. A query that *counts* has a run of its own,
which keeps nothing. If a bundle is run again and has another length, the pipeline is not
deterministic, and its readers get TaskFailed.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np

from ..block_limits import check_block, cost
from ..blocks import BLOCK_BYTES, Array, Block, alike, gathered, picked
from ..checksums import Checksum
from .base import (
    END_OF_TASK,
    End,
    EndOfSlice,
    Listener,
    OutputCancelled,
    Subscription,
    TaskFailed,
    TaskOutput,
    refused,
)
from .element_log import ElementLog, LoggedBlock
from .memory import MemoryBudget
from .read_requests import MAX_INDEX, UNNEEDED, ReadRequest, Slice, runs_after
from .run_queue import QueuedRun, RunQueue

FIRST_AHEAD_BYTES, AHEAD_BYTES = 256 << 10, 2 << 20
"""How much a run makes beyond what was asked for: as much as it has given, within these bounds. So
bundles that are only opened do not hold up those that are read."""

ANSWER_S = 0.02
"""How long a query waits for further elements once there is news."""

HOLD_S, LARGE_BYTES = 0.01, 32 << 10
"""How long at most elements of this size and more wait for others of their slice: each block that
is sent costs as much as an element. A run makes what is asked of it in one go."""

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


class BundleRun(QueuedRun):
    """One run of a bundle. Its producer calls `put`, and `finish` or `fail`."""

    def __init__(
        self, output: BundlesOutput, bundle: _BundleState, start: int, position: int, counts: bool
    ) -> None:
        super().__init__(output.lock, position)
        self.number = bundle.number
        self.start = start
        self.log = ElementLog(output.memory, start)
        self.counts = counts  # it keeps nothing
        self.bundle = bundle
        self._checksum = Checksum() if start == 0 else None  # of all elements; its producer's
        self.wanted = start  # elements before this one were asked for
        self.enough = start  # elements before this one are made if there is room
        self.given_bytes = 0
        self.slices: set[_SliceSubscription] = set()  # that have joined
        self._told: list[_SliceSubscription] = []  # that may have something new; its producer's
        self.ended = False
        self.failed: TaskFailed | None = None
        self._output = output

    @property
    def stop(self) -> int:
        """The next element to put."""
        return self.log.stop

    @property
    def asked(self) -> int:
        return min((each.request.position for each in self.slices), default=UNNEEDED)

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
            self._output.on_change(self._output, self._told)
        self._output.on_change(self._output, self._told)

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
            self._told = [s for s in self.bundle.subscriptions if not (s.holds and s.is_held())]
            return begins_to_wait

    def _add(self, block: Block) -> bool:
        output, bundle = self._output, self.bundle
        size = 0 if self.counts else cost(block)
        if not self.counts:
            if not self._wait_for_room(size):
                return False
            output.put_bytes += size
            output.put_elements += block.count
        # Several readers may get it.
        self.log.add(block if block.loan is None else replace(block, loan=None), size)
        if self.counts:
            self.log.clear()
        if bundle.length is not None and self.stop > bundle.length:
            self._differ(f"at least {self.stop}")
        bundle.at_least = max(bundle.at_least, self.stop)
        output.forget(bundle)
        output.changed.notify_all()
        return True

    def _wait_for_room(self, size: int) -> bool:
        """Wait until the block is needed, or there is room for it. False before it waits, once: a
        query may be answered, and a slice may join then."""
        output, queue, begins = self._output, self._output.queue, False
        try:
            while True:
                self._check()
                is_wanted = bool(self.slices) and self.stop < self.wanted
                ahead = 0 if is_wanted or self.stop < self.enough else self._ahead()
                # What nobody asked for must not hold up what somebody waits for.
                most_ahead = min(max(FIRST_AHEAD_BYTES, self.given_bytes), AHEAD_BYTES)
                is_needed = is_wanted and self._is_lacked(most_ahead)
                is_held_up = queue.is_run_needed()
                may_grow = is_wanted or (
                    not is_held_up and (not ahead or ahead + size <= most_ahead)
                )
                behind = output.reader_to_wait_for(size)
                if behind is None:
                    goes_on = (output.make_room(size) and may_grow) or is_needed
                else:
                    goes_on = is_needed and any(s.request.reader == behind for s in self.slices)
                if goes_on:
                    if output.memory.take(size, force=is_needed):
                        queue.set_busy(self, True)
                        return True
                    output.memory.wait_no_more()
                if begins := not self.waits:
                    queue.set_busy(self, False)
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
                reader, first = each.request.reader, each.runs[0]
                firsts[reader] = min(first, firsts.get(reader, first))
            elif not each.request.runs and self.stop < each.wanted:
                return True
        first, here = max(firsts.values(), default=self.stop), 0
        for kept in reversed(self.log):
            if kept.stop <= first or here > few_bytes:
                break
            here += kept.cost
        return here <= few_bytes

    def _ahead(self) -> int:
        """The bytes that nobody has asked for."""
        total = 0
        for kept in reversed(self.log):
            if kept.start < max(self.wanted, self.enough):
                break
            total += kept.cost
        return total

    def finish(self) -> int | None:
        """The bundle has no more elements. Returns their checksum, if the run made all of them.
        Raises OutputCancelled.
        """
        self._end(None)
        return None if self._checksum is None else self._checksum.value

    def fail(self, code: str, message: str) -> None:
        """The pipeline raised: readers get TaskFailed behind the blocks. Raises OutputCancelled."""
        self._end(TaskFailed(code, message))

    def _end(self, failed: TaskFailed | None) -> None:
        output, bundle = self._output, self.bundle
        with output.lock:
            self._check()
            self.ended, self.failed = failed is None, failed
            output.queue.end(self)
            if failed is not None:
                pass  # how long the bundle is does not show
            elif self.stop == self.start > bundle.at_least:
                output.count(self)  # it has at most `start` elements
            elif bundle.length is None and self.stop >= bundle.at_least:
                bundle.length = self.stop
            elif self.stop != bundle.length:
                self._differ(str(self.stop))
            output.forget(bundle)
            output.changed.notify_all()
            changed = list(bundle.subscriptions)
        output.on_change(output, changed)

    def _differ(self, now: str) -> None:
        bundle = self.bundle
        known = bundle.at_least if bundle.length is None else bundle.length
        bundle.failed = TaskFailed(
            "FAILED_PRECONDITION",
            f"bundle {bundle.number} had {known} elements when it was run first, and {now} "
            "now: the pipeline is not deterministic, so its elements have no names; give its "
            "random operations seeds, or read it without ordered=True and delivery",
        )
        for run in list(bundle.runs):
            self._output.drop(run)

    def _check(self) -> None:
        if self.dropped or self.failed is not None or self._output.ended:
            raise OutputCancelled(f"a run of bundle {self.number} that nobody needs any more")

    def has(self, index: int) -> bool:
        """Whether it has this element, or will make it."""
        return index >= self.log.start and not (self.counts or self.dropped)

    def given_before(self) -> int:
        """Elements before this one were given, each to the one reader that it belongs to, and that
        reader needs them no more."""
        keeps, before = self.bundle.keeps, self.log.start
        for kept in self.log:
            count = kept.stop - kept.start
            if kept.given < count or any(keeps.get(r, 0) < kept.stop for r in kept.readers):
                break
            before = kept.stop
        return before

    def needed(self) -> int:
        """No slice that has joined needs an element before this one."""
        return min((s.runs[0] for s in self.slices if s.runs), default=MAX_INDEX)


class _BundleState:
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
        self.queue: RunQueue[BundleRun] = RunQueue(self.lock, max_runs)
        self._bundles: dict[int, _BundleState] = {}
        self._readers = 1
        self._floors: dict[int, int] = {}  # by reader: it needs nothing of bundles at places before
        self._floor = 0  # nobody does
        self._asked: dict[int, int] = {}  # by reader: the last position in the order
        self.given_s: dict[int, float] = {}  # by reader: when it was given something
        self.put_bytes, self.put_elements = 0, 0  # of all blocks so far
        self._look_above = max_bytes  # fewer bytes: there is nothing to drop
        self._most_known = MAX_KNOWN

    # -- the worker ----------------------------------------------------------------------------

    def next_run(self, most: int, timeout_s: float) -> BundleRun | None:
        """Wait for a run to begin, if fewer than `most` runs that are needed are making elements,
        or for one that is not needed yet, if no other such one is. None after `timeout_s`. Raises
        OutputCancelled."""
        queue = self.queue
        with self.lock:
            if not queue.wait(most, timeout_s, lambda: self._end is not None):
                return None
            if self._end is not None:
                raise OutputCancelled("the task has ended")
            run = queue.pop()
            if queue.is_full and (other := queue.to_end_for(run)) is not None:
                self.drop(other)
                for each in [s for s in other.bundle.subscriptions if s in other.slices]:
                    self._join(each)
            queue.begin(run)
            return run

    @property
    def busy_s(self) -> float:
        with self.lock:
            return self.queue.busy_s()

    def put(self, block: Block) -> NoReturn:
        raise TypeError("blocks of bundles are put to a run: see next_run()")

    @property
    def waiting_elements(self) -> int:
        return 0  # whatever is lost here is made again

    # -- the policy ----------------------------------------------------------------------------

    def _open(self, request: ReadRequest) -> Subscription | End:
        if not isinstance(request, Slice):
            return refused(request, "slices of bundles")
        with self.lock:
            if self._end is not None:
                return self._end
            bundle = self._bundles.get(request.bundle)
            if bundle is None:
                self._bound_known()
                bundle = self._bundles[request.bundle] = _BundleState(request.bundle, request.place)
            subscription = _SliceSubscription(self, request, bundle)
            bundle.subscriptions[subscription] = None
            self._join(subscription)
            self._hear(request, bundle)
            self.forget(bundle)
            self.changed.notify_all()
            return subscription

    def _join(self, subscription: _SliceSubscription) -> None:
        """Have it join a run, or begin one for it."""
        bundle, needed = subscription.bundle, subscription.needed()
        if needed is None:
            return
        if subscription.request.counts:
            runs = [run for run in bundle.runs if run.counts and run.failed is None]
        else:
            runs = [run for run in bundle.runs if run.has(needed)]
        run = max(runs, key=lambda run: run.stop, default=None)
        if run is None:
            request = subscription.request
            if request.alone:  # what an earlier reader left
                for left in [run for run in bundle.runs if not run.slices]:
                    self.drop(left)
            start = needed if request.counts else min(needed, request.keep)
            run = self._add_run(bundle, start, request.position, request.counts)
        subscription.run = run
        run.slices.add(subscription)
        self.queue.hurry(run, subscription.request.position)
        run.used = next(self.queue.numbers)
        run.wanted = max(run.wanted, subscription.wanted)
        run.enough = max(run.enough, subscription.request.enough)
        run.room.notify_all()

    def _add_run(self, bundle: _BundleState, start: int, position: int, counts: bool) -> BundleRun:
        run = BundleRun(self, bundle, start, position, counts)
        bundle.runs.append(run)
        self.queue.add(run)
        return run

    def count(self, run: BundleRun) -> None:
        """The run began behind the end of its bundle: count that for its slices."""
        counting = next((r for r in run.bundle.runs if r.counts and r.failed is None), None)
        counting = counting or self._add_run(run.bundle, 0, run.position, counts=True)
        for subscription in run.slices:
            subscription.run = counting
        counting.slices |= run.slices
        run.slices.clear()

    def _hear(self, request: Slice, bundle: _BundleState) -> None:
        """Note what the reader needs no more."""
        if request.floor < self._floors.get(request.reader, self._floor):
            self._drop_left_ahead()
        if request.readers != self._readers:  # another group
            self._readers, self._floor, self._look_above = request.readers, 0, 0
            self._floors.clear()
            self._asked.clear()
            self.given_s.clear()
            for each in self._bundles.values():
                each.keeps.clear()
                for kept in (kept for run in each.runs for kept in run.log):
                    kept.given, kept.readers = 0, set()
        bundle.alone = request.alone
        if not request.counts:
            bundle.keeps[request.reader] = request.keep
        if request.runs:
            self._asked[request.reader] = request.position
        self._floors[request.reader] = request.floor
        before = self._floor
        self._floor = min(self._floors.values()) if len(self._floors) >= self._readers else 0
        if self._floor > before:
            for each in [b for b in self._bundles.values() if b.place < self._floor]:
                self.forget(each)

    def forget(self, bundle: _BundleState) -> None:
        """Drop the blocks and runs that no reader needs."""
        keeps, is_passed = bundle.keeps, bundle.place < self._floor
        keep = min(keeps.values()) if len(keeps) >= self._readers else 0
        if is_passed:
            keep = MAX_INDEX
        for run in list(bundle.runs):
            if run.log:
                run.log.drop_before(min(max(keep, run.given_before()), run.needed()))
            is_over = run.ended or run.failed is not None or not run.begun
            is_over |= run.counts or is_passed
            if is_over and not (run.log or run.slices):
                self.drop(run)
        if is_passed and not bundle.runs and self._bundles.get(bundle.number) is bundle:
            del self._bundles[bundle.number]

    @property
    def _most_bytes(self) -> int:
        return self._max_bytes * min(self._readers, MAX_SHARES)

    def make_room(self, size: int) -> bool:
        """Whether there is room for so many bytes, of `max_bytes` for each reader. Drops blocks
        that some reader has passed, if need be."""
        most = self._most_bytes
        if self.memory.held + size <= most:
            self._look_above = most
            return True
        if self.memory.held + size > self._look_above:
            self._drop_passed(most - size - most // 8)
            self._look_above = max(most, self.memory.held + size + most // 16)
        return self.memory.held + size <= most

    def reader_to_wait_for(self, size: int) -> int | None:
        """If there is no room: the reader that asks for what comes first, if it was given something
        lately, and another asks for what is a quarter of what all may hold behind that. None if the
        run that it needs may be unable to begin."""
        most, asked = self._most_bytes, self._asked
        if self.memory.held + size <= most or len(asked) < 2 or self.queue.is_full:
            return None
        last = min(asked, key=asked.__getitem__)
        if (max(asked.values()) - asked[last]) * self.put_bytes <= most // 4 * self.put_elements:
            return None
        return last if time.monotonic() - self.given_s.get(last, 0.0) < STILL_READS_S else None

    def _drop_left_ahead(self) -> None:
        """A reader begins again before where it was: drop what has no slice. It was made for later
        positions, and would leave no room for those that are read now."""
        for bundle in self._bundles.values():
            for run in [run for run in bundle.runs if run.log and not run.slices]:
                self.drop(run)

    def _drop_passed(self, most_bytes: int) -> None:
        """Drop blocks that some reader has passed, until there are at most so many bytes. What was
        used last goes last: a reader that is behind may need what follows."""
        runs = [run for bundle in self._bundles.values() for run in bundle.runs if run.log]
        for run in sorted(runs, key=lambda run: run.used):
            if self.memory.held <= most_bytes:
                return
            bundle = run.bundle
            passed = max(bundle.keeps.values(), default=0)
            if bundle.alone and not run.slices:
                passed = MAX_INDEX
            run.log.drop_before(min(passed, run.needed()), most_bytes)
            self.forget(bundle)

    def drop(self, run: BundleRun) -> None:
        run.dropped = True
        run.bundle.runs.remove(run)
        run.log.clear()
        self.queue.end(run)
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

    def finish(self, end: End = END_OF_TASK) -> None:
        super().finish(end)
        with self.lock:
            self._clear()  # nobody gets it any more

    def _clear(self) -> None:
        for bundle in self._bundles.values():
            for run in list(bundle.runs):
                self.drop(run)
        self._bundles.clear()
        self.queue.clear()


class _SliceSubscription(Subscription):
    output: BundlesOutput

    def __init__(self, output: BundlesOutput, request: Slice, bundle: _BundleState) -> None:
        super().__init__(output)
        self.request = request
        self.bundle = bundle
        self.runs = request.runs  # still to be given
        self.wanted = max(request.stop, request.until)
        if not request.runs and request.known <= request.until:
            self.wanted = max(self.wanted, request.known + 1)
        self.run: BundleRun | None = None
        self._near = 0  # the block of the run's log that it was given last
        self._held_s: float | None = None  # since when what is there waits for more
        self.holds = False  # whether `next` gave nothing for that
        self._most: int | None = None  # elements that `next` may give
        self._opened_s = time.monotonic()
        self._end: End | None = None

    def needed(self) -> int | None:
        """From which element on a run must go for it; None if it needs none."""
        bundle, request = self.bundle, self.request
        if bundle.failed is not None:
            return None
        if self.runs:
            first = self.runs[0]
            return first if bundle.length is None or first < bundle.length else None
        if bundle.length is not None or bundle.at_least > request.known:
            return None
        return 0 if request.counts else request.keep

    def next_locked(self, credit: bool, max_elements: int | None) -> tuple[Block, int] | End | None:
        if self.output._end is not None:
            return self.output._end
        item = self._end or self._next(credit, max_elements)
        if self._end is None and item is not None and not isinstance(item, tuple):
            self._end = item
            self._leave()
        return item

    def _next(self, credit: bool, max_elements: int | None) -> tuple[Block, int] | End | None:
        self.holds, self._most = False, max_elements
        bundle, run = self.bundle, self.run
        if bundle.failed is not None:
            return bundle.failed
        if not self.runs:
            return self._answer()
        first = self.runs[0]
        if bundle.length is not None and first >= bundle.length:
            return EndOfSlice(bundle.number, bundle.length, True)
        assert run is not None, "needed() is None only with one of these"
        kept = run.log.at(first, self._near)
        if kept is None:
            return run.failed
        self.holds = credit and self.is_held()
        if self.holds or not credit:
            return None
        self._held_s = None
        block = self._given(run, kept, max_elements)
        size = kept.cost if block is kept.block else cost(block)
        run.used = next(self.output.queue.numbers)
        self.output.given_s[self.request.reader] = time.monotonic()
        if run.given_bytes < AHEAD_BYTES:
            run.given_bytes += size
            run.room.notify_all()  # it may make more ahead
        elif run.waits and run.stop < run.wanted:
            run.room.notify_all()
        if bundle.alone:
            reader, end = self.request.reader, block.index + block.count
            bundle.keeps[reader] = max(bundle.keeps.get(reader, 0), end)
            self.output.forget(bundle)
        return block, size

    def _given(self, run: BundleRun, kept: LoggedBlock, most: int | None) -> Block:
        """The next elements, of one block of the log or, if they are large, of several."""
        parts: list[tuple[Block, range | Array]] = []
        count = size = 0
        following: LoggedBlock | None = kept
        while following is not None:
            indexes = _within(self.runs, following, None if most is None else most - count)
            parts.append((following.block, indexes))
            self.runs = runs_after(self.runs, len(indexes))
            if self.request.readers == self.output._readers:  # else its group has gone
                following.given += len(indexes)
                following.readers.add(self.request.reader)
            self._near = following.number
            count += len(indexes)
            size += len(indexes) * following.element_bytes
            if not self.runs or kept.element_bytes < LARGE_BYTES or size >= BLOCK_BYTES:
                break
            following = run.log.at(self.runs[0], self._near) if count != most else None
            if following is not None and not alike(kept.block, following.block):
                break
        return picked(*parts[0]) if len(parts) == 1 else gathered(parts)

    def is_held(self) -> bool:
        """Whether large elements wait a moment for those that the run makes next."""
        run = self.run
        if run is None or not self.runs or (kept := run.log.at(self.runs[0], self._near)) is None:
            return False
        size, runs = kept.element_bytes, zip(self.runs[::2], self.runs[1::2], strict=True)
        here = sum(max(0, min(count, run.stop - first)) for first, count in runs)
        is_over = run.waits or run.ended or run.failed is not None
        is_enough = here * size >= BLOCK_BYTES or (self._most is not None and here >= self._most)
        if size < LARGE_BYTES or run.stop >= self.request.stop or is_over or is_enough:
            return False
        now_s = time.monotonic()
        self._held_s = self._held_s or now_s
        return now_s - self._held_s < HOLD_S and alike(kept.block, kept.block)

    def _answer(self) -> End | None:
        bundle, run = self.bundle, self.run
        if bundle.length is not None:
            return EndOfSlice(bundle.number, bundle.length, True)
        if self.request.runs or self._is_due():
            return EndOfSlice(bundle.number, bundle.at_least, False)
        return run.failed if run is not None else None

    def _is_due(self) -> bool:
        """Whether a query that does not know the bundle's end is answered now."""
        run, at_least = self.run, self.bundle.at_least
        if at_least <= self.request.known:
            return False
        is_held_up = run is not None and (run.waits or run.failed is not None)
        if is_held_up or at_least >= self.request.enough:
            return True
        return time.monotonic() - self._opened_s >= ANSWER_S

    def retry_s(self) -> float | None:
        if self.holds and self._held_s is not None:
            return max(0.001, self._held_s + HOLD_S - time.monotonic())
        if self.request.runs or self.bundle.at_least <= self.request.known:
            return None
        return max(0.001, self._opened_s + ANSWER_S - time.monotonic())

    @property
    def sleeps(self) -> bool:
        return self.retry_s() is None

    def close(self, lacking: Sequence[Block] = ()) -> None:
        with self.output.lock:
            self._leave()

    def _leave(self) -> None:
        self.bundle.subscriptions.pop(self, None)
        run, self.run = self.run, None
        if run is not None:
            run.slices.discard(self)
            self.output.forget(self.bundle)
            self.output.queue.notify()


def _within(runs: tuple[int, ...], kept: LoggedBlock, most: int | None) -> range | Array:
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
