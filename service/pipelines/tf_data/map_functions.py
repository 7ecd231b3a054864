"""Maps whose functions run in the thread that asks for elements.

TensorFlow runs a map's function in its thread pool, so that operations that do not depend on each
other run at the same time. To hand over a call and to wait for it takes some 25 µs. That is most of
the cost of a small function. Bundles run at the same time anyway, so they do without.

TensorFlow 2.21's executor for one thread supports no control flow. A function that has any, also in
functions that it calls, runs in the pool as before.
"""

from __future__ import annotations

from ...proto import graph_pb2 as pb
from .graphs import TABLES, all_nodes, bodies, called_functions

_NEED_POOL = {
    *("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile", "For"),
    *("Switch", "RefSwitch", "_SwitchN", "Merge", "RefMerge", "LoopCond", "ControlTrigger"),
    *("Enter", "RefEnter", "Exit", "RefExit", "NextIteration", "RefNextIteration"),
    # Operations of TensorFlow 1, which return references.
    *("Variable", "VariableV2", "TemporaryVariable"),
    *(op for op in TABLES if not op.endswith("V2")),
}


def run_in_calling_thread(graph: pb.GraphDef) -> None:
    """Have the graph's maps, also those in functions, call their functions in the calling thread,
    where TensorFlow supports that. Maps with `num_parallel_calls` stay as they are."""
    nodes = dict(bodies(graph))
    for node in all_nodes(graph):
        if node.op != "MapDataset":
            continue
        called = called_functions([node], nodes)
        if not any(inner.op in _NEED_POOL for name in called for inner in nodes[name]):
            node.attr["use_inter_op_parallelism"].b = False
