"""Peers that stall, never acknowledge, vanish or return: memory is bounded, nothing is lost."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from forebay.chaos.proxy import Proxies
from forebay.service.delivery import FirstComeOutput
from forebay.service.proto import transfer_pb2 as pb
from forebay.service.transport import BlockServer, frames, sending, server

from .peers import TIMEOUT_S, Consumer, Peer, only, started, task
from .samples import numbered

TASK = 5
MB = 1 << 20


@pytest.fixture(autouse=True)
def leave_no_descriptor() -> Iterator[None]:
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files


class Reading(Peer):
    """Reads TASK."""

    def __init__(self, worker: BlockServer, consumer_id: int, received: int = 0) -> None:
        super().__init__(worker, consumer_id)
        frames.tune(self.socket)
        self.read(TASK, received=received)

    def give(self, credit_bytes: int, received: int | None = None) -> None:
        positions = [] if received is None else [pb.Position(task_id=TASK, received=received)]
        self.say(credit=pb.Credit(bytes=credit_bytes, positions=positions))

    def blocks(self) -> Iterator[pb.Block]:
        """Until the end of the task."""
        while (message := self.hear()).HasField("block"):
            yield message.block
        assert message.HasField("end_of_task")

    def vanish(self) -> None:
        """Reset the connection: no goodbye, and what is on its way is lost."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


# -- stalls ------------------------------------------------------------------------------------


def test_a_worker_that_accepts_connections_and_sends_nothing_is_skipped(closing: ExitStack) -> None:
    mute = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    worker = started(closing)
    task(worker, TASK, 3)
    addresses = [("tcp", f"127.0.0.1:{mute.getsockname()[1]}"), *only(worker, "tcp")]
    consumer = Consumer(addresses, reads=TASK, connect_timeout_s=0.2, closing=closing)
    assert consumer.numbers() == [1, 2, 3]


def test_a_connection_that_stalls_or_goes_deaf_costs_nothing(closing: ExitStack) -> None:
    """Others go on meanwhile. What was lost on the way is sent again, and nothing twice."""
    worker = started(closing)
    proxies = Proxies()
    closing.callback(proxies.close)
    proxy = [("tcp", f"127.0.0.1:{proxies.add('worker', worker.port)}")]
    task(worker, TASK, 60, lambda: MB)
    slow = Consumer(proxy, 1, reads=TASK, credit_bytes=4 * MB, give_up_s=TIMEOUT_S, closing=closing)
    slow_ones = [slow.take()[1].index for _ in range(5)]  # type: ignore[union-attr]
    proxies.disturb("worker", "stall", 600)
    brisk = Consumer(only(worker, "tcp"), 2, reads=TASK, closing=closing)
    brisk_ones = brisk.numbers()
    proxies.disturb("worker", "mute", 0.1)  # lost, and then the connection is cut
    proxies.disturb("worker", "stall", 0)
    slow_ones += slow.numbers()
    assert slow_ones == sorted(slow_ones)
    assert sorted(slow_ones + brisk_ones) == list(range(1, 61))


def test_consumers_that_do_not_read_hold_only_what_was_sent_to_them(closing: ExitStack) -> None:
    worker = started(closing)
    task(worker, TASK, 300, lambda: MB)
    mute = [Reading(worker, consumer_id) for consumer_id in range(10)]
    for peer in mute:
        closing.callback(peer.socket.close)
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        peer.give(1 << 34)
    brisk = Consumer(worker.addresses, 11, reads=TASK, closing=closing)
    numbers = brisk.numbers()
    assert len(numbers) >= 300 - 10 * 10, "the kernel takes a few, the sender has one in its hands"
    for peer in mute:
        numbers += [block.index for block in peer.blocks()]
    assert sorted(numbers) == list(range(1, 301))


# -- hoarders ----------------------------------------------------------------------------------


