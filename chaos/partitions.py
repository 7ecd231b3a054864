"""Partitions of the network: between which hosts, and when. Each host has the name of its member.

This is pure: hosts.py makes partitions, and the audits excuse with them what a pause excuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from string import digits

import msgspec

from ..journal.reasons import SILENT
from .history import History
from .plan import Sides

SILENT_S = 20.0
"""How long after a partition its member's removal still counts as its effect."""


class Partition(msgspec.Struct):
    """No packet passed between the two sides. `one_way`: none from the second to the first one.
    Times are CLOCK_MONOTONIC.
    """

    sides: Sides
    since_s: float
    until_s: float
    one_way: bool = False

    def cuts(self, host: str, whom: str) -> bool:
        """Whether the host is cut off from that host, or from one of that role."""
        one, other = ({*side, *(name.rstrip(digits) for name in side)} for side in self.sides)
        return (host in one and whom in other) or (host in other and whom in one)


def failed_cut_off(
    history: History,
    consumers: Mapping[int, str],
    hosts: Mapping[str, str],
    partitions: Iterable[Partition],
    wall_s: float,
) -> set[str]:
    """The processes that failed because they were cut off: no dispatcher heard of them, and so one
    gave up a consumer of theirs.

    `consumers` are the processes' names by their consumers' ids, `hosts` the hosts of those that
    failed, by name.
    """
    found = set()
    for consumer_id, name in consumers.items():
        stay = history.stays.get(consumer_id)
        if stay is None or stay.why != SILENT or name not in hosts:
            continue
        at_s = (stay.left_ms or 0) / 1000 - wall_s
        away = (p for p in partitions if p.cuts(hosts[name], "dispatcher"))
        if any(p.since_s <= at_s <= p.until_s + SILENT_S for p in away):
            found.add(name)
    return found
