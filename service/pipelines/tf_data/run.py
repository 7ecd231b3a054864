"""Runs a tf.data graph into blocks.

Two sides meet in a TensorFlow FIFOQueue. A thread drives the pipeline (drivers.py): one call, which
stays in C++, puts every element into the queue. `blocks` takes out whatever is ready, in bulk. So a
fast pipeline gives large blocks and a slow one small ones, and no element waits longer than
LINGER_S for a block to fill. The queue bounds how far the pipeline runs ahead.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import tensorflow as tf

from ...blocks import Block, Component
from ...errors import PipelineError
from .columns import reshaped
from .drivers import DrivenBundle, Driver, LongRun
from .queues import ENDED
from .split_files import Begun
from .traces import LARGE_BYTES, MAX_BLOCK_ELEMENTS, QUANTUM_BYTES, Trace

LINGER_S = 0.025
"""How long an element may wait for a block to fill. A block of any size costs both ends together a
millisecond or two."""

POLL_S = 0.001  # the first pause; each pause is twice as long as the one before

Tensor = Any


class TfDataRun:
    """One run: the queue between a pipeline and `blocks`."""

    def __init__(
        self,
        trace: Trace,
        source: LongRun | DrivenBundle,
        bundle: int | None = None,
        start: int = 0,
        explained: Callable[[PipelineError, Begun], PipelineError] = lambda error, _: error,
    ) -> None:
        self.trace = trace
        self._source = source
        self._explained = explained
        self._bundle = bundle
        self._index = start
        self._queues = trace.make_queues()
        self._queue, *self._budget = self._queues
        self._cancelled = threading.Event()
        self.most = MAX_BLOCK_ELEMENTS
        self.needs = source.per_element * trace.pack

    @property
    def waiting(self) -> int:
        return self._ready() * self.trace.pack

    def cancel(self) -> None:
        """End `blocks` soon, from any thread. The caller must end the feed's own waits."""
        self._cancelled.set()
        for queue in self._queues:
            queue.close(cancel=True)

    def blocks(self) -> Generator[Block, None, None]:
        """The elements, in order; call it once. Raises PipelineError.

        After `cancel` it ends early. Once it has ended or is closed, no thread works for it. A
        thread may still wait for TensorFlow, or for an element that cannot be cancelled.
        """
        driver: Driver | None = None
        complete = False
        try:
            if self._cancelled.is_set():
                return
            driver = self._source.begin(self._queues)
            stacked = self._dequeue(1)  # send the first element at once: a consumer waits for it
            while stacked is not None and not self._cancelled.is_set():
                for block in self._cut(stacked):
                    yield self._placed(block)
                    self._source.passed(block.count)
                stacked = self._take()
            complete = driver.error is None and not self._cancelled.is_set()
            if driver.error is not None and not self._cancelled.is_set():
                raise self._explained(driver.error, self._source.begun())
        finally:
            if not complete:
                self.cancel()
            if driver is not None:
                self._source.end(driver, complete=complete)
            # Free elements and constants now: this object is part of reference cycles.
            if driver is None or complete:
                self._release_queues()
            else:
                driver.when_ended(self._release_queues)
            self._source.release()

    def _release_queues(self) -> None:
        for queue in self._queues:
            queue.release()

    def _placed(self, block: Block) -> Block:
        if self._bundle is None:
            return block
        placed = Block(block.count, block.components, self._bundle, self._index)
        self._index += block.count
        return placed

    def _take(self) -> list[Tensor] | None:
        """At least one element, stacked: what the queue has. None at the end."""
        if self.trace.alone:
            return self._dequeue(1)
        head = None
        ready = self._ready()
        if not ready:
            head = self._dequeue(1)
            if head is None:
                return None
            ready = self._ready()
        give_up = time.monotonic() + LINGER_S
        pause_s = POLL_S
        # The queue holds two blocks, so a pause that is too long doesn't stall the pipeline.
        while not self._is_enough(ready) and (left_s := give_up - time.monotonic()) > 0:
            time.sleep(min(pause_s, left_s))
            pause_s *= 2
            ready = self._ready()
        want = min(ready, self._most)
        tail = self._dequeue(want) if want else None
        if head is None or tail is None:
            return head or tail
        # concat does not support variants.
        places = [tf.constant([0]), tf.range(1, want + 1)]
        return [
            tf.raw_ops.DynamicStitch(indices=places, data=pair)
            for pair in zip(head, tail, strict=True)
        ]

    @property
    def _most(self) -> int:
        """How many elements of the queue a block may have."""
        return min(self.trace.most, max(1, self.most // self.trace.pack))

    def _ready(self) -> int:
        return self._queue.size()

    def _is_enough(self, ready: int) -> bool:
        """Whether the queue, which has so many elements, has a block's worth or was closed."""
        if ready >= self._most or self._queue.is_closed():
            return True
        return any(2 * queue.size() >= self.trace.quanta for queue in self._budget)

    def _dequeue(self, count: int) -> list[Tensor] | None:
        try:
            # dequeue_up_to would copy.
            return self._queue.dequeue() if self.trace.alone else self._queue.dequeue_up_to(count)
        except ENDED:
            return None

    def _cut(self, stacked: list[Tensor]) -> Iterator[Block]:
        """Cut dequeued elements into blocks: large elements alone, the others by bytes."""
        count = stacked[0].shape[0]
        if not self.trace.varies:
            yield self._block(stacked, 0, count, count)
            return
        sizes = stacked.pop().numpy()
        quanta = int((sizes // QUANTUM_BYTES).clip(max=self.trace.quanta).sum())
        if quanta:
            with contextlib.suppress(*ENDED):  # cancelled, so the budget no longer matters
                self._budget[0].dequeue_up_to(quanta)
        if sizes.max() < LARGE_BYTES and sizes.sum() <= self.trace.block_bytes:
            yield self._block(stacked, 0, count, count)
            return
        start, total = 0, 0
        for i, size in enumerate(sizes.tolist()):
            if i > start and (size >= LARGE_BYTES or total + size > self.trace.block_bytes):
                yield self._block(stacked, start, i, count)
                start, total = i, 0
            total += size
            if size >= LARGE_BYTES:
                yield self._block(stacked, i, i + 1, count)
                start, total = i + 1, 0
        if start < count:
            yield self._block(stacked, start, count, count)

    def _block(self, stacked: list[Tensor], start: int, stop: int, count: int) -> Block:
        parts = iter(stacked if stop - start == count else [t[start:stop] for t in stacked])
        components = tuple(c.decode([next(parts) for _ in c.queued]) for c in self.trace.columns)
        if self.trace.shapes is None:
            return Block(stop - start, components)
        pairs = zip(components, self.trace.shapes, strict=True)
        stacks = [reshaped(c.values, (-1, *shape)) for c, shape in pairs]
        return Block(len(stacks[0]), tuple(map(Component, stacks)))
