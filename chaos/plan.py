"""The plan of faults: a pure function of the seed and the cluster's size.

The plan is reproducible; a run is not, because real processes interleave differently.
"""

from __future__ import annotations

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
    "trainer": {"kill": 2, "terminate": 1, "pause": 1, "cut": 2, "leave": 2},
    "claimer": {"kill": 2, "terminate": 1, "pause": 1, "cut": 1},
    "redis": {"kill": 2, "pause": 1, "cut": 1, "mute": 1, "silence": 1},
    "storage": {"empty": 1},
    "crowd": {"start": 2},
}
"""The relative frequency of each action, by role. cluster.py explains the actions."""

LASTING = {"pause", "stall", "mute", "silence", "empty"}
LASTS_S = (0.3, 3.0)  # less than any failure detector's timeout


class Fault(msgspec.Struct, frozen=True):
    """A fault of one member of the cluster, or of its storage; or the start of a crowd."""

    at_s: float  # after the faults' beginning
    role: str
    number: int
    action: str
    lasts_s: float = 0.0

    @property
    def kind(self) -> str:
        return f"{self.action} {self.role}"


def make_plan(
    seed: int,
    duration_s: float,
    every_s: float,
    members: Mapping[str, int],
    only: Collection[str] = (),
) -> list[Fault]:
    """Faults at random instants, `every_s` apart on average, for `duration_s`.

    `members` is the number of members of each role, `only` the kinds to choose from, such as "kill
    worker" (none: all). Raises InvalidArgument for a kind that this cluster does not have.
    """
    chance = random.Random(seed)
    kinds = [(role, action) for role in WEIGHTS if members.get(role) for action in WEIGHTS[role]]
    if wrong := set(only) - {f"{action} {role}" for role, action in kinds}:
        known = ", ".join(f"{action} {role}" for role, action in kinds)
        raise InvalidArgument(f"no fault is called {wrong.pop()!r} here; there are: {known}")
    kinds = [kind for kind in kinds if not only or f"{kind[1]} {kind[0]}" in only]
    weights = [WEIGHTS[role][action] for role, action in kinds]
    plan = []
    at_s = chance.expovariate(1 / every_s)
    while at_s < duration_s:
        role, action = chance.choices(kinds, weights)[0]
        lasts_s = round(chance.uniform(*LASTS_S), 2) if action in LASTING else 0.0
        number = chance.randrange(members[role])
        plan.append(Fault(round(at_s, 3), role, number, action, lasts_s))
        at_s += chance.expovariate(1 / every_s)
    return plan
