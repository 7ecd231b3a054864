"""The port of a dispatcher, from one role to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from forebay.service.dispatcher.listener import ServedPort


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Stopping:
    """Of all servers that gRPC makes from now on."""
    stopping, make = Stopping(), grpc.aio.server

    def made(**options: Any) -> grpc.aio.Server:
        server = make(**options)
        stop = server.stop

        async def stops(grace_s: float | None) -> None:
            stopping.graces_s.append(grace_s)
            if grace_s is not None:
                await stopping.before()
            await stop(grace_s)

        server.stop = stops  # type: ignore[method-assign, assignment]
        return server

    monkeypatch.setattr(grpc.aio, "server", made)
    return stopping


class Stopping:
    """How servers are stopped: their graces, and what happens `before` a stop with one."""

    def __init__(self) -> None:
        self.graces_s: list[float | None] = []
        self.before: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)


def test_closing_survives_a_wait_that_grpc_itself_cancels(stopping: Stopping) -> None:
    """As gRPC may after a pause of the process."""

    async def cancel() -> None:
        raise asyncio.CancelledError

    async def change_roles() -> None:
        port = ServedPort("localhost", 0, standby=False)
        await port.open([], standby=False)
        stopping.before = cancel
        await port.close(2.0)
        assert stopping.graces_s == [2.0, None]
        await port.open([], standby=True)
        stopping.before = lambda: asyncio.sleep(0)
        await port.close(0)

    asyncio.run(change_roles())


def test_closing_can_be_cancelled(stopping: Stopping) -> None:
    async def cancelled() -> None:
        port = ServedPort("localhost", 0, standby=False)
        await port.open([], standby=False)
        stopping.before = lambda: asyncio.sleep(60)
        task = asyncio.create_task(port.close(2.0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stopping.graces_s == [2.0]
        await port.close(None)

    asyncio.run(cancelled())
