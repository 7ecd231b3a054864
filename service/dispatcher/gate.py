"""The gate before a dispatcher's two faces: open while it leads, a redirection otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from ..grpc_server import LEADER_KEY


class Gate(grpc.GenericRpcHandler):  # type: ignore[type-arg] # generic in its stubs only
    """Passes calls on to the faces' handlers, if there are any.

    A dispatcher that does not lead answers UNAVAILABLE, which every client retries, and says
    in the metadata who does, for those that understand it.
    """

    def __init__(self) -> None:
        self._handlers: Sequence[grpc.GenericRpcHandler[Any, Any]] = ()
        self._leader: Callable[[], str] = str
        self._refusal = grpc.unary_unary_rpc_method_handler(self._refuse)

    def open(self, handlers: Sequence[grpc.GenericRpcHandler[Any, Any]]) -> None:
        """From now on this dispatcher leads."""
        self._handlers = handlers

    def close(self, leader: Callable[[], str]) -> None:
        """It does not, or not yet; `leader` tells who does, "" if that is not known."""
        self._handlers = ()
        self._leader = leader

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if not self._handlers:
            return self._refusal
        found = (handler.service(handler_call_details) for handler in self._handlers)
        return next(filter(None, found), None)

    async def _refuse(self, _: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        leader = self._leader()
        where = f"ask {leader}" if leader else "no leader is known yet; ask again"
        await context.abort(
            grpc.StatusCode.UNAVAILABLE,
            f"this dispatcher stands by: {where}",
            ((LEADER_KEY, leader),) if leader else (),
        )
