"""Which consumer gets which block, tested without sockets and (but for one test) threads."""

from __future__ import annotations

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from forebay.service.block_limits import BLOCK_OVERHEAD_BYTES
from forebay.service.blocks import Block, Component
from forebay.service.delivery import (
    EndOfTask,
    FirstComeOutput,
    OutputCancelled,
    TaskFailed,
    TaskUnknown,
)
from forebay.service.errors import ProtocolError
from forebay.service.proto import transfer_pb2 as pb
from forebay.service.transport.sending import BATCH_BYTES, Connection, Ended, Sent
from forebay.service.transport.sessions import MAX_CREDIT_ELEMENTS, Sessions

from .samples import numbered

TASK = 5
COST = 8 + BLOCK_OVERHEAD_BYTES


class World:
    """A worker with one task of `blocks` blocks."""

    def __init__(self, blocks: int = 0, *, size: int = 8) -> None:
        self.sessions = Sessions(linger_s=10)
        self.output = FirstComeOutput(1 << 30)
        self.sessions.add_task(TASK, self.output)
        for number in range(1, blocks + 1):
            self.output.put(numbered(number, size))

    def connect(self, consumer_id: int, received: int = 0, credit: int = 1 << 34) -> Connection:
        connection = self.sessions.attach(consumer_id, lambda: None)
        self.sessions.read(connection, TASK, received)
        self.credit(connection, credit)
        return connection

    def credit(self, connection: Connection, size: int, received: int | None = None) -> None:
        positions = [] if received is None else [pb.Position(task_id=TASK, received=received)]
        self.sessions.give_credit(connection, size, positions)

    def sent(self, connection: Connection) -> list[int | type]:
        """The numbers of the blocks that the connection sends next, and ends."""
        self.sessions.read(connection, -1, 0)  # answered at once, so that next_batch never waits
        batch = self.sessions.next_batch(connection)
        assert batch is not None
        return [
            out.block.index if isinstance(out, Sent) else type(out.end)
            for out in batch
            if isinstance(out, Sent | Ended) and out.task_id == TASK
        ]


def test_blocks_are_sent_while_credit_is_above_zero() -> None:
    world = World(10)
    connection = world.connect(1, credit=3 * COST - 1)
    assert world.sent(connection) == [1, 2, 3]
    assert world.sent(connection) == []
    world.credit(connection, 1)
    assert world.sent(connection) == []
    world.credit(connection, 1)
    assert world.sent(connection) == [4]


def test_the_end_needs_no_credit_and_comes_after_the_blocks() -> None:
    world = World(1)
    world.output.finish()
    connection = world.connect(1, credit=0)
    assert world.sent(connection) == []
    world.credit(connection, 1)
    assert world.sent(connection) == [1, EndOfTask]
    assert world.sent(world.connect(2, credit=0)) == [EndOfTask], "one that comes later"


def test_a_task_that_goes_on_for_a_reader_holds_up_no_other() -> None:
    """Opening the task starts a thread; a consumer that hands back meanwhile must be answered."""
    world = World()
    seen: list[set[int]] = []
    with ThreadPoolExecutor(1) as pool:
        read_tasks = world.sessions.read_tasks
        world.output.when_opened(lambda: seen.append(pool.submit(read_tasks).result(timeout=10)))
        assert not seen
        connection = world.connect(1)
        assert seen == [{TASK}]
        world.sessions.detach(connection, now=0)
        world.connect(1)
    assert len(seen) == 1, "once"


