"""Whether runs of one graph could share state that TensorFlow keeps for operations."""

from __future__ import annotations

import enum

from tensorflow.python.framework import op_def_registry

from .graphs import TABLES, Graph

# Ops that TensorFlow marks as stateful only so that it does not prune them.
_HARMLESS = {"Assert", "Case", "If", "PrintV2", "StatefulPartitionedCall", "While"}


class GraphState(enum.Enum):
    """Where a graph has state besides its datasets, which every run makes anew."""

    NONE = enum.auto()
    IN_FUNCTIONS = enum.auto()  # random numbers, for instance
    IN_GRAPH = enum.auto()  # or in tables, which have names


def state_of(graph: Graph) -> GraphState:
    nodes = [node.op for node in graph.proto.node if node is not graph.result]
    functions = [node.op for f in graph.proto.library.function for node in f.node_def]
    if any(map(_has_state, nodes)) or any(op in TABLES for op in functions):
        return GraphState.IN_GRAPH
    return GraphState.IN_FUNCTIONS if any(map(_has_state, functions)) else GraphState.NONE


def _has_state(op: str) -> bool:
    definition = op_def_registry.get(op)  # None for a function of the graph
    stateful = definition is not None and definition.is_stateful
    return stateful and "Dataset" not in op and op not in _HARMLESS
