"""A proxy in the environment, which gRPC would use for loopback, too, and other wrong addresses."""

from __future__ import annotations

import socketserver
import threading

import pytest

from forebay.service.client.dispatcher_status import fetch_status
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.connections.proxies import (
    EXCEPTIONS,
    USES_PROXY,
    VARIABLES,
    proxy_options,
    proxy_variable,
)
from forebay.service.errors import Unavailable

from ..stock import DispatcherProcess

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*VARIABLES, *EXCEPTIONS, USES_PROXY):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("address", ["localhost:1", "127.8.0.1:1", "[::1]:1", "10.0.0.6:1"])
def test_loopback_and_ip_addresses_are_direct(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", NOWHERE)
    assert proxy_options(address) and not proxy_variable(address)
    monkeypatch.setenv(USES_PROXY, "1")
    assert not proxy_options(address) and proxy_variable(address) == "http_proxy"


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        ({}, ""),
        ({"http_proxy": NOWHERE}, "http_proxy"),
        ({"http_proxy": NOWHERE, "grpc_proxy": NOWHERE}, "grpc_proxy"),
        ({"http_proxy": NOWHERE, "no_proxy": "other, .example"}, ""),
        ({"http_proxy": NOWHERE, "no_proxy": ",elsewhere"}, "http_proxy"),
        ({"http_proxy": NOWHERE, "no_proxy": "example", "no_grpc_proxy": "x"}, "http_proxy"),
    ],
)
def test_names_go_through_the_proxy_that_grpc_would_use(
    environment: dict[str, str], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert proxy_variable("host.example:1") == variable and not proxy_options("host.example:1")


@pytest.mark.parametrize("variable", ["grpc_proxy", "http_proxy"])
def test_a_dispatcher_on_loopback_answers(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with DispatcherProcess("memory:") as dispatcher:
        monkeypatch.setenv(variable, NOWHERE)
        port = dispatcher.address.rpartition(":")[2]
        for address in (dispatcher.address, f"localhost:{port}"):
            with DispatcherClient(address, own_connection=True) as client:
                assert fetch_status(client, patience_s=5)["workers"] == []


def test_an_error_names_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", NOWHERE)
    with (
        DispatcherClient("dispatcher.invalid:5050") as client,
        pytest.raises(Unavailable, match=r"variable http_proxy .*no_proxy=dispatcher\.invalid"),
    ):
        fetch_status(client, patience_s=0)


def test_an_error_says_that_something_else_listens_there() -> None:
    class Refusing(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with (
                DispatcherClient(f"127.0.0.1:{server.server_address[1]}") as client,
                pytest.raises(Unavailable, match=r"speaks no gRPC: give the dispatcher's --port"),
            ):
                fetch_status(client, patience_s=1)
        finally:
            server.shutdown()
