"""A writer whose process seems to have ended is displaced before its lease expires."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from forebay.storage import Fenced, Locked, open_storage
from forebay.storage.server_log import QUERY_MS
from forebay.storage.server_storage import ServerStorage
from forebay.storage.server_writer import ServerWriter

from ..redis_server import wait_until

LEASE_MS = 60_000


@pytest.mark.parametrize("any_storage", ["redis", "postgres"], indirect=True)
@pytest.mark.parametrize(
    ("connected", "listens", "listened", "early"),
    [
        pytest.param(False, False, True, True, id="its process has ended"),
        pytest.param(True, False, True, False, id="a firewall rejects, or it binds its port anew"),
        pytest.param(False, True, True, False, id="the server forgot its connections"),
        pytest.param(False, None, True, False, id="its host is cut off"),
        pytest.param(False, False, None, False, id="its address was never reached"),
    ],
)
def test_who_seems_to_have_ended(
    any_storage: str,
    clock: SimpleNamespace,
    connected: bool,
    listens: bool | None,
    listened: bool | None,
    early: bool,
) -> None:
    leader = open_storage(any_storage).open_writer("the leader", lease_ms=LEASE_MS)
    assert isinstance(leader, ServerWriter)
    leader.append([b"a"])
    leader.renew()
    standby = open_storage(any_storage)
    assert isinstance(standby, ServerStorage)
    told = [listened]
    standby.listens = lambda term: told[-1] if term == leader.term else None
    with pytest.raises(Locked):
        standby.open_writer("the standby")
    told.append(listens)
    if not connected:
        leader._client.close()
        leader._renewals.close()
        wait_until("it is noticed", lambda: not standby._is_connected(leader._token))
    clock.now += leader.query_ms / 1000 - 0.01
    with pytest.raises(Locked):
        standby.open_writer("the standby")
    clock.now += 0.02
    if not early:
        with pytest.raises(Locked):
            standby.open_writer("the standby")
        clock.now += LEASE_MS / 1000
    assert standby.open_writer("the standby").term == leader.term + 1
    with pytest.raises(Fenced):  # a process that lived would connect again
        leader.renew()


def test_a_short_lease_has_queries_answered_for_a_quarter_of_it(redis_storage_url: str) -> None:
    for lease_ms, query_ms in ((60_000, QUERY_MS), (400, 100)):
        writer = open_storage(redis_storage_url).open_writer("x", lease_ms=lease_ms, place="here")
        assert writer.query_ms == query_ms
