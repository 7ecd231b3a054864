"""Consumers: what they wait for, log and report; in rounds, in groups, and where workers refuse."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay import service
from forebay.service.blocks import Block
from forebay.service.client import consumer as consumers
from forebay.service.client import heartbeats as clients_heartbeats
from forebay.service.client import reader
from forebay.service.client.consumer import Consumer, WaitLog
from forebay.service.client.heartbeats import Heartbeats
from forebay.service.client.options import read_options
from forebay.service.client.reader import Reader
from forebay.service.client.slices import Slices
from forebay.service.delivery import EndOfTask
from forebay.service.errors import Unavailable
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.transport import ConnectionRefused

from ..cluster import WorkerProcess
from ..stock import DispatcherProcess
from .connections import Client, consuming, news, task

NEWS = pb.ConsumerHeartbeatResponse


@pytest.mark.usefixtures("connections")
class TestWaiting:
    def test_the_warning_comes_soon_and_is_repeated_after_twice_the_time(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        wait_log, said = WaitLog(), []
        for at_s in [100, 104, 105, 159, 160, 219, 220]:
            caplog.clear()
            wait_log.warn(at_s, lambda: "a worker", 0.0)
            said.append("".join(caplog.messages))
        wait_log.restart()
        wait_log.warn(1000, lambda: "a worker", 0.0)
        wait_log.warn(1060, lambda: "a worker", 33.0)
        assert said == [
            "",
            "",
            "no element for 5 s: waiting for a worker",
            "",
            "no element for 60 s: waiting for a worker",
            "",
            "no element for 120 s: waiting for a worker",
        ]
        silent = "the dispatcher has not answered for 33 s"
        assert caplog.messages[1:] == [f"no element for 60 s: {silent}; waiting for a worker"]

    def test_a_consumer_logs_what_it_waits_for(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(consumers, "FIRST_S", 0.5)
        with consuming() as consumer:
            blocks = consumer.blocks(Block(0, ()))
            next(blocks)  # after a second without one
            assert caplog.messages == []
            next(blocks)
            assert "no element for 1 s: waiting for a worker" in caplog.messages[0]
            consumer.mode.update(news(1))
            Client.all[11].send(1, 5)
            while not next(blocks).count:
                pass
            caplog.clear()
            next(blocks)
            assert caplog.messages == [], "it waits anew"

    def test_the_warning_names_tasks_and_their_workers(self) -> None:
        with consuming() as consumer:
            consumer.mode.update(news(1, 2))
            silent, refusing = Client.all[11], Client.all[12]
            silent.silence, refusing.silence = (False, 7), (True, 8)
            assert consumer.mode.awaited() == (
                "task 1 of worker h:1, which sends nothing; nothing was heard of it for 7 s; "
                "task 2 of worker h:2, which refuses connections (tcp h:1); "
                "nothing was heard of it for 8 s"
            )
            consumer.mode.held_by_others(1)
            consumer.mode.update(news(1))
            assert consumer.mode.awaited() == (
                "task 2 of worker h:2, given up by the dispatcher, which refuses "
                "connections (tcp h:1); "
                "nothing was heard of it for 8 s; "
                "task 1 of worker h:1, of which other trainers have the rest, and have not used it"
            )
            consumer.mode.end((1, 0), EndOfTask())
            consumer.mode.end((2, 0), EndOfTask())
            assert consumer.mode.awaited().startswith("the end of the epoch")

    def test_the_warning_names_workers_that_are_not_eligible(self) -> None:
        with consuming() as consumer:
            assert consumer._awaits() == "no_task"
            consumer._update(news(1, 2, worker_tags=["COLOCATED"]))
            assert consumer._awaits() == "network", "they have tasks, and it may not read them"
            assert consumer.mode.awaited() == (
                "a worker to read from: with target_workers=AUTO, those that have tasks are not: "
                "h:1, h:2"
            )

    def test_the_warning_of_a_coordinated_read(self) -> None:
        with consuming(consumer_index=0, num_consumers=2) as consumer:
            assert consumer.mode.awaited().startswith("a worker: none has a task of the epoch (see")
            consumer.mode.heard(news(1, 2, starting_round=3))
            assert consumer.mode.awaited().endswith("the other consumers may not have come: task 1")
            consumer.mode.update(news(1, 2, starting_round=3))
            Client.all[11].silence = (False, 7)
            assert consumer.mode.awaited() == (
                "round 3, for which the other consumers may not have come: task 1 of worker h:1, "
                "which sends nothing; nothing was heard of it for 7 s"
            )
            consumer.mode.heard(news(1, 2, starting_round=3, lost=9))
            assert "the others' word on task 1" in consumer.mode.awaited()
            held_up = news(1, 2, starting_round=3)
            held_up.block_round = 3
            consumer.mode.heard(held_up)
            assert consumer.mode.awaited() == "the other consumers, before round 3"

    def test_a_wait_is_for_the_network_only_while_workers_live(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Heartbeats, "say_now", lambda _: None)
        with consuming() as consumer:
            consumer.mode.update(news(1, 2))
            assert consumer._awaits() == "workers"
            Client.all[11].connected = Client.all[12].connected = False
            assert consumer._awaits() == "network"
            for why, counts_as in (
                (ConnectionRefused.NEVER_CONNECTED, "network"),
                (ConnectionRefused.ONCE_CONNECTED, "no_task"),
            ):
                for uid in Client.all:
                    consumer._heartbeats.refused(uid, why)
                assert consumer._awaits() == counts_as
            consumer._heartbeats.refused(12, None)  # it listens again
            assert consumer._awaits() == "network"

    def test_a_consumer_that_takes_received_blocks_does_not_wait(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with consuming(consumer_index=0, num_consumers=2) as consumer:
            consumer.mode.heard(news(1))
            consumer.mode.update(news(1))
            Client.all[11].send(1, 5, 6)
            consumer.handle_inbox()  # which is here from now on, and not taken
            consumer._wait_log.warn(1.0, str, 0.0)
            assert next(consumer.blocks()).count
            consumer._wait_log.warn(100.0, str, 0.0)
            assert not caplog.messages


class Later:
    """The clock in 100 seconds."""

    @staticmethod
    def monotonic() -> float:
        return time.monotonic() + 100


class Recording:
    """Records requests. It answers long polls from `answers`."""

    def __init__(self) -> None:
        self.at_once: list[pb.ConsumerHeartbeatRequest] = []
        self.waited: queue.Queue[pb.ConsumerHeartbeatRequest] = queue.Queue()
        self.answers: queue.Queue[pb.ConsumerHeartbeatResponse] = queue.Queue()

    def call(self, request: Any, _: Any, **__: Any) -> Any:
        kept = pb.ConsumerHeartbeatRequest()
        kept.CopyFrom(request)
        if not request.wait_ms:
            self.at_once.append(kept)
            return NEWS()
        self.waited.put(kept)
        answer = self.answers.get(timeout=30)
        if answer is None:
            raise Unavailable("it is over")
        return answer


def named(request: pb.ConsumerHeartbeatRequest) -> tuple[list[int], list[int]]:
    return [*request.refused], [*request.never_answered]


def test_heartbeats_report_workers_that_refuse_connections(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher, heard, closed = Recording(), queue.Queue[Any](), threading.Event()
    heartbeats = Heartbeats(
        dispatcher, 1, news=NEWS(version=4, no_task="no worker can"),  # type: ignore[arg-type]
        report=lambda request: request.rounds.CopyFrom(pb.RoundReport(current=6)),
        answered=lambda _: None, hear=heard.put, closed=closed,
    )  # fmt: skip
    heartbeats.start()
    first = dispatcher.waited.get(timeout=30)
    assert first.version == 4 and named(first) == ([], [])
    assert caplog.messages == ["no worker can"], "at once"
    heartbeats.refused(8, ConnectionRefused.ONCE_CONNECTED)
    heartbeats.refused(7, ConnectionRefused.NEVER_CONNECTED)
    heartbeats.refused(9, ConnectionRefused.ONCE_CONNECTED)
    assert list(map(named, dispatcher.at_once)) == [([8], []), ([8], [7]), ([8, 9], [7])]
    assert [request.rounds.current for request in dispatcher.at_once] == [6, 6, 6]
    with monkeypatch.context() as later:
        later.setattr(clients_heartbeats, "time", Later)
        assert heartbeats.silent_s > 100
    dispatcher.answers.put(NEWS(version=5))
    again = dispatcher.waited.get(timeout=30)
    assert heartbeats.silent_s < 100
    assert again.version == 5 and named(again) == ([8, 9], [7])
    assert heard.get(timeout=30).version == 5
    for uid in (7, 8):
        heartbeats.refused(uid, None)
    dispatcher.answers.put(NEWS(version=5))
    last = dispatcher.waited.get(timeout=30)
    assert named(last) == ([9], []) and len(dispatcher.at_once) == 3
    dispatcher.answers.put(None)  # type: ignore[arg-type]
    assert isinstance(heard.get(timeout=30), Unavailable)
    heartbeats.join()
    assert not heartbeats.alive and heard.empty()


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


GRACE_MS, PATIENCE_S = 200, 1.5
"""A new dispatcher knows after three times the grace who is gone. To say goodbye takes longer than
the patience."""


def joined(target: str, dataset_id: str) -> Generator[Block, None, None]:
    """An ordered read that has joined its group."""
    how = read_options(ordered=True, consumer_index=0, num_consumers=2)
    assert how.ordered is not None
    blocks = Reader(target, dataset_id, "job", how).iterate(NOTHING)
    while how.ordered.epoch is None:
        assert next(blocks) is NOTHING
    return blocks


def test_time_without_a_dispatcher_is_not_waited_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "GROUP_S", PATIENCE_S)
    with (
        ThreadPoolExecutor(1) as pool,
        DispatcherProcess(tmp_path, reconnect_grace_ms=GRACE_MS) as dispatcher,
    ):
        dataset_id = service.register_dataset(dispatcher.target, tf.data.Dataset.range(4))
        before = joined(dispatcher.target, dataset_id)
        dispatcher.kill()
        after = pool.submit(joined, dispatcher.target, dataset_id)
        before.close()  # in vain
        dispatcher.restart()
        after.result().close()


IN_ORDER = {"ordered": True, "cycle_length": 2}


@pytest.mark.parametrize("way", [IN_ORDER, {"delivery": "at_least_once"}])
def test_others_are_asked_for_what_a_killed_worker_was_to_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: dict[str, Any]
) -> None:
    """At once, also if the trainer has many elements and takes long for each."""
    got, asked, heard, refused = list[int](), list[int](), threading.Event(), Slices.refused

    def record(slices: Slices, worker_uid: int) -> None:
        asked.append(len(got))
        refused(slices, worker_uid)

    monkeypatch.setattr(Slices, "refused", record)
    monkeypatch.setattr(Heartbeats, "refused", lambda *_: heard.set())  # and not the dispatcher
    with (
        DispatcherProcess(tmp_path) as dispatcher,
        WorkerProcess(dispatcher.address) as killed,
        WorkerProcess(dispatcher.address),
    ):
        service.wait_for_workers(dispatcher.target, 2)
        dataset = tf.data.Dataset.range(40).map(lambda x: tf.fill([100_000], x))
        dataset_id = service.register_dataset(dispatcher.target, dataset)
        how: Any = {"shuffle": False, "bundle_splits": 1, **way}
        with service.read(dispatcher.target, dataset_id, **how) as elements:
            got.append(int(next(elements)[0]))
            time.sleep(1)  # more elements come than the trainer takes
            heard.clear()
            killed.kill()
            assert heard.wait(60)
            got.extend(int(element[0]) for element in elements)
        assert asked[0] < 8
        assert (got if way is IN_ORDER else sorted(got)) == [*range(40)]
