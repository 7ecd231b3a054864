"""Server and client over real sockets: cut, stalled and stopped."""

from __future__ import annotations

import contextlib
import json
import queue
import random
import select
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from forebay.service import block_limits
from forebay.service.blocks import Block, Component
from forebay.service.delivery import (
    BundlesOutput,
    EndOfSlice,
    EndOfTask,
    FirstComeOutput,
    Slice,
    TaskFailed,
    TaskUnknown,
)
from forebay.service.errors import AddressInUse
from forebay.service.proto import transfer_pb2 as pb
from forebay.service.transport import BlockClient, BlockServer, ConnectionRefused, frames
from forebay.service.transport.dial import WorkerAddresses
from forebay.service.transport.sessions import Sessions

from ..standbys import wait_until
from .peers import TIMEOUT_S, UID, WELCOME, Consumer, Peer, only, task
from .samples import SAMPLES, assert_same, numbered


@pytest.mark.parametrize("protocol", ["unix", "tcp"])
def test_blocks_arrive_whole_and_in_order(
    server: BlockServer, closing: ExitStack, protocol: str
) -> None:
    consumer = Consumer(only(server, protocol), closing=closing)
    consumer.client.read(5)
    assert consumer.take() == (5, TaskUnknown())
    output = FirstComeOutput()
    server.sessions.add_task(5, output)
    consumer.client.read(5)
    for block in SAMPLES.values():
        output.put(block)
    output.fail("INVALID_ARGUMENT", "that was all")
    for block in SAMPLES.values():
        task_id, got = consumer.take()
        assert task_id == 5
        assert isinstance(got, Block)
        assert_same(got, block)
    assert consumer.take() == (5, TaskFailed("INVALID_ARGUMENT", "that was all"))
    assert output.wait_drained(TIMEOUT_S)


