"""Connections that end, or fall silent, more often than a block passes: everything arrives."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.blocks import Block, Component
from forebay.service.connections import tunnel
from forebay.service.delivery import (
    ANY,
    AnyBlock,
    BundlesOutput,
    Cached,
    CachedOutput,
    End,
    EndOfTask,
    EndPending,
    FirstComeOutput,
    ReadRequest,
    Rounds,
    RoundsOutput,
    Slice,
    TaskOutput,
)
from forebay.service.errors import ProtocolError
from forebay.service.proto import transfer_pb2 as pb
from forebay.service.transport import BlockServer, ElementBudget, client, cut_blocks, frames, server

from ..standbys import wait_until
from .peers import (
    TIMEOUT_S,
    WELCOME,
    Consumer,
    Peer,
    Saying,
    ScriptedWorker,
    ShortLived,
    TunnelledWorker,
    encoded,
    only,
)

TASK = 5
ELEMENTS = 12
ELEMENT_BYTES = 256 << 10
# After which a peer counts as gone. A busy machine may hold up these processes for longer than the
# first; who counts connections tries again with the next.
SILENCES_S = (0.8, 4.0, 16.0)


class Worker:
    """A BlockServer that consumers reach through a proxy, over TCP or a tunnel."""

    def __init__(self, closing: ExitStack, protocol: str, output: TaskOutput) -> None:
        self.closing, self._protocol = closing, protocol
        worker = TunnelledWorker(closing)
        self.blocks, self._port = worker.blocks, worker.port(protocol)
        self.blocks.sessions.add_task(TASK, output)

    def behind(self, limit: int, **options: Any) -> ShortLived:
        proxy = ShortLived(self._port, limit, **options)
        self.closing.callback(proxy.close)
        return proxy

    def consumer(self, proxy: ShortLived, request: ReadRequest = ANY, **options: Any) -> Consumer:
        consumer = Consumer(
            [(self._protocol, proxy.address)],
            open_tunnel=tunnel.open_tunnel,
            give_up_s=1e9,
            start=False,
            **options,
        )
        consumer.client.read(TASK, request, 1)
        consumer.client.start()
        self.closing.callback(consumer.client.close)
        return consumer


@pytest.fixture(params=["tcp", "grpc"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PING_S", 0.1)
    monkeypatch.setattr(client, "SILENCE_S", 0.4)
    monkeypatch.setattr(client, "_REPORT_S", 0.05)
    monkeypatch.setattr(tunnel, "_FAREWELL_S", 0.05)


def element(number: int) -> np.ndarray[Any, Any]:
    """Which any codec makes half as large, and not smaller."""
    noise = np.random.default_rng(number).integers(0, 256, ELEMENT_BYTES // 2, np.uint8)
    return np.concatenate([noise, np.full_like(noise, number)])


def block(first: int, count: int, bundle: int | None = None) -> Block:
    elements = np.stack([element(first + i) for i in range(count)])
    return Block(count, (Component(elements),), bundle, first)


def took(consumer: Consumer) -> tuple[list[int], End]:
    """Which elements the consumer is given, whole, and how it ends."""
    found = []
    while isinstance(item := consumer.take_numbered()[2], Block | EndPending):
        if isinstance(item, Block):
            values = item.components[0].values
            assert isinstance(values, np.ndarray)
            for value in values:
                found.append(int(value[-1]))
                assert np.array_equal(value, element(found[-1]))
    return found, item


def filled(output: Any, in_one_block: int = 4) -> Any:
    for first in range(0, ELEMENTS, in_one_block):
        output.put(block(first, in_one_block))
    output.finish()
    return output


# -- a block takes several connections ---------------------------------------------------------


@pytest.mark.parametrize(
    ("in_one_block", "silent"),
    [(1, False), (4, False), (4, True)],
    ids=["element-reset", "block-reset", "block-silent"],
)
def test_no_connection_lets_a_block_pass(
    closing: ExitStack, protocol: str, silent: bool, in_one_block: int, impatient: None
) -> None:
    worker = Worker(closing, protocol, filled(FirstComeOutput(), in_one_block))
    size = in_one_block * ELEMENT_BYTES
    proxy = worker.behind(size if protocol == "grpc" else size * 2 // 3, silent=silent)
    consumer = worker.consumer(proxy)
    assert took(consumer) == ([*range(ELEMENTS)], EndOfTask())
    assert proxy.spent >= ELEMENTS // in_one_block


SLICE = Slice(7, runs=(0, ELEMENTS), until=ELEMENTS, readers=2)


def bundle() -> BundlesOutput:
    output = BundlesOutput(1 << 30)
    output.open(SLICE)
    run = output.next_run(1, 0)
    assert run is not None
    for first in range(0, ELEMENTS, 4):
        run.put(block(first, 4, 7))
    run.finish()
    return output


POLICIES: dict[str, tuple[Callable[[], TaskOutput], ReadRequest]] = {
    "hands back": (lambda: filled(FirstComeOutput()), AnyBlock(hands_back=True)),
    "bundles": (bundle, SLICE),
    "rounds": (lambda: filled(RoundsOutput(1)), Rounds(0, 1)),
    "cached": (lambda: filled(CachedOutput(1 << 30)), Cached("trainer")),
}


@pytest.mark.parametrize("max_elements", [None, 1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy_with_a_limit_of_elements(
    closing: ExitStack, policy: str, max_elements: int | None
) -> None:
    make, request = POLICIES[policy]
    worker = Worker(closing, "tcp", make())
    proxy = worker.behind(ELEMENT_BYTES * 2 // 3, silent=False)
    share = None if max_elements is None else ElementBudget(max_elements).share()
    consumer = worker.consumer(proxy, request, elements=share)
    assert took(consumer)[0] == [*range(ELEMENTS)]
    assert proxy.spent > ELEMENTS


@pytest.mark.parametrize("codec", ["ZSTD", "LZ4", "MEASURED"])
def test_compressed_blocks(closing: ExitStack, protocol: str, codec: str) -> None:
    output = filled(FirstComeOutput())
    output.compression = ev.BlockCompression.Value(codec)
    worker = Worker(closing, protocol, output)
    proxy = worker.behind(ELEMENT_BYTES, silent=False)
    assert took(worker.consumer(proxy)) == ([*range(ELEMENTS)], EndOfTask())
    assert proxy.spent > 3


def test_a_partly_received_block_that_is_handed_back_goes_to_others_whole(
    closing: ExitStack, impatient: None
) -> None:
    output = filled(FirstComeOutput())
    worker = Worker(closing, "tcp", output)
    request = AnyBlock(hands_back=True)
    proxy = worker.behind(6 * ELEMENT_BYTES, silent=True)
    leaving = worker.consumer(proxy, request)
    item = leaving.arrived.get(timeout=TIMEOUT_S)[2]
    assert isinstance(item, Block) and item.count == 2
    wait_until(lambda: proxy.spent)
    leaving.client.hand_back(((TASK, 1), 1))
    assert leaving.client.close(time.monotonic() + TIMEOUT_S)
    staying = worker.consumer(worker.behind(1 << 60, silent=False), request, consumer_id=2)
    assert took(staying) == ([*range(1, ELEMENTS)], EndOfTask())


# -- what the two sides say of it --------------------------------------------------------------


def greeted(closing: ExitStack, worker: BlockServer, **how: Any) -> Peer:
    peer = Peer(worker)
    closing.callback(peer.close)
    peer.read(TASK, **how)
    peer.say(credit=pb.Credit(bytes=1 << 20))
    return peer


SIZES = [1, 63, 64, 100, 127, 128, 191]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wrong", ["nothing", "bytes", "checksum", "codec", "block"])
def test_only_the_rest_of_a_partly_received_block_is_sent(
    server: BlockServer, closing: ExitStack, size: int, wrong: str
) -> None:
    output = FirstComeOutput()
    components = [Component(np.full((1, n), n, np.uint8)) for n in (70, 10, 1)]
    output.put(Block(1, tuple(components)))
    output.put(Block(1, tuple(reversed(components))))
    server.sessions.add_task(TASK, output)
    first = greeted(closing, server).frame()
    assert first.payload.size == 256
    cut = cut_blocks.cut_block(frames.CutFrame(*first, size), None, "the worker")
    assert cut is not None
    report = cut.report()
    match wrong:
        case "bytes":
            report.bytes = 256 if size % 2 else 1 << 63
        case "checksum":
            report.checksum ^= 1
        case "codec":
            report.codec = "?"
    again = greeted(closing, server, received=int(wrong == "block"), cut=report).frame()
    header = pb.ToConsumer.FromString(again.header).block
    if wrong == "nothing":
        assert (header.number, header.resumes_at, again.payload.size) == (1, size, 256 - size)
        whole = np.concatenate([first.payload[:size], again.payload])
        assert np.array_equal(whole, first.payload)
    else:
        number = 2 if wrong == "block" else 1
        assert (header.number, header.resumes_at, again.payload.size) == (number, 0, 256)


def rest_of_a_block(number: int, resumes_at: int, size: int, codec: str = "") -> Saying:
    component = pb.Component(dtype="uint8", shape=[1, 128], buffer_bytes=[128])
    header = pb.Block(
        task_id=TASK, number=number, count=1, components=[component], resumes_at=resumes_at
    )
    header.packed.codec = codec
    if not codec:
        header.ClearField("packed")
    return Saying(encoded(pb.ToConsumer(block=header), bytes(size)))


@pytest.mark.parametrize(
    "absurd", [(1, 64, 64), (1, 28, 128), (1, 28, 64), (2, 28, 100), (1, 1 << 63, 100)]
)
def test_a_rest_that_does_not_fit_is_refused(
    closing: ExitStack, absurd: tuple[int, int, int]
) -> None:
    """The connection is made anew, and the block comes whole."""
    worker = ScriptedWorker()
    closing.callback(worker.close)
    whole = rest_of_a_block(1, 0, 128)
    end = Saying(encoded(pb.ToConsumer(end_of_task=pb.EndOfTask(task_id=TASK))))
    worker.follow([WELCOME, Saying(whole.data[:-100])])
    worker.follow([WELCOME, rest_of_a_block(*absurd)])
    worker.follow([WELCOME, rest_of_a_block(1, 28, 100, "zstd")])
    worker.follow_always([WELCOME, whole, end])
    consumer = Consumer(worker.addresses, reads=TASK)
    closing.callback(consumer.client.close)
    assert isinstance(consumer.take()[1], Block)
    assert consumer.take()[1] == EndOfTask()


def test_a_rest_of_nothing_is_refused(closing: ExitStack) -> None:
    worker = ScriptedWorker()
    closing.callback(worker.close)
    worker.follow([WELCOME, rest_of_a_block(1, 28, 100)])
    consumer = Consumer(worker.addresses, reads=TASK)
    closing.callback(consumer.client.close)
    assert consumer.get() == f"worker at {worker.addresses[0][1]} refused: it has been enough"
    assert cut_blocks.cut_block(
        frames.CutFrame(pb.ToConsumer(block=pb.Block(resumes_at=5)).SerializeToString(), b"", 3),  # type: ignore[arg-type]
        None,
        "a worker",
    ) is None  # fmt: skip


# -- silence -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [100, 300, 1 << 20], ids=["begin", "headers", "blocks"])
def test_a_connection_that_falls_silent_is_made_anew(
    protocol: str, limit: int, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the consumer sends is taken and acknowledged all the while, and goes nowhere."""

    def connections(silence_s: float) -> int:
        monkeypatch.setattr(client, "SILENCE_S", silence_s)
        with ExitStack() as closing:
            output = FirstComeOutput()
            worker = Worker(closing, protocol, output)
            proxy = worker.behind(limit, silent=True, endless_from=1)
            consumer = worker.consumer(proxy, connect_timeout_s=1.0)
            for first in range(0, ELEMENTS, 4):
                output.put(block(first, 4))
            if limit < 1 << 20:
                wait_until(lambda: proxy.spent or proxy.connections > 1)
            output.finish()
            assert took(consumer) == ([*range(ELEMENTS)], EndOfTask())
            return proxy.connections

    assert 2 in map(connections, SILENCES_S)


