"""Dispatcher RPCs on a worker's address: refuses them, and names the dispatcher."""

from __future__ import annotations

from typing import Any, NoReturn

from ..connections.grpc_server import generic_handler
from ..errors import InvalidArgument
from ..proto import forebay_pb2, tf_service_pb2

SERVICES = {
    "forebay.v1.Dispatcher": forebay_pb2,
    "tensorflow.data.DispatcherService": tf_service_pb2,
}


def handlers(dispatcher: str) -> list[Any]:
    """Handlers for `grpc.server`; every dispatcher method fails with the right address."""

    def refuse(_: object) -> NoReturn:
        raise InvalidArgument(
            f"this address is a worker's: its dispatcher is {dispatcher}; give that one's"
        )

    return [
        generic_handler(
            service,
            {
                name: (refuse, getattr(messages, f"{name}Request"), response)
                for request in messages.DESCRIPTOR.message_types_by_name
                if (name := request.removesuffix("Request")) != request
                and (response := getattr(messages, f"{name}Response", None)) is not None
            },
        )
        for service, messages in SERVICES.items()
    ]
