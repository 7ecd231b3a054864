"""A graph that runs bundle by bundle: checks that it can, and the dataset of one range.

In a long run, sources ask Python for splits and take whatever comes. A bundle is one range of
splits. So here each source becomes the dataset of a range, and the range is two tensors. The whole
graph becomes the function of a flat_map: C++ makes an iterator for one bundle after another,
without Python and without tracing or optimizing again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from ....journal.proto import events_pb2 as ev
from ...proto import graph_pb2 as pb
from .element_packs import calls_functions
from .graphs import TABLES, Graph, all_nodes, bodies, called_functions
from .imports import ImportedGraph, expansion, import_graph, import_part, options_of, output_specs
from .seeds import KEY, seeded
from .source_walk import SourceWalk
from .split_sources import require_bundles, require_splittable

Tensor = Any


class BundleGraph:
    """A graph as a function of a range of splits, a key and a start, to be traced."""

    most_at_once = 2**63 - 1

    def __init__(self, graph: bytes, sources: Sequence[ev.SplitSource]) -> None:
        """Raises InvalidGraph, NotSplittable."""
        require_splittable(sources)
        parsed = Graph(graph)
        walk = SourceWalk(parsed)
        require_bundles(walk)
        self._sources = {source.node.name for source in walk.sources}
        self.component_specs = output_specs(parsed.dataset)
        self.calls_functions = calls_functions(parsed)
        self.options = options_of(walk.options)
        self.options.deterministic = True
        del parsed
        self._imported = ImportedGraph(seeded(graph))
        run_in_calling_thread(self._imported.proto)
        try:
            self._imported.add_functions()
        except BaseException:
            self.close()
            raise

    def dataset(self, first: Tensor, count: Tensor, key: Tensor) -> Any:
        """The dataset of the splits first … first + count − 1."""

        def stand_in(node: pb.NodeDef, operands: list[Tensor], source: Tensor) -> Tensor:
            of_range = expansion(node, operands, source, output_specs(node))
            return of_range(first, count)._variant_tensor

        proto = self._imported.proto
        drawn = any(KEY in node.input for node in proto.node)
        given = {KEY: key} if drawn else {}
        results = [self._imported.result]
        (variant,) = import_graph(proto, self._sources, stand_in, given, results)
        return dataset_ops._VariantDataset(variant, self.component_specs)

    def forget(self) -> None:
        """Free what `dataset` needed only for tracing."""
        self._imported.forget()

    def close(self) -> None:
        """Free TensorFlow's resources. Idempotent. No bundle may still run."""
        self._imported.forget()
        tables, self._imported.tables = self._imported.tables, []
        if tables:  # shared by all bundles
            handles_of = tf.function(
                lambda: import_part(self._imported.proto, {}, tables), autograph=False
            )
            for handle in handles_of():
                tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
        self._imported.close()


_NEED_POOL = {
    *("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile", "For"),
    *("Switch", "RefSwitch", "_SwitchN", "Merge", "RefMerge", "LoopCond", "ControlTrigger"),
    *("Enter", "RefEnter", "Exit", "RefExit", "NextIteration", "RefNextIteration"),
    # Operations of TensorFlow 1, which return references.
    *("Variable", "VariableV2", "TemporaryVariable"),
    *(op for op in TABLES if not op.endswith("V2")),
}


def run_in_calling_thread(graph: pb.GraphDef) -> None:
    """Have the graph's maps, also those in functions, call their functions in the calling thread.

    TensorFlow runs a map's function in its thread pool, so that operations that do not depend on
    each other run at the same time. To hand over a call and to wait for it takes some 25 µs, most
    of the cost of a small function, and bundles run at the same time anyway. TensorFlow 2.21's
    executor for one thread supports no control flow: a function that has any, also in functions
    that it calls, stays in the pool. So do maps with `num_parallel_calls`.
    """
    nodes = dict(bodies(graph))
    for node in all_nodes(graph):
        if node.op != "MapDataset":
            continue
        called = called_functions([node], nodes)
        if not any(inner.op in _NEED_POOL for name in called for inner in nodes[name]):
            node.attr["use_inter_op_parallelism"].b = False