def test_small_blocks_leave_together_within_bounds() -> None:
    world = World(2000)
    assert len(world.sent(world.connect(1))) == -(-BATCH_BYTES // COST)
    world = World(3, size=BATCH_BYTES)
    assert world.sent(world.connect(1)) == [1]


def test_unreceived_blocks_are_sent_again_on_the_next_connection() -> None:
    world = World(6)
    connection = world.connect(1, credit=4 * COST)
    assert world.sent(connection) == [1, 2, 3, 4]
    world.credit(connection, 0, received=1)
    world.sessions.detach(connection, now=0)
    world.sessions.expire(now=10)
    connection = world.connect(1, received=2, credit=2 * COST)
    assert world.sent(connection) == [3, 4], "resending costs credit too"
    world.credit(connection, 1 << 20)
    assert world.sent(connection) == [5, 6]


def test_a_consumer_that_stays_away_is_forgotten() -> None:
    world = World(3)
    connection = world.connect(1, credit=1)
    assert world.sent(connection) == [1]
    world.sessions.detach(connection, now=0)
    assert world.sessions.wait_until_received(0)
    world.sessions.expire(now=10.1)
    assert not world.sessions.wait_until_received(0)
    connection = world.connect(1, received=7)
    batch = world.sessions.next_batch(connection)
    assert batch is not None
    assert [(o.number, o.block.index) for o in batch if isinstance(o, Sent)] == [(8, 2), (9, 3)]


def test_a_consumer_that_is_gone_is_forgotten_at_once() -> None:
    world = World(3)
    connection = world.connect(1, credit=2 * COST)
    assert world.sent(connection) == [1, 2]
    assert world.sessions.away() == [] and world.sessions.forget_gone([1, 77]) == 0
    assert TASK in world.sessions.read_tasks(), "it is connected, whatever one says"
    world.sessions.detach(connection, now=0)
    assert world.sessions.away() == [1]
    assert world.sessions.forget_gone([1]) == 2
    assert TASK not in world.sessions.read_tasks() and world.sessions.away() == []
    assert not world.sessions.wait_until_received(0)


def test_goodbye_and_stop_forget_at_once() -> None:
    for goodbye in (True, False):
        world = World(3)
        connection = world.connect(1)
        assert world.sent(connection) == [1, 2, 3]
        assert world.sessions.wait_until_received(0)
        if goodbye:
            world.sessions.detach(connection)
        else:
            world.sessions.stop_reading(connection, TASK)
        assert not world.sessions.wait_until_received(0)


def test_a_new_connection_cuts_the_old_one() -> None:
    world = World(2)
    cut = []
    old = world.sessions.attach(1, lambda: cut.append(True))
    world.credit(old, 1)
    world.sessions.read(old, TASK, 0)
    assert world.sent(old) == [1]
    new = world.connect(1)
    assert cut
    assert world.sessions.next_batch(old) is None
    world.sessions.detach(old, now=0)
    assert world.sent(new) == [1, 2]


def test_a_block_goes_to_the_consumer_that_has_waited_longest() -> None:
    world = World()
    connections = [world.connect(1), world.connect(2)]
    with ThreadPoolExecutor(2) as pool:
        for number in range(20):
            connections.reverse()
            waiting = []
            for connection in connections:
                waiting.append(pool.submit(world.sessions.next_batch, connection))
                while connection not in world.sessions.idle:
                    time.sleep(0.001)
            for part, future in enumerate(waiting):
                world.output.put(numbered(2 * number + part))  # two at once could go to one
                batch = future.result(timeout=10)
                assert batch is not None
                assert [out.block.index for out in batch if isinstance(out, Sent)] == [
                    2 * number + part
                ]


def test_a_consumer_without_credit_holds_up_nobody() -> None:
    world = World(4)
    stalled = world.connect(1, credit=0)
    assert world.sent(stalled) == []
    assert world.sent(world.connect(2)) == [1, 2, 3, 4]


def test_failure_and_cancellation_are_told() -> None:
    world = World(1)
    world.output.fail("INVALID_ARGUMENT", "no such op")
    connection = world.connect(1)
    batch = world.sessions.next_batch(connection)
    assert batch is not None
    assert batch[1:] == [Ended(TASK, TaskFailed("INVALID_ARGUMENT", "no such op"))]

    world = World(1)
    connection = world.connect(1, credit=0)
    world.sessions.remove_task(TASK)
    assert world.sent(connection) == [TaskUnknown]
    with pytest.raises(OutputCancelled):
        world.output.put(numbered(2))
    assert world.sent(world.connect(1)) == [TaskUnknown], "asked for anew"


def test_a_removed_task_that_has_ended_is_still_delivered() -> None:
    world = World(2)
    world.output.finish()
    connection = world.connect(1, credit=1)
    assert world.sent(connection) == [1]
    world.sessions.remove_task(TASK)
    assert world.sent(world.connect(2)) == [TaskUnknown]
    world.sessions.detach(connection, now=0)
    assert world.sent(world.connect(1, received=0)) == [1, 2, EndOfTask]


def test_the_rules_for_consumers() -> None:
    world = World(2)
    connection = world.connect(1, credit=1)
    assert world.sent(connection) == [1]
    with pytest.raises(ProtocolError, match="asked for twice"):
        world.sessions.read(connection, TASK, 0)
    with pytest.raises(ProtocolError, match="2 blocks of task 5 were reported as received"):
        world.credit(connection, 0, received=2)
    world.credit(connection, 0, received=1)
    with pytest.raises(
        ProtocolError, match="0 blocks of task 5 were reported as received, after 1"
    ):
        world.credit(connection, 0, received=0)
    with pytest.raises(ProtocolError, match="absurd"):
        world.credit(connection, 1 << 63)
    with pytest.raises(ProtocolError, match="absurd"):
        world.sessions.give_credit(connection, 0, (), MAX_CREDIT_ELEMENTS + 1)
    with pytest.raises(ProtocolError, match="nobody can have received"):
        world.connect(2, received=1 << 63)
    with pytest.raises(ProtocolError, match="reads none of them"):
        for task_id in range(2000):
            world.sessions.read(connection, 1000 + task_id, 0)


def test_a_subscription_that_a_new_connection_does_not_ask_for_is_dropped() -> None:
    world = World(3)
    connection = world.connect(1)
    assert world.sent(connection) == [1, 2, 3]
    world.sessions.detach(connection, 0.0)
    assert world.sessions.wait_until_received(0)
    again = world.sessions.attach(1, lambda: None)
    world.credit(again, 1)
    assert not world.sessions.wait_until_received(0)
    assert TASK not in world.sessions.read_tasks()


@pytest.mark.parametrize("end", ["goodbye", "gone", "stop"])
def test_blocks_go_with_the_consumer_and_not_with_the_next_garbage_collection(end: str) -> None:
    """Sessions, connections and buffers are part of cycles of references, and blocks are large."""
    world = World()
    values = np.zeros(9)
    world.output.put(Block(9, (Component(values),)))
    freed = weakref.ref(values)
    connection = world.connect(1)
    gc.disable()
    try:
        del values
        assert world.sent(connection) == [0]
        assert freed() is not None, "what was not received is kept"
        match end:
            case "goodbye":
                world.sessions.detach(connection)
            case "gone":
                world.sessions.detach(connection, 0)
                world.sessions.forget_gone([1])
            case "stop":
                world.sessions.stop_reading(connection, TASK)
        assert freed() is None
    finally:
        gc.enable()
