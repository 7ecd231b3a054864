"""What the dispatcher asks about a dataset's definition, in a process without TensorFlow."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence

from ...journal.proto import events_pb2 as ev
from ..processes import forebay, tied
from .tf_data import split_sources as walks
from .tf_data.graphs import Graph, InvalidGraph, fingerprint, sanitize
from .tf_data.seeds import nondeterministic
from .tf_data.split_sources import Evaluate, TensorFacts, require_splittable, split_sources

__all__ = [
    "Evaluate",
    "evaluate_in_subprocess",
    "fingerprint",
    "nondeterministic",
    "require_bundles",
    "sanitize",
    "split_sources",
]


def require_bundles(graph: bytes, sources: Iterable[ev.SplitSource]) -> None:
    """Raises NotSplittable, naming the node, if a range of this dataset's splits cannot be run by
    itself; `sources` are those that were registered. Raises InvalidGraph.
    """
    require_splittable(sources)
    walks.require_bundles(walks.SourceWalk(Graph(graph)))


def evaluate_in_subprocess(
    graph: bytes, names: Sequence[str], timeout_s: float = 120
) -> list[TensorFacts]:
    """An `Evaluate` that runs TensorFlow in a process of its own, and waits for it.

    Raises InvalidGraph if the tensors cannot be computed there.
    """
    command = tied(forebay("pipelines.tf_data.evaluate", *names))
    try:
        done = subprocess.run(command, input=graph, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise InvalidGraph(
            f"the tensors {list(names)} of the graph were not computed within {timeout_s:g} s"
        ) from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise InvalidGraph(
            f"the tensors {list(names)} of the graph could not be computed: "
            f"{last[0] if last else f'exit code {done.returncode}'}"
        )
    return [TensorFacts(tuple(shape), value) for shape, value in json.loads(done.stdout)]
