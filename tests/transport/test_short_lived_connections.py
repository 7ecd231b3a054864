"""Connections that end, or fall silent, again and again: everything arrives."""

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
from forebay.service.proto import transfer_pb2 as pb
from forebay.service.transport import BlockServer, ElementBudget, client, frames, server

from ..standbys import wait_until
from .peers import TIMEOUT_S, Consumer, Peer, ShortLived, TunnelledWorker, only

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


# -- connections that end within a block -------------------------------------------------------


def within_the_next(protocol: str, block_bytes: int) -> int:
    """After how many bytes a connection ends that lets one block of so many pass, and not two more.
    Of what is sent through gRPC, the last chunk may not arrive."""
    return block_bytes * 5 // 2 if protocol == "grpc" else block_bytes * 3 // 2


@pytest.mark.parametrize(
    ("in_one_block", "silent"),
    [(1, False), (4, False), (4, True)],
    ids=["element-reset", "block-reset", "block-silent"],
)
def test_each_connection_ends_within_a_block(
    closing: ExitStack, protocol: str, silent: bool, in_one_block: int, impatient: None
) -> None:
    """That block is sent again, whole."""
    worker = Worker(closing, protocol, filled(FirstComeOutput(), in_one_block))
    proxy = worker.behind(within_the_next(protocol, in_one_block * ELEMENT_BYTES), silent=silent)
    consumer = worker.consumer(proxy)
    assert took(consumer) == ([*range(ELEMENTS)], EndOfTask())
    assert proxy.spent


def test_a_block_that_no_connection_lets_pass_is_waited_for_and_told(
    closing: ExitStack, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(closing, protocol, filled(FirstComeOutput(), 1))
    proxy = worker.behind(ELEMENT_BYTES * 2 // 3, silent=False, endless_from=8)
    consumer = worker.consumer(proxy)
    assert took(consumer) == ([*range(ELEMENTS)], EndOfTask())
    assert proxy.spent == 8
    assert caplog.text.count("no elements come from worker") == 1


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


@pytest.mark.parametrize("max_elements", [4, 1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy_with_a_limit_of_elements(
    closing: ExitStack, policy: str, max_elements: int
) -> None:
    make, request = POLICIES[policy]
    worker = Worker(closing, "tcp", make())
    proxy = worker.behind(ELEMENT_BYTES * 9 // 2, silent=False)
    consumer = worker.consumer(proxy, request, elements=ElementBudget(max_elements).share())
    assert took(consumer)[0] == [*range(ELEMENTS)]
    assert proxy.spent >= 2


@pytest.mark.parametrize("codec", ["ZSTD", "LZ4", "MEASURED"])
def test_compressed_blocks(closing: ExitStack, protocol: str, codec: str) -> None:
    output = filled(FirstComeOutput())
    output.compression = ev.BlockCompression.Value(codec)
    worker = Worker(closing, protocol, output)
    elements = 4 if codec == "MEASURED" else 2  # within a host that is none
    proxy = worker.behind(within_the_next(protocol, elements * ELEMENT_BYTES), silent=False)
    assert took(worker.consumer(proxy)) == ([*range(ELEMENTS)], EndOfTask())
    assert proxy.spent


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


def test_pings_are_part_of_the_protocol(server: BlockServer, closing: ExitStack) -> None:
    server.sessions.add_task(TASK, FirstComeOutput())
    peer = Peer(server)
    closing.callback(peer.close)
    peer.read(TASK)
    for _ in range(3):
        peer.say(ping=pb.Ping())
        assert peer.hear().HasField("pong")


def test_a_silent_worker_is_waited_for_only_over_a_unix_socket(
    closing: ExitStack, server: BlockServer, impatient: None
) -> None:
    """Over a Unix socket the worker can only be paused, and continues where it was."""
    output = FirstComeOutput()
    server.sessions.add_task(TASK, output)
    consumer = Consumer(only(server, "unix"), reads=TASK, closing=closing)
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
