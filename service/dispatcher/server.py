"""The dispatcher's server: one port, and behind it both faces for as long as it leads.

stand by ─► lead ─► (displaced) ─► stand by …
              └─► the journal cannot be written: exit, recovery is by replay
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ...storage import open_storage
from ..errors import InvalidArgument
from ..grpc_server import SERVER_OPTIONS, WILDCARDS, bind
from .candidate import Candidate, place_of
from .dispatcher import Dispatcher
from .forebay_face import ForebayFace
from .gate import Gate
from .options import DispatcherOptions
from .tensorflow_face import TensorFlowFace

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
"""For replies whose decisions are already recorded: cutting them off would lose splits."""

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def serve(options: DispatcherOptions, ready: Callable[[str], None]) -> bool:
    """Run a dispatcher until SIGTERM or SIGINT, or until its journal fails.

    Calls `ready` with the address once requests are answered; a standby answers them with the
    leader's address. Returns whether it was stopped, rather than failed. Raises StorageError
    when the journal cannot be taken over, and AddressInUse.
    """
    if options.host in WILDCARDS and options.standby and not options.address:
        raise InvalidArgument(
            f"a standby that listens on {options.host} must be told the address that clients "
            "reach it at: --address HOST:%port%"
        )
    if options.standby and options.storage.startswith("memory:"):
        raise InvalidArgument(
            "a standby shares its storage with the leader, and memory: cannot be shared: give "
            "--storage a directory or a Redis"
        )
    server = grpc.aio.server(options=SERVER_OPTIONS)
    bound = bind(server, options.host, options.port)
    address = options.address.replace("%port%", bound.rpartition(":")[2]) or bound
    storage = open_storage(
        options.storage, **({"allow_volatile": True} if options.allow_volatile else {})
    )
    candidate = Candidate(storage, options, address, place_of(bound))
    running = _Server(server, candidate)
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, interrupted.set)
    serving = asyncio.create_task(
        running.serve(ready=lambda: ready(bound)), name="forebay-dispatcher"
    )
    stop = asyncio.create_task(interrupted.wait(), name="forebay-interrupt")
    try:
        await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not interrupted.is_set():
            await serving  # raises what it failed with
        return interrupted.is_set()
    finally:
        await running.stop(serving)
        storage.close()


class _Server:
    def __init__(self, server: grpc.aio.Server, candidate: Candidate) -> None:
        self._server = server
        self._candidate = candidate
        self._gate = Gate()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._leading: tuple[Dispatcher, TensorFlowFace] | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        server.add_generic_rpc_handlers((self._gate,))

    async def serve(self, ready: Callable[[], None]) -> None:
        """Stand by and lead in turn, until the journal fails."""
        standby = self._candidate.standby
        self._gate.close(self._candidate.leader)
        await self._health.set("", NOT_SERVING)
        if standby:
            await self._server.start()
            ready()
        while True:
            dispatcher = await self._candidate.take_over()
            tensorflow = TensorFlowFace(dispatcher)
            self._leading = dispatcher, tensorflow
            self._gate.open([ForebayFace(dispatcher).handlers(), tensorflow.handlers()])
            await self._health.set("", SERVING)
            if not standby:
                await self._server.start()
                ready()
            await dispatcher.stopped.wait()
            if not (standby and dispatcher.displaced):
                return
            await self._step_down()

    async def _step_down(self) -> None:
        self._gate.close(self._candidate.leader)
        await self._health.set("", NOT_SERVING)
        assert self._leading is not None
        dispatcher, tensorflow = self._leading
        self._leading = None
        await tensorflow.close()
        await dispatcher.close()

    async def stop(self, serving: asyncio.Task[Any]) -> None:
        """Give answers whose decisions are recorded a moment to leave, then close everything."""
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        if self._leading is not None:
            self._leading[0].wake_all()
        await self._server.stop(STOP_GRACE_S)
        if self._leading is not None:
            await self._step_down()
