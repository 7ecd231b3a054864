"""Limits of the transport: what exceeds them is refused, and the waiting caller gets an error."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from forebay.service import block_limits
from forebay.service.blocks import Block, Component
from forebay.service.client.options import read_options
from forebay.service.delivery import End, FirstComeOutput, TaskFailed
from forebay.service.errors import InvalidArgument
from forebay.service.structure import assemble
from forebay.service.transport import BlockServer, frames, local_worker
from forebay.service.transport.budget import MAX_ELEMENTS, ElementBudget
from forebay.service.transport.sessions import MAX_CREDIT_ELEMENTS

from .peers import UID, Consumer, task
from .samples import numbered

QUIET_S = 0.02


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_peer_that_stalls_within_a_frame_is_dropped(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    whole = b"".join(frames.encode(b"header", [memoryview(bytes(100))]))
    theirs.sendall(whole + whole[:-1])
    reader = frames.FrameReader(ours, "the peer")
    quiet = []
    reader.watch(QUIET_S, lambda: quiet.append(True), 5 * QUIET_S)
    assert reader.read() is not None
    with pytest.raises(TimeoutError, match="the peer sent nothing for"):
        reader.read()
    assert quiet


def test_each_byte_is_a_sign_of_life_not_only_a_whole_frame(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    whole = b"".join(frames.encode(b"header"))
    reader = frames.FrameReader(ours, "the peer")
    rest = iter(whole)
    reader.watch(QUIET_S, lambda: theirs.sendall(bytes([next(rest)])), 10 * QUIET_S)
    frame = reader.read()
    assert frame is not None and frame.header == b"header", f"after {len(whole)} ticks"


class PausedIn(socket.socket):
    """A socket in whose `recv_into` this process is paused now and then."""

    pauses_s: Iterator[float]
    now_s = 1000.0

    def setsockopt(self, *_: object) -> None: ...

    def recv_into(self, target: Any, size: int = 0, flags: int = 0) -> int:
        for pause_s in self.pauses_s:
            self.now_s += pause_s
            raise BlockingIOError
        return super().recv_into(target, size, flags)


def test_a_pause_of_this_process_does_not_count_as_silence_of_its_peers(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    for pauses_s, is_silence in (([0.25] * 39, False), ([60, 60, 60], False), ([0.25] * 40, True)):
        paused = PausedIn(fileno=os.dup(ours.fileno()))
        paused.pauses_s = iter(pauses_s)
        monkeypatch.setattr(frames, "time", paused)
        monkeypatch.setattr(PausedIn, "monotonic", lambda self: self.now_s, raising=False)
        with paused:
            reader = frames.FrameReader(paused, "the peer")
            reader.watch(0.25, lambda: None, 10)
            theirs.sendall(b"".join(frames.encode(b"header")))
            if is_silence:
                with pytest.raises(TimeoutError, match="the peer sent nothing for 10 s"):
                    reader.read()
            else:
                assert reader.read() is not None


@pytest.mark.parametrize("limit", [MAX_ELEMENTS, 1 << 62])
def test_a_limit_beyond_all_elements_is_none(limit: int) -> None:
    assert ElementBudget(limit).share().grant() == MAX_ELEMENTS < MAX_CREDIT_ELEMENTS


@pytest.mark.parametrize(("limit", "most"), [(None, None), (-1, None), (3, 3), (np.int64(3), 3)])
def test_a_limit_may_be_left_to_the_service(limit: int | None, most: int | None) -> None:
    """As tf.data service's client does by default, with tf.data.AUTOTUNE, which is -1."""
    assert read_options(max_outstanding_requests=limit).max_elements == most


@pytest.mark.parametrize("limit", [0, -2, 2.5, "3"])
def test_a_limit_is_a_positive_integer(limit: object) -> None:
    with pytest.raises(InvalidArgument, match="must be a positive integer"):
        read_options(max_outstanding_requests=limit)  # type: ignore[arg-type]


def test_a_block_that_no_consumer_would_take_is_refused_at_once() -> None:
    once = np.zeros(1, np.uint8)
    huge = np.broadcast_to(once, (1, block_limits.MAX_PAYLOAD_BYTES + 1))  # of no memory
    with pytest.raises(ValueError, match="make smaller elements"):
        block_limits.check_block(Block(1, (Component(huge),)))


@pytest.mark.parametrize("columns", [0, 1, 3])
def test_another_number_of_components_than_the_structure_has(columns: int) -> None:
    build = assemble('{"tuple":[{"tensor":"int64","shape":[]},{"tensor":"int64","shape":[]}]}')
    with pytest.raises(ValueError, match=r"components are (fewer|more) than"):
        build([[1, 2]] * columns, 2)  # type: ignore[list-item]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["client.decode_block", "local.Sessions.next_batch"])
def test_an_exception_of_the_reading_thread_reaches_the_waiting_caller(
    server: BlockServer, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no room")

    output = FirstComeOutput()
    server.sessions.add_task(5, output)
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
