"""In a child: runs a `tf.data.Dataset` that the user's function builds there.

The dataset runs like a registered graph (../tf_data). Its Python functions are found, because this
is the process that created them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import tensorflow as tf

from ....journal.proto import events_pb2 as ev
from ... import malloc, structure
from ...blocks import Block
from ...errors import FailedPrecondition
from ..splits import SplitFeed
from ..tf_data.evaluate import evaluate
from ..tf_data.pipeline import TfDataPipeline
from ..tf_data.split_sources import contents_of, described, split_sources


class BuiltDataset:
    """The dataset of a function, built once for all runs of this process. Its Python functions have
    numbers, so a second build would be another graph, which TensorFlow would trace and keep."""

    def __init__(self, function: Callable[[], Any], registered: str) -> None:
        """`registered` is its structure. Raises ForebayError, and what the function raises."""
        self._dataset = function()  # it keeps the Python functions alive
        if not isinstance(self._dataset, tf.data.Dataset):
            raise TypeError(
                f"the function returned {self._dataset!r:.100}, which is no tf.data.Dataset"
            )
        spec = self._dataset.element_spec
        if (here := structure.encode(spec)) != registered:
            raise _differs(structure.describe(here), structure.describe(registered))
        self._graph = graph_of(self._dataset)
        self._pipeline = TfDataPipeline(self._graph, element_spec=spec)
        self._sources: list[ev.SplitSource] | None = None

    def blocks(self, feed: SplitFeed | None, contents: bytes) -> Generator[Block, None, None]:
        """The blocks of the splits of `feed`, whose sources have these contents; of all splits if
        `feed` is None. Raises ForebayError."""
        if feed is not None:
            if self._sources is None:
                self._sources = [each.splits for each in split_sources(self._graph, evaluate)]
            _require_same(self._sources, feed.sources)
            if contents_of(self._graph) != contents:
                raise FailedPrecondition(
                    f"the function builds a dataset of {described(self._sources)}, as where it was "
                    "registered, but of other values, or in another order: sort what glob or "
                    "listdir gives, and seed what draws"
                )
        try:
            with contextlib.closing(self._pipeline.run(feed).blocks()) as made:
                for block in made:
                    malloc.keep_large_buffers_now()  # a `from_generator` may have changed it
                    yield block
        finally:
            self._pipeline.close()


def graph_of(dataset: Any) -> bytes:
    """A dataset's serialized graph; its state stays in this process."""
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    return bytes(dataset._as_serialized_graph(external_state_policy=policy).numpy())


def _require_same(here: Sequence[ev.SplitSource], registered: Sequence[ev.SplitSource]) -> None:
    if list(here) != list(registered):
        raise _differs(described(here), described(registered))


def _differs(here: str, registered: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"the function builds a dataset of {here} here, and of {registered} where it was "
        "registered: let it build the same one everywhere, or register it anew"
    )
