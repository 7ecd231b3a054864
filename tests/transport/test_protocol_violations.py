"""Peers that break the rules of the protocol: refused, logged once, and harmless to others."""

from __future__ import annotations

import logging
import pathlib
import socket
from contextlib import ExitStack
from typing import Any

import pytest

from forebay.service.proto import transfer_pb2 as pb
from forebay.service.transport import BlockServer, frames, messages

from ..certificates import Authority
from .peers import (
    UID,
    WELCOME,
    Consumer,
    Peer,
    Saying,
    ScriptedWorker,
    connected,
    encoded,
    only,
    say,
    started,
    task,
)
from .samples import numbered

HELLO: dict[str, Any] = {"version": messages.VERSION, "consumer_id": 1, "worker_uid": UID}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pb.ToWorker(hello=pb.Hello(**HELLO | {"version": 9})), "version 9"),
        (pb.ToWorker(hello=pb.Hello(**HELLO | {"worker_uid": 1})), "this is worker 77, not 1"),
        (pb.ToWorker(stop=pb.Stop(task_id=1)), "starts with Hello"),
        (pb.ToWorker(), "starts with Hello"),
    ],
)
def test_a_wrong_hello_is_refused(
    server: BlockServer, closing: ExitStack, message: pb.ToWorker, reason: str
) -> None:
    peer = Peer(server, greets=False)
    closing.callback(peer.close)
    say(peer.socket, message)
    assert reason in peer.refusal()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pb.ToWorker(), "an empty message"),
        (pb.ToWorker(hello=pb.Hello(**HELLO)), "sent hello"),
        (pb.ToWorker(read=pb.Read(task_id=5)), "a request of a kind not known"),
        (pb.ToWorker(credit=pb.Credit(bytes=1 << 63)), "absurd"),
    ],
)
def test_a_message_out_of_place_is_refused_and_others_are_served_on(
    server: BlockServer,
    closing: ExitStack,
    caplog: pytest.LogCaptureFixture,
    message: pb.ToWorker,
    reason: str,
) -> None:
    peer = Peer(server)
    closing.callback(peer.close)
    with caplog.at_level(logging.WARNING):
        say(peer.socket, message)
        assert reason in peer.refusal()
    task(server, 5, 3)
    consumer = Consumer(server.addresses, reads=5, closing=closing)
    assert consumer.numbers() == [1, 2, 3]
    server.stop()
    assert len(caplog.records) == 1, "logged once"


@pytest.mark.parametrize("kind", ["tcp", "unix", "tls"])
def test_connections_that_end_before_they_say_hello_are_one_line(
    closing: ExitStack, caplog: pytest.LogCaptureFixture, tmp_path: pathlib.Path, kind: str
) -> None:
    credentials = Authority(tmp_path).issue("server") if kind == "tls" else None
    server = started(closing, credentials=credentials)
    (address,) = only(server, "unix" if kind == "unix" else "tcp")
    with caplog.at_level(logging.INFO):
        for _ in range(20):
            with connected(address) as sock:
                sock.shutdown(socket.SHUT_WR)
                assert sock.recv(1) == b""
        server.stop()
    said = [line for line in caplog.messages if " ended: " in line]
    assert len(said) == 1, said


def test_consumers_may_not_send_payloads_or_long_headers(
    server: BlockServer, closing: ExitStack
) -> None:
    for frame in (frames.encode(b"", [memoryview(b"x")]), frames.encode(bytes(1 << 17))):
        peer = Peer(server)
        closing.callback(peer.close)
        peer.socket.sendall(frame[0][:24])
        assert "at most 65536 and 0 are allowed here" in peer.refusal()


def says(**message: Any) -> Saying:
    return Saying(encoded(pb.ToConsumer(**message)))


def sends(number: int) -> Saying:
    """A block of task 5, of this number."""
    buffers, _ = messages.encode_block(5, number, numbered(number))
    return Saying(b"".join(buffers))


@pytest.mark.parametrize(
    ("conversation", "reason"),
    [
        ([says(refused=pb.Refused(reason="go away"))], "refused: go away"),
        ([says()], "did not answer Hello with Welcome"),
        ([Saying(b"HTTP/1.1 400 Bad Request\r\n\r\n")], "where a frame starts"),
        ([WELCOME, says()], "an empty message"),
        ([WELCOME, Saying(b"x" * 100)], "where a frame starts"),
        ([WELCOME, Saying(b"".join(frames.encode(b"\xff")))], "cannot be parsed"),
        ([WELCOME, sends(2)], "sent block 2 of task 5 after 0"),
        ([WELCOME, sends(1), sends(2), sends(3)], "of task 5 without credit"),
        ([WELCOME, Saying(encoded(pb.ToConsumer(), bytes(5000)))], "at most 1048576 and 4096"),
    ],
)
def test_a_worker_that_breaks_the_rules_is_lost(
    closing: ExitStack, conversation: list[Saying], reason: str
) -> None:
    worker = ScriptedWorker()
    closing.callback(worker.close)
    worker.follow_always(conversation)
    consumer = Consumer(
        worker.addresses, reads=5, credit_bytes=600, max_payload_bytes=4096, give_up_s=0.2
    )
    closing.callback(consumer.client.close)
    while not isinstance(item := consumer.get(), str):
        pass
    assert reason in item


def test_a_worker_that_cannot_be_reached_is_lost(closing: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    consumer = Consumer([("unix", "@forebay-none"), ("tcp", f"127.0.0.1:{port}")], give_up_s=0.2)
    closing.callback(consumer.client.close)
    lost = consumer.get()
    assert isinstance(lost, str)
    assert "worker 77 was out of reach for 0.2 s" in lost
    assert "refused" in lost


def test_another_process_at_the_address_is_not_the_worker(
    server: BlockServer, closing: ExitStack
) -> None:
    consumer = Consumer(server.addresses, uid=UID + 1, closing=closing)
    assert "this is worker 77, not 78" in str(consumer.get())
