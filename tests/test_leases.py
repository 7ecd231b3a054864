"""A task's splits while no dispatcher answers."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from forebay.service.dispatcher_client import DispatcherClient
from forebay.service.worker import leases


@pytest.mark.parametrize("providers", [1, 3])
def test_who_waits_for_a_lease_stops_waiting_when_the_worker_drains(
    monkeypatch: pytest.MonkeyPatch, providers: int
) -> None:
    monkeypatch.setattr(leases, "HAND_BACK_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    dispatcher = DispatcherClient(f"127.0.0.1:{port}")
    feed = leases.LeaseFeed(dispatcher, 1, providers)
    found: list[tuple[int, int] | None] = []
    threads = [
        threading.Thread(target=lambda number=number: found.append(feed.next_range(number, 0)))
        for number in range(providers)
    ]
    with contextlib.closing(dispatcher), contextlib.closing(feed):
        for thread in threads:
            thread.start()
        feed.drain()
        for thread in threads:
            thread.join(30)
        assert found == [None] * providers, "the end, and no error: what was made is delivered"
