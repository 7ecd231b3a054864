"""Saves that a pipeline loads without leases, so that nobody divides their chunks.

TensorFlow's own source waits for chunks that are not written yet, and cannot be cancelled. So this
source replaces it there too.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

from ...errors import Unavailable
from ...saved_chunks import Search
from ..splits import SplitRange
from .constants import text
from .graphs import Graph
from .source_walk import CHUNKS

MAX_OPENINGS = 4096
"""How many openings are remembered; the pipeline doesn't tell when it leaves one."""


class Watch:
    """The chunks of one save, the same in each of its openings. Thread-safe."""

    def __init__(self, path: str) -> None:
        self.openings = itertools.count()
        self.cancelled = threading.Event()
        self.had: dict[int, int] = {}  # names delivered, by opening; the last one to ask is last
        self._path = path
        self._lock = threading.Lock()
        self._names: list[str] = []  # in the order of discovery
        self._complete = False

    def next_range(self, opening: Any) -> SplitRange:
        """All names that this opening has not had. Waits for more. Raises StopIteration at the end
        of the save, FailedPrecondition if the save failed, and Unavailable after cancellation.
        """
        search = Search(self._path)
        while not (names := self._names_of(int(opening), search)):
            if names is None:
                raise StopIteration
            if self.cancelled.wait(search.pause_s):
                raise Unavailable(f"whoever waited for the save at {self._path} has gone")
        return SplitRange(0, len(names), int(opening), names)

    def _names_of(self, opening: int, search: Search) -> tuple[str, ...] | None:
        """Names that the opening has not had; None once it has had the complete save."""
        with self._lock:
            had = self.had.get(opening, 0)
            if had == len(self._names):
                if self._complete:
                    return None
                found = search.look(self._names)
                self._names += found.names
                self._complete = found.complete
                if self._complete and not found.names:
                    return None
            self.had.pop(opening, None)
            self.had[opening] = len(self._names)
            if len(self.had) > MAX_OPENINGS:
                del self.had[next(iter(self.had))]
            return tuple(self._names[had:])


def saves_in(graph: Graph) -> dict[str, str]:
    """The saves that a graph loads, by the names of their source nodes."""
    sources = [node for node in graph.proto.node if node.op == CHUNKS]
    paths = {node.name: text(graph.producer(node.input[0])) for node in sources}
    return {name: path for name, path in paths.items() if path and path.startswith("/")}
