"""Pipelines: from a dataset's definition and splits to blocks of elements.

Each kind of dataset has a package of its own here. Workers come in by this module, and the
dispatcher, which runs none of them, by `definitions`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Protocol

from ...journal.proto import events_pb2 as ev
from ..blocks import Block
from ..errors import Unimplemented
from ..proto import tf_service_pb2 as tf
from .splits import SplitFeed, SplitRange

__all__ = ["Executor", "SplitFeed", "SplitRange", "load", "make_executor", "response_maker"]


class Executor(Protocol):
    """One run of a dataset."""

    def blocks(self) -> Iterator[Block]:
        """The blocks, in the pipeline's order; to be called once. Raises PipelineError."""
        ...

    def cancel(self) -> None:
        """End `blocks` soon, from any thread. Idempotent."""
        ...


def load() -> None:
    """Import what pipelines need, so that the first task does not wait for it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # a worker computes on the CPU
    from .tf_data import run, stock_elements  # noqa: F401


def make_executor(
    definition: ev.DatasetDefinition, graph: bytes, feed: SplitFeed | None
) -> Executor:
    """The executor for a dataset of this kind. `feed` is None where splits are not leased.

    Raises InvalidGraph, NotSplittable, PipelineError.
    """
    if definition.WhichOneof("kind") != "tf_data_graph":
        raise Unimplemented(
            f"this worker cannot run datasets of kind {definition.WhichOneof('kind')}; "
            "run workers of the version that registered it"
        )
    from .tf_data.element_specs import decode_metadata, without_extension_types
    from .tf_data.run import TfDataExecutor

    metadata = decode_metadata(definition)
    if metadata.raw:
        return TfDataExecutor(graph, feed)
    spec = without_extension_types(metadata.element_spec)
    return TfDataExecutor(graph, feed, element_spec=spec, compressed=metadata.compressed)


def response_maker(definition: ev.DatasetDefinition) -> Callable[[Block], tf.GetElementResponse]:
    """Makes of a block of one element the answer that tf.data service's own clients want."""
    from .tf_data import stock_elements

    return stock_elements.response_maker(definition)
