"""In a child: a `tf.data.Dataset` that the user's function builds there, as blocks.

It goes the way of registered graphs (../tf_data). Python functions in it are found, as this is the
process that they were made in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from ... import structure
from ...blocks import Block
from ...errors import PipelineError
from ..tf_data.pipeline import TfDataPipeline


def blocks(function: Callable[[], Any], registered: str) -> Iterator[Block]:
    """Raises PipelineError, and what the function does."""
    dataset = function()
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"the function returned {dataset!r:.100}, which is no tf.data.Dataset")
    spec = dataset.element_spec
    if (here := structure.encode(spec)) != registered:
        raise PipelineError(
            "FAILED_PRECONDITION",
            f"the function builds a dataset of {structure.describe(here)} here, and of "
            f"{structure.describe(registered)} where it was registered",
        )
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE  # it stays in this process
    graph = bytes(dataset._as_serialized_graph(external_state_policy=policy).numpy())
    pipeline = TfDataPipeline(graph, element_spec=spec)
    try:
        yield from pipeline.run(None).blocks()
    finally:
        pipeline.close()
