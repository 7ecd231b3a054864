"""The listener on a dispatcher's port: a new gRPC server for each change of role.

A connection must not outlive the role in which it was accepted. A client may know only one
address, behind which another dispatcher leads by now: it must reconnect to reach the leader. So
each role has its own server, and a standby's server ends its connections after a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ..connections.admission import Admission
from ..connections.grpc_server import LEADER_KEY, bind, interceptors, server_options
from ..errors import AddressInUse

Handler = grpc.GenericRpcHandler  # of a service

_STANDBY_OPTIONS = [("grpc.max_connection_age_ms", 2_000)]
REBIND_S = 5.0
"""How long to wait for the system to free the port."""


class _Health(health.aio.HealthServicer):  # type: ignore[misc, name-defined] # not in its stubs
    """That of the whole server alone: each watcher of another name would be kept with its name."""

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802 - gRPC's name
        if request.service:
            await context.abort(grpc.StatusCode.NOT_FOUND, "ask for the service of no name")
        await super().Watch(request, context)


class ServedPort:
    """A port on which `open` serves one role after another."""

    def __init__(
        self, host: str, port: int, *, standby: bool, admission: Admission | None = None
    ) -> None:
        """Bind host:port (0: any free one); `standby` is the first role. Raises AddressInUse."""
        self._host = host
        self._admission = admission
        self._credentials = None if admission is None else admission.credentials
        self._server = self._make_server(standby)
        self.address = bind(self._server, host, port, self._credentials)
        self._port = int(self.address.rpartition(":")[2])
        self._started = False

    async def open(self, handlers: Sequence[Any], *, standby: bool) -> None:
        """Serve these services from now on, and end all earlier connections.

        Raises AddressInUse if another process has taken the port meanwhile.
        """
        if self._started:
            await self.close(None)
            self._server = self._make_server(standby)
            await self._bind()
        servicer = _Health()
        states = health_pb2.HealthCheckResponse
        await servicer.set("", states.NOT_SERVING if standby else states.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        self._server.add_generic_rpc_handlers(tuple(handlers))
        await self._server.start()
        self._started = True

    async def close(self, grace_s: float | None) -> None:
        """Accept no more calls, and cancel those that last longer than `grace_s` (None: all)."""
        try:
            await self._server.stop(grace_s)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            # Nobody cancelled us, but gRPC itself: after a pause, its time and its calls end at
            # once.
            await self._server.stop(None)

    def _make_server(self, standby: bool) -> grpc.aio.Server:
        return grpc.aio.server(
            interceptors=interceptors(self._admission, is_async=True) or None,
            options=server_options(self._credentials) + _STANDBY_OPTIONS * standby,
        )

    async def _bind(self) -> None:
        give_up = time.monotonic() + REBIND_S
        while True:
            try:
                bind(self._server, self._host, self._port, self._credentials)
                return
            except AddressInUse:
                if time.monotonic() > give_up:
                    raise
            await asyncio.sleep(0.01)


class StandbyHandler(grpc.GenericRpcHandler):  # type: ignore[type-arg] # generic in its stubs only
    """Answers every call to a standby with UNAVAILABLE, which every client retries.

    The metadata names the leader, for clients that understand it.
    """

    def __init__(self, leader: Callable[[], str], stands_by: Callable[[], str]) -> None:
        """`leader` returns the leader's address; "" if it is unknown. `stands_by` says the same in
        words."""
        self._leader, self._stands_by = leader, stands_by
        self.refused = 0  # calls
        self._handler = grpc.unary_unary_rpc_method_handler(self._refuse)

    def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        return self._handler

    async def _refuse(self, _: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        self.refused += 1
        leader = self._leader()
        await context.abort(
            grpc.StatusCode.UNAVAILABLE,
            f"this dispatcher stands by: {self._stands_by()}",
            ((LEADER_KEY, leader),) if leader else (),
        )
