"""Iterations: how they begin, how far a trainer has come, who closes them, and when all is read."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay import service
from forebay.service.blocks import Block, Component
from forebay.service.client import links, reader, tf_elements
from forebay.service.client.batches import Layout, laid_out
from forebay.service.client.block_sources import BlockSource
from forebay.service.client.consumer import Consumer
from forebay.service.client.deferred_closer import deferred_closer
from forebay.service.client.links import Links
from forebay.service.client.open_iterations import Taker, close_between_steps
from forebay.service.client.options import ShardingPolicy, TargetWorkers, read_options
from forebay.service.client.progress import Blocks, EpochIterator, Progress
from forebay.service.client.reader import Reader
from forebay.service.client.tf_elements import NOTHING, dataset_of_blocks, under_way
from forebay.service.delivery import EndOfTask
from forebay.service.errors import InvalidArgument
from forebay.service.pipelines.tf_data.transformations import mapped, traced
from forebay.service.proto import forebay_pb2 as pb

from ..stock import DispatcherProcess
from .connections import Client, Dispatcher, consuming, news, task


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_end_with_workers_of_other_trainers(connections: None, dynamic: bool) -> None:
    """If all share splits, our workers may get what others lost."""
    others = task(2, worker_tags=["colocated"])
    policy = ShardingPolicy.DYNAMIC if dynamic else ShardingPolicy.OFF
    with consuming(targets=TargetWorkers.AUTO, policy=policy) as consumer:
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
        one = reader.Reader("a:1", "dataset", None, options)
        one.definition()
        joined = pb.JoinIterationResponse(consumer_id=1)
        consumer = Consumer(Dispatcher(), joined, credit_bytes=1, options=one.options)  # type: ignore[arg-type]
        found = {number for number, each in enumerate(tasks) if consumer.mode._is_for_us(each)}  # type: ignore[attr-defined]
        consumer.close()
        is_static = policy not in (ShardingPolicy.OFF, ShardingPolicy.DYNAMIC)
        assert found == (static if is_static else not_static), policy


TIMEOUT_S = 60


@pytest.fixture
def consumer(connections: None) -> Iterator[Consumer]:
    with consuming() as made:
        yield made


def in_thread(call: Any) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_a_link_opened_during_leave_is_closed(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it stayed open, it would take blocks that nobody reads."""
    real, barrier = Links._connected, threading.Barrier(2, timeout=TIMEOUT_S)
    left = threading.Event()
    blocks: list[Any] = []

    def open_slowly(self: Links, task: pb.TaskInfo) -> Any:
        barrier.wait()
        left.wait(0.2)  # who leaves waits for us, or has been and gone
        return real(self, task)

    monkeypatch.setattr(Links, "_connected", open_slowly)
    consumer._hear(news(1))
    reader = in_thread(lambda: blocks.extend(consumer.blocks()))
    barrier.wait()
    consumer.leave()
    left.set()
    reader.join(TIMEOUT_S)
    assert not reader.is_alive() and not blocks
    assert all(client.closed for client in Client.all.values())


