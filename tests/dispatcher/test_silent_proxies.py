"""A proxy that goes silent between a dispatcher and who calls it, and acknowledges all the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import grpc
import pytest

from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.connections.grpc_server import bind, server_options, threaded_handler
from forebay.service.proto import forebay_pb2 as pb

from ..transport.peers import ShortLived

STATUS = "a status of some size" * 50_000


@pytest.fixture
def port() -> Iterator[int]:
    def get_status(_: pb.GetStatusRequest) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(status=STATUS)

    methods = {"GetStatus": (get_status, pb.GetStatusRequest, pb.GetStatusResponse)}
    handler = threaded_handler("forebay.v1.Dispatcher", methods)
    server = grpc.server(ThreadPoolExecutor(2), handlers=[handler], options=server_options(None))
    port = int(bind(server, "127.0.0.1", 0).rpartition(":")[2])
    server.start()
    yield port
    server.stop(0).wait()


@pytest.mark.parametrize("passes", [1, 20, 100, 500_000], ids=lambda passes: f"{passes} bytes")
def test_a_call_is_made_again_on_another_connection(port: int, passes: int) -> None:
    """Long before its own time is over, for which a long poll may wait."""
    with ExitStack() as stack:
        proxy = ShortLived(port, passes, silent=True, endless_from=1)
        stack.callback(proxy.close)
        client = stack.enter_context(closing(DispatcherClient(proxy.address)))
        answer = client.call(pb.GetStatusRequest(), pb.GetStatusResponse, timeout_s=1e6)
        assert answer.status == STATUS
        assert proxy.spent == 1
        assert proxy.connections >= 2
