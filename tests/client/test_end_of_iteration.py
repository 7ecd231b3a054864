"""When a consumer has read all that there is for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.service.blocks import Block
from forebay.service.client import links, reader, tf_elements
from forebay.service.client.block_sources import BlockSource
from forebay.service.client.consumer import Consumer
from forebay.service.client.options import ShardingPolicy, TargetWorkers, read_options
from forebay.service.delivery import EndOfTask
from forebay.service.proto import forebay_pb2 as pb

from .connections import Client, Dispatcher, consuming, task


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_end_with_workers_of_other_trainers(connections: None, dynamic: bool) -> None:
    """If all share splits, our workers may get what others lost."""
    others = task(2, worker_tags=["colocated"])
    with consuming(targets=TargetWorkers.AUTO, dynamic=dynamic) as consumer:
        consumer.mode.update(pb.ConsumerHeartbeatResponse(tasks=[task(1), others]))
        consumer.mode.end((1, 0), EndOfTask())
        assert consumer.mode.has_ended() == (not dynamic)
        if dynamic:
            consumer.mode.update(
                pb.ConsumerHeartbeatResponse(tasks=[task(1), task(3)], finished=True)
            )
            assert not consumer.mode.has_ended() and Client.all[13].reads == [3]
            consumer.mode.end((3, 0), EndOfTask())
            assert consumer.mode.has_ended()


def test_news_that_waits_behind_the_last_end_is_heard(connections: None) -> None:
    mine, other, new = task(1), task(2, worker_tags=["colocated"]), task(3)
    with consuming() as consumer:
        consumer.mode.update(pb.ConsumerHeartbeatResponse(tasks=[mine, other]))
        Client.all[11].deliver(1, 0, EndOfTask())
        consumer._hear(pb.ConsumerHeartbeatResponse(tasks=[mine, other, new]))
        nothing = Block(0, ())
        assert next(consumer.blocks(nothing), None) is nothing, "there is more to come"
        assert Client.all[13].reads == [3]


def test_a_received_block_is_given_after_its_worker_was_given_up(connections: None) -> None:
    with consuming() as consumer:
        consumer.mode.update(pb.ConsumerHeartbeatResponse(tasks=[task(1)]))
        consumer.mode.update(pb.ConsumerHeartbeatResponse(finished=True))  # it is given up
        worker = Client.all[11]
        worker.silence = (True, 0.0)
        assert not consumer.mode.has_ended()
        worker.send(1, 5)
        consumer.handle_inbox()
        worker.silence = (True, 1000.0)
        assert [block.count for block in consumer.blocks()] == [1]
        assert worker.stopped == [1]


def test_an_open_iteration_goes_silently_at_the_interpreter_s_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then this module's names are gone."""
    closed: list[bool] = []

    def blocks() -> Iterator[Block]:
        try:
            yield tf_elements.NOTHING
        finally:
            closed.append(True)

    going = tf_elements._blocks_of(BlockSource(blocks))
    next(going)
    monkeypatch.setattr(tf_elements, "ForebayError", None)
    going.close()
    assert closed


HERE, TAGGED_HERE, THERE, TAGGED_THERE = range(4)
ALL, OWN, NOT_OTHERS = {0, 1, 2, 3}, {0, 1}, {0, 1, 2}


@pytest.mark.parametrize(
    ("mode", "targets", "static", "not_static"),
    [
        ("COLOCATED", "AUTO", OWN, NOT_OTHERS),
        ("REMOTE", "AUTO", NOT_OTHERS, NOT_OTHERS),  # the same for HYBRID, and without a mode
        ("COLOCATED", "ANY", ALL, ALL),
        ("REMOTE", "ANY", ALL, ALL),
        ("COLOCATED", "LOCAL", OWN, OWN),
        ("REMOTE", "LOCAL", OWN, OWN),
    ],
)
def test_which_workers_target_workers_means(
    monkeypatch: pytest.MonkeyPatch, mode: str, targets: str, static: set[int], not_static: set[int]
) -> None:
    """As with tf.data service, measured with a local and three remote workers of either kind."""
    tasks = [
        task(HERE),
        task(TAGGED_HERE, worker_tags=["COLOCATED"]),
        task(THERE),
        task(TAGGED_THERE, worker_tags=["Colocated"]),
    ]
    registered = pb.GetDatasetResponse(colocated=mode == "COLOCATED")
    monkeypatch.setattr(reader, "fetch_dataset", lambda *_: registered)
    monkeypatch.setattr(links.Links, "is_local", lambda _, uid: uid - 10 in OWN)
    for policy in ShardingPolicy:
        options = read_options(policy, target_workers=targets)
        one = reader.Reader("a:1", "dataset", policy, None, options)
        one.definition()
        joined = pb.JoinIterationResponse(consumer_id=1)
        consumer = Consumer(Dispatcher(), joined, credit_bytes=1, options=one.options)  # type: ignore[arg-type]
        found = {number for number, each in enumerate(tasks) if consumer.mode._is_for_us(each)}  # type: ignore[attr-defined]
        consumer.close()
        is_static = policy not in (ShardingPolicy.OFF, ShardingPolicy.DYNAMIC)
        assert found == (static if is_static else not_static), policy
