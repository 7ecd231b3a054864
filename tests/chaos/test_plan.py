"""The plan of faults follows from the seed."""

from __future__ import annotations

import pytest

from forebay.chaos.plan import LASTS_S, PARTED, PARTED_S, PARTITIONS, WEIGHTS, host_names, make_plan
from forebay.service.errors import InvalidArgument

MEMBERS = {
    "dispatcher": 2,
    "worker": 3,
    "trainer": 2,
    "claimer": 2,
    "ordered": 3,
    "redis": 1,
    "postgres": 1,
}


def test_it_follows_from_the_seed() -> None:
    plan = make_plan(7, 600, 2, MEMBERS)
    assert plan == make_plan(7, 600, 2, MEMBERS)
    assert plan != make_plan(8, 600, 2, MEMBERS)


def test_it_hits_everybody_in_every_way() -> None:
    plan = make_plan(7, 6000, 2, MEMBERS)
    assert {(f.role, f.action) for f in plan} == {
        (role, action) for role, actions in WEIGHTS.items() for action in actions
    }
    assert {(f.role, f.number) for f in plan} == {
        (role, number) for role, count in MEMBERS.items() for number in range(count)
    }
    assert 2700 < len(plan) < 3300
    assert [f.at_s for f in plan] == sorted(f.at_s for f in plan)
    assert all(0 < f.at_s < 6000 for f in plan)
    assert {LASTS_S[0] <= f.lasts_s <= LASTS_S[1] for f in plan if f.lasts_s} == {True}


def test_it_hits_only_who_is_there() -> None:
    plan = make_plan(7, 600, 2, {"dispatcher": 1, "worker": 1})
    assert {(f.role, f.number) for f in plan} == {("dispatcher", 0), ("worker", 0)}


def test_only_some_kinds() -> None:
    only = ["kill worker", "pause redis"]
    assert {fault.kind for fault in make_plan(7, 600, 2, MEMBERS, only)} == set(only)
    with pytest.raises(InvalidArgument, match="no fault is called 'kill time' here; there are: k"):
        make_plan(7, 600, 2, MEMBERS, ["kill time"])
    with pytest.raises(InvalidArgument, match="'kill redis'"):
        make_plan(7, 600, 2, {"worker": 1}, ["kill redis"])


def test_partitions() -> None:
    """Where members have hosts: one is cut off from all others, or one group from another."""
    members = MEMBERS | {"network": 1}
    plan = [fault for fault in make_plan(7, 6000, 2, members) if fault.action in PARTED]
    assert {(f.role, f.action) for f in plan} == {
        (role, action) for role, actions in PARTITIONS.items() for action in actions
    }
    hosts = set(host_names(members))
    assert "ordered2" in hosts and "network0" not in hosts
    for fault in plan:
        one, other = map(set, fault.sides)
        assert one and other and not one & other and one | other <= hosts
        assert PARTED_S[0] <= fault.lasts_s <= PARTED_S[1]
        if fault.action in ("isolate", "deafen"):
            assert one == {f"{fault.role}{fault.number}"}
        assert fault.action == "sever" or one | other == hosts
    assert any(len(hosts.difference(*fault.sides)) > 3 for fault in plan)
    assert min(f.lasts_s for f in plan) < 2 and max(f.lasts_s for f in plan) > 25
