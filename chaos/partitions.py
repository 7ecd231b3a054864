"""Partitions of the network: between which hosts, and when. Each host has the name of its member.

This is pure: hosts.py makes partitions, and the audits excuse with them what a pause excuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from string import digits

import msgspec

from .history import History
from .plan import Sides

SILENT_S = 20.0
"""How long after a pause or partition its member's removal still counts as its effect, as does a
connection that is not back yet."""


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


def periods(partitions: Iterable[Partition], host: str, whom: str) -> list[tuple[float, float]]:
    """When the host was cut off from that host or role, or had been in the SILENT_S before."""
    return [(p.since_s, p.until_s + SILENT_S) for p in partitions if p.cuts(host, whom)]


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
        at_ms = history.given_up_ms.get(consumer_id)
        if at_ms is None or name not in hosts:
            continue
        at_s = at_ms / 1000 - wall_s
        away = periods(partitions, hosts[name], "dispatcher")
        if any(since_s <= at_s <= until_s for since_s, until_s in away):
            found.add(name)
    return found
