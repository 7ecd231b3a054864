"""GroupProgress: how far the trainers of ordered reads are, as their heartbeats say.

The journal has it for the audit. So a group has one event in PROGRESS_S, however many consumers it
has: with the first report that is due, what all of them have reported since the last one.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from ..core import commands as c
from .decider import Decider

PROGRESS_S = 14.0
"""Of one that reads alone, each third heartbeat (the client's HEARTBEAT_S): four a minute."""


@dataclass
class _Reports:
    journaled_s: float = -math.inf
    positions: dict[int, int] = field(default_factory=dict)  # by consumer: not journaled yet


class GroupProgress:
    """Runs on the dispatcher's event loop."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._groups: dict[int, _Reports] = {}  # by iteration

    async def report(self, iteration_id: int, consumer_id: int, position: int) -> None:
        """A consumer's trainer was given all of its elements before this position."""
        if (group := self._groups.get(iteration_id)) is None:
            there = self._decider.state.iterations
            self._groups = {number: g for number, g in self._groups.items() if number in there}
            group = self._groups[iteration_id] = _Reports()
        group.positions[consumer_id] = position
        if (now_s := time.monotonic()) < group.journaled_s + PROGRESS_S:
            return
        positions, group.positions, group.journaled_s = group.positions, {}, now_s
        await self._decider.execute(c.MoveConsumers(iteration_id=iteration_id, positions=positions))
