"""Dispatcher RPCs on a worker's address: refuses them, and names the dispatcher."""

from __future__ import annotations

from typing import Any

from ..connections.grpc_server import refusing_handler
from ..errors import InvalidArgument
from ..proto import forebay_pb2, tf_service_pb2

SERVICES = {
    "forebay.v1.Dispatcher": forebay_pb2,
    "tensorflow.data.DispatcherService": tf_service_pb2,
}


def handlers(dispatcher: str) -> list[Any]:
    """Handlers for `grpc.server`; every dispatcher method fails with the right address."""
    error = InvalidArgument(
        f"this address is a worker's; use the address of its dispatcher instead: {dispatcher}"
    )
    return [
        refusing_handler(service, messages, error, is_async=False)
        for service, messages in SERVICES.items()
    ]
