"""A consumer that leaves in order: what it has not taken goes to others, over every connection."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from forebay.service.blocks import Block
from forebay.service.delivery import AnyBlock, EndOfTask, EndPending, FirstComeOutput
from forebay.service.errors import ProtocolError
from forebay.service.proto import transfer_pb2 as pb
from forebay.service.transport import BlockClient, BlockServer
from forebay.service.transport.sending import Connection, Farewell
from forebay.service.transport.sessions import Sessions

from ..delivery.contract import block, numbers
from .peers import TIMEOUT_S, Consumer, only, waiting_sender

TASK = 5
KEY = TASK, 0
HANDS_BACK = AnyBlock(hands_back=True)
READING: dict[str, Any] = {"reads": TASK, "request": HANDS_BACK}

Connect = Callable[..., Any]  # which is a Consumer


@pytest.fixture
def output() -> FirstComeOutput:
    return FirstComeOutput()


@pytest.fixture
def reader(server: BlockServer, output: FirstComeOutput, closing: ExitStack) -> Connect:
    """Makes consumers that read the task."""
    server.sessions.add_task(TASK, output)

    def connect(consumer_id: int = 1, protocol: str = "unix") -> Consumer:
        local = server.sessions if protocol == "local" else None
        return Consumer(
            only(server, protocol), consumer_id, local=local, **READING, closing=closing
        )

    return connect


@pytest.fixture(params=["unix", "tcp", "local"])
def connect(request: pytest.FixtureRequest, reader: Connect) -> Connect:
    return functools.partial(reader, protocol=request.param)


def got(consumer: Consumer) -> Any:
    found = consumer.get()
    assert isinstance(found, tuple)
    return numbers(found[1]) if isinstance(found[1], Block) else found[1]


def leave(consumer: Consumer, given: int | None = None) -> None:
    """`given` are elements of the block that it has."""
    consumer.client.hand_back(None if given is None else (KEY, given))
    assert consumer.client.close(time.monotonic() + TIMEOUT_S)


def test_elements_that_the_trainer_took_stay_and_the_rest_goes_to_others(
    output: FirstComeOutput, connect: Connect
) -> None:
    leaving = connect(1)
    for first in range(0, 6, 2):  # a new consumer is given two at a time
        output.put(block(first, 2))
    output.finish()
    taken = leaving.arrived.get(timeout=TIMEOUT_S)[2]
    leaving.client.taken(taken, KEY)
    assert got(leaving) == [2, 3]
    other = connect(2)
    assert got(leaving) == [4, 5] and got(leaving) == EndOfTask()
    while (news := got(other)) != EndPending(4):
        assert news == EndPending(6)  # until it was said that some were taken
    leave(leaving, given=1)
    assert [got(other) for _ in range(3)] == [[3], [4, 5], EndOfTask()]
    assert not output.wait_drained(0)
    leave(other)
    assert output.waiting_elements == 3, "nobody else is there: they wait"
    assert [got(connect(3)) for _ in range(1)] == [[3]]


def test_the_last_block_that_is_taken_is_reported_at_once(
    output: FirstComeOutput, connect: Connect
) -> None:
    slow, other = connect(1), connect(2)
    output.put(block(0, 1))
    output.finish()
    first = [consumer.arrived.get(timeout=TIMEOUT_S)[2] for consumer in (slow, other)]
    if not isinstance(first[0], Block):
        first, slow, other = first[::-1], other, slow
    assert got(slow) == EndOfTask() and first[1] == EndPending(1)
    slow.client.taken(first[0], KEY)
    assert got(other) == EndOfTask()
    assert output.wait_drained(TIMEOUT_S)


def one_that_has_a_block() -> tuple[Sessions, FirstComeOutput, Connection]:
    sessions, output = Sessions(linger_s=10), FirstComeOutput()
    sessions.add_task(TASK, output)
    output.put(block(0, 2))
    connection = sessions.attach(1, lambda: None)
    sessions.read(connection, TASK, 0, HANDS_BACK)
    sessions.give_credit(connection, 1 << 20, [])
    assert sessions.next_batch(connection)
    return sessions, output, connection


def test_a_leaving_consumer_is_not_given_again_what_it_hands_back() -> None:
    """Its connection had waited longest, so the server would have asked it first."""
    sessions, output, connection = one_that_has_a_block()
    with waiting_sender(sessions, connection) as batch:
        sessions.goodbye(connection, [pb.Position(task_id=TASK, received=1, elements=1)])
        assert output.waiting_elements == 1
        assert batch.result(TIMEOUT_S) == [Farewell()]
    assert sessions.next_batch(connection) is None


def test_blocks_received_before_a_cut_can_be_handed_back_after_it() -> None:
    """Of a task that had ended by then, too: its end is said again before all that is read is."""
    sessions, output = Sessions(linger_s=10), FirstComeOutput()
    sessions.add_task(TASK, output)
    output.put(block(0, 2))
    output.finish()
    for received in (0, 1):
        connection = sessions.attach(1, lambda: None)
        with waiting_sender(sessions, connection) as batch:
            sessions.read(connection, TASK, received, HANDS_BACK)
            sessions.give_credit(connection, 1 << 20, [])
            assert batch.result(TIMEOUT_S)
        sessions.detach(connection, 0)
    connection = sessions.attach(1, lambda: None)
    with waiting_sender(sessions, connection):
        sessions.read(connection, TASK, 1, HANDS_BACK)
        sessions.give_credit(connection, 1 << 20, [])
        sessions.goodbye(connection, [pb.Position(task_id=TASK, received=1)])
        assert output.waiting_elements == 2


@pytest.mark.parametrize(
    ("position", "wrong"),
    [
        ({"received": 9}, "9 blocks of task 5 were reported as received"),
        ({"received": 1, "taken": 2}, "2 blocks of task 5 were reported as taken, and 1"),
        ({"received": 1, "elements": 3}, "3 elements of block 1 of task 5 were reported as taken"),
    ],
)
def test_absurd_goodbyes_are_refused(position: dict[str, int], wrong: str) -> None:
    sessions, _, connection = one_that_has_a_block()
    with pytest.raises(ProtocolError, match=wrong):
        sessions.goodbye(connection, [pb.Position(task_id=TASK, **position)])


def test_a_goodbye_that_was_cut_off_is_repeated(output: FirstComeOutput, reader: Connect) -> None:
    consumer = reader()
    output.put(block(0, 2))
    assert got(consumer) == [0, 1]
    with consumer.client._lock:
        consumer.client._outbox.cut()
    leave(consumer)
    assert output.waiting_elements == 2


def test_a_consumer_that_never_reached_its_worker_hands_nothing_back() -> None:
    consumer = Consumer([("unix", "@forebay-nobody")], give_up_s=1e9, **READING)
    consumer.client.hand_back(None)
    assert consumer.client.close(0.0)


def test_blocks_that_arrive_while_the_consumer_leaves_do_not_count_as_received(
    output: FirstComeOutput, reader: Connect, closing: ExitStack
) -> None:
    """The goodbye, which is repeated after the cut, counts only blocks that had arrived."""
    consumer = reader()
    client = consumer.client
    assert isinstance(client, BlockClient)
    came, go_on = threading.Event(), threading.Event()
    closing.callback(go_on.set)
    payload = client._payloads.read

    def late(*arguments: Any) -> Any:
        came.set()
        go_on.wait(TIMEOUT_S)
        return payload(*arguments)

    output.put(block(0, 2))
    assert got(consumer) == [0, 1]
    client._payloads.read = late  # type: ignore[method-assign, assignment]
    output.put(block(2, 2))
    assert came.wait(TIMEOUT_S)
    with client._lock:
        client._outbox.cut()
    client.hand_back(None)
    go_on.set()
    assert client.close(time.monotonic() + TIMEOUT_S)
    assert output.waiting_elements == 4
