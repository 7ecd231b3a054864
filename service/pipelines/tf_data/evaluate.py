"""Compute tensors of a dataset graph with TensorFlow, for split_sources.py.

    python -m forebay.service.pipelines.tf_data.evaluate LIBRARIES TENSOR … < graph > facts.json

LIBRARIES is a JSON list of paths of custom op libraries. The output is a JSON list of
[shape, value or null]. The dispatcher runs this in a separate process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from ...errors import InvalidArgument
from .constants import TensorFacts
from .graphs import Graph, InvalidGraph


def evaluate(graph: bytes, names: Sequence[str]) -> list[TensorFacts]:
    """An `Evaluate` that runs TensorFlow in this process. Raises InvalidGraph."""
    import tensorflow as tf
    from tensorflow.core.framework import graph_pb2

    from .op_libraries import explained

    parsed = Graph(graph)
    parsed.proto.node.remove(parsed.result)
    proto = graph_pb2.GraphDef.FromString(parsed.proto.SerializeToString())
    tensors = [name if ":" in name else f"{name}:0" for name in names]

    try:
        # A session isolates the graph's tables and functions.
        with tf.Graph().as_default() as scope, tf.compat.v1.Session(graph=scope) as session:
            found = tf.graph_util.import_graph_def(proto, return_elements=tensors, name="")
            values = session.run(found)
    except (tf.errors.OpError, ValueError) as error:
        said = explained(str(error).splitlines()[0], graph)
        raise InvalidGraph(f"cannot compute {list(names)}: {said}") from error
    return [TensorFacts(tuple(value.shape), _integer(value)) for value in values]


def _integer(value: Any) -> int | None:
    return int(value) if value.shape == () and value.dtype.kind in "iu" else None


def main() -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    from .op_libraries import load_op_libraries

    try:
        load_op_libraries(json.loads(sys.argv[1]))
        facts = evaluate(sys.stdin.buffer.read(), sys.argv[2:])
    except InvalidArgument as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
