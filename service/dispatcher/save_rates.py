"""SaveRates: how fast saves are written, since this dispatcher leads or they began."""

from __future__ import annotations

import time
from typing import Any

from ...journal.proto import events_pb2 as ev
from ..core.saves import elements_of, expected_elements
from .decider import Decider


class SaveRates:
    """Runs on the dispatcher's event loop."""

    def __init__(self, decider: Decider) -> None:
        self._saves = decider.state.saves
        self._since: dict[int, tuple[float, int]] = {}  # when, and how many elements there were
        for save_id in self._saves:
            self._begin(save_id)
        decider.subscribe(self._see)

    def status(self) -> list[dict[str, Any]]:
        """Of saves of which something was written since."""
        found = []
        for save_id in self._since.keys() & self._saves.keys():
            save, (since_s, before) = self._saves[save_id], self._since[save_id]
            elements, lasted_s = elements_of(save), max(time.monotonic() - since_s, 1e-3)
            if elements == before:
                continue
            rate, expected = (elements - before) / lasted_s, expected_elements(save)
            left_s = None if expected is None else max(0, expected - elements) / rate
            found.append({"path": save.path, "elements_per_s": rate, "left_s": left_s})
        return found

    def _begin(self, save_id: int) -> None:
        self._since.setdefault(save_id, (time.monotonic(), elements_of(self._saves[save_id])))

    def _see(self, event: ev.Event) -> None:
        if event.HasField("stream_assigned"):
            self._begin(event.stream_assigned.save_id)
        elif (kind := event.WhichOneof("event")) in ("save_finished", "save_failed"):
            self._since.pop(getattr(event, kind).save_id, None)
