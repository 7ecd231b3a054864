"""Which operations a graph may have that somebody registers who has the role `trainer` alone.

The list, operations.txt, is one of what is allowed: an operation that TensorFlow adds, or that a
library brings, may read a token or open a socket, and nobody has looked. scripts/operations.py
makes it of TensorFlow's own registry. Files are read by datasets of records alone.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping

from ...proto import graph_pb2 as pb
from .graphs import bodies, node_name, where
from .source_walk import names_no_file


@functools.cache
def _allowed() -> frozenset[str]:
    return frozenset(pathlib.Path(__file__).with_name("operations.txt").read_text().split())


def forbidden(graph: bytes) -> str:
    """The first node that is not allowed, in words; "" if all are. Looks at all functions, too.
    `graph` must parse."""
    proto = pb.GraphDef.FromString(graph)
    functions = {function.signature.name for function in proto.library.function}
    for function, body in bodies(proto):
        nodes = {node.name: node for node in body}
        for node in body:
            # TensorFlow names functions so. Another name could be that of an operation.
            calls = node.op in functions and node.op.startswith("__")
            why = "" if calls else _why_not(node, nodes)
            if why:
                return f"{node.name!r} ({node.op}){where(function)} {why}"
    return ""


def _why_not(node: pb.NodeDef, nodes: Mapping[str, pb.NodeDef]) -> str:
    if node.op not in _allowed():
        return "is not an operation that keeps to itself"
    if node.op in ("CacheDataset", "CacheDatasetV2"):
        name = node_name([*node.input, "", ""][1])
        if not names_no_file(nodes.get(name, pb.NodeDef())):
            return "writes a file, or may: only a cache in memory is known not to"
    return ""