def test_a_consumer_that_never_says_what_arrived(closing: ExitStack) -> None:
    """It gets one send buffer, whatever its credit, until it acknowledges."""
    worker = started(closing)
    most = sending.MAX_RETAINED_BYTES // MB + 1
    one, total = numbered(1, MB), 2 * most
    output = FirstComeOutput(1 << 40)
    for _ in range(total):
        output.put(one)
    output.finish()
    worker.sessions.add_task(TASK, output)
    hoarder = Reading(worker, 1)
    closing.callback(hoarder.socket.close)
    hoarder.give(1 << 34)
    for number in range(1, most):
        assert hoarder.hear().block.number == number
    hoarder.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        for _ in range(2):
            hoarder.hear()
    brisk = Consumer(worker.addresses, 2, reads=TASK, closing=closing)
    assert len(brisk.numbers()) >= total - most - 1, "the others' share is theirs"


# -- those that come again and again -----------------------------------------------------------


def test_a_consumer_that_reconnects_a_thousand_times_gets_every_block_in_order(
    closing: ExitStack,
) -> None:
    """Each time it takes a block or two, and is gone without a word. It gets all, in order."""
    worker = started(closing)
    total = 1000
    task(worker, TASK, total, lambda: 2_000)
    dice = random.Random(7)
    received = 0
    memory = []
    tracemalloc.start()
    closing.callback(tracemalloc.stop)
    for times in itertools.count(1):
        peer = Reading(worker, 1, received)
        peer.give(20_000)
        for _ in range(dice.randrange(1, 3)):
            if not (message := peer.hear()).HasField("block"):
                break
            assert message.block.number == message.block.index == received + 1
            received += 1
            if dice.random() < 0.5:
                peer.give(0, received)
            if received == total:
                break
        peer.vanish()
        if times % 100 == 0:
            gc.collect()
            memory.append(tracemalloc.get_traced_memory()[0])
        if times >= 1000 and received == total:
            break
    assert max(memory) < memory[0] + 2 * MB


def test_memory_for_consumers_that_stay_away_is_bounded(closing: ExitStack) -> None:
    """As for a trainer that crashes again and again: each time it is another consumer."""
    worker = started(closing, max_away_bytes=8 * MB)
    task(worker, TASK, 40, lambda: MB)
    for consumer_id in range(1, 21):
        peer = Reading(worker, consumer_id)
        peer.give(1)
        assert peer.hear().block.index == consumer_id
        peer.vanish()
        wait_until_nobody_is_served()
    again = []
    for consumer_id in range(20, 0, -1):
        peer = Reading(worker, consumer_id)
        closing.callback(peer.socket.close)
        peer.give(1)
        again.append(peer.hear().block.index)
    assert again == [*range(20, 13, -1), *range(21, 34)], "those who left last, theirs again"


def wait_until_nobody_is_served() -> None:
    while any(t.name == "forebay-blocks-receiver" for t in threading.enumerate()):
        time.sleep(0.001)


def test_more_connections_than_are_allowed(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 4)
    worker = started(closing)
    task(worker, TASK, 4)
    peers = [Reading(worker, consumer_id) for consumer_id in range(4)]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", worker.port), TIMEOUT_S) as refused:
                assert refused.recv(1) == b""
    assert len(caplog.records) == 1  # a minute
    for number, peer in enumerate(peers, 1):
        peer.give(1)
        assert peer.hear().block.index == number
        peer.socket.close()
    while True:  # until the worker has noticed that they are gone
        try:
            Reading(worker, 5).socket.close()
        except (OSError, AssertionError):
            continue
        break


def test_connections_that_have_ended_leave_no_shared_memory(closing: ExitStack) -> None:
    """Nor a descriptor; and not only once the garbage collector happens to come."""
    worker = started(closing)
    output = FirstComeOutput(1 << 40)
    worker.sessions.add_task(TASK, output)
    one = numbered(1, MB)
    for _ in range(1000):
        output.put(one)
    gc.collect()
    gc.disable()
    closing.callback(gc.enable)
    files = len(os.listdir("/proc/self/fd"))
    for consumer_id in range(20):
        consumer = Consumer(only(worker, "unix"), consumer_id, reads=TASK, credit_bytes=8 * MB)
        for _ in range(20):
            consumer.take()
        consumer.client.close()
        consumer.arrived.queue.clear()
        wait_until_nobody_is_served()
        assert len(os.listdir("/proc/self/fd")) == files
