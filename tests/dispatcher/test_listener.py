"""The port of a dispatcher, from one role to the next."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from forebay.service.connections import grpc_server
from forebay.service.connections.grpc_server import connect
from forebay.service.dispatcher.listener import ServedPort
from forebay.service.transport import BlockServer


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


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_a_host_may_be_an_ipv6_address(host: str) -> None:
    async def bound() -> str:
        port = ServedPort(host, 0, standby=False)
        await port.open([], standby=False)
        await port.close(0)
        return port.address

    assert asyncio.run(bound()).startswith("[::1]:")
    data = BlockServer(1, host)
    socket.create_connection(("::1", data.port)).close()
    data.start()
    data.stop()


@pytest.mark.parametrize("standby", [False, True])
def test_a_request_that_is_too_large_is_refused(
    monkeypatch: pytest.MonkeyPatch, standby: bool
) -> None:
    monkeypatch.setattr(grpc_server, "MAX_DATASET_BYTES", 1_000)

    async def call(port: ServedPort, size: int) -> str:
        with connect(port.address) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
            with pytest.raises(grpc.RpcError) as refused:
                await asyncio.to_thread(check, bytes(size))
        return str(refused.value.details())

    async def serve() -> None:
        port = ServedPort("localhost", 0, standby=standby)
        await port.open([], standby=standby)
        assert "larger than max (1001 vs. 1000)" in await call(port, 1_001)
        assert "larger" not in await call(port, 1_000)
        await port.close(0)

    asyncio.run(serve())
