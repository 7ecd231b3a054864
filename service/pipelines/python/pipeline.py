"""The pipeline of a Python dataset."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ....journal.proto import events_pb2 as ev
from ....journal.splits import source_size
from ...proto.python_pb2 import PythonDataset
from ...user_metrics import Totals
from ..files import manifest
from ..splits import PARTS, MaySkip, SplitFeed, SplitRange, require_bundle
from .child_connections import Children, StoredDataset
from .fork_server import HERE, ForkServers
from .run_states import FailureRules
from .runs import PythonRun
from .stored import require_runnable

MOST_IDLE = 16
"""How many idle processes are kept, or as many as may work. Bundles that wait for their readers
hold one each, and a new process would do its imports and open its files anew."""


class PythonPipeline:
    """A registered function and its splits, as `pipelines.Pipeline`.

    A long run has up to `processes` children; with one, splits are in order.
    """

    def __init__(
        self,
        stored: bytes,
        sources: Sequence[ev.SplitSource],
        structure: str,
        *,
        processes: int = 1,
        where: str = "?",
        may_skip: MaySkip | None = None,
        totals: Totals | None = None,
        fork_servers: ForkServers = HERE,
        iteration: int = 0,
        cache: tuple[str, int] = ("", 0),
    ) -> None:
        """Without `may_skip`, as where it is materialized, a run skips up to the registered number
        of splits, a bundle nothing, and elements have the inferred shapes. `totals` collects
        what the function counts in long runs. Each `iteration` shuffles records of files in another
        way. `cache` is of ranges of objects: a directory, and its bytes. Raises
        FailedPrecondition, PipelineError."""
        dataset = PythonDataset.FromString(stored)
        require_runnable(dataset)
        files = dataset.files
        self._has_files = bool(files)
        self._sources = sources
        self._processes = processes
        self._may_skip = may_skip
        self._totals = totals
        fork_server = fork_servers.of(dataset)
        if self._has_files:
            dataset.iteration = iteration  # whatever was registered
            dataset.cache_directory, dataset.cache_bytes = cache
            dataset.ClearField("files")
            stored = dataset.SerializeToString()
        if dataset.inferred and may_skip is None:
            dataset.inferred = False
            stored = dataset.SerializeToString()
        told = StoredDataset(structure, stored, files)
        self._children = Children(fork_server, told, max(self._processes, MOST_IDLE))
        self._rules = FailureRules(
            dataset.on_error, dataset.limit, dataset.timeout_s, where,
            lambda number: manifest.decode(told.files()).files[number].path,
        )  # fmt: skip

    def run(self, feed: SplitFeed | None) -> PythonRun:
        """Each split runs in one of the children, which share what the feed gives at once."""
        may_skip = self._may_skip or _counted()
        ranges = _parts(source_size(self._sources[0]), PARTS * self._processes)

        def next_range() -> SplitRange | None:
            return next(ranges, None) if feed is None else feed.next_range(0, 0, False)

        return PythonRun(
            self._children, self._rules, next_range, may_skip, self._processes,
            totals=self._totals,
        )  # fmt: skip

    def bundle(self, splits: SplitRange, *, number: int, seed: int, start: int = 0) -> PythonRun:
        """Seed and number determine what `random`, `numpy.random` and the function's pickled
        generators draw.

        What fails is left out, if that was registered and `may_skip` was given: the same, wherever
        the bundle runs. The end of its process ends the bundle.
        """
        require_bundle(self._sources, splits, start)
        may_skip = self._may_skip or (lambda _: False)
        ranges = iter([splits] if splits.count else [])
        drawn_by = f"{seed} {number}" + (f" {splits.pass_number}" if self._has_files else "")
        return PythonRun(
            self._children, self._rules, lambda: next(ranges, None), may_skip, 1,
            bundle=number, seed=drawn_by, start=start,
        )  # fmt: skip

    def close(self) -> None:
        """End idle children now, and others when they become idle. Idempotent."""
        self._children.close()


def _parts(splits: int, parts: int) -> Iterator[SplitRange]:
    size = max(1, -(-splits // parts))
    for first in range(0, splits, size):
        yield SplitRange(first, min(size, splits - first), 0)


def _counted() -> MaySkip:
    """Allows the limit, counted for one run."""
    numbers = itertools.count(1)
    return lambda report: next(numbers) <= report.limit
