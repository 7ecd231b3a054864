"""Pipelines as TensorFlow functions, traced once for many runs.

Importing a graph and tracing its driver takes five times as long as running it to its first
element, and TensorFlow never frees all of a function. So all runs of the same graph share a trace,
and it is kept for the next run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol, TypeVar, cast

import tensorflow as tf
from tensorflow.python.data.experimental.ops import compression_ops
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.util import nest

from ... import structure
from ..splits import SplitFeed
from .bundles import BundleGraph
from .columns import column
from .element_packs import elements_per_pack
from .element_specs import component_specs, flatten, options_for
from .feeds import LoadedGraph, TracedGraph
from .queues import OwnedQueue, Queue, QueueSpec
from .transformations import call_unoptimized, concrete, drained, flat_mapped, mapped, until_stopped

LARGE_BYTES = 512 << 10  # an element of this size is sent alone, without the copy into a block
MAX_BLOCK_ELEMENTS = 8192
QUANTUM_BYTES = 4096  # the unit of the queue's budget where sizes differ
QUEUE_BLOCKS = 2
KEPT_TRACES = 64
KEPT_WITH_DRIVERS = 4
"""How many unused traces keep their bundle drivers, such as those of a training's and a
validation's datasets. A driver has some 4 threads, a few hundred KB, and copies of the graph."""
KEPT_WITH_DRIVERS_BYTES = 1 << 20  # limit of such a trace's graph
KEPT_BYTES = 32 << 20  # limit of the kept traces' graphs; TensorFlow copies each several times

Tensor = Any
T = TypeVar("T", bound="Trace")
K = TypeVar("K", bound="Kept")

STOP = QueueSpec(1, (tf.bool,), ((),))
"""The queue that a step waits for while it drives; see Driver."""


class Kept(Protocol):
    """What `Traces` keeps: a trace, perhaps with its drivers."""

    has_drivers: bool

    def end_idle(self) -> None:
        """End drivers that wait for the next bundle."""

    def close(self) -> None:
        """Free TensorFlow's resources. No run may still use it."""


