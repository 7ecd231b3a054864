"""A consumer of a coordinated read: tasks, elements and ends that come in any order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from forebay.service.blocks import Block
from forebay.service.client.consumer import Consumer
from forebay.service.errors import Unavailable
from forebay.service.proto import forebay_pb2 as pb

from .connections import Client, consuming, task

NOTHING = Block(0, ())


@pytest.fixture
def consumer(connections: None) -> Iterator[Consumer]:
    with consuming(consumer_index=0, num_consumers=2) as made:
        yield made


def says(
    workers: dict[int, int],
    *,
    lost: tuple[int, ...] = (),
    removed: dict[int, int] | None = None,
    block: int | None = None,
) -> pb.ConsumerHeartbeatResponse:
    """News that list tasks with their workers, and say which of the workers are lost."""
    tasks = [task(i, uid, lost=uid if i in lost else 0) for i, uid in workers.items()]
    return pb.ConsumerHeartbeatResponse(tasks=tasks, removed=removed, block_round=block)


def numbers(block: Block) -> list[int]:
    return np.asarray(block.components[0].values).tolist()


def test_a_consumer_that_never_waits_keeps_no_taken_elements(consumer: Consumer) -> None:
    consumer._hear(says({1: 11}))
    blocks = consumer.blocks(NOTHING)
    consumer.handle_inbox()
    for number in range(50):
        Client.all[11].send(1, number)
        assert numbers(next(blocks)) == [number]
        assert consumer._inbox.qsize() <= 1


def test_a_consumer_that_never_waits_handles_news(consumer: Consumer) -> None:
    consumer._hear(says({1: 11}))
    consumer.handle_inbox()
    blocks = consumer.blocks(NOTHING)
    Client.all[11].send(1, 0)
    assert numbers(next(blocks)) == [0]
    consumer._hear(says({1: 11, 2: 12}))
    Client.all[11].send(1, 1)
    assert numbers(next(blocks)) == [1]
    assert Client.all[12].reads == [2]
    consumer._hear(Unavailable("the dispatcher is another one"))
    Client.all[11].send(1, 2)
    with pytest.raises(Unavailable, match="another one"):
        next(blocks)


def test_a_paused_consumer_survives_changes_of_workers(consumer: Consumer) -> None:
    """The heartbeats went on meanwhile."""
    consumer._hear(says({1: 11}))
    consumer.handle_inbox()
    consumer._hear(says({1: 11}, block=5))
    consumer._hear(says({1: 11, 2: 12}))
    consumer._hear(says({1: 11, 2: 12, 3: 13}))
    consumer._hear(says({1: 11, 2: 12, 3: 13}, lost=(1, 3)))
    consumer._hear(says({2: 12}, removed={1: 0, 3: 0}))
    Client.all[11].send(1, 0)
    consumer.handle_inbox()
    Client.all[12].send(2, 7)
    assert numbers(next(consumer.blocks())) == [7]
    assert Client.all[11].stopped == [1] and Client.all[11].closed
    assert 13 not in Client.all


def test_a_removed_task_is_read_up_to_its_last_round(consumer: Consumer) -> None:
    consumer._hear(says({1: 11, 2: 12}))
    consumer.handle_inbox()
    Client.all[11].send(1, 0)
    Client.all[11].send(1, 2, 4)
    Client.all[11].send(1, 6)
    consumer._hear(says({1: 11, 2: 12}, lost=(1,)))
    consumer._hear(says({2: 12}, removed={1: 2}))
    blocks = consumer.blocks(NOTHING)
    Client.all[12].send(2, 1, 3, 5)
    assert numbers(next(blocks)) == [0, 1, 2, 3, 5]
    assert Client.all[11].stopped == [1] and Client.all[11].closed
    assert Client.all[11].held == 0, "of what nobody reads the budget of elements knows no more"
    Client.all[11].send(1, 8)  # was on its way
    assert Client.all[11].held == 0


def test_a_removed_task_leaves_the_credit_to_the_next_one_of_its_worker(consumer: Consumer) -> None:
    """Its elements come in turn with the next task's, for which there would be no credit."""
    consumer._hear(says({1: 11, 2: 12}))
    consumer.handle_inbox()
    Client.all[11].send(1, 0)
    Client.all[11].send(1, 2)
    Client.all[12].send(2, 1)
    consumer._hear(says({1: 11, 2: 12}, lost=(1,)))
    consumer._hear(says({2: 12, 3: 11}, removed={1: 2}))
    blocks = consumer.blocks(NOTHING)
    assert numbers(next(blocks)) == [0, 1]
    assert next(blocks) is NOTHING
    assert Client.all[11].held == 0 and Client.all[11].stopped == [1]
    assert Client.all[11].reads == [1, 3]
    Client.all[11].send(1, 4)  # was on its way
    assert Client.all[11].held == 0
    Client.all[11].send(3, 9)
    assert numbers(next(blocks)) == [9, 2]
    assert Client.all[11].held == 0
