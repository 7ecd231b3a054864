"""LostWorkers: which workers were given up lately, and why."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ...journal.proto import events_pb2 as ev
from .decider import Decider

MOST = 100
"""The latest ones are kept, by address."""


@dataclass
class _Departure:
    reason: str
    time_ms: int
    is_back: bool = False


class LostWorkers:
    """Begins with the events that the state still has. Runs on the dispatcher's event loop."""

    def __init__(self, decider: Decider) -> None:
        self._addresses = {i: worker.address for i, worker in decider.state.workers.items()}
        self._lost: dict[str, _Departure] = {}
        for _, event in decider.state.recent:
            self._see(event)
        decider.subscribe(self._see)

    def status(self) -> list[dict[str, Any]]:
        """The latest last. Times are those of the events."""
        now_ms = time.time_ns() // 1_000_000
        return [
            {
                "address": address,
                "reason": lost.reason,
                "ago_s": max(0, now_ms - lost.time_ms) / 1000,
                "back": lost.is_back,
            }
            for address, lost in self._lost.items()
        ]

    def _see(self, event: ev.Event) -> None:
        if event.HasField("worker_registered"):
            address = event.worker_registered.address
            self._addresses[event.worker_registered.worker_id] = address
            if address in self._lost:
                self._lost[address].is_back = True
        elif event.HasField("worker_lost"):
            lost = event.worker_lost
            address = self._addresses.pop(lost.worker_id, "")
            if address and not lost.left:
                self._lost.pop(address, None)
                self._lost[address] = _Departure(lost.reason, event.time_ms)
                if len(self._lost) > MOST:
                    del self._lost[next(iter(self._lost))]
