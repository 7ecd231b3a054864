from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

import pytest

from forebay.service.proto import transfer_pb2 as pb
from forebay.service.transport import frames
from forebay.service.transport.outbox import Outbox


def ping() -> pb.ToWorker:
    return pb.ToWorker(ping=pb.Ping())


def test_a_send_that_blocks_holds_up_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds if the worker does not read: the trainer must not wait for the heartbeat."""
    lock, stuck, go_on = threading.Lock(), threading.Event(), threading.Event()
    sent: list[tuple[str, int]] = []

    def send(sock: socket.socket, buffers: Sequence[frames.Buffer]) -> None:
        sent.append((threading.current_thread().name, len(buffers)))
        stuck.set()
        assert go_on.wait(60) and not lock.locked()

    monkeypatch.setattr(frames, "send", send)
    outbox = Outbox(1, lock)
    one = len(frames.encode(ping().SerializeToString()))

    def add() -> None:
        with outbox:
            outbox.add(ping())

    with socket.socket() as outbox.socket:
        outbox.connect()
        first = threading.Thread(target=add, name="first")
        first.start()
        assert stuck.wait(60)
        for _ in range(2):
            add()  # here, and at once
        assert sent == [("first", one)]
        go_on.set()
        first.join(60)
        assert sent == [("first", one), ("first", 2 * one)]


def test_a_goodbye_that_another_thread_sends_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says it cuts the connection next."""
    sends, go_on, done = threading.Event(), threading.Event(), list[str]()

    def send(*_: object) -> None:
        sends.set()
        assert go_on.wait(60)
        done.append("sent")

    def say_goodbye() -> None:
        outbox.flush(60)
        done.append("said")

    monkeypatch.setattr(frames, "send", send)
    outbox = Outbox(1, threading.Lock())
    with socket.socket() as outbox.socket:
        outbox.connect()
        outbox.add(ping())
        threads = [threading.Thread(target=each) for each in (outbox.flush, say_goodbye)]
        threads[0].start()
        assert sends.wait(60)
        threads[1].start()
        threads[1].join(0.2)
        go_on.set()
        for thread in threads:
            thread.join(60)
    assert done == ["sent", "said"]


def test_a_socket_is_closed_once_nobody_sends_on_it() -> None:
    """Its number might be another file's by then."""
    ours, theirs = socket.socketpair()
    outbox, sends = Outbox(1, threading.Lock()), threading.Event()
    outbox.socket = ours

    def send() -> None:
        with outbox:
            outbox.connect()
            sends.set()
            for _ in range(8):
                outbox.add(pb.ToWorker(hello=pb.Hello(credential=bytes(1 << 19))))

    with theirs:
        sender = threading.Thread(target=send)
        sender.start()
        assert sends.wait(60)
        theirs.recv(1)  # it is under way, and waits for room
        with outbox._lock:
            sock = outbox.disconnect()
        assert sock is ours
        outbox.close(sock)
        sender.join(60)
        assert not sender.is_alive() and ours.fileno() == -1