def test_close_during_the_removal_of_a_worker(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer.mode.update(news(1, 2))
    consumer.mode.end((1, 0), EndOfTask())
    close = Client.close

    def close_all(self: Client, *arguments: Any) -> bool:
        monkeypatch.setattr(Client, "close", close)
        in_thread(consumer.close).join(TIMEOUT_S)
        return close(self, *arguments)

    monkeypatch.setattr(Client, "close", close_all)
    consumer.mode.update(news(2))
    assert all(client.closed for client in Client.all.values())


def test_a_second_close_waits_for_the_first(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer.mode.update(news(1))
    closing, go_on = threading.Event(), threading.Event()
    close = Client.close

    def close_slowly(self: Client, *arguments: Any) -> bool:
        closing.set()
        assert go_on.wait(TIMEOUT_S)
        return close(self, *arguments)

    monkeypatch.setattr(Client, "close", close_slowly)
    first = in_thread(consumer.close)
    assert closing.wait(TIMEOUT_S)
    second = in_thread(consumer.close)
    second.join(0.2)
    assert second.is_alive()
    go_on.set()
    first.join(TIMEOUT_S)
    second.join(TIMEOUT_S)
    assert Client.all[11].closed and not second.is_alive()


def test_only_a_taker_in_use_by_another_thread_may_refuse_close(consumer: Consumer) -> None:
    class Taker:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def close(self) -> None:
            raise self.error

    consumer.taker = Taker(InvalidArgument("a bug"))  # type: ignore[assignment]
    with pytest.raises(InvalidArgument):
        close_between_steps(consumer)
    consumer.taker = Taker(ValueError("generator already executing"))  # type: ignore[assignment]
    close_between_steps(consumer)
    assert consumer._closed.is_set()


DYNAMIC = service.ShardingPolicy.DYNAMIC
count = tf.data.Dataset.range
EPOCH = [0, 1, 2]
OVER = "is over, so this iteration has no elements"


def by_id(target: str, name: str, initial_epoch: int) -> Any:
    dataset_id = service.register_dataset(target, count(3))
    return service.from_dataset_id(
        DYNAMIC, target, dataset_id, job_name=name, initial_epoch=initial_epoch
    )


def distributed(target: str, name: str, initial_epoch: int) -> Any:
    read = service.distribute(DYNAMIC, target, name, initial_epoch=initial_epoch)
    return count(3).apply(read)


def behind_others(target: str, name: str, initial_epoch: int) -> Any:
    return by_id(target, name, initial_epoch).map(lambda i: i).prefetch(2)


class InNumPy:
    def __init__(self, target: str, name: str, initial_epoch: int) -> None:
        self._target, self._name, self._epoch = target, name, initial_epoch
        self._dataset_id = service.register_dataset(target, count(3))

    def __iter__(self) -> Iterator[Any]:
        self._epoch += 1
        return service.read(
            self._target, self._dataset_id, processing_mode=DYNAMIC, job_name=self._name,
            initial_epoch=self._epoch - 1,
        )  # fmt: skip


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("make", [by_id, distributed, behind_others, InNumPy])
def test_a_finished_epoch_without_initial_epoch_is_warned_of(
    dispatcher: DispatcherProcess, make: Callable[[str, str, int], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def elements(dataset: Any) -> list[int]:
        return sorted(int(e) for e in dataset)

    def warnings() -> list[str]:
        return [said for said in caplog.messages if OVER in said]

    name = make.__name__
    first = make(dispatcher.target, name, 0)
    early = make(dispatcher.target, name, 0)  # which is iterated over when the epoch is over
    assert [elements(first), elements(first)] == [EPOCH, EPOCH]
    assert not warnings()
    assert elements(early) == []
    (said,) = warnings()
    assert f"epoch 0 of the job {name!r} {OVER}" in said and "initial_epoch=" in said
    dispatcher.kill_and_restart()
    caplog.clear()
    again = make(dispatcher.target, name, 0)
    assert [elements(again), elements(again)] == [[], []]
    said = warnings()[0]
    assert "initial_epoch=2" in said and "another job_name" in said
    assert make is InNumPy or len(warnings()) == 1
    caplog.clear()
    assert elements(again) == elements(make(dispatcher.target, name, 3)) == EPOCH
    assert elements(make(dispatcher.target, f"another than {name}", 0)) == EPOCH
    assert not warnings()


@pytest.mark.usefixtures("worker")
def test_later_epochs_that_are_empty_are_not_warned_of(
    dispatcher: DispatcherProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """Other trainers may have had all of a short one."""
    slow, fast = (by_id(dispatcher.target, "of two", 0) for _ in range(2))
    assert sorted(int(e) for e in slow) == EPOCH
    assert [sorted(int(e) for e in fast) for _ in range(3)] == [[], EPOCH, EPOCH]
    caplog.clear()
    assert [sorted(int(e) for e in slow) for _ in range(3)] == [[], [], EPOCH]
    assert not caplog.messages


ONE_DEVICE = "experimental_ints_on_device"


class Pairs:
    """Blocks of two elements each. `close` adds this to the list `closed`."""

    def __init__(self, closed: list[Pairs], *values: list[Any]) -> None:
        self._closed = closed
        self._blocks = iter([Block(2, (Component(np.array(own)),)) for own in values])

    def __iter__(self) -> Iterator[Block]:
        return self._blocks

    def close(self) -> None:
        self._closed.append(self)


def test_datasets_of_different_specs_share_traces_and_leave_nothing_behind() -> None:
    """The functions that begin and end iterations are traced once for all datasets."""
    closed: list[Pairs] = []

    def blocks(*values: list[Any]) -> Callable[[], Pairs]:
        return lambda: Pairs(closed, *values)

    numbers = dataset_of_blocks(blocks([1, 2], [3, 4]), tf.TensorSpec([], tf.int64))
    floats = dataset_of_blocks(blocks([0.5, 1.5]), tf.TensorSpec([], tf.float64))
    wrong = dataset_of_blocks(blocks([0.5, 1.5], [1, 2]), tf.TensorSpec([], tf.int64))
    before = set(under_way)
    pairs = zip(numbers, floats, strict=False)
    assert [(int(n), float(f)) for n, f in pairs] == [(1, 0.5), (2, 1.5)]
    failing = iter(wrong)
    for _ in range(2):  # it goes on failing, or its end would be taken for an epoch's
        with pytest.raises(tf.errors.InvalidArgumentError, match="float64"):
            next(failing)
    del failing
    assert list(numbers.as_numpy_iterator()) == [1, 2, 3, 4]
    del pairs
    gc.collect()
    deferred_closer.wait()
    assert len(closed) == 4
    assert set(under_way) == before


def test_a_graph_keeps_what_its_dataset_calls() -> None:
    """One of TensorFlow 1's, in which nothing is traced for others."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        dataset = dataset_of_blocks(lambda: Pairs([], [7, 8]), tf.TensorSpec([], tf.int64))
        iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
        number = iterator.get_next()
        gc.collect()
        session.run(iterator.initializer)
        assert [session.run(number), session.run(number)] == [7, 8]


def test_an_iteration_can_be_dropped_before_a_dispatcher_answers() -> None:
    """TensorFlow can, while it waits for nothing of Python's."""
    iteration = Reader("127.0.0.1:1", "dataset", None).iterate(NOTHING)
    assert [next(iteration), next(iteration)] == [NOTHING, NOTHING]
    iteration.close()


def test_a_function_that_returns_int32_passes_tf_datas_optimizer() -> None:
    """With the attribute, tf.data would take the function for a whole dataset. Our workaround
    can go once TensorFlow mends that."""
    numbers = tf.data.Dataset.range(3, output_type=tf.int32)
    made = traced(lambda n: (n, 2 * n), numbers.element_spec)
    assert ONE_DEVICE not in made.function.function_def.attr
    pairs = mapped(numbers, lambda n: (n, 2 * n))
    assert list(pairs.as_numpy_iterator()) == [(0, 0), (1, 2), (2, 4)]


LAYOUT = Layout('{"tensor": "int64", "shape": []}')


class Epoch:
    """Three blocks of four elements, and how many of the last one were left."""

    left: int | None = None

    def iterate(self, taker: Taker) -> Blocks:
        try:
            for first in range(0, 12, 4):
                yield Block(4, (Component(np.arange(first, first + 4)),))
        finally:
            self.left = taker.left()

    def taking(self, batch_size: int | None) -> EpochIterator:
        def give(blocks: Blocks, progress: Progress) -> Iterator[Any]:
            return laid_out(blocks, progress, layout=LAYOUT, batch_size=batch_size)

        return EpochIterator(self.iterate, give)


@pytest.mark.parametrize(
    ("size", "lefts"),
    [
        (None, [3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0]),
        (1, [3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0]),
        (3, [1, 2, 3, 0]),
        (5, [3, 2, 0]),
        (8, [0, 0]),
        (100, [0]),
    ],
)
@pytest.mark.parametrize("how", ["leave", "close", "drop"])
def test_elements_left_of_a_block(size: int | None, lefts: list[int], how: str) -> None:
    gc.disable()
    try:
        for taken, left in enumerate(lefts, 1):
            epoch = Epoch()
            taking = epoch.taking(size)
            given = [next(taking) for _ in range(taken)]
            assert np.hstack(given).tolist() == [*range(min(taken * (size or 1), 12))]
            if how == "leave":
                taking.leave()
                assert epoch.left is None or taken == len(lefts)
                assert list(taking) == []
            elif how == "close":
                taking.close()
                assert list(taking) == []
            else:
                del taking
                deferred_closer.wait()
            assert epoch.left == left
    finally:
        gc.enable()


def test_a_collected_iterator_is_left_in_another_thread_whatever_lock_is_held() -> None:
    """Garbage is collected anywhere, also in a lock that leaving needs."""
    lock, left_by = threading.Lock(), queue.SimpleQueue[str]()

    def iterate(_: Taker) -> Blocks:
        try:
            yield Block(4, (Component(np.arange(4)),))
        finally:
            with lock:
                left_by.put(threading.current_thread().name)

    for _ in range(3):
        taking = EpochIterator(iterate, partial(laid_out, layout=LAYOUT, batch_size=None))
        assert next(taking) == 0
        cycle: list[Any] = [taking]
        cycle.append(cycle)
        with lock:
            del taking, cycle
            gc.collect()
        assert left_by.get(timeout=60) == "forebay-leaving"


@pytest.mark.parametrize("size", [None, 5])
def test_threads_that_share_an_iterator_take_turns(size: int | None) -> None:
    """Without turns they crash the process, within itertools.chain."""

    def iterate(_: Taker) -> Blocks:
        for first in range(0, 400, 4):
            time.sleep(1e-4)  # another thread runs
            yield Block(4, (Component(np.arange(first, first + 4)),))

    taking = EpochIterator(iterate, partial(laid_out, layout=LAYOUT, batch_size=size))
    with ThreadPoolExecutor(4) as threads:
        taken = [*threads.map(lambda _: np.hstack([*taking, []]), range(4))]
    assert sorted(np.hstack(taken)) == [*range(400)]
