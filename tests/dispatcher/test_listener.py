"""The port of a dispatcher, from one role to the next."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forebay.service.dispatcher.listener import ServedPort


def cancelled_once(port: ServedPort) -> list[Any]:
    """Have the port's server cancel its own wait, as gRPC may after a pause of the process."""
    graces: list[Any] = []
    stop = port.server.stop

    async def stops(grace: Any) -> None:
        graces.append(grace)
        if len(graces) == 1:
            raise asyncio.CancelledError
        await stop(grace)

    port.server.stop = stops  # type: ignore[method-assign, assignment]
    return graces


def test_a_wait_that_grpc_cancels_itself_does_not_end_the_dispatcher() -> None:
    async def change_roles() -> None:
        port = ServedPort("localhost", 0, standby=False)
        await port.open([], standby=False)
        graces = cancelled_once(port)
        await port.close(2.0)
        assert graces == [2.0, None]
        await port.open([], standby=True)
        await port.close(0)

    asyncio.run(change_roles())


def test_whoever_is_cancelled_stays_cancelled() -> None:
    async def cancelled() -> None:
        port = ServedPort("localhost", 0, standby=False)
        await port.open([], standby=False)
        stop, graces = port.server.stop, []

        async def stops(grace: Any) -> None:
            graces.append(grace)
            await asyncio.sleep(60)

        port.server.stop = stops  # type: ignore[method-assign, assignment]
        task = asyncio.create_task(port.close(2.0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert graces == [2.0]
        await stop(None)

    asyncio.run(cancelled())
