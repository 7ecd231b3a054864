"""The two ends of data connections, and what may be between them, for tests."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import grpc

from forebay.service.blocks import Block
from forebay.service.connections import tunnel
from forebay.service.connections.admission import Identity
from forebay.service.connections.grpc_server import bind, server_options
from forebay.service.delivery import ANY, End, EndOfTask, FirstComeOutput, ReadRequest
from forebay.service.proto import transfer_pb2 as pb
from forebay.service.transport import BlockClient, BlockServer, LocalClient, frames, messages
from forebay.service.transport.sending import Connection
from forebay.service.transport.sessions import Sessions

from .samples import numbered

UID = 77
TIMEOUT_S = 40  # above the 30 s after which a client gives up and says why


class Consumer:
    """A client, and what it was given."""

    def __init__(
        self,
        addresses: list[tuple[str, str]],
        consumer_id: int = 1,
        uid: int = UID,
        reads: int | None = None,
        request: ReadRequest = ANY,
        local: Sessions | None = None,
        start: bool = True,
        closing: ExitStack | None = None,
        **options: Any,
    ) -> None:
        """`reads` is a task of which it requests that from the start, `local` a worker in this
        process. `closing` closes it."""
        self.arrived: queue.Queue[tuple[int, int, Block | End] | str] = queue.Queue()
        options |= {
            "consumer_id": consumer_id,
            "deliver": lambda *delivered: self.arrived.put(delivered),
            "lost": self.arrived.put,
        }
        self.client: BlockClient | LocalClient
        if local is not None:
            self.client = LocalClient(local, **options)
        else:
            self.client = BlockClient(addresses, worker_uid=uid, **options)
        if closing is not None:
            closing.callback(self.client.close)
        if reads is not None:
            self.client.read(reads, request)
        if start:
            self.client.start()

    def get(self) -> tuple[int, Block | End] | str:
        """The next item, with its task; why nothing comes any more."""
        arrived = self.arrived.get(timeout=TIMEOUT_S)
        return arrived if isinstance(arrived, str) else (arrived[0], arrived[2])

    def waiting_blocks(self) -> int:
        return sum(isinstance(item[2], Block) for item in list(self.arrived.queue))

    def take_numbered(self) -> tuple[int, int, Block | End]:
        """The next item, with its task and subscription; a block counts as taken."""
        arrived = self.arrived.get(timeout=TIMEOUT_S)
        assert not isinstance(arrived, str), f"lost: {arrived}"
        if isinstance(arrived[2], Block):
            self.client.taken(arrived[2], (arrived[0], arrived[1]))
        return arrived

    def take(self) -> tuple[int, Block | End]:
        task_id, _, item = self.take_numbered()
        return task_id, item

    def numbers(self) -> list[int]:
        """The numbers of all blocks until a task's end."""
        numbers = []
        while isinstance(item := self.take()[1], Block):
            numbers.append(item.index)
        assert item == EndOfTask()
        return numbers


@contextlib.contextmanager
def waiting_sender(sessions: Sessions, connection: Connection) -> Iterator[Future[Any]]:
    """A sender that waits for the connection's next batch, and that batch."""
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(sessions.next_batch, connection)
        while connection not in sessions.idle:
            time.sleep(0.001)
        try:
            yield batch
        finally:
            sessions.refuse(connection, "the test is over")  # a sender that still waits ends


def task(
    server: BlockServer, task_id: int, blocks: int, sizes: Callable[[], int] = lambda: 8
) -> FirstComeOutput:
    """A task with all of its blocks ready."""
    output = FirstComeOutput(1 << 40)
    server.sessions.add_task(task_id, output)
    for number in range(1, blocks + 1):
        output.put(numbered(number, sizes()))
    output.finish()
    return output


def started(closing: ExitStack, **options: Any) -> BlockServer:
    server = BlockServer(UID, **options)
    closing.callback(server.stop)
    server.start()
    return server


def only(server: BlockServer, protocol: str) -> list[tuple[str, str]]:
    return [address for address in server.addresses if address[0] == protocol]


def connected(address: tuple[str, str]) -> socket.socket:
    protocol, where = address
    if protocol == "tcp":
        host, _, port = where.rpartition(":")
        return socket.create_connection((host, int(port)), TIMEOUT_S)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(TIMEOUT_S)
    sock.connect(where.replace("@", "\0", 1))
    return sock


