"""*Addressed*: elements have names, (bundle, index), and are read by them.

n consumers that read together have n subscriptions with a stride of n: consumer i gets elements
i, i + n, … A bundle may be run again, after somebody asked for what was forgotten. Its elements
are the same each time, so what was given before is still right. What is buffered is a *run* of a
bundle; a subscription stays with the run that it was opened on.

**What is kept.** A block of a run is kept until every open subscription has moved past it, and
every one that is still to come: as a stride of n is that of n subscriptions, those that were not
opened yet count as if they were to ask for what their fellows ask for. Otherwise whoever comes
first would have the elements of the others forgotten. Therefore each of the n opens a
subscription to each bundle, and learns its length so, even if none of the bundle's elements is
for it. One that is closed has moved on. While none is open, nothing is forgotten. `forget` says
that nobody wants a bundle any more.

**What is not there.** A subscription to a bundle that has not begun waits for it, until the task
ends: its consumer may have heard of the bundle before the worker has. One from an index on that
was forgotten, or that comes before all that is run, ends with BundleForgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

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
    TaskOutput,
    TaskUnknown,
    refused,
)
from .orders import Addressed, Order


class AddressedOutput(TaskOutput):
    """One task's bundles, from any number of producers, one for each bundle at a time.

    It holds up to `max_bytes` of each run of a bundle. How many run at a time is the worker's to
    bound. An element is given to each subscription that asks for it, and reported for each; that it
    was given to none is reported when it is forgotten.
    """

    def __init__(self, max_bytes: int = 64 << 20, listener: Listener | None = None) -> None:
        super().__init__(max_bytes, listener)
        self._runs: dict[int, list[_Run]] = {}  # by bundle, the latest last
        self._waiting: dict[int, list[_AddressedSubscription]] = {}  # for a bundle to begin

    def begin(self, bundle: int, index: int = 0) -> None:
        """A bundle is run, perhaps again, and its elements from `index` on will be put.

        Raises RuntimeError if it is being run already.
        """
        with self.changed:
            self._begin(bundle, index)
        self._tell()  # those who wait for what comes before `index`

    def put(self, block: Block) -> None:
        """Add a block to its bundle's run, which begins with it unless it has begun.

        Raises ValueError if it does not follow the block before; OutputCancelled also if the
        bundle was forgotten.
        """
        check_block(block)
        if block.bundle is None:
            raise ValueError("a block that is of no bundle, put to bundles that are addressed")
        size = cost(block)
        with self.changed:
            self._check_open()
            run = self._latest(block.bundle)
            if run is None or run.length is not None:
                run = self._begin(block.bundle, block.index)
            if block.index != run.stop:
                raise ValueError(
                    f"elements from {block.index} on of bundle {block.bundle}, after {run.stop}"
                )
            while self._end is None and run.is_full(size, self._max_bytes):
                self.changed.wait()  # for readers, cancel() or forget()
            self._check_open()
            if run.unwanted:
                raise OutputCancelled(f"bundle {block.bundle} was forgotten")
            run.add(block, size)
            self._missed(run.forget())
            self.changed.notify_all()
        self._tell()

    def end(self, bundle: int) -> None:
        """The bundle has no more elements: its length is known."""
        with self.changed:
            run = self._latest(bundle)
            if run is None:  # it is empty
                run = self._begin(bundle, 0)
            run.finish()
            self._missed(run.forget())
            self.changed.notify_all()
        self._tell()

    def forget(self, bundle: int) -> None:
        """Nobody wants the bundle any more: drop what is buffered, and end who produces it."""
        with self.changed:
            for run in self._runs.get(bundle, ()):
                run.unwanted = run.length is None
                self._missed(run.drop_all())
            self.changed.notify_all()
        self._tell()

    def open(self, order: Order) -> Subscription | End:
        if not isinstance(order, Addressed):
            return refused(order, "bundles that are addressed")
        with self.changed:
            if isinstance(self._end, TaskUnknown):
                return self._end
            runs = self._runs.get(order.bundle)
            subscription = _AddressedSubscription(self, order)
            if not runs:
                self._waiting.setdefault(order.bundle, []).append(subscription)
                return subscription
            run = next((r for r in runs if r.has(order.index)), runs[-1])
            subscription.bind(run)
            if run.is_lost(subscription):
                return run.lost(subscription)
            self._missed(run.forget())
            self.changed.notify_all()
            return subscription

    @property
    def waiting_elements(self) -> int:
        with self.changed:
            return sum(run.waiting() for run in self._all_runs())

    def _holds(self) -> bool:
        return any(run.blocks for run in self._all_runs())

    def _clear(self) -> None:
        for run in self._all_runs():
            self._missed(run.drop_all())

    def _forget_waiting(self, subscription: _AddressedSubscription) -> None:
        bundle = subscription.order.bundle
        waiting = [r for r in self._waiting.pop(bundle, ()) if r is not subscription]
        if waiting:
            self._waiting[bundle] = waiting

    def _missed(self, parts: Iterable[Part]) -> None:
        if self._listener is not None:
            for part in parts:
                self._listener.dropped(part)

    def _all_runs(self) -> Iterator[_Run]:
        return (run for runs in self._runs.values() for run in runs)

    def _latest(self, bundle: int) -> _Run | None:
        runs = self._runs.get(bundle)
        return runs[-1] if runs else None

    def _begin(self, bundle: int, index: int) -> _Run:
        self._check_open()
        before = self._latest(bundle)
        if before is not None and before.length is None and not before.unwanted:
            raise RuntimeError(f"bundle {bundle} is being run already")
        run = _Run(bundle, index)
        runs = [r for r in self._runs.get(bundle, ()) if r.blocks or r.subscriptions]
        self._runs[bundle] = [*runs, run]
        for subscription in self._waiting.pop(bundle, ()):
            subscription.bind(run)
        return run


class _Kept:
    """A block, until its subscriptions have moved past it."""

    __slots__ = ("block", "cost", "given")

    def __init__(self, block: Block, size: int) -> None:
        self.block = block
        self.cost = size
        self.given: npt.NDArray[np.bool_] = np.zeros(block.count, np.bool_)  # to any subscription

    @property
    def stop(self) -> int:
        return self.block.index + self.block.count

    def missed(self) -> Iterator[Part]:
        """What was given to nobody."""
        edges = np.flatnonzero(np.diff(self.given, prepend=True, append=True)).tolist()
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            yield Part(stop - start, self.block.bundle, self.block.index + start)


class _Run:
    """One run of a bundle. Its blocks are numbered from 0 on; a subscription is at a number."""

    def __init__(self, bundle: int, index: int) -> None:
        self.bundle = bundle
        self.kept = index  # what was put from here on is there
        self.stop = index  # what was put ends here
        self.length: int | None = None  # of the bundle, once it has ended
        self.unwanted = False  # before it had ended
        self.blocks: dict[int, _Kept] = {}
        self.oldest = 0  # of `blocks`, which has all up to `following`
        self.following = 0  # the number of the block that is put next
        self.subscriptions: set[_AddressedSubscription] = set()  # that are open, and can go on
        self._at: Counter[int] = Counter()  # how many of them are at each number
        self._stride = 0  # of the subscription opened last
        self._awaited: dict[int, int] = {}  # its fellows to come: remainder -> from which index
        self._bytes = 0

    def is_full(self, size: int, max_bytes: int) -> bool:
        return bool(self.blocks) and self._bytes + size > max_bytes and not self.unwanted

    def add(self, block: Block, size: int) -> None:
        if not block.count:
            return
        self.blocks[self.following] = _Kept(block, size)
        self.following += 1
        self._bytes += size
        self.stop += block.count
        for subscription in self.subscriptions:  # that want none of it
            self.move(subscription)

    def finish(self) -> None:
        self.length = self.stop
        self._awaited = {r: index for r, index in self._awaited.items() if index < self.stop}

    def join(self, subscription: _AddressedSubscription) -> None:
        """A subscription is opened. Its fellows may begin up to a stride before it."""
        order = subscription.order
        if order.stride != self._stride:
            self._stride = order.stride
            first = max(0, order.index - order.stride + 1)
            self._awaited = {i % order.stride: i for i in range(first, first + order.stride)}
            if self.length is not None:
                self.finish()
        self._awaited.pop(order.index % order.stride, None)
        self.subscriptions.add(subscription)
        subscription.number = self.oldest
        self._at[self.oldest] += 1
        self.move(subscription)

    def leave(self, subscription: _AddressedSubscription) -> None:
        if subscription in self.subscriptions:
            self.subscriptions.remove(subscription)
            self._count_out(subscription.number)

    def move(self, subscription: _AddressedSubscription) -> None:
        """On to the block with what the subscription wants next, or to the one to come."""
        before = subscription.number
        while (kept := self.blocks.get(subscription.number)) and kept.stop <= subscription.index:
            subscription.number += 1
        if subscription.number != before:
            self._at[subscription.number] += 1
            self._count_out(before)

    def _count_out(self, number: int) -> None:
        self._at[number] -= 1
        if not self._at[number]:
            del self._at[number]

    def has(self, index: int) -> bool:
        """Whether a subscription can begin there."""
        return self.kept <= index and not self.unwanted

    def is_lost(self, subscription: _AddressedSubscription) -> bool:
        """Whether what the subscription wants next is not there, and will not come."""
        return self.unwanted or subscription.number < self.oldest

    def lost(self, subscription: _AddressedSubscription) -> BundleForgotten:
        return BundleForgotten(self.bundle, subscription.index, max(subscription.index, self.kept))

    def forget(self) -> list[Part]:
        """Forget what is not wanted any more; what of it was given to nobody."""
        missed: list[Part] = []
        if not self.subscriptions:
            return missed
        wanted = min(self._awaited.values(), default=self.stop)
        while (
            (kept := self.blocks.get(self.oldest)) is not None
            and kept.stop <= wanted
            and self.oldest not in self._at
        ):
            missed += self._drop_oldest()
        return missed

    def drop_all(self) -> list[Part]:
        """Forget all; what of it was given to nobody."""
        missed: list[Part] = []
        while self.blocks:
            missed += self._drop_oldest()
        return missed

    def _drop_oldest(self) -> Iterator[Part]:
        kept = self.blocks.pop(self.oldest)
        self.oldest += 1
        self.kept = kept.stop
        self._bytes -= kept.cost
        return kept.missed()

    def waiting(self) -> int:
        return sum(k.block.count - int(np.count_nonzero(k.given)) for k in self.blocks.values())


class _AddressedSubscription(Subscription):
    output: AddressedOutput

    def __init__(self, output: AddressedOutput, order: Addressed) -> None:
        super().__init__(output)
        self.order = order
        self.index = order.index  # of the element that it is given next
        self.number = -1  # of the block that has it
        self._run: _Run | None = None  # once the bundle has begun

    def bind(self, run: _Run) -> None:
        self._run = run
        if run.has(self.index):
            run.join(self)

    def next(self, credit: bool, max_elements: int | None = None) -> tuple[Block, int] | End | None:
        output = self.output
        with output.changed:
            run = self._run
            if run is None or isinstance(output._end, TaskUnknown):
                return output._end
            if run.is_lost(self):
                return run.lost(self)
            kept = run.blocks.get(self.number)
            if kept is None:
                return output._end if run.length is None else EndOfBundle(run.bundle, run.length)
            if not credit:
                return None
            stride = self.order.stride
            first = self.index - kept.block.index
            count = -((first - kept.block.count) // stride)
            if max_elements is not None:
                count = min(count, max_elements)
            block = strided(kept.block, first, stride, count)
            kept.given[first : first + (count - 1) * stride + 1 : stride] = True
            self.index += count * stride
            run.move(self)
            output._missed(run.forget())
            output.changed.notify_all()
            return block, cost(block)

    def received(self, blocks: Sequence[Block]) -> None:
        self.output._acknowledged(blocks, self.order.stride)

    def close(self, lacking: Sequence[Block] = ()) -> None:
        output = self.output
        with output.changed:
            if self._run is not None:
                self._run.leave(self)
                output._missed(self._run.forget())
                output.changed.notify_all()
            else:
                output._forget_waiting(self)
        output._dropped(lacking, self.order.stride)
