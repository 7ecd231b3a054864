"""Which graphs yield the elements of their splits in order, a known number of splits an element."""

from __future__ import annotations

from .constants import constant
from .graphs import Graph
from .source_walk import kind_of

_SOURCES = {"Range", "TensorSlice"}  # a split is an element

_ONE_TO_ONE = {
    *("AssertCardinality", "AssertNext", "Finalize", "Map", "MaxIntraOpParallelism", "Model"),
    *("Options", "Prefetch", "PrivateThreadPool", "Repeat"),
}


def splits_per_element(graph: Graph) -> int:
    """How many splits each element is of, if elements come in the order of their splits; else 0.

    The last batch may be smaller, so there is no such number if anything repeats it.
    """
    node, splits, repeats = graph.dataset, 1, False
    while inputs := graph.dataset_inputs(node):
        kind = kind_of(node)
        repeats |= kind == "Repeat"
        if kind == "Batch" and (size := constant(graph.producer(node.input[1]))) is not None:
            splits *= size.value or 0
        elif kind not in _ONE_TO_ONE:
            return 0
        may_reorder = node.attr["deterministic"].s == b"false" or node.attr["sloppy"].b
        if may_reorder or len(inputs) > 1:
            return 0
        node = inputs[0]
    return splits if kind_of(node) in _SOURCES and not (repeats and splits > 1) else 0
