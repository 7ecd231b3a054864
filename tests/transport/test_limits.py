"""What is too much, too little or too slow: refused, and heard of by whoever waits."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from forebay.service import block_limits
from forebay.service.blocks import Block, Component
from forebay.service.client.options import reading
from forebay.service.delivery import AnyOutput, End, TaskFailed
from forebay.service.errors import InvalidArgument, ProtocolError
from forebay.service.structure import assemble
from forebay.service.transport import BlockServer, codecs, frames, local_worker
from forebay.service.transport.budget import MAX_ELEMENTS, ElementBudget
from forebay.service.transport.sessions import MAX_CREDIT_ELEMENTS
from forebay.service.shared import Borrower

from .peers import UID, Consumer, task
from .samples import numbered

QUIET_S = 0.02


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_who_stalls_inside_a_frame_is_not_waited_for(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "_STALL_S", 5 * QUIET_S)
    ours, theirs = pair
    whole = b"".join(frames.encode(b"header", [memoryview(bytes(100))]))
    theirs.sendall(whole + whole[:-1])
    frames.set_timeout(ours, socket.SO_RCVTIMEO, QUIET_S)
    reader = frames.FrameReader(ours, "the peer")
    quiet = []
    reader.on_quiet = lambda: quiet.append(True)
    assert reader.read() is not None
    with pytest.raises(TimeoutError, match="the peer did not go on in time"):
        reader.read()
    assert quiet


def test_who_has_nothing_to_say_between_frames_is_waited_for(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "_STALL_S", QUIET_S)
    ours, theirs = pair
    whole = b"".join(frames.encode(b"header"))
    frames.set_timeout(ours, socket.SO_RCVTIMEO, QUIET_S)
    reader = frames.FrameReader(ours, "the peer")
    quiet: list[bool] = []

    def on_quiet() -> None:
        quiet.append(True)
        if len(quiet) == 5:
            theirs.sendall(whole)

    reader.on_quiet = on_quiet
    frame = reader.read()
    assert frame is not None and frame.header == b"header"


@pytest.mark.parametrize("limit", [MAX_ELEMENTS, 1 << 62])
def test_a_limit_beyond_all_elements_is_none(limit: int) -> None:
    assert ElementBudget(limit).share().grant() == MAX_ELEMENTS < MAX_CREDIT_ELEMENTS


@pytest.mark.parametrize("limit", [0, -1, 2.5, "3"])
def test_a_limit_is_a_positive_integer(limit: object) -> None:
    with pytest.raises(InvalidArgument, match="must be a positive integer"):
        reading(max_outstanding_requests=limit)  # type: ignore[arg-type]


def test_a_block_that_no_consumer_would_take_is_refused_at_once() -> None:
    once = np.zeros(1, np.uint8)
    huge = np.broadcast_to(once, (1, block_limits.MAX_PAYLOAD_BYTES + 1))  # of no memory
    with pytest.raises(ValueError, match="make smaller elements"):
        block_limits.check_block(Block(1, (Component(huge),)))


def test_a_slab_of_no_bytes() -> None:
    descriptor = os.memfd_create("forebay-test", os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with pytest.raises(ProtocolError, match="a slab of no bytes"):
            Borrower("a worker").learn(0, descriptor)
    finally:
        os.close(descriptor)


def test_lz4_of_more_than_it_can_hold() -> None:
    target = np.broadcast_to(np.zeros(1, np.uint8), (1 << 31,))
    with pytest.raises(codecs.Unpackable, match="which LZ4 cannot"):
        codecs.unpack("lz4", memoryview(b"abc"), target)


@pytest.mark.parametrize("columns", [0, 1, 3])
def test_another_number_of_components_than_the_structure_has(columns: int) -> None:
    build = assemble('{"tuple":[{"tensor":"int64","shape":[]},{"tensor":"int64","shape":[]}]}')
    with pytest.raises(ValueError, match=r"components are (fewer|more) than"):
        build([[1, 2]] * columns, 2)  # type: ignore[list-item]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["client.decode_block", "local.Sessions.next_batch"])
def test_a_bug_in_the_readers_thread_reaches_who_waits(
    server: BlockServer, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no room")

    output = AnyOutput()
    server.add_task(5, output)
    output.put(numbered(1))
    local = local_worker(UID) if where.startswith("local") else None
    consumer = Consumer(server.addresses[:1], reads=5, local=local, start=False)
    monkeypatch.setattr(f"forebay.service.transport.{where}", fails)
    with closing(consumer.client):
        consumer.client.start()
        item = consumer.get()
        assert isinstance(item, tuple)
        ended: Block | End = item[1]
        assert isinstance(ended, TaskFailed) and "MemoryError('no room')" in ended.message
        assert consumer.get() == "its thread crashed; the log says why"


@pytest.mark.parametrize("name", ["forebay-blocks-receiver", "forebay-blocks-sender"])
def test_a_thread_that_cannot_be_started_costs_one_connection(
    server: BlockServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start = threading.Thread.start
    wanting = [name, name]

    def start_if_there_is_room(thread: threading.Thread) -> None:
        if wanting and thread.name == name:
            wanting.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_if_there_is_room)
    task(server, 5, blocks=3)
    consumer = Consumer(server.addresses, reads=5)
    with closing(consumer.client):
        assert consumer.numbers() == [1, 2, 3]
    assert not wanting