class Trace:
    """A function that puts a graph's elements into a queue, traced.

    This class has what long runs and bundles share; subclasses make `traced`.
    """

    min_varying_bytes = 0  # an element whose size varies counts as at least this much

    def __init__(
        self,
        graph: TracedGraph | BundleGraph,
        element_spec: Any,
        compressed: bool,
        block_bytes: int,
    ) -> None:
        """Arguments as TfDataPipeline's. Raises UnsupportedElement."""
        self._graph = graph
        self.traced: Any = None  # a Drive
        self._element_spec = element_spec
        self._compressed = compressed
        raw = graph.component_specs
        specs = list(raw) if element_spec is None else component_specs(element_spec)
        alone = compressed or graph.calls_functions
        self.pack = 1 if alone else min(elements_per_pack(specs), graph.most_at_once)
        self.shapes = [spec.shape for spec in specs] if self.pack > 1 else None
        if self.pack > 1:  # a pack of fixed-shape elements is one element of the queue
            specs = [tf.TensorSpec([None, *spec.shape], spec.dtype) for spec in specs]
        self._options = options_for(specs)
        self.columns = [column(spec) for spec in specs]
        self.block_bytes = block_bytes
        fixed = [c.fixed_bytes for c in self.columns if c.fixed_bytes is not None]
        self.varies = len(fixed) < len(self.columns)
        element_bytes = max(sum(fixed), self.min_varying_bytes if self.varies else 0)
        # One element a block: large ones, and those without a common rank.
        self.alone = element_bytes >= LARGE_BYTES or any(s.shape.rank is None for s in specs)
        most = 1 if self.alone else block_bytes // max(1, element_bytes)
        self.most = max(1, min(MAX_BLOCK_ELEMENTS, most))

        queued = [item for c in self.columns for item in c.queued]
        if self.varies:
            queued.append((tf.int64, []))  # the element's bytes
        elif not queued:
            queued.append((tf.bool, []))  # elements without a component still count
        dtypes = tuple(dtype for dtype, _ in queued)
        first = (1,) if self.alone else ()  # already a stack of one, which saves a copy
        shapes = tuple((*first, *shape) for _, shape in queued)
        capacity = max(1, QUEUE_BLOCKS * block_bytes // max(1, element_bytes))
        # Where sizes differ, a queue of quanta bounds the bytes in the main queue.
        self.quanta = QUEUE_BLOCKS * block_bytes // QUANTUM_BYTES
        self._queues = [QueueSpec(min(capacity, 2 * MAX_BLOCK_ELEMENTS), dtypes, shapes)]
        if self.varies:
            self._queues.append(QueueSpec(self.quanta, (tf.bool,), ((),)))

    def make_queues(self) -> list[OwnedQueue]:
        """New queues for a run: the main one and, if sizes vary, the budget."""
        return list(map(OwnedQueue, self._queues))

    def drive(self, *inputs: Tensor) -> None:
        """Call the function, which moves elements to queues until the end.

        Raises TensorFlow's errors.
        """
        self.traced.call(*inputs)

    def _elements(self, variant: Tensor) -> Any:
        """The dataset of the elements as their specs say."""
        spec, opened = self._element_spec, None
        if spec is None or self._compressed:
            spec, opened = self._graph.component_specs, spec
        dataset = dataset_ops._VariantDataset(variant, spec)
        if opened is not None:
            dataset = mapped(dataset, lambda e: compression_ops.uncompress(e, opened))
        return dataset

    def _packed(self, dataset: Any) -> Any:
        """The dataset of packs, the elements of the queue."""
        return dataset.batch(self.pack) if self.pack > 1 else dataset

    def _enqueue(self, whole: Any, handles: Sequence[Tensor]) -> None:
        """Put an element, or a pack, into the queues."""
        queue, *budget = map(Queue, self._queues, handles)
        spec = self._element_spec
        tensors = list(whole) if spec is None else flatten(spec, whole)
        encoded = [c.encode(t) for c, t in zip(self.columns, tensors, strict=True)]
        parts = [part for own, _ in encoded for part in own]
        if budget:
            parts.append(tf.add_n([size for _, size in encoded]))
            quanta = tf.minimum(parts[-1] // QUANTUM_BYTES, self.quanta)
            budget[0].enqueue_many([tf.fill(tf.stack([quanta]), False)])
        if self.alone:
            parts = [tf.raw_ops.Pack(values=[part]) for part in parts]
        queue.enqueue(parts or [True])

    def _drained(
        self,
        dataset: Any,
        stop: Tensor,
        again: Tensor,
        options: Any,
        function: Callable[[Any], Any] | None = None,
    ) -> Tensor:
        """Call the function for each element of a dataset until its end, or until `stop` is closed.
        `again` is the same queue: TensorFlow serializes uses of one tensor.
        """
        Queue(STOP, stop).dequeue()
        options = options.merge(self._options)
        options.experimental_optimization.inject_prefetch = False  # the queue does that
        state = drained(dataset.with_options(options), function)
        with tf.control_dependencies([state]):
            Queue(STOP, again).enqueue([True])
        return state

    def close(self) -> None:
        self._graph.close()
        self.traced = None


class Drive:
    """A traced function that moves elements to queues."""

    def __init__(self, function: Callable[..., Tensor], *inputs: Any) -> None:
        self._places, self._free = itertools.count(), list[int]()
        self._function = concrete(lambda *own: [function(*own)], inputs)

    def call(self, *inputs: Tensor) -> None:
        """Run until the end. Raises TensorFlow's errors."""
        try:
            place = self._free.pop()
        except IndexError:
            place = next(self._places)
        try:
            call_unoptimized(self._function, *inputs, place=place)
        finally:
            self._free.append(place)


_drives: weakref.WeakValueDictionary[Hashable, Drive] = weakref.WeakValueDictionary()
"""The functions of long runs, by all that they depend on. The dataset is an argument."""

_making = threading.Lock()


class RunTrace(Trace):
    """Drives a dataset: puts every element into a run's queues."""

    has_drivers = False

    _graph: TracedGraph

    def __init__(
        self, graph: TracedGraph, element_spec: Any, compressed: bool, block_bytes: int
    ) -> None:
        super().__init__(graph, element_spec, compressed, block_bytes)

        def drive(variant: Tensor, stop: Tensor, again: Tensor, *handles: Tensor) -> Tensor:
            packed = self._packed(self._elements(variant))
            enqueue = functools.partial(self._enqueue, handles=handles)

            def closing(_: Tensor) -> Any:
                """Nothing; whoever reads it, behind the pipeline, closes the queue (drivers.py)."""
                Queue(self._queues[0], handles[0]).close()
                return packed.take(0)

            fed = packed.concatenate(flat_mapped(tf.data.Dataset.range(1), closing))
            return self._drained(fed, stop, again, tf.data.Options(), enqueue)

        handles = [tf.TensorSpec([], tf.resource)] * (2 + len(self._queues))
        nesting, leaves = None, ()
        if element_spec is not None:
            nesting, leaves = structure.encode(element_spec), tuple(nest.flatten(element_spec))
        key = graph.component_specs, nesting, leaves, compressed, block_bytes, self.pack
        with _making:
            self.traced = _drives.get(key)
            if self.traced is None:
                self.traced = Drive(drive, tf.TensorSpec([], tf.variant), *handles)
                _drives[key] = self.traced

    def load(self, feed: SplitFeed | None) -> LoadedGraph:
        """The dataset of one run. Raises TensorFlow's errors."""
        return self._graph.load(feed)

    def end_idle(self) -> None:
        pass


class BundleTrace(Trace):
    """Drives the bundles of a queue of requests, each into its own queues, and closes those after
    the bundle."""

    # Each of the many open bundles fills its queue, while others lack elements that are read next.
    # Elements that are smaller than a quantum are bounded by their number alone.
    min_varying_bytes = QUANTUM_BYTES

    def __init__(self, graph: BundleGraph, *layout: Any) -> None:
        super().__init__(graph, *layout)
        handles = [tf.resource] * len(self._queues)
        self._requests = QueueSpec(1, (tf.int64, *handles), ((4,), *[()] * len(handles)))

        def bundle(numbers: Tensor, *handles: Tensor) -> Any:
            parts = tf.unstack(tf.ensure_shape(numbers, [4]))
            # TensorFlow's optimizer assumes that a dataset's input is the first output of a node
            # ("noop_elimination" looks for a `skip` by 0), and crashes otherwise.
            first, count, key, start = map(tf.identity, parts)
            dataset = self._elements(graph.dataset(first, count, key)._variant_tensor).skip(start)

            def close(_: Tensor) -> Tensor:
                Queue(self._queues[0], handles[0]).close()
                return tf.constant(0, tf.int64)

            closed = mapped(tf.data.Dataset.range(1), close)

            def enqueue(*element: Any) -> Tensor:
                whole = element if type(packed.element_spec) is tuple else element[0]
                self._enqueue(whole, handles)
                return tf.constant(0, tf.int64)

            packed = self._packed(dataset)
            return mapped(packed, enqueue).concatenate(closed)

        def drive(stop: Tensor, again: Tensor, requests: Tensor) -> Tensor:
            asked = until_stopped(lambda: tuple(Queue(self._requests, requests).dequeue()))
            return self._drained(flat_mapped(asked, bundle), stop, again, graph.options)

        self.traced = Drive(drive, *[tf.TensorSpec([], tf.resource)] * 3)
        graph.forget()

    def make_requests(self) -> OwnedQueue:
        """A queue of (int64 [4]: first, count, key, start; the handles of a run's queues)."""
        return OwnedQueue(self._requests)


class _Entry:
    def __init__(self, size: int) -> None:
        self.size = size
        self.users = 0
        self.tracing = threading.Lock()
        self.kept: Kept | None = None


class Traces:
    """Traces, shared by key; those used last are kept for later runs.

    Thread-safe. Keeps at most `most` unused traces, of graphs with at most `most_bytes` together,
    and `most_with_drivers` of them with their bundle drivers.
    """

    def __init__(
        self,
        most: int = KEPT_TRACES,
        most_bytes: int = KEPT_BYTES,
        most_with_drivers: int = KEPT_WITH_DRIVERS,
    ) -> None:
        self._most = most
        self._most_with_drivers = most_with_drivers
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()  # the last used is last

    def take(self, key: Hashable, size: int, make: Callable[[], K]) -> tuple[K, Callable[[], None]]:
        """The trace under `key`, which `make` creates if needed; and a function to call when the
        run is over. `size` is the graph's, in bytes. Raises what `make` raises."""
        with self._lock:
            entry = self._entries.setdefault(key, _Entry(size))
            entry.users += 1
        release = functools.partial(self._release, key, entry)
        try:
            with entry.tracing:  # one traces while the others wait
                kept = entry.kept = entry.kept or make()
        except BaseException:
            release()
            raise
        return cast("K", kept), release

    def forget_idle(self) -> None:
        """Free unused traces."""
        with self._lock:
            idle = [key for key, entry in self._entries.items() if not entry.users]
            dropped = [self._entries.pop(key) for key in idle]
        _close(dropped)

    def _release(self, key: Hashable, entry: _Entry) -> None:
        with self._lock:
            entry.users -= 1
            self._entries.move_to_end(key)
            idle = [item for item in self._entries.items() if not item[1].users]
            count, size = len(idle), sum(own.size for _, own in idle)
            dropped: list[_Entry] = []
            small: list[Kept] = []
            ending: list[Kept] = []
            for name, own in idle:
                if own.kept is None or count > self._most or size > self._most_bytes:
                    count, size = count - 1, size - own.size
                    dropped.append(self._entries.pop(name))
                elif own.kept.has_drivers:
                    few = own.size <= KEPT_WITH_DRIVERS_BYTES
                    (small if few else ending).append(own.kept)
            ending += small[: max(0, len(small) - self._most_with_drivers)]
        with contextlib.ExitStack() as stack:
            stack.callback(_close, dropped)
            for kept in ending:
                stack.callback(kept.end_idle)


def _close(entries: Iterable[_Entry]) -> None:
    """All of them, also if one raises an error."""
    with contextlib.ExitStack() as stack:
        for own in entries:
            if own.kept is not None:
                stack.callback(own.kept.close)