class Peer:
    """A consumer that does as the test says, and not more."""

    def __init__(
        self,
        worker: BlockServer,
        consumer_id: int = 1,
        *,
        protocol: str = "tcp",
        shares_memory: bool = False,
        greets: bool = True,
    ) -> None:
        ((*address,),) = only(worker, protocol)
        self.socket = connected((address[0], address[1]))
        self._reader = frames.FrameReader(
            self.socket, "the worker", takes_descriptors=shares_memory
        )
        self.hello = pb.Hello(
            version=messages.VERSION, consumer_id=consumer_id, worker_uid=UID,
            shares_memory=shares_memory,
        )  # fmt: skip
        if greets:
            self.say(hello=self.hello)
            assert self.hear().HasField("welcome")

    def say(self, **message: Any) -> None:
        say(self.socket, pb.ToWorker(**message))

    def read(self, task_id: int, **how: Any) -> None:
        self.say(read=pb.Read(task_id=task_id, any=pb.Any(), **how))

    def frame(self) -> frames.Frame:
        frame = self._reader.read()
        assert frame is not None
        return frame

    def hear(self) -> pb.ToConsumer:
        return pb.ToConsumer.FromString(self.frame().header)

    def refusal(self) -> str:
        """What the worker says before it closes the connection."""
        reason = self.hear().refused.reason
        assert self._reader.read() is None
        return reason

    def close(self) -> None:
        self._reader.close()
        self.socket.close()


def say(sock: socket.socket, message: pb.ToWorker) -> None:
    frames.send(sock, frames.encode(message.SerializeToString()))


def encoded(message: pb.ToConsumer | pb.ToWorker, payload: bytes = b"") -> bytes:
    """The frame of a message."""
    return b"".join(frames.encode(message.SerializeToString(), [memoryview(payload)]))


class Saying(NamedTuple):
    """Bytes, and the descriptors that go with the first of them; those are closed once sent."""

    data: bytes
    descriptors: Sequence[int] = ()


WELCOME = Saying(encoded(pb.ToConsumer(welcome=pb.Welcome(version=messages.VERSION))))
ENOUGH = Saying(encoded(pb.ToConsumer(refused=pb.Refused(reason="it has been enough"))))


class ScriptedWorker:
    """Follows a script on each connection and closes it; by default, it refuses for good."""

    def __init__(self, family: socket.AddressFamily = socket.AF_INET) -> None:
        if family == socket.AF_UNIX:
            name = f"forebay-test-{secrets.token_hex(8)}"
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(f"\0{name}")
            self._listener.listen()
            self.addresses = [("unix", f"@{name}")]
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.addresses = [("tcp", f"127.0.0.1:{self._listener.getsockname()[1]}")]
        self._scripts: collections.deque[list[Saying]] = collections.deque()
        self._always = [ENOUGH]
        self._thread = threading.Thread(target=self._run, name="test-scripted-worker")
        self._thread.start()

    def follow(self, script: Iterable[Saying]) -> None:
        """Say this to the next one that connects."""
        self._scripts.append(list(script))

    def follow_always(self, script: Iterable[Saying]) -> None:
        """Say this to everybody else."""
        self._always = list(script)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            script = self._scripts.popleft() if self._scripts else self._always
            with sock:
                self._perform(sock, script)

    @staticmethod
    def _perform(sock: socket.socket, script: list[Saying]) -> None:
        sock.settimeout(TIMEOUT_S)
        open_ones = [d for saying in script for d in saying.descriptors]
        try:
            for saying in script:
                if saying.data:
                    frames.send(sock, [saying.data], saying.descriptors)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        except OSError:  # the client has had enough of it
            pass
        finally:
            for descriptor in open_ones:
                os.close(descriptor)


class Damage(NamedTuple):
    """What is done to the byte `at` of what passes in one direction."""

    to_worker: bool
    at: int
    cut: bool  # there; otherwise all bits of the byte are turned over


