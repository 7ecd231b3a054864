"""Rewrites a dataset's graph to one worker's shard, under static sharding.

TensorFlow's own workers rewrite the graph (`auto_shard.cc`): the rewrite adds a `shard` behind the
files, or at the end, or at `shard(SHARD_HINT, …)`. The op `AutoShardDataset` does the same rewrite
when the pipeline is made. But where file names come from a tensor, it sees a placeholder, in which
it expects no files. If then a function for what was read comes later (a flat_map behind an
interleave), it divides elements, and every worker reads all files. So here no file source is
directly behind its tensor.

TensorFlow's `AUTO` loses elements where files are joined with something else. It divides the files,
finds that it cannot divide the other input by files, and then divides the elements of both as well.
`open_shard` tries FILE for such a dataset, and DATA if FILE is refused.

Under `DATA` the rewrite mistakes a `rebatch` at the end for the one that `tf.distribute` adds, and
replaces its batch sizes. TensorFlow's workers avoid this only behind the map that compresses
elements. Here a `skip(0)` follows every `rebatch`.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorflow.core.framework import dataset_options_pb2

from ....journal.proto import events_pb2 as ev
from ...errors import InvalidArgument, PipelineError, Unimplemented
from ...proto import graph_pb2 as pb
from ..splits import SHARD_HINT, Shard, SplitFeed, SplitRange
from .constants import element_types
from .graphs import Body, Graph
from .pipeline import TfDataPipeline
from .run import TfDataRun
from .save_watchers import saves_in

NUM_REPLICAS = 1  # as TensorFlow's workers set it; other values are for `tf.distribute`

_POLICIES = {  # AutoShardPolicy of dataset_options.proto; FILE_OR_DATA replaces its AUTO
    ev.FILE: dataset_options_pb2.AutoShardPolicy.FILE,
    ev.DATA: dataset_options_pb2.AutoShardPolicy.DATA,
    ev.FILE_OR_DATA: dataset_options_pb2.AutoShardPolicy.AUTO,
    ev.HINT: dataset_options_pb2.AutoShardPolicy.HINT,
}

_JOINS = ("ConcatenateDataset", "ZipDataset")  # the rewrite visits all of their inputs
_NO_FILES = (
    "Found an unshardable source",
    "Did not find a shardable",
    "Unable to shard this input",
)
"""How the rewrite's message begins when it cannot divide by files; other errors have the same
code."""


def open_shard(
    graph: bytes, shard: Shard, open_graph: Callable[[bytes], TfDataPipeline]
) -> TfDataPipeline | FileOrData:
    """The pipeline of a shard's elements; `open_graph` opens a graph. Raises as `sharded`."""
    joins = any(node.op in _JOINS for node in Graph(graph).proto.node)
    if shard.sharding != ev.FILE_OR_DATA or not joins:
        return open_graph(sharded(graph, shard))
    by_file, by_data = (shard._replace(sharding=policy) for policy in (ev.FILE, ev.DATA))
    return FileOrData(open_graph(sharded(graph, by_file)), open_graph(sharded(graph, by_data)))


class FileOrData:
    """A shard by files, or by elements if an input has no files; as `pipelines.Pipeline`."""

    def __init__(self, by_file: TfDataPipeline, by_data: TfDataPipeline) -> None:
        self._by_file = by_file
        self._by_data = by_data

    def run(self, feed: SplitFeed | None) -> TfDataRun:
        """Raises as TfDataPipeline.run."""
        try:
            return self._by_file.run(feed)
        except PipelineError as error:
            if error.code != "NOT_FOUND" or not any(why in error.message for why in _NO_FILES):
                raise
        return self._by_data.run(feed)

    def bundle(self, splits: SplitRange, *, number: int, seed: int, start: int = 0) -> TfDataRun:
        """A shard has no bundles."""
        raise Unimplemented(f"bundle {number} of a static shard: a shard is one long run")

    def close(self) -> None:
        """Idempotent."""
        self._by_file.close()
        self._by_data.close()


def sharded(graph: bytes, shard: Shard) -> bytes:
    """The graph of a shard's elements.

    What the policy cannot divide (fewer files than shards, say) fails with TensorFlow's error when
    it runs. Raises InvalidArgument for HINT without a hint, InvalidGraph, and Unimplemented for a
    save.
    """
    parsed = Graph(graph)
    proto = parsed.proto
    for path in saves_in(parsed).values():
        raise Unimplemented(
            f"the dataset is loaded from the distributed save at {path}, and each worker would "
            "number its chunks in the order in which it found them; use ShardingPolicy.OFF"
        )
    if shard.sharding == ev.HINT and not any(_has_hint(parsed, node) for node in proto.node):
        raise InvalidArgument(
            "the dataset is to be sharded by HINT, and has no hint, so each worker would read all "
            "of it: put .shard(SHARD_HINT, SHARD_HINT) where it is to be divided, outside of the "
            "functions of interleave and flat_map, or use another ShardingPolicy"
        )
    for node in proto.node:
        if node.op == "OptionsDataset":  # the op would prefer its policy; stock workers don't
            options = dataset_options_pb2.Options.FromString(node.attr["serialized_options"].s)
            options.distribute_options.ClearField("auto_shard_policy")
            node.attr["serialized_options"].s = options.SerializeToString()
    body = Body(proto.node, function=False)
    of, number, nothing = map(body.constant, (shard.of, shard.number, 0))
    _put_skips(proto, nothing)
    whole = parsed.result.input[0]
    node = proto.node.add(name="forebay/shard", op="AutoShardDataset", input=[whole, of, number])
    node.attr["auto_shard_policy"].i = _POLICIES[shard.sharding]
    node.attr["num_replicas"].i = NUM_REPLICAS
    _copy_types(parsed.dataset, node)
    parsed.result.input[:] = [node.name]
    return proto.SerializeToString()


def _put_skips(proto: pb.GraphDef, nothing: str) -> None:
    """Put `skip(0)` behind nodes that the rewrite would mistake; `nothing` is the 0."""
    mistaken = ("TensorSliceDataset", "TensorDataset", "RebatchDatasetV2")
    skipped = {n.name: f"forebay/{n.name}" for n in proto.node if n.op in mistaken}
    for node in proto.node:
        for place, name in enumerate(node.input):
            node.input[place] = skipped.get(name.removesuffix(":0"), name)
    for node in list(proto.node):
        if node.name in skipped:
            inputs = [node.name, nothing]
            skip = proto.node.add(name=skipped[node.name], op="SkipDataset", input=inputs)
            _copy_types(node, skip)


def _copy_types(dataset: pb.NodeDef, node: pb.NodeDef) -> None:
    for name, attr in zip(("output_types", "output_shapes"), element_types(dataset), strict=True):
        node.attr[name].CopyFrom(attr)


def _has_hint(graph: Graph, node: pb.NodeDef) -> bool:
    return node.op == "ShardDataset" and graph.value_of(node.input[1]) == SHARD_HINT
