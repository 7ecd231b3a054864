"""Runs a tf.data graph into blocks.

Two sides meet in a FIFOQueue of TensorFlow's. A thread drives the pipeline: one call that
stays in C++ and puts every element into the queue. `blocks` takes out whatever is ready, in
bulk. So a fast pipeline gives large blocks, a slow one small ones, and no element waits longer
than LINGER_S for a block to fill. The queue bounds how far the pipeline runs ahead.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import tensorflow as tf

from ... import structure
from ...blocks import BLOCK_BYTES, Block, Component
from ...errors import PipelineError
from ..splits import SplitFeed
from .columns import reshaped
from .element_specs import component_specs
from .traces import LARGE_BYTES, QUANTUM_BYTES, Trace, Traces, end_of

LINGER_S = 0.01  # how long an element may wait for company
POLL_S = 0.001
UNWIND_S = 1.0  # for a cancelled pipeline to end at its next element, or by its feed

Tensor = Any

TRACES = Traces()
"""Those of this process."""


class TfDataExecutor:
    """One run of a serialized dataset graph.

    `feed` gives the splits of every source; without it the graph runs as it is. With
    `element_spec` the blocks have that spec's components, and `compressed` says whether the
    graph ends in tf.data service's compression, to be undone. Without it the components are
    what the graph itself yields, its variants serialized with `tf.io.serialize_tensor`.
    """

    def __init__(
        self,
        graph: bytes,
        feed: SplitFeed | None = None,
        *,
        element_spec: Any = None,
        compressed: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """Raises InvalidGraph, NotSplittable, UnsupportedElement, PipelineError."""
        sources = None if feed is None else [s.SerializeToString() for s in feed.sources]
        key = (
            hashlib.sha256(graph).digest(),
            None if sources is None else tuple(sources),
            None if element_spec is None else structure.encode(element_spec),
            None if element_spec is None else tuple(component_specs(element_spec)),
            compressed,
            block_bytes,
        )

        def make() -> Trace:
            registered = None if feed is None else feed.sources
            return Trace(graph, registered, element_spec, compressed, block_bytes)

        try:
            trace, self._graph, self._release = TRACES.load(key, len(graph), make, feed)
        except tf.errors.OpError as error:
            raise _pipeline_error(error) from error
        try:
            self._run = _Run(trace, self._graph.variant)
        except BaseException:
            self._release()
            raise

    def blocks(self) -> Generator[Block, None, None]:
        """The elements, in order; to be called once. Raises PipelineError.

        After `cancel` it ends early. When it has ended, or is closed, no thread is left.
        """
        try:
            yield from self._run.blocks()
        finally:
            self._release()

    def cancel(self) -> None:
        """End `blocks` soon, from any thread. The feed's own waits are the caller's to end."""
        self._run.cancel()


class _Run:
    """The queue between the pipeline and `blocks`."""

    def __init__(self, trace: Trace, variant: Tensor) -> None:
        self._trace = trace
        self._variant = variant
        # An operation that fails cancels all others of its step. The step waits for something in
        # `stop` while the pipeline runs, so closing it cancels the pipeline. TensorFlow's
        # CancellationManager would hold Python's global lock while it waits for the pipeline's
        # locks; and who has one of these may wait for Python.
        self._queues = trace.make_queues()
        self._stop, self._queue, *self._budget = self._queues
        self._ended = threading.Event()
        self._cancelled = threading.Event()
        self._error: PipelineError | None = None

    def cancel(self) -> None:
        self._cancelled.set()
        for queue in (self._queue, *self._budget):
            queue.close(cancel=True)

    def blocks(self) -> Generator[Block, None, None]:
        thread = threading.Thread(target=self._pipeline, name="forebay-pipeline", daemon=True)
        thread.start()
        try:
            first = True
            while not self._cancelled.is_set():
                stacked = self._take(linger_s=0 if first else LINGER_S)
                if stacked is None:
                    break
                yield from self._cut(stacked)
                first = False
            if self._error is not None and not self._cancelled.is_set():
                raise self._error
        finally:
            self.cancel()
            # Here, where waiting for a lock of the pipeline's holds up nobody else; and late:
            # a function call that returns while TensorFlow cancels waits for that, with its locks.
            if not self._ended.wait(UNWIND_S):
                self._stop.close()
            thread.join()
            # What holds elements and constants goes now: we are part of cycles of references.
            for queue in self._queues:
                queue.release()
            self._variant = None

    def _pipeline(self) -> None:
        try:
            handles = [queue.handle for queue in self._queues]
            self._trace.drive(self._variant, end_of(self._stop), *handles)
        except tf.errors.OpError as error:
            self._error = _pipeline_error(error)
        except Exception as error:  # noqa: BLE001 - a message of TensorFlow's that is no UTF-8, say
            self._error = PipelineError("UNKNOWN", f"the pipeline failed: {error!r}")
        finally:
            self._ended.set()
            self._queue.close()

    def _take(self, linger_s: float) -> list[Tensor] | None:
        """What the queue has, stacked; at least one element. None at the end."""
        if self._trace.alone:
            return self._dequeue(1)
        head = None
        if not self._ready():
            head = self._dequeue(1)
            if head is None:
                return None
        give_up = time.monotonic() + linger_s
        while not self._full() and time.monotonic() < give_up:
            time.sleep(POLL_S)
        want = min(self._ready(), self._trace.most)
        tail = self._dequeue(want) if want else None
        if head is None or tail is None:
            return head or tail
        # Not concat, which knows no variants.
        places = [tf.constant([0]), tf.range(1, want + 1)]
        return [
            tf.raw_ops.DynamicStitch(indices=places, data=pair)
            for pair in zip(head, tail, strict=True)
        ]

    def _ready(self) -> int:
        return self._queue.size()

    def _full(self) -> bool:
        """Is there a block's worth in the queue, or nothing more to come?"""
        if self._ended.is_set() or self._cancelled.is_set() or self._ready() >= self._trace.most:
            return True
        return any(2 * queue.size() >= self._trace.quanta for queue in self._budget)

    def _dequeue(self, count: int) -> list[Tensor] | None:
        try:
            # dequeue_up_to would copy.
            taken = self._queue.dequeue() if self._trace.alone else self._queue.dequeue_up_to(count)
        except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
            return None
        # Pack copies nothing here, and takes a fifth of reshape's time.
        return [tf.raw_ops.Pack(values=[t]) for t in taken] if self._trace.alone else taken

    def _cut(self, stacked: list[Tensor]) -> Iterator[Block]:
        """Blocks of what was taken: large elements alone, the others by bytes."""
        count = stacked[0].shape[0]
        if not self._trace.varies:
            yield self._block(stacked, 0, count, count)
            return
        sizes = stacked.pop().numpy()
        quanta = int((sizes // QUANTUM_BYTES).clip(max=self._trace.quanta).sum())
        if quanta:
            self._release(quanta)
        start, total = 0, 0
        for i, size in enumerate(sizes.tolist()):
            if i > start and (size >= LARGE_BYTES or total + size > self._trace.block_bytes):
                yield self._block(stacked, start, i, count)
                start, total = i, 0
            total += size
            if size >= LARGE_BYTES:
                yield self._block(stacked, i, i + 1, count)
                start, total = i + 1, 0
        if start < count:
            yield self._block(stacked, start, count, count)

    def _release(self, quanta: int) -> None:
        try:
            self._budget[0].dequeue_up_to(quanta)
        except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
            pass  # cancelled: nothing is counted any more

    def _block(self, stacked: list[Tensor], start: int, stop: int, count: int) -> Block:
        parts = iter(stacked if stop - start == count else [t[start:stop] for t in stacked])
        components = tuple(c.decode([next(parts) for _ in c.queued]) for c in self._trace.columns)
        if self._trace.shapes is None:
            return Block(stop - start, components)
        pairs = zip(components, self._trace.shapes, strict=True)
        stacks = [reshaped(c.values, (-1, *shape)) for c, shape in pairs]
        return Block(len(stacks[0]), tuple(map(Component, stacks)))


def _pipeline_error(error: Any) -> PipelineError:
    """TensorFlow's error with its code's canonical name."""
    code = next((name for name, number in _CODES if number == error.error_code), "UNKNOWN")
    return PipelineError(code, _TRACE.sub("", str(error.message)))


# Where in *our* program TensorFlow's nodes come from, which tells nobody anything.
_TRACE = re.compile(
    r"^Graph execution error:\n\nDetected at node .*\n"
    r"(<stack traces unavailable>\n|(  File .*\n\n?)+)+"
    r"|\n\t \[\[.*"
    r"|\{\{function_node [^}]*\}\} ?"
)

_CODES = [
    (name, value)
    for name, value in vars(tf.errors).items()
    if name.isupper() and isinstance(value, int)
]
