"""A tf.data graph as a pipeline of this process."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from ....journal.proto import events_pb2 as ev
from ... import structure
from ...blocks import BLOCK_BYTES
from ...errors import PipelineError
from ..splits import SplitFeed, SplitRange, require_bundle
from .bundles import BundleGraph
from .drivers import UNWIND_S, BundleDrivers, DrivenBundle, LongRun, pipeline_error
from .element_specs import component_specs
from .feeds import TracedGraph
from .op_libraries import explained
from .run import TfDataRun
from .seeds import key_of
from .split_files import Begun, naming_files
from .split_sources import split_sources
from .traces import BundleTrace, K, L, RunTrace, T, Traces

TRACES = Traces()
"""Of this process."""


BUNDLE_BLOCK_BYTES = 2 << 20
"""Of blocks of bundles, at most: many bundles are read at a time, each of which has some blocks in
memory."""


class TfDataPipeline:
    """A serialized dataset graph, as `pipelines.Pipeline`.

    With `element_spec`, blocks have that spec's components, and `compressed` says whether to undo
    tf.data service's compression at the graph's end. Without it, the components are what the graph
    yields, with variants serialized by `tf.io.serialize_tensor`.
    """

    def __init__(
        self,
        graph: bytes,
        sources: Sequence[ev.SplitSource] = (),
        *,
        element_spec: Any = None,
        compressed: bool = False,
    ) -> None:
        """`sources` are the registered ones, for bundles; a long run uses its feed's."""
        self._graph = graph
        self._sources = sources
        self._layout = element_spec, compressed
        self._key = (
            hashlib.sha256(graph).digest(),
            None if element_spec is None else structure.encode(element_spec),
            None if element_spec is None else tuple(component_specs(element_spec)),
            compressed,
        )
        self._lock = threading.Lock()
        self._bundles: _Bundles | None = None
        self._long_runs: weakref.WeakSet[LongRun] = weakref.WeakSet()

    def run(self, feed: SplitFeed | None) -> TfDataRun:
        """Raises InvalidGraph, NotSplittable, UnsupportedElement, PipelineError."""
        registered = None if feed is None else feed.sources

        def make() -> RunTrace:
            return self._trace(RunTrace, TracedGraph(self._graph, registered), BLOCK_BYTES)

        trace, loaded, release = self._load(registered, make, lambda trace: trace.load(feed))
        source = LongRun(trace, loaded, release)
        self._long_runs.add(source)
        return TfDataRun(trace, source, explained=self._explained)

    def bundle(self, splits: SplitRange, *, number: int, seed: int, start: int = 0) -> TfDataRun:
        """Raises InvalidGraph, NotSplittable, UnsupportedElement, PipelineError."""
        require_bundle(self._sources, splits, start)
        with self._lock:
            if self._bundles is None:
                self._bundles = self._open_bundles()
            bundles = self._bundles
            bundles.users += 1
        numbers = [splits.first, splits.count, key_of(seed, number), start]
        source = DrivenBundle(bundles.drivers, numbers, lambda: self._leave(bundles))
        return TfDataRun(bundles.drivers.trace, source, number, start, self._explained)

    def close(self) -> None:
        """Idempotent. The bundles' drivers stay for the next pipeline of this graph.

        Waits a little for TensorFlow to free the resources of long runs that have ended.
        """
        with self._lock:
            bundles, self._bundles = self._bundles, None
        if bundles is not None:
            self._leave(bundles)
        for source in list(self._long_runs):
            source.join(UNWIND_S)

    def _open_bundles(self) -> _Bundles:
        def make() -> BundleDrivers:
            graph = BundleGraph(self._graph, self._sources)
            return BundleDrivers(self._trace(BundleTrace, graph, BUNDLE_BLOCK_BYTES))

        def load(_: BundleDrivers) -> contextlib.ExitStack:
            return contextlib.ExitStack()  # nothing: all bundles share what the trace has

        drivers, _, release = self._load(self._sources, make, load, "bundles")
        return _Bundles(drivers, release)

    def _trace(
        self, kind: Callable[..., T], graph: TracedGraph | BundleGraph, block_bytes: int
    ) -> T:
        try:
            return kind(graph, *self._layout, block_bytes)
        except BaseException:
            graph.close()
            raise

    def _load(
        self,
        sources: Sequence[ev.SplitSource] | None,
        make: Callable[[], K],
        load: Callable[[K], L],
        kind: str = "",
    ) -> tuple[K, L, Callable[[], None]]:
        known = None if sources is None else tuple(s.SerializeToString() for s in sources)
        try:
            return TRACES.load((*self._key, known, kind), len(self._graph), make, load)
        except tf.errors.OpError as error:
            raise self._explained(pipeline_error(error), {}) from error

    def _explained(self, error: PipelineError, begun: Begun) -> PipelineError:
        said = explained(error.message, self._graph)
        return naming_files(self._graph, PipelineError(error.code, said), begun)

    def _leave(self, bundles: _Bundles) -> None:
        with self._lock:
            bundles.users -= 1
            last = not bundles.users
        if last:
            bundles.release()


def warm_up() -> None:
    """Run a small pipeline of leased splits that calls a function."""
    dataset = tf.data.Dataset.range(1).map(tf.identity)
    graph = bytes(dataset._as_serialized_graph().numpy())
    sources = [source.splits for source in split_sources(graph)]
    pipeline = TfDataPipeline(graph, sources, element_spec=dataset.element_spec)
    list(pipeline.run(_OneSplit(sources)).blocks())
    pipeline.close()
    TRACES.forget_idle()


class _OneSplit:
    """A feed of one split."""

    def __init__(self, sources: Sequence[ev.SplitSource]) -> None:
        self.sources = sources
        self._left = [SplitRange(0, 1, 0)]

    def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
        return self._left.pop() if self._left else None

    def is_over(self, sources: Iterable[int]) -> bool:
        return not self._left


class _Bundles:
    """What a pipeline's bundles share."""

    def __init__(self, drivers: BundleDrivers, release: Callable[[], None]) -> None:
        self.drivers = drivers
        self.release = release
        self.users = 1  # the runs, and the pipeline until it is closed
