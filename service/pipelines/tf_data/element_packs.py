"""Pipelines that may be driven several elements at a time.

To put an element into the queue costs a function call of TensorFlow's. Where the pipeline
calls no function for its elements that is most of the cost; and there, elements come so fast
that none waits long for its neighbours. So such a pipeline (ranges and slices of tensors,
however they are shuffled, repeated and interleaved) is batched into *packs* before the queue. In
any other pipeline an element may take a second, and travels as soon as it is there.

Strings are never packed: nobody knows their sizes before, and they come from files, which may
fail, and then TensorFlow would drop the batch that it was filling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .graphs import Graph

PACK_BYTES = 64 << 10
MAX_PACK_ELEMENTS = 1024

_DATASETS = {
    "AutoShardDataset",
    "CacheDataset",
    "ConcatenateDataset",
    "FlatMapDataset",
    "InterleaveDataset",
    "ListDataset",
    "OptionsDataset",
    "ParallelInterleaveDataset",
    "PrefetchDataset",
    "RangeDataset",
    "RepeatDataset",
    "ShardDataset",
    "ShuffleAndRepeatDataset",
    "ShuffleDataset",
    "SkipDataset",
    "TakeDataset",
    "TensorDataset",
    "TensorSliceDataset",
    "ZipDataset",
}

# What may stand beside datasets in the functions of interleave and flat_map.
_TRIVIAL = {"Const", "Identity", "NoOp", "Reshape"}


def elements_per_pack(specs: Sequence[Any]) -> int:
    """How many elements of these component specs make a pack, in a pipeline that may have them."""
    fixed = [spec.shape.num_elements() for spec in specs if spec.shape.is_fully_defined()]
    if not specs or len(fixed) < len(specs) or 0 in fixed:
        return 1
    if any(spec.dtype.name in ("string", "variant", "resource") for spec in specs):
        return 1
    size: int = sum(n * spec.dtype.size for n, spec in zip(fixed, specs, strict=True))
    return max(1, min(MAX_PACK_ELEMENTS, PACK_BYTES // size))


def calls_functions(graph: Graph) -> bool:
    """Whether the pipeline calls functions for its elements, as far as one can see."""
    datasets = (node.op for node in graph.proto.node if "Dataset" in node.op)
    functions = (node.op for f in graph.proto.library.function for node in f.node_def)
    return not all(_is_plain_dataset(op) for op in datasets) or not all(
        op in _TRIVIAL or _is_plain_dataset(op) for op in functions
    )


def _is_plain_dataset(op: str) -> bool:
    return op.rstrip("0123456789").removesuffix("V") in _DATASETS
