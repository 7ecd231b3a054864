"""SaveRates: how fast saves are written, since this dispatcher leads or they began."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ...journal.proto import events_pb2 as ev
from ..core.saves import expected_elements
from ..core.state import Save
from .decider import Decider


@dataclass
class _Written:
    since_s: float
    elements: int = 0
    bytes: int = 0


class SaveRates:
    """Follows commits of Forebay's workers. Runs on the dispatcher's event loop."""

    def __init__(self, decider: Decider) -> None:
        self._saves = decider.state.saves
        self._written = {save_id: _Written(time.monotonic()) for save_id in self._saves}
        decider.subscribe(self._see)

    def committed(self, save_id: int, count: int) -> None:
        """A chunk of so many bytes is committed. A repeated request counts again."""
        if (written := self._written.get(save_id)) is not None:
            written.bytes += count

    def status(self) -> list[dict[str, Any]]:
        """Of saves of which something was written since."""
        return [
            self._rate(self._saves[save_id], written)
            for save_id, written in self._written.items()
            if written.elements and save_id in self._saves
        ]

    def _rate(self, save: Save, written: _Written) -> dict[str, Any]:
        lasted_s = max(time.monotonic() - written.since_s, 1e-3)
        expected, rate = expected_elements(save), written.elements / lasted_s
        there = sum(stream.elements for stream in save.streams)
        return {
            "path": save.path,
            "elements_per_s": rate,
            "bytes_per_s": written.bytes / lasted_s or None,
            "left_s": None if expected is None else max(0, expected - there) / rate,
        }

    def _see(self, event: ev.Event) -> None:
        if event.HasField("stream_assigned"):
            self._written.setdefault(event.stream_assigned.save_id, _Written(time.monotonic()))
        elif event.HasField("chunk_committed"):
            written = self._written.setdefault(
                event.chunk_committed.save_id, _Written(time.monotonic())
            )
            written.elements += event.chunk_committed.elements
        elif (kind := event.WhichOneof("event")) in ("save_finished", "save_failed"):
            self._written.pop(getattr(event, kind).save_id, None)
