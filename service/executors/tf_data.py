"""Runs a tf.data graph into blocks.

Two sides meet in a FIFOQueue of TensorFlow's. A thread drives the pipeline: one call that
stays in C++ and puts every element into the queue. `blocks` takes out whatever is ready, in
bulk. So a fast pipeline gives large blocks, a slow one small ones, and no element waits longer
than LINGER_S for a block to fill. The queue bounds how far the pipeline runs ahead.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import compression_ops
from tensorflow.python.data.ops import dataset_ops, map_op
from tensorflow.python.eager import context, execute

from ..blocks import BLOCK_BYTES, Block, Component
from ..element_specs import component_specs, flatten, options_for, plain
from ..errors import PipelineError
from .columns import column, reshaped
from .feeds import LoadedGraph
from .packs import elements_per_pack
from .splits import SplitFeed

LARGE_BYTES = 512 << 10  # an element of this size travels alone, and is not copied
MAX_BLOCK_ELEMENTS = 8192
LINGER_S = 0.01  # how long an element may wait for company
POLL_S = 0.001
QUANTUM_BYTES = 4096  # in which the queue's bytes are counted where sizes differ
QUEUE_BLOCKS = 2
DRIVEN_ELEMENTS = 1024
UNWIND_S = 1.0  # for a cancelled pipeline to end at its next element, or by its feed

Tensor = Any


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
        try:
            self._graph = LoadedGraph(graph, feed)
        except tf.errors.OpError as error:
            raise _pipeline_error(error) from error
        try:
            dataset = self._dataset(element_spec, compressed)
            raw = dataset.element_spec
            specs = list(raw) if element_spec is None else component_specs(element_spec)
            alone = compressed or self._graph.calls_functions
            pack = 1 if alone else min(elements_per_pack(specs), self._graph.most_at_once)
            self._run = _Run(dataset, element_spec, specs, block_bytes, pack)
        except BaseException:
            self._graph.close()
            raise

    def _dataset(self, element_spec: Any, compressed: bool) -> Any:
        raw = self._graph.component_specs
        if element_spec is None or compressed:
            dataset = dataset_ops._VariantDataset(self._graph.variant, raw)
        else:
            dataset = dataset_ops._VariantDataset(self._graph.variant, element_spec)
        if element_spec is None or not compressed:
            return dataset
        return map_op._MapDataset(
            dataset,
            plain(lambda element: compression_ops.uncompress(element, element_spec)),
            use_inter_op_parallelism=False,
        )

    def blocks(self) -> Generator[Block, None, None]:
        """The elements, in order; to be called once. Raises PipelineError.

        After `cancel` it ends early. When it has ended, or is closed, no thread is left.
        """
        try:
            yield from self._run.blocks()
        finally:
            self._graph.close()

    def cancel(self) -> None:
        """End `blocks` soon, from any thread. The feed's own waits are the caller's to end."""
        self._run.cancel()


class _Run:
    """The queue between the pipeline and `blocks`."""

    def __init__(
        self, dataset: Any, element_spec: Any, specs: list[Any], block_bytes: int, pack: int
    ) -> None:
        """`pack` elements of fixed shapes go through the queue together, as one."""
        self._shapes = [spec.shape for spec in specs] if pack > 1 else None
        if pack > 1:
            dataset = dataset.batch(pack)
            specs = [tf.TensorSpec([None, *spec.shape], spec.dtype) for spec in specs]
        self._columns = [column(spec) for spec in specs]
        self._block_bytes = block_bytes
        fixed = [c.fixed_bytes for c in self._columns if c.fixed_bytes is not None]
        self._varies = len(fixed) < len(self._columns)
        self._element_bytes = sum(fixed)
        # One element a block: the large, and those that do not even have a rank in common.
        self._alone = self._element_bytes >= LARGE_BYTES or any(s.shape.rank is None for s in specs)
        most = 1 if self._alone else block_bytes // max(1, self._element_bytes)
        self._most = max(1, min(MAX_BLOCK_ELEMENTS, most))

        queued = [item for c in self._columns for item in c.queued]
        if self._varies:
            queued.append((tf.int64, []))  # the element's bytes
        elif not queued:
            queued.append((tf.bool, []))  # elements without a component still count
        capacity = max(1, QUEUE_BLOCKS * block_bytes // max(1, self._element_bytes))
        self._queue = tf.queue.FIFOQueue(
            min(capacity, 2 * MAX_BLOCK_ELEMENTS),
            [dtype for dtype, _ in queued],
            [shape for _, shape in queued],
        )
        # Where sizes differ the bytes in the queue are bounded by a queue of quanta beside it.
        self._quanta = QUEUE_BLOCKS * block_bytes // QUANTUM_BYTES
        self._budget = tf.queue.FIFOQueue(self._quanta, [tf.bool], [[]])

        @plain
        def enqueue(*element: Any) -> Tensor:
            whole = element if type(dataset.element_spec) is tuple else element[0]
            tensors = list(whole) if element_spec is None else flatten(element_spec, whole)
            parts = [p for c, t in zip(self._columns, tensors, strict=True) for p in c.encode(t)]
            if self._varies:
                sizes = [c.size(t) for c, t in zip(self._columns, tensors, strict=True)]
                parts.append(tf.add_n(sizes))
                quanta = tf.minimum(parts[-1] // QUANTUM_BYTES, self._quanta)
                self._budget.enqueue_many([tf.zeros([quanta], tf.bool)])
            self._queue.enqueue(parts or [True])
            return tf.constant(0)

        # An operation that fails cancels all others of its step. `drive` waits for something in
        # this queue while the pipeline runs, so closing it cancels the pipeline. TensorFlow's
        # CancellationManager would hold Python's global lock while it waits for the pipeline's
        # locks; and who has one of these may wait for Python.
        self._stop = tf.queue.FIFOQueue(1, [tf.bool], [[]])

        @plain
        def let_go(_: Tensor) -> Tensor:
            self._stop.enqueue(True)
            return tf.constant(0)

        # Made outside `drive`, in which uses of one queue would wait for each other.
        end = tf.data.Dataset.range(1).map(let_go).batch(1)

        def drive() -> Tensor:
            self._stop.dequeue()
            # Without inter-op parallelism the function runs in the driving thread, 10 × faster.
            fed = map_op._MapDataset(dataset, enqueue, use_inter_op_parallelism=False)
            # Padded, because TensorFlow would fuse a plain batch with the map before it.
            fed = fed.padded_batch(DRIVEN_ELEMENTS, []).concatenate(end)
            options = options_for(specs)
            options.experimental_optimization.inject_prefetch = False  # the queue is one
            return fed.with_options(options).reduce(0, _keep)

        self._drive = tf.function(drive, autograph=False).get_concrete_function()
        self._ended = threading.Event()
        self._cancelled = threading.Event()
        self._error: PipelineError | None = None

    def cancel(self) -> None:
        self._cancelled.set()
        _close(self._queue, cancel=True)
        _close(self._budget, cancel=True)

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
                _close(self._stop)
            thread.join()
            # What holds elements and constants goes now: we are part of cycles of references.
            for queue in (self._queue, self._budget, self._stop):
                tf.raw_ops.DestroyResourceOp(resource=queue.queue_ref)
            self._drive = None

    def _pipeline(self) -> None:
        try:
            _call(self._drive)
        except tf.errors.OpError as error:
            self._error = _pipeline_error(error)
        except Exception as error:  # noqa: BLE001 - a message of TensorFlow's that is no UTF-8, say
            self._error = PipelineError("UNKNOWN", f"the pipeline failed: {error!r}")
        finally:
            self._ended.set()
            _close(self._queue)

    def _take(self, linger_s: float) -> list[Tensor] | None:
        """What the queue has, stacked; at least one element. None at the end."""
        if self._alone:
            return self._dequeue(1)
        head = None
        if not self._ready():
            head = self._dequeue(1)
            if head is None:
                return None
        give_up = time.monotonic() + linger_s
        while not self._full() and time.monotonic() < give_up:
            time.sleep(POLL_S)
        want = min(self._ready(), self._most)
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
        return int(self._queue.size())

    def _full(self) -> bool:
        """Is there a block's worth in the queue, or nothing more to come?"""
        if self._ended.is_set() or self._cancelled.is_set() or self._ready() >= self._most:
            return True
        return self._varies and 2 * int(self._budget.size()) >= self._quanta

    def _dequeue(self, count: int) -> list[Tensor] | None:
        try:
            # dequeue_up_to would copy.
            taken = self._queue.dequeue() if self._alone else self._queue.dequeue_up_to(count)
        except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
            return None
        tensors = list(taken) if isinstance(taken, list | tuple) else [taken]
        # Pack copies nothing here, and takes a fifth of reshape's time.
        return [tf.raw_ops.Pack(values=[t]) for t in tensors] if self._alone else tensors

    def _cut(self, stacked: list[Tensor]) -> Iterator[Block]:
        """Blocks of what was taken: large elements alone, the others by bytes."""
        count = stacked[0].shape[0]
        if not self._varies:
            yield self._block(stacked, 0, count, count)
            return
        sizes = stacked.pop().numpy()
        quanta = int((sizes // QUANTUM_BYTES).clip(max=self._quanta).sum())
        if quanta:
            self._release(quanta)
        start, total = 0, 0
        for i, size in enumerate(sizes.tolist()):
            if i > start and (size >= LARGE_BYTES or total + size > self._block_bytes):
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
            self._budget.dequeue_many(quanta)
        except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
            pass  # cancelled: nothing is counted any more

    def _block(self, stacked: list[Tensor], start: int, stop: int, count: int) -> Block:
        parts = iter(stacked if stop - start == count else [t[start:stop] for t in stacked])
        components = tuple(c.decode([next(parts) for _ in c.queued]) for c in self._columns)
        if self._shapes is None:
            return Block(stop - start, components)
        pairs = zip(components, self._shapes, strict=True)
        stacks = [reshaped(c.values, (-1, *shape)) for c, shape in pairs]
        return Block(len(stacks[0]), tuple(map(Component, stacks)))


def _call(function: Any) -> None:
    """Run a concrete function, whatever cancellation is on in other threads.

    CancellationManager.get_cancelable_function keeps the manager in a global variable, where
    the calls of all threads find it.
    """
    ctx = context.context()
    options = ctx.function_call_options.as_attrs()
    execute.execute(
        function.name.decode(),
        num_outputs=len(function.outputs),
        inputs=function.captured_inputs,
        attrs=tuple(part for option in options.items() for part in option),
        ctx=ctx,
    )


@plain
def _keep(state: Tensor, _: Tensor) -> Tensor:
    return state


def _close(queue: Any, *, cancel: bool = False) -> None:
    try:
        queue.close(cancel_pending_enqueues=cancel)
    except (tf.errors.CancelledError, tf.errors.NotFoundError):
        pass  # closed already, or gone


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
