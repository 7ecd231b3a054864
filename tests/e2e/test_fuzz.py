"""Garbage on each port of real servers with TLS, from strangers and from who is let in: by tokens,
or by certificates and an access file.

FOREBAY_FUZZ says how many inputs each port gets; more by hand than here.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

import grpc
import pytest
import tensorflow as tf
from google.protobuf.wrappers_pb2 import BytesValue

from forebay import service
from forebay.service import Credentials
from forebay.service.connections.access import ROLES
from forebay.service.connections.dispatcher_client import SERVICE
from forebay.service.connections.grpc_server import connect, metadata_of
from forebay.service.dispatcher.permissions import METHODS
from forebay.service.processes import free_port
from forebay.service.proto import forebay_pb2
from forebay.service.proto import transfer_pb2 as pb
from forebay.service.transport import frames
from forebay.service.transport.messages import VERSION

from .. import certificates
from ..cluster import WorkerProcess
from ..standbys import wait_until
from ..stock import DispatcherProcess

INPUTS = int(os.environ.get("FOREBAY_FUZZ", "60"))
"""For each port, and each way to come."""

pytestmark = pytest.mark.timeout(600 + INPUTS)

MOST_GROWTH_KB = 64 << 10
"""By how much a server's memory may differ between two rounds of the same."""

STARTS = (
    b"",
    b"\x16\x03\x01\x02\x00\x01\x00\x01",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /",
    b"FBY1",
)


def field(number: int, content: bytes) -> bytes:
    """A field of a message, which holds bytes or a message."""
    return bytes([number << 3 | 2]) + BytesValue(value=content).SerializeToString()[1:]


class Fuzzer:
    """Sends garbage to one port after another."""

    def __init__(self, own: Credentials, seed: int) -> None:
        self._own = own
        self._dice = random.Random(seed)
        self._context = own.loaded().client

    def garbage(self, *good: bytes) -> bytes:
        """Something right, cut and changed, and something random behind it."""
        dice = self._dice
        data = bytearray(dice.choice((*STARTS, *good)) + dice.randbytes(dice.randrange(200)))
        for _ in range(dice.randrange(4)):
            if data:
                data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        return bytes(data[: dice.randrange(len(data) + 1)] if dice.random() < 0.3 else data)

    def connected(
        self, address: str, *, tls: bool
    ) -> contextlib.AbstractContextManager[socket.socket]:
        port = int(address.rpartition(":")[2])
        sock = socket.create_connection(("127.0.0.1", port), timeout=30)
        return self._context.wrap_socket(sock, server_hostname="localhost") if tls else sock

    def send(self, address: str, data: bytes, *, tls: bool = False) -> None:
        """Send it, and wait until the server has something to say, or ends the connection."""
        with contextlib.suppress(OSError), self.connected(address, tls=tls) as sock:
            sock.sendall(data)
            if not tls:
                sock.shutdown(socket.SHUT_WR)
            sock.settimeout(0.02)
            sock.recv(4096)

    def strangers(self, address: str) -> None:
        for _ in range(INPUTS):
            self.send(address, self.garbage())

    def behind_tls(self, address: str, *good: bytes) -> None:
        for _ in range(INPUTS):
            self.send(address, self.garbage(*good), tls=True)

    def calls(self, address: str) -> None:
        """Of each method, with all that this peer is known by."""
        methods = [f"/{SERVICE}/{name}" for name in METHODS]
        requests = {name: getattr(forebay_pb2, f"{name}Request") for name in METHODS}
        with connect(address, credentials=self._own) as channel:
            for number in range(INPUTS):
                name = methods[number % len(methods)]
                request = requests[name.rpartition("/")[2]]
                poses = name.endswith("/WorkerHeartbeat")  # who is let in may pose as a worker
                data = self.garbage() if number % 3 or poses else self._filled(request)
                self._call(channel, name, data)
            for depth in (10, 30, 33, 100, 101, 1_000):
                self._call(channel, f"/{SERVICE}/RegisterDataset", self._nested(depth))
                self._call(channel, f"/{SERVICE}/GetStatus", b"\x7b" * depth + b"\x7c" * depth)

    def _call(self, channel: grpc.Channel, name: str, data: bytes) -> None:
        with contextlib.suppress(grpc.RpcError):
            call = channel.unary_unary(name, None, None)
            call(data, timeout=5, metadata=metadata_of(self._own))

    @staticmethod
    def _nested(depth: int) -> bytes:
        """The registration of a graph whose attributes have attributes, and so on: more, perhaps,
        than protobuf reads."""
        attribute = field(2, b"x")
        for _ in range(depth):
            attribute = field(10, field(2, field(1, b"name") + field(2, attribute)))
        graph = field(1, field(5, field(1, b"name") + field(2, attribute)))
        return forebay_pb2.RegisterDatasetRequest(graph=graph).SerializeToString()

    def _filled(self, kind: type) -> bytes:
        """A message whose numbers and texts are anything."""
        message, dice = kind(), self._dice
        for field in message.DESCRIPTOR.fields:
            if field.message_type is not None or dice.random() < 0.3:
                continue
            value: object
            if field.type == field.TYPE_BYTES:
                value = dice.randbytes(dice.randrange(20))
            elif field.type == field.TYPE_STRING:
                value = dice.choice(("", "x", "é" * 300, "../../etc", "\0"))
            elif field.type == field.TYPE_BOOL:
                value = dice.random() < 0.5
            else:
                value = dice.choice((0, 1, 7, 2**31 - 1))
            with contextlib.suppress(ValueError, TypeError):
                if field.is_repeated:
                    getattr(message, field.name).extend([value] * dice.randrange(3))
                else:
                    setattr(message, field.name, value)
        if hasattr(message, "wait_ms"):
            message.wait_ms = 0
        return message.SerializeToString()