class TunnelledWorker:
    """A BlockServer that is reached through a gRPC server, too."""

    def __init__(self, closing: ExitStack) -> None:
        self.blocks = BlockServer(UID)
        closing.callback(self.blocks.stop)
        self.hosts: queue.Queue[str] = queue.Queue()
        self.grpc = grpc.server(
            ThreadPoolExecutor(2 * tunnel.MAX_TUNNELS),
            handlers=[tunnel.handlers(self._serve)],
            options=[*server_options(None), *tunnel.SERVER_OPTIONS],
        )
        self.address = bind(self.grpc, "127.0.0.1", 0)
        self.grpc.start()
        self.blocks.start()
        closing.callback(lambda: self.grpc.stop(0).wait())

    def _serve(self, sock: socket.socket, address: tuple[str, int], _: Identity | None) -> None:
        self.hosts.put(address[0])
        self.blocks.serve(sock, address)

    def port(self, protocol: str) -> int:
        """Of "tcp" or "grpc"."""
        return self.blocks.port if protocol == "tcp" else int(self.address.rpartition(":")[2])


Rule = Callable[[bytes], tuple[bytes, bool]]
"""What of the data passes in one direction, and whether the connection goes on behind it."""


def whole(data: bytes) -> tuple[bytes, bool]:
    return data, True


class Proxy:
    """A TCP proxy before a worker, which passes on what the rules of each connection let pass."""

    def __init__(
        self, port: int, rules: Callable[[], tuple[Rule, Rule]], buffer_bytes: int = 0
    ) -> None:
        """`rules` is asked for each connection to the worker's `port`: there, and back."""
        self._target = ("127.0.0.1", port)
        self._rules = rules
        self._buffer_bytes = buffer_bytes  # of each socket, for what it receives; 0: the system's
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.addresses = [("tcp", self.address)]
        self.connections = 0
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._run, name="test-proxy")]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for sock in list(self._open):
            self._shut(sock)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            self.connections += 1
            there, back = self._rules()
            thread = threading.Thread(
                target=self._serve, args=(near, there, back), name="test-proxy"
            )
            self._open.add(near)
            self._threads.append(thread)
            thread.start()

    def _serve(self, near: socket.socket, there: Rule, back: Rule) -> None:
        with near, socket.socket() as far:
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._buffer_bytes:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_bytes)
            self._open.add(far)
            try:
                far.connect(self._target)
            except OSError:  # nobody listens there now
                return
            forth = threading.Thread(target=self._pass, args=(near, far, there), name="test-proxy")
            forth.start()
            self._pass(far, near, back)
            forth.join()
            self._open -= {near, far}

    def _pass(self, source: socket.socket, sink: socket.socket, rule: Rule) -> None:
        goes_on = True
        try:
            while goes_on and (data := source.recv(self._buffer_bytes or 1 << 16)):
                data, goes_on = rule(data)
                sink.sendall(data)
        except OSError:  # cut, by the other direction or by an end
            pass
        for sock in (source, sink):
            self._shut(sock)

    def _shut(self, sock: socket.socket) -> None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is cut
            pass


class MeddlingProxy(Proxy):
    """Damages connections."""

    def __init__(self, port: int, damage: Callable[[], Damage | None]) -> None:
        """`damage` is asked for each connection."""
        self.damaged = 0  # connections
        super().__init__(port, lambda: self._rules_of(damage()))

    def _rules_of(self, damage: Damage | None) -> tuple[Rule, Rule]:
        if damage is None:
            return whole, whole
        ahead = damage.at

        def damaging(data: bytes) -> tuple[bytes, bool]:
            nonlocal ahead
            at, ahead = ahead, ahead - len(data)
            if not 0 <= at < len(data):
                return data, True
            self.damaged += 1
            if damage.cut:
                return data[:at], False
            return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :], True

        return (damaging, whole) if damage.to_worker else (whole, damaging)


class ShortLived(Proxy):
    """Each connection passes only so many bytes of what the worker says."""

    def __init__(self, port: int, limit: int, *, silent: bool, endless_from: int = 1 << 30) -> None:
        """Then the connection is reset; or, if `silent`, stays open, and the proxy takes what
        comes without passing it on. Connection number `endless_from`, from 0, has no limit.
        """
        self.spent = 0  # connections that have reached their limit
        self._limit, self._silent, self._endless_from = limit, silent, endless_from
        super().__init__(port, self._limited)

    def _limited(self) -> tuple[Rule, Rule]:
        if self.connections > self._endless_from:
            return whole, whole
        left = self._limit

        def there(data: bytes) -> tuple[bytes, bool]:
            return (data, True) if left > 0 else (b"", self._silent)

        def back(data: bytes) -> tuple[bytes, bool]:
            nonlocal left
            before, left = left, left - len(data)
            self.spent += before > 0 >= left
            return data[: max(0, before)], left > 0 or self._silent

        return there, back