def test_an_idle_connection_is_pinged_and_kept(
    protocol: str, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow pipeline or a slow trainer does not count as silence."""

    def connections(silence_s: float) -> int:
        monkeypatch.setattr(client, "SILENCE_S", silence_s)
        with ExitStack() as closing:
            output = FirstComeOutput()
            worker = Worker(closing, protocol, output)
            proxy = worker.behind(1 << 60, silent=False)
            consumer = worker.consumer(proxy, credit_bytes=ELEMENT_BYTES)
            threading.Event().wait(1.5 * silence_s)  # nothing is made
            for first in range(ELEMENTS):
                output.put(block(first, 1))
            output.finish()
            wait_until(lambda: consumer.waiting_blocks() >= 1)
            threading.Event().wait(1.5 * silence_s)  # nothing is taken
            assert took(consumer) == ([*range(ELEMENTS)], EndOfTask())
            return proxy.connections

    assert 1 in map(connections, SILENCES_S)


def test_a_consumer_that_is_gone_behind_a_silent_proxy_is_noticed(
    closing: ExitStack, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection stays open for good; what was sent on it is kept for as long as for others."""
    monkeypatch.setattr(server, "SILENT_CONSUMER_S", 0.5)
    monkeypatch.setattr(server, "_SILENCE_TICK_S", 0.1)
    monkeypatch.setattr(client, "PING_S", 1e9)
    worker = Worker(closing, protocol, filled(FirstComeOutput()))
    consumer = worker.consumer(worker.behind(1000, silent=True))
    wait_until(lambda: worker.blocks.sessions.away() == [1])
    consumer.client.close()


def test_a_consumer_does_not_resume_a_block_of_a_task_that_it_stopped_reading(
    closing: ExitStack,
) -> None:
    worker = Worker(closing, "tcp", filled(FirstComeOutput()))
    proxy = worker.behind(ELEMENT_BYTES, silent=False, endless_from=1)
    consumer = worker.consumer(proxy)
    consumer.client.stop_task(TASK, 1)
    output = filled(FirstComeOutput())
    worker.blocks.sessions.add_task(TASK + 1, output)
    consumer.client.read(TASK + 1)
    assert took(consumer) == ([*range(ELEMENTS)], EndOfTask())
    assert consumer.client._payloads._cut is None  # type: ignore[union-attr]


def test_pings_are_part_of_the_protocol(server: BlockServer, closing: ExitStack) -> None:
    server.sessions.add_task(TASK, FirstComeOutput())
    peer = greeted(closing, server)
    for _ in range(3):
        peer.say(ping=pb.Ping())
        assert peer.hear().HasField("pong")


def test_a_silent_worker_is_waited_for_only_over_a_unix_socket(
    closing: ExitStack, server: BlockServer, impatient: None
) -> None:
    """Over a Unix socket the worker can only be paused, and continues where it was."""
    output = FirstComeOutput()
    server.sessions.add_task(TASK, output)
    consumer = Consumer(only(server, "unix"), reads=TASK)
    closing.callback(consumer.client.close)
    wait_until(lambda: TASK in server.sessions.read_tasks())
    threading.Event().wait(2 * client.SILENCE_S)
    assert server.sessions.connections == 1
    filled(output)
    assert took(consumer) == ([*range(ELEMENTS)], EndOfTask())


def test_a_small_message_never_waits_for_a_peer_that_takes_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frame = frames.encode(b"pong")
        while frames.send_at_once(ours, frame):
            pass
        assert frames.FrameReader(theirs, "the peer").read() is not None


def test_the_rest_of_another_block_is_never_joined() -> None:
    cut = cut_blocks.CutBlock((1, 0), 3, "", np.zeros(128, np.uint8), 28, 0)
    for other in (pb.Block(task_id=1, number=4), pb.Block(task_id=2, number=3)):
        other.resumes_at = 28
        with pytest.raises(ProtocolError, match="missing are bytes 28 to 128 of block 3 of task 1"):
            cut.rest(other, 100, "a worker")
