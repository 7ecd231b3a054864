"""The plan of faults: a pure function of the seed and the cluster's size.

The plan is reproducible; a run is not, because real processes interleave differently.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping

import msgspec

from ..service.errors import InvalidArgument

WEIGHTS: dict[str, dict[str, int]] = {
    "dispatcher": {
        "kill": 4,
        "terminate": 1,
        "pause": 2,
        "cut": 1,
        "stall": 1,
        "mute": 2,
        "silence": 1,
    },
    "worker": {"kill": 3, "terminate": 2, "pause": 2},
    "trainer": {"kill": 2, "terminate": 1, "pause": 1, "cut": 2},
    "claimer": {"kill": 2, "terminate": 1, "pause": 1, "cut": 1},
    "ordered": {"kill": 2, "pause": 1, "cut": 1, "re-form": 2},
    **{
        server: {"kill": 2, "pause": 1, "cut": 1, "mute": 1, "silence": 1}
        for server in ("redis", "postgres")
    },
}
"""The relative frequency of each action, by role. docs/chaos.md explains the actions."""

PARTITIONS: dict[str, dict[str, int]] = {
    "dispatcher": {"isolate": 2, "deafen": 1},
    "worker": {"isolate": 2, "deafen": 1},
    "trainer": {"isolate": 1, "deafen": 1},
    "claimer": {"isolate": 1},
    "ordered": {"isolate": 1},
    **{server: {"isolate": 1, "deafen": 1} for server in ("redis", "postgres")},
    "network": {"split": 2, "sever": 2},
}
"""The same of partitions, where each member has a host of its own."""

LASTING = {"pause", "stall", "mute", "silence"}
LASTS_S = (0.3, 3.0)  # less than any failure detector's timeout
PARTED = {"isolate", "deafen", "split", "sever"}
PARTED_S = (1.0, 30.0)  # some longer than the timeouts; as many below 5.5 s as above

Sides = tuple[tuple[str, ...], tuple[str, ...]]
"""Two groups of hosts, by their names: nothing passes between them, or only in one direction."""


class Fault(msgspec.Struct, frozen=True):
    """A fault of one member of the cluster."""

    at_s: float  # after the faults' beginning
    role: str
    number: int
    action: str
    lasts_s: float = 0.0
    sides: Sides = ((), ())  # of a partition

    @property
    def kind(self) -> str:
        return f"{self.action} {self.role}"


def host_names(members: Mapping[str, int]) -> list[str]:
    """The hosts of these members: each process has one."""
    return [f"{role}{i}" for role, n in members.items() if role != "network" for i in range(n)]


def make_plan(
    seed: int,
    duration_s: float,
    every_s: float,
    members: Mapping[str, int],
    only: Collection[str] = (),
) -> list[Fault]:
    """Faults at random instants, `every_s` apart on average, for `duration_s`.

    `members` is the number of members of each role; with a "network", there are partitions. `only`
    are the kinds to choose from, such as "kill worker" (none: all). Raises InvalidArgument for a
    kind that this cluster does not have.
    """
    chance = random.Random(seed)
    weight = {
        (role, action): frequency
        for weights in (WEIGHTS, PARTITIONS if members.get("network") else {})
        for role, actions in weights.items()
        if members.get(role)
        for action, frequency in actions.items()
    }
    kinds = list(weight)
    if wrong := set(only) - {f"{action} {role}" for role, action in kinds}:
        known = ", ".join(f"{action} {role}" for role, action in kinds)
        raise InvalidArgument(f"no fault is called {wrong.pop()!r} here; there are: {known}")
    kinds = [kind for kind in kinds if not only or f"{kind[1]} {kind[0]}" in only]
    weights = [weight[kind] for kind in kinds]
    plan = []
    at_s = chance.expovariate(1 / every_s)
    while at_s < duration_s:
        role, action = chance.choices(kinds, weights)[0]
        lasts_s = round(chance.uniform(*LASTS_S), 2) if action in LASTING else 0.0
        number = chance.randrange(members[role])
        sides: Sides = ((), ())
        if action in PARTED:
            shortest, longest = map(math.log, PARTED_S)
            lasts_s = round(math.exp(chance.uniform(shortest, longest)), 2)
            sides = _sides(chance, action, f"{role}{number}", host_names(members))
        plan.append(Fault(round(at_s, 3), role, number, action, lasts_s, sides))
        at_s += chance.expovariate(1 / every_s)
    return plan


def _sides(chance: random.Random, action: str, host: str, hosts: list[str]) -> Sides:
    """The sides of a partition. Nobody is on the third side of a split."""
    if action in ("isolate", "deafen"):
        return (host,), tuple(other for other in hosts if other != host)
    while True:
        side_of = {name: chance.randrange(2 if action == "split" else 3) for name in hosts}
        one, other = (tuple(n for n in hosts if side_of[n] == side) for side in (0, 1))
        if one and other:
            return one, other