def memory_kb(process: int) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError(process)


def descriptors(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


@pytest.mark.parametrize("by", ["tokens", "certificates"])
def test_garbage_on_any_port_stops_nobody_and_nothing_grows(tmp_path: Path, by: str) -> None:
    authority = certificates.Authority(tmp_path / "ca")
    server = authority.issue("server").files()
    rules: dict[str, str] = {}
    if by == "tokens":
        path = certificates.token(tmp_path / "cluster.token", "secret\n")
        server["token_file"] = path
        own = Credentials(tls_ca=str(authority.file), token_file=path)
    else:
        own = authority.issue("all")
        access = tmp_path / "access.toml"
        access.write_text(f'[[grant]]\nto = ["server", "all"]\nroles = {[*ROLES]}\n')
        rules["access_file"] = str(access)
    http, worker_http, data = free_port(), free_port(), free_port()
    with (
        DispatcherProcess(tmp_path / "j", http_port=http, **server, **rules) as dispatcher,
        WorkerProcess(
            dispatcher.address, http_port=worker_http, data_port=data, **server
        ) as worker,
        certificates.using(own),
    ):

        def reads() -> None:
            dataset_id = service.register_dataset(dispatcher.target, tf.data.Dataset.range(500))
            for protocol in ("tcp", "grpc"):
                elements = service.read(
                    dispatcher.target, dataset_id, data_transfer_protocol=protocol
                )
                assert sorted(int(x) for x in elements) == [*range(500)]

        def garbage(seed: int) -> None:
            fuzzer = Fuzzer(own, seed)
            for address in (dispatcher.address, worker.address, f":{data}", f":{http}"):
                fuzzer.strangers(address)
            hello = pb.Hello(version=VERSION, consumer_id=1, worker_uid=1, token="secret")
            greeting = pb.ToWorker(hello=hello).SerializeToString()
            fuzzer.behind_tls(f":{data}", bytes(frames.encode(greeting)[0]))
            request = b"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret\r\n\r\n"
            for port in (http, worker_http):
                fuzzer.behind_tls(f":{port}", request)
            fuzzer.behind_tls(dispatcher.address)
            fuzzer.calls(dispatcher.address)
            fuzzer.calls(worker.address)

        reads()
        garbage(1)
        reads()
        before = {pid: (memory_kb(pid), descriptors(pid)) for pid in (dispatcher.pid, worker.pid)}
        garbage(2)
        reads()
        for pid, (kilobytes, files) in before.items():
            assert memory_kb(pid) < kilobytes + MOST_GROWTH_KB
            wait_until(lambda: descriptors(pid) <= files + 5)  # noqa: B023
