"""A tf.data graph as a pipeline of this process."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from ....journal.proto import events_pb2 as ev
from ... import structure
from ...blocks import BLOCK_BYTES
from ...errors import PipelineError
from ..splits import SplitFeed, SplitRange, require_bundle
from .bundles import BundleGraph
from .drivers import UNWIND_S, BundleDrivers, DrivenBundle, LongRun, pipeline_error
from .element_specs import component_specs, options_for
from .feeds import TracedGraph, runs_share_nothing
from .graphs import Graph
from .imports import graph_of, output_specs
from .op_libraries import explained
from .run import TfDataRun
from .seeds import key_of
from .split_files import Begun, naming_files
from .split_sources import split_sources
from .traces import BundleTrace, K, RunTrace, T, Traces

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
        self._key: tuple[Any, ...] = hashlib.sha256(graph).digest(), compressed
        if element_spec is not None:  # in text, whose hash is computed once
            self._key += structure.encode(element_spec), f"{component_specs(element_spec)}"
        self._lock = threading.Lock()
        self._release: Callable[[], None] | None = None  # keeps the bundles' trace until `close`
        self._long_runs: weakref.WeakSet[LongRun] = weakref.WeakSet()

    def run(self, feed: SplitFeed | None) -> TfDataRun:
        """Raises InvalidGraph, NotSplittable, UnsupportedElement, PipelineError."""
        registered = None if feed is None else feed.sources

        def make() -> RunTrace:
            return self._trace(RunTrace, TracedGraph(self._graph, registered), BLOCK_BYTES)

        with contextlib.ExitStack() as held, self._explaining():
            if self._runs_share:
                trace, release = self._take(registered, make)
            else:
                trace = make()
                release = trace.close
            held.callback(release)
            loaded = trace.load(feed)
            held.callback(loaded.close)
            source = LongRun(trace, loaded, held.pop_all().close)
        self._long_runs.add(source)
        return TfDataRun(trace, source, explained=self._explained)

    def bundle(self, splits: SplitRange, *, number: int, seed: int, start: int = 0) -> TfDataRun:
        """Raises InvalidGraph, NotSplittable, UnsupportedElement, PipelineError."""
        require_bundle(self._sources, splits, start)
        with self._explaining():
            drivers, release = self._take_bundles()
            with self._lock:
                if self._release is None:
                    _, self._release = self._take_bundles()
        numbers = [splits.first, splits.count, key_of(seed, number), start]
        source = DrivenBundle(drivers, numbers, release)
        return TfDataRun(drivers.trace, source, number, start, self._explained)

    def close(self) -> None:
        """Idempotent. The bundles' drivers stay for the next pipeline of this graph.

        Waits a little for TensorFlow to free the resources of long runs that have ended.
        """
        with self._lock:
            release, self._release = self._release, None
        if release is not None:
            release()
        for source in list(self._long_runs):
            source.join(UNWIND_S)

    @functools.cached_property
    def _runs_share(self) -> bool:
        """Whether long runs may share a trace."""
        graph, spec = Graph(self._graph), self._layout[0]
        specs = output_specs(graph.dataset) if spec is None else component_specs(spec)
        return runs_share_nothing(graph, options_for(specs))

    def _take_bundles(self) -> tuple[BundleDrivers, Callable[[], None]]:
        def make() -> BundleDrivers:
            graph = BundleGraph(self._graph, self._sources)
            return BundleDrivers(self._trace(BundleTrace, graph, BUNDLE_BLOCK_BYTES))

        return self._take(self._sources, make, kind="bundles")

    def _trace(
        self, kind: Callable[..., T], graph: TracedGraph | BundleGraph, block_bytes: int
    ) -> T:
        try:
            return kind(graph, *self._layout, block_bytes)
        except BaseException:
            graph.close()
            raise

    def _take(
        self, sources: Sequence[ev.SplitSource] | None, make: Callable[[], K], kind: str = ""
    ) -> tuple[K, Callable[[], None]]:
        known = None if sources is None else tuple(s.SerializeToString() for s in sources)
        return TRACES.take((*self._key, known, kind), len(self._graph), make)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            raise self._explained(pipeline_error(error), {}) from error

    def _explained(self, error: PipelineError, begun: Begun) -> PipelineError:
        said = explained(error.message, self._graph)
        return naming_files(self._graph, PipelineError(error.code, said), begun)


def warm_up() -> None:
    """Run a small pipeline of leased splits that calls a function."""
    dataset = tf.data.Dataset.range(1).map(tf.identity)
    graph = graph_of(dataset)
    sources = split_sources(graph)
    pipeline = TfDataPipeline(graph, sources, element_spec=dataset.element_spec)
    splits = iter([SplitRange(0, 1, 0)])
    feed: Any = SimpleNamespace(sources=sources, next_range=lambda *_: next(splits, None))
    list(pipeline.run(feed).blocks())
    pipeline.close()
    TRACES.forget_idle()
