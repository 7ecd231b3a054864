"""What the dispatcher asks about a dataset's definition, in a process without TensorFlow."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

from ..processes import forebay, tied
from .tf_data.graphs import InvalidGraph, fingerprint, sanitize
from .tf_data.split_sources import Evaluate, TensorFacts, split_sources

__all__ = [
    "Evaluate",
    "evaluate_in_subprocess",
    "fingerprint",
    "sanitize",
    "split_sources",
]


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
