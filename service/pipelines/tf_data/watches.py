"""Saves that a pipeline loads which runs as it is: nobody divides their chunks.

TensorFlow's own source waits for chunks that are yet to be written, and cannot be cancelled. So it
is replaced here, too.
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


class Watch:
    """The chunks of one save, which each opening of it lists for itself. Thread-safe."""

    def __init__(self, path: str) -> None:
        self.openings = itertools.count()
        self.cancelled = threading.Event()
        self._path = path
        self._known: dict[int, list[str] | None] = {}  # of each opening, until it has ended

    def next_range(self, opening: Any) -> SplitRange:
        """All that it has not had. Waits for more, and raises StopIteration at the end of the save;
        FailedPrecondition if that failed, Unavailable once this is cancelled.
        """
        known = self._known.setdefault(int(opening), [])
        search = Search(self._path)
        while known is not None:
            found = search.look(known)
            if found.names:
                known += found.names
                return SplitRange(0, len(found.names), int(opening), tuple(found.names))
            if found.complete:
                self._known[int(opening)] = None
                break
            if self.cancelled.wait(search.pause_s):
                raise Unavailable(f"whoever waited for the save at {self._path} has gone")
        raise StopIteration


def saves_in(graph: Graph) -> dict[str, str]:
    """The saves that a graph loads, by the names of their sources' nodes."""
    sources = [node for node in graph.proto.node if node.op == CHUNKS]
    paths = {node.name: text(graph.producer(node.input[0])) for node in sources}
    return {name: path for name, path in paths.items() if path and path.startswith("/")}
