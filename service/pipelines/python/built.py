"""In a child: runs a `tf.data.Dataset` that the user's function builds there.

The dataset runs like a registered graph (../tf_data). Its Python functions are found, because this
is the process that created them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import tensorflow as tf

from ... import malloc, structure
from ...blocks import Block
from ...errors import FailedPrecondition
from ...proto.python_pb2 import PythonDataset
from ..splits import SplitFeed, SplitRange
from ..tf_data.evaluate import evaluate
from ..tf_data.imports import Policy, graph_of
from ..tf_data.pipeline import TfDataPipeline
from ..tf_data.run import TfDataRun
from ..tf_data.split_sources import contents_of, described, split_sources


class BuiltDataset:
    """The dataset of a function, built once for all runs of this process. Its Python functions have
    numbers, so a second build would be another graph, which TensorFlow would trace and keep."""

    def __init__(self, function: Callable[[], Any], registered: str, stored: PythonDataset) -> None:
        """`registered` is its structure, and `stored` says which sources are to be found. Raises
        ForebayError, and what the function raises."""
        self._dataset = function()  # it keeps the Python functions alive
        if not isinstance(self._dataset, tf.data.Dataset):
            raise TypeError(
                f"the function returned {self._dataset!r:.100}, which is no tf.data.Dataset"
            )
        spec = self._dataset.element_spec
        if (here := structure.encode(spec)) != registered:
            raise _differs(structure.describe(here), structure.describe(registered))
        self._graph = graph_of(self._dataset, Policy.IGNORE)
        self._registered, self._contents = list(stored.sources), stored.contents
        self._pipeline = TfDataPipeline(self._graph, self._registered, element_spec=spec)
        self._is_same = False  # as was registered; nobody has looked yet

    def blocks(self, feed: SplitFeed | None) -> Generator[Block, None, None]:
        """The blocks of the splits of `feed`; of all splits if it is None. Raises ForebayError."""
        if feed is not None:
            self._require_same()
        try:
            with contextlib.closing(self._pipeline.run(feed).blocks()) as made:
                for block in made:
                    malloc.keep_large_buffers_now()  # a `from_generator` may have changed it
                    yield block
        finally:
            self._pipeline.close()

    def bundle(self, splits: SplitRange, *, number: int, seed: int, start: int) -> TfDataRun:
        """As TfDataPipeline.bundle; any thread may call it. Raises ForebayError."""
        self._require_same()
        return self._pipeline.bundle(splits, number=number, seed=seed, start=start)

    def _require_same(self) -> None:
        """Raises FailedPrecondition unless its sources are those that were registered."""
        if self._is_same:
            return
        here = [each.splits for each in split_sources(self._graph, evaluate)]
        if here != self._registered:
            raise _differs(described(here), described(self._registered))
        if contents_of(self._graph) != self._contents:
            raise FailedPrecondition(
                f"the function builds a dataset of {described(here)}, as where it was "
                "registered, but of other values, or in another order: sort what glob or "
                "listdir gives, and seed what draws"
            )
        self._is_same = True


def _differs(here: str, registered: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"the function builds a dataset of {here} here, and of {registered} where it was "
        "registered: let it build the same one everywhere, or register it anew"
    )
