"""Names the files that a failed run was reading: TensorFlow's errors about their content don't."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import tensorflow as tf

from ...errors import ForebayError, PipelineError
from ...proto import graph_pb2 as pb
from ..splits import SplitRange
from .element_specs import plain
from .graphs import Graph
from .source_walk import SourceWalk

Begun = Mapping[int, Iterable[SplitRange]] | None
"""Of each source, what was begun last, and may not be finished. None: any splits."""

MOST_NAMED = 8
MOST_READ_BYTES = 1 << 28
"""Of files that are read once more, to find the one at fault."""


def naming_files(graph: bytes, error: PipelineError, begun: Begun) -> PipelineError:
    """The error with the file that is at fault, or all that it may be, if the splits are files'."""
    try:
        named = dict.fromkeys(_listed(graph, begun))
        if any(path in error.message for path in named):
            return error
        paths = [path for path in named if tf.io.gfile.exists(path)]
        if len(paths) > 1 and error.code == "DATA_LOSS":
            paths = _at_fault(paths, error) or paths
    except (ForebayError, tf.errors.OpError):  # the first error says more
        return error
    if not paths:
        return error
    if len(paths) > MOST_NAMED:
        said = f"one of {len(paths)} files, {paths[0]} to {paths[-1]}"
    else:
        said = " or ".join(paths)
    return PipelineError(error.code, f"{error.message} (while it read {said})")


def _listed(graph: bytes, begun: Begun) -> Iterator[str]:
    """What the splits are that were begun, if they are strings."""
    parsed = Graph(graph)
    for source in SourceWalk(parsed).sources:
        for tensor in source.node.input if source.node.op == "TensorSliceDataset" else ():
            names = _strings(parsed.producer(tensor))
            whole = [SplitRange(0, len(names), 0)]
            for splits in whole if begun is None else begun.get(source.leases, ()):
                yield from names[splits.first : splits.first + splits.count]


def _strings(node: pb.NodeDef) -> list[str]:
    """The vector of strings that a node yields; empty if it yields another, or isn't constant."""
    tensor = node.attr["value"].tensor
    if node.op != "Const" or tensor.dtype != tf.string or len(tensor.tensor_shape.dim) != 1:
        return []
    found = tf.io.parse_tensor(tensor.SerializeToString(), tf.string).numpy()
    return [name.decode(errors="replace") for name in found]


def _at_fault(paths: list[str], error: PipelineError) -> list[str]:
    """Of files of records, those that fail alike."""
    if sum(tf.io.gfile.stat(path).length for path in paths) > MOST_READ_BYTES:
        return []
    found = []
    for path in paths:
        try:
            tf.data.TFRecordDataset(path).reduce(tf.constant(0, tf.int64), plain(lambda n, _: n))
        except tf.errors.DataLossError as own:
            if error.message in own.message:
                found.append(path)
    return found