def test_a_consumer_is_welcomed_once_its_earlier_connections_are_replaced(
    server: BlockServer, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it might connect again first. Its older connection would then replace the newer
    one, and close what it began to read there."""
    attach, welcomed = Sessions.attach, []
    peer = Peer(server, protocol="unix", greets=False)
    closing.callback(peer.close)

    def watched(sessions: Sessions, *arguments: Any) -> Any:
        welcomed.append(bool(select.select([peer.socket], [], [], 0)[0]))
        return attach(sessions, *arguments)

    monkeypatch.setattr(Sessions, "attach", watched)
    peer.say(hello=peer.hello)
    assert peer.hear().HasField("welcome")
    assert welcomed == [False]


def test_the_worker_hears_that_an_end_was_heard_though_nothing_else_is_said(
    server: BlockServer, closing: ExitStack
) -> None:
    output = BundlesOutput()
    server.sessions.add_task(5, output)
    consumer = Consumer(only(server, "tcp"), consumer_id=1, closing=closing)
    consumer.client.read(5, Slice(bundle=7, place=7, until=1), subscription=3)
    run = output.next_run(most=1, timeout_s=TIMEOUT_S)
    assert run is not None
    run.finish()
    assert consumer.take_numbered() == (5, 3, EndOfSlice(7, 0, True))
    (session,) = server.sessions._by_consumer.values()
    wait_until(lambda: not session.buffers)


@pytest.mark.parametrize("credit_bytes", [1, 5_000, 100_000])
def test_no_more_is_in_flight_than_credit_and_one_block(
    server: BlockServer, closing: ExitStack, credit_bytes: int
) -> None:
    dice = random.Random(credit_bytes)
    size = 2_000
    cost = size + block_limits.BLOCK_OVERHEAD_BYTES
    most = (credit_bytes - 1) // cost + 1  # the last of them when hardly a byte of credit is left
    task(server, 5, 300, lambda: size)
    consumer = Consumer(server.addresses, reads=5, credit_bytes=credit_bytes, closing=closing)
    held: list[Block] = []
    for number in range(1, 301):
        while held and dice.random() < 0.5:
            consumer.client.taken(held.pop(dice.randrange(len(held))))
        if len(held) == most:
            assert consumer.waiting_blocks() == 0
            while held:
                consumer.client.taken(held.pop())
        assert len(held) + consumer.waiting_blocks() <= most
        if held and consumer.arrived.empty():  # the credit given back may be too little to tell
            while held:
                consumer.client.taken(held.pop())
        item = consumer.get()[1]
        assert isinstance(item, Block)
        assert item.index == number
        held.append(item)


def test_stopped_tasks_are_not_delivered_and_cost_no_credit(
    server: BlockServer, closing: ExitStack
) -> None:
    task(server, 5, 1000, lambda: 8_000)
    task(server, 6, 20)
    consumer = Consumer(server.addresses, reads=5, credit_bytes=100_000, closing=closing)
    assert consumer.take()[0] == 5
    consumer.client.stop_task(5)
    consumer.client.read(6)
    rest = []
    while (item := consumer.take())[1] != EndOfTask():
        rest.append(item[0])
    assert rest.count(6) == 20
    assert rest == sorted(rest), "nothing of task 5 after those that had been delivered"


# -- ends --------------------------------------------------------------------------------------


def test_consumers_are_told_that_the_server_stops(server: BlockServer, closing: ExitStack) -> None:
    consumer = Consumer(server.addresses, closing=closing)
    output = FirstComeOutput()
    server.sessions.add_task(5, output)
    consumer.client.read(5)
    output.put(numbered(1))
    assert consumer.take()[0] == 5
    assert not server.sessions.wait_until_received(TIMEOUT_S)
    server.stop()
    server.stop()
    assert "the worker stops" in str(consumer.get())


def test_a_server_stops_though_a_consumer_does_not_read(
    server: BlockServer, closing: ExitStack
) -> None:
    task(server, 5, 100, lambda: 1 << 20)
    mute = Peer(server)
    closing.callback(mute.close)
    mute.say(credit=pb.Credit(bytes=1 << 34))
    mute.read(5)
    assert mute.socket.recv(1)
    server.stop()


def test_a_client_closes_in_any_state(server: BlockServer) -> None:
    output = FirstComeOutput()
    server.sessions.add_task(5, output)
    idle = Consumer(server.addresses)
    idle.client.close()
    idle.client.close()
    reading = Consumer(server.addresses, reads=5)
    output.put(numbered(1))
    reading.take()
    reading.client.close()
    searching = Consumer([("unix", "@forebay-none")])
    searching.client.close()
    unstarted = BlockClient(
        server.addresses, worker_uid=UID, consumer_id=1, deliver=lambda *_: None, lost=print
    )
    unstarted.close()


CONSUMER = """
import json, sys, threading
from forebay.service.transport import BlockClient
got = lambda *_: print("got", flush=True)
client = BlockClient(
    json.loads(sys.argv[1]), worker_uid=int(sys.argv[2]), consumer_id=1, deliver=got, lost=print
)
client.read(5)
client.start()
threading.Event().wait()
"""


def test_the_server_forgets_a_consumer_whose_process_has_ended(server: BlockServer) -> None:
    """Its session would linger, and a worker that drains wait for it."""
    task(server, 5, blocks=3)
    command = [sys.executable, "-c", CONSUMER, json.dumps(only(server, "unix")), str(UID)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as consumer:
        assert consumer.stdout is not None and consumer.stdout.readline() == "got\n"
        assert 5 in server.sessions.read_tasks()
        consumer.kill()
    wait_until(lambda: 5 not in server.sessions.read_tasks())


def test_it_is_reported_that_a_workers_address_refuses_connections() -> None:
    reports: list[ConnectionRefused | None] = []
    here, there = ("unix", "@here"), ("tcp", "there:1")

    def refuses(*answering: tuple[str, str], others: type[OSError]) -> bool:
        """Whether the worker's address refuses, after an attempt to connect."""

        def connect_to(*address: str) -> str:
            if address not in answering:
                raise others
            return address[1]

        with contextlib.suppress(ConnectionError):
            assert addresses.connect(connect_to) in [where for _, where in answering]
        return addresses.refuse

    addresses = WorkerAddresses([here, there], with_grpc=False, refused=reports.append)
    assert not refuses(others=TimeoutError) and not reports
    assert refuses(others=ConnectionRefusedError) and refuses(others=ConnectionRefusedError)
    assert reports == [ConnectionRefused.NEVER_CONNECTED]
    assert not refuses(there, others=ConnectionRefusedError), "a Unix name is local to a host"
    assert reports[1:] == [None]
    assert refuses(others=ConnectionRefusedError)
    assert reports[2:] == [ConnectionRefused.ONCE_CONNECTED]
    with pytest.raises(ValueError, match="none of the worker's addresses"):
        WorkerAddresses([("grpc", "a:1")], with_grpc=False, refused=reports.append)


def test_a_client_reports_that_its_worker_has_ended(closing: ExitStack) -> None:
    told: queue.Queue[ConnectionRefused | None] = queue.Queue()
    listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    where = "tcp", f"127.0.0.1:{listener.getsockname()[1]}"
    consumer = Consumer([where], refused=told.put, give_up_s=1e9, closing=closing)
    with listener.accept()[0] as connection:
        frames.send(connection, [WELCOME.data])
        wait_until(lambda: consumer.client.connected)
        assert told.empty()
        listener.close()
    assert told.get(timeout=TIMEOUT_S) is ConnectionRefused.ONCE_CONNECTED


def test_a_server_that_never_started_and_a_port_in_use() -> None:
    first = BlockServer(UID)
    with pytest.raises(
        AddressInUse, match=f"cannot listen for consumers on 127.0.0.1:{first.port}"
    ):
        BlockServer(UID, port=first.port)
    first.stop()
    BlockServer(UID).stop()


def test_large_blocks_are_received_without_a_copy(server: BlockServer, closing: ExitStack) -> None:
    output = FirstComeOutput()
    server.sessions.add_task(5, output)
    consumer = Consumer(server.addresses, reads=5, closing=closing)
    for value in range(8):
        output.put(Block(2, (Component(np.full((2, 600_000), value, np.float32)),)))
        block = consumer.take()[1]
        assert isinstance(block, Block)
        values = block.components[0].values
        assert isinstance(values, np.ndarray)
        assert values.base is not None
        assert values.ctypes.data % 64 == 0
        assert (values == value).all()
