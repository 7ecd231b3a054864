"""Pipelines that may be driven several elements at a time.

To put an element into the queue takes a TensorFlow function call. If the pipeline calls no function
for its elements, that is most of the cost, and elements come so fast that none waits long for the
next. So such a pipeline (ranges and slices of tensors, however shuffled, repeated and interleaved)
is batched into *packs* before the queue. In any other pipeline an element may take a second, and
is sent as soon as it exists.

Strings are never packed. Their sizes are unknown beforehand. And they come from files, which may
fail: TensorFlow would then drop the batch that it was filling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .graphs import Graph

PACK_BYTES = 64 << 10
MAX_PACK_ELEMENTS = 256

_DATASETS = {
    *("AutoShardDataset", "CacheDataset", "ConcatenateDataset", "FlatMapDataset"),
    *("InterleaveDataset", "ListDataset", "OptionsDataset", "ParallelInterleaveDataset"),
    *("PrefetchDataset", "RangeDataset", "RepeatDataset", "ShardDataset"),
    *("ShuffleAndRepeatDataset", "ShuffleDataset", "SkipDataset", "TakeDataset"),
    *("TensorDataset", "TensorSliceDataset", "ZipDataset"),
}

# Operations that the functions of interleave and flat_map may have besides datasets.
_TRIVIAL = {"Const", "Identity", "NoOp", "Reshape"}


_UNBATCHED = {"string", "variant", "resource", "int4", "uint4", "qint16", "quint16"}
"""Besides float8, dtypes that are not packed: TensorFlow's `batch` cannot copy all but the first
three."""


def elements_per_pack(specs: Sequence[Any]) -> int:
    """The number of elements of these component specs in a pack, if the pipeline may have packs."""
    fixed = [spec.shape.num_elements() for spec in specs if spec.shape.is_fully_defined()]
    if not specs or len(fixed) < len(specs) or 0 in fixed:
        return 1
    names = {spec.dtype.name for spec in specs}
    if names & _UNBATCHED or any(name.startswith("float8") for name in names):
        return 1
    size: int = sum(n * spec.dtype.size for n, spec in zip(fixed, specs, strict=True))
    return max(1, min(MAX_PACK_ELEMENTS, PACK_BYTES // size))


def calls_functions(graph: Graph) -> bool:
    """Whether the pipeline visibly calls functions for its elements."""
    datasets = (node.op for node in graph.proto.node if "Dataset" in node.op)
    functions = (node.op for f in graph.proto.library.function for node in f.node_def)
    return not all(_is_plain_dataset(op) for op in datasets) or not all(
        op in _TRIVIAL or _is_plain_dataset(op) for op in functions
    )


def _is_plain_dataset(op: str) -> bool:
    return op.rstrip("0123456789").removesuffix("V") in _DATASETS
