"""The transport under other policies than *any*: it carries whatever they give."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from forebay.service.block_limits import cost
from forebay.service.blocks import Block
from forebay.service.delivery import (
    ANY,
    BundleRun,
    BundlesOutput,
    Cached,
    CachedOutput,
    End,
    EndOfSlice,
    EndOfTask,
    FirstComeOutput,
    OutputCancelled,
    ReadRequest,
    Rounds,
    RoundsOutput,
    Slice,
    Subscription,
    Superseded,
    TaskFailed,
    TaskOutput,
)
from forebay.service.errors import ProtocolError
from forebay.service.proto import transfer_pb2 as pb
from forebay.service.transport import BlockServer, local_worker, messages
from forebay.service.transport.sending import Connection, Ended, Sent
from forebay.service.transport.sessions import MAX_BUFFERS, Sessions

from ..delivery.contract import Ledger, block, numbers
from ..standbys import wait_until
from .peers import (
    TIMEOUT_S,
    UID,
    WELCOME,
    Consumer,
    Damage,
    MeddlingProxy,
    Saying,
    ScriptedWorker,
    only,
    waiting_sender,
)

TASK = 5
LENGTH = 40


class World:
    """A worker with a task."""

    def __init__(self, output: TaskOutput) -> None:
        self.sessions = Sessions(linger_s=10)
        self.sessions.add_task(TASK, output)

    def connect(
        self, consumer_id: int, *requests: ReadRequest, credit: int = 1 << 34
    ) -> Connection:
        connection = self.sessions.attach(consumer_id, lambda: None)
        for number, request in enumerate(requests, 1):
            self.sessions.read(connection, TASK, 0, request, number)
        self.sessions.give_credit(connection, credit, ())
        return connection

    def sent(self, connection: Connection) -> list[Sent | Ended]:
        self.sessions.read(connection, -1, 0)  # answered at once, so that next_batch never waits
        batch = self.sessions.next_batch(connection) or ()
        return [out for out in batch if isinstance(out, Sent | Ended) and out.task_id == TASK]

    def received(self, connection: Connection, subscription: int, blocks: int) -> None:
        position = pb.Position(task_id=TASK, received=blocks, subscription=subscription)
        self.sessions.give_credit(connection, 0, [position])


def story(sent: list[Sent | Ended]) -> list[tuple[int, object]]:
    """(subscription, its elements or its end) of each."""
    return [
        (out.subscription, numbers(out.block) if isinstance(out, Sent) else out.end) for out in sent
    ]


def produce(output: BundlesOutput, run: BundleRun | None = None) -> None:
    """A bundle of LENGTH elements, from where the run begins, in blocks to the next ten."""
    run = run or output.next_run(100, 0)
    assert run is not None
    while run.stop < LENGTH:
        run.put(block(run.stop, 10 - run.stop % 10, run.number))
    run.finish()


def bundles(*numbers: int, ledger: Ledger | None = None) -> BundlesOutput:
    """Has run these bundles; they are kept for the sake of a second reader."""
    output = BundlesOutput(1 << 30, ledger)
    for number in numbers:
        opened = output.open(Slice(number, runs=(0, LENGTH), until=LENGTH, readers=2))
        assert isinstance(opened, Subscription)
        produce(output)
        opened.close()
    return output


def whole(bundle: int, first: int = 0, **options: Any) -> Slice:
    options = {"until": LENGTH, "keep": first, "readers": 2} | options
    return Slice(bundle, runs=(first, LENGTH - first), **options)


def every(bundle: int, step: int, first: int = 0) -> Slice:
    """Elements `first`, `first + step`, …"""
    runs = tuple(n for i in range(first, LENGTH, step) for n in (i, 1))
    return Slice(bundle, runs=runs, until=LENGTH, readers=2)


def end(bundle: int) -> EndOfSlice:
    return EndOfSlice(bundle, LENGTH, True)


# -- sessions ----------------------------------------------------------------------------------


def test_an_end_is_repeated_until_the_consumer_has_received_it() -> None:
    """A consumer that lacks only the end gets it without another run of the bundle."""
    output = bundles(1)
    world = World(output)
    connection = world.connect(1, whole(1))
    assert story(world.sent(connection))[-1] == (1, end(1))
    world.received(connection, 1, 4)
    world.sessions.detach(connection, now=0)
    output.open(Slice(8, floor=9, readers=1))  # so that nothing is left of the bundle
    assert 1 not in output._bundles
    connection = world.sessions.attach(1, lambda: None)
    world.sessions.read(connection, TASK, 4, Slice(1, until=LENGTH, readers=2), 1)
    assert story(world.sent(connection)) == [(1, end(1))]
    world.sessions.detach(connection, now=0)
    connection = world.connect(1)
    assert not connection.session.buffers, "it has been heard"


@pytest.mark.parametrize("late", ["block", "end", "answer"])
def test_a_waiting_consumer_is_told_when_elements_appear(late: str) -> None:
    output = BundlesOutput()
    world = World(output)
    connection = world.connect(1, Slice(1) if late == "answer" else whole(1, 35, readers=1))
    run = output.next_run(1, 0)
    assert run is not None
    with waiting_sender(world.sessions, connection) as waiting:
        if late == "end":
            run.fail("DATA_LOSS", "torn")
        else:
            run.put(block(run.start, 5, 1))
        batch = waiting.result(TIMEOUT_S)
    assert batch
    out = batch[0]
    if late == "block":
        assert isinstance(out, Sent) and numbers(out.block) == [*range(35, 40)]
    else:
        answer = EndOfSlice(1, 5, False)
        assert out == Ended(
            TASK, answer if late == "answer" else TaskFailed("DATA_LOSS", "torn"), 1
        )


def test_a_waiting_consumer_is_told_that_another_one_took_its_place() -> None:
    world = World(RoundsOutput(2))
    older = world.connect(1, Rounds(0, 2))
    with waiting_sender(world.sessions, older) as waiting:
        world.connect(2, Rounds(0, 2))
        assert waiting.result(TIMEOUT_S) == [Ended(TASK, Superseded(), 1)]


def test_each_subscription_is_resumed_where_it_was() -> None:
    requests = every(1, 5, 1), whole(2)
    world = World(bundles(1, 2))
    first = world.connect(1, *requests, credit=1)
    assert story(world.sent(first)) == [(1, [1, 6])]
    world.sessions.detach(first, now=0)
    again = world.connect(1, *requests)
    assert story(world.sent(again))[:3] == [(1, [1, 6]), (2, [*range(10)]), (1, [11, 16])]


def test_a_forgotten_consumer_asks_again_for_the_elements_that_it_lacks() -> None:
    """Blocks on their way to a forgotten consumer are lost; slices of bundles are made again."""
    output = bundles(1)
    world = World(output)
    request: ReadRequest = every(1, 3)
    connection = world.connect(1, request, credit=1)
    (sent,) = world.sent(connection)
    assert isinstance(sent, Sent)
    request = request.after(sent.block)
    world.sessions.detach(connection, now=0)
    world.sessions.expire(now=11)
    output.open(Slice(8, floor=9, readers=1))  # so that nothing is left of the bundle
    connection = world.sessions.attach(1, lambda: None)
    world.sessions.read(connection, TASK, 1, request, 1)
    world.sessions.give_credit(connection, 1 << 30, ())
    assert not world.sent(connection)
    run = output.next_run(1, 0)
    while run is not None and run.number != 1:
        run = output.next_run(9, 0)
    assert run is not None
    produce(output, run)
    batch = [out for out in world.sent(connection) if isinstance(out, Sent)]
    assert [out.number for out in batch] == [2, 3, 4]
    assert [n for out in batch for n in numbers(out.block)] == [*range(12, LENGTH, 3)]


def test_a_consumer_has_a_bounded_number_of_subscriptions() -> None:
    world = World(bundles())
    connection = world.connect(1)
    slices = [Slice(number) for number in range(MAX_BUFFERS + 1)]
    with pytest.raises(ProtocolError, match="10000 tasks and bundles are read already"):
        for number in range(1, MAX_BUFFERS + 2):
            world.sessions.read(connection, TASK, 0, slices[number - 1], number)
    connection = world.connect(1, *slices[:-1])
    assert len(connection.session.buffers) == MAX_BUFFERS, "all are resumed"


def test_a_refused_read_leaves_no_subscription() -> None:
    output = bundles(1)
    world = World(output)
    connection = world.connect(1)
    with pytest.raises(ProtocolError, match="nobody can have received"):
        world.sessions.read(connection, TASK, 1 << 63, every(1, 2, 1), 1)
    assert TASK not in world.sessions.read_tasks()
    assert not any(run.slices for run in output._bundles[1].runs)


@pytest.mark.parametrize("protocol", ["tcp", "unix", "local"])
def test_skipped_elements_are_reported_over_any_connection(
    server: BlockServer, closing: ExitStack, protocol: str
) -> None:
    output = CachedOutput(2 * cost(block(0, 5)))
    server.sessions.add_task(TASK, output)
    slow, fast = (output.open(Cached(name)) for name in ("slow", "fast"))
    assert isinstance(slow, Subscription) and isinstance(fast, Subscription)
    for first in range(0, 25, 5):
        output.put(block(first, 5))
        assert isinstance(fast.next(True), tuple)
        if not first:
            assert isinstance(slow.next(True, 3), tuple)
    output.finish()
    local = local_worker(UID) if protocol == "local" else None
    consumer = Consumer(only(server, protocol), local=local, closing=closing)
    consumer.client.read(TASK, Cached("slow"))
    got = [consumer.take_numbered()[2] for _ in range(3)]
    assert got[2] == EndOfTask()
    assert [(numbers(b), b.skipped) for b in got if isinstance(b, Block)] == [
        ([*range(15, 20)], 12), ([*range(20, 25)], 0),
    ]  # fmt: skip


class _Returning(FirstComeOutput):
    """What a consumer leaves behind goes to the others: at least once."""

    def open(self, request: ReadRequest, *, notify: bool = True) -> Subscription:
        output = self

        class Returns(Subscription):
            def next_locked(
                self, credit: bool, max_elements: int | None
            ) -> tuple[Block, int] | None:
                return output._blocks.popleft() if credit and output._blocks else None

            def received(self, blocks: Sequence[Block]) -> None: ...

            def close(self, lacking: Sequence[Block] = ()) -> None:
                with output.changed:
                    output._blocks.extend((block, 0) for block in lacking)

        return Returns(self)


@pytest.mark.parametrize("how", ["stop", "goodbye", "expire", "gone", "not resumed"])
def test_waiting_consumers_get_what_another_one_leaves(how: str) -> None:
    output = _Returning()
    world = World(output)
    leaves = world.connect(1, ANY)
    output.put(block(0, 3))
    assert story(world.sent(leaves)) == [(1, [0, 1, 2])]
    stays = world.connect(2, ANY)
    with waiting_sender(world.sessions, stays) as waiting:
        match how:
            case "stop":
                world.sessions.stop_reading(leaves, TASK, 1)
            case "goodbye":
                world.sessions.detach(leaves)
            case "expire":
                world.sessions.detach(leaves, now=0)
                world.sessions.expire(now=11)
            case "gone":
                world.sessions.detach(leaves, now=0)
                world.sessions.forget_gone([1])
            case "not resumed":
                world.connect(1)
        batch = waiting.result(TIMEOUT_S) or []
    assert [numbers(sent.block) for sent in batch if isinstance(sent, Sent)] == [[0, 1, 2]]


# -- real connections --------------------------------------------------------------------------


Elements = dict[int, list[int]]  # by their subscription


def read_to_the_end(
    consumer: Consumer, ends: int, of: int = TASK
) -> tuple[Elements, dict[int, End]]:
    """What each of so many subscriptions gives, and how it ends."""
    got: Elements = {}
    ended: dict[int, End] = {}
    while len(ended) < ends:
        task_id, number, item = consumer.take_numbered()
        assert task_id == of and number not in ended
        if isinstance(item, Block):
            got.setdefault(number, []).extend(numbers(item))
        else:
            ended[number] = item
    return got, ended


@pytest.mark.parametrize("protocol", ["tcp", "unix", "local"])
def test_trainers_read_bundles_together(
    server: BlockServer, closing: ExitStack, protocol: str
) -> None:
    output = BundlesOutput(1 << 20)
    server.sessions.add_task(TASK, output)
    consumers = []
    for i in range(3):
        local = local_worker(UID) if protocol == "local" else None
        consumer = Consumer(only(server, protocol), i + 1, local=local, closing=closing)
        for bundle in (1, 2):
            request = every(bundle, 3, i)
            consumer.client.read(TASK, replace(request, reader=i, readers=3), bundle)
        consumers.append(consumer)
    for _ in range(2):
        run = output.next_run(2, TIMEOUT_S)
        produce(output, run)
    for i, consumer in enumerate(consumers):
        got, ends = read_to_the_end(consumer, 2)
        assert got == {1: [*range(i, LENGTH, 3)], 2: [*range(i, LENGTH, 3)]}
        for bundle in (1, 2):  # whether it has more is not known yet
            assert ends[bundle] in (EndOfSlice(bundle, LENGTH, False), end(bundle))
        last = Slice(1, known=1 << 20, keep=LENGTH, floor=9, reader=i, readers=3)
        consumer.client.read(TASK, last, 3)
        assert consumer.take_numbered() == (TASK, 3, end(1))
    wait_until(lambda: not (output._bundles or output.held_bytes or server.sessions.read_tasks()))


@pytest.mark.parametrize("to_worker", [False, True])
@pytest.mark.parametrize("forgetful", [False, True])
def test_connections_that_are_cut(
    server: BlockServer, closing: ExitStack, forgetful: bool, to_worker: bool
) -> None:
    """Nothing twice, nothing missing, whatever is on its way then, and even if the worker has
    forgotten its consumer, and the blocks, when it comes again.
    """
    tasks: list[BundlesOutput] = []
    if forgetful:
        done = threading.Event()

        def forget() -> None:
            while not done.wait(0.0005):
                server.sessions.expire(float("inf"))
                for output in tasks[-1:]:
                    with contextlib.suppress(OutputCancelled):
                        if (run := output.next_run(9, 0)) is not None:
                            produce(output, run)

        forgetting = threading.Thread(target=forget, name="test-forgetting")
        forgetting.start()
        closing.callback(forgetting.join)
        closing.callback(done.set)
    damages: list[Damage] = []
    proxy = MeddlingProxy(server.port, lambda: damages.pop() if damages else None)
    closing.callback(proxy.close)
    places = range(20, 300, 10) if to_worker else range(30, 3000, 110)
    for task_id, at in enumerate(places, 100):
        output = bundles(1, 2)
        if forgetful:  # what has been given is dropped, too, and made again
            output._max_bytes = output._look_above = 0
            output.open(Slice(1, keep=LENGTH, reader=1, readers=2))
            output.open(Slice(2, keep=LENGTH, reader=1, readers=2))
        tasks.append(output)
        server.sessions.add_task(task_id, output)
        damages[:] = [Damage(to_worker, where, cut=True) for where in (at, at // 2 + 15)]
        consumer = Consumer(proxy.addresses, task_id, start=False)
        for bundle in (1, 2):
            consumer.client.read(task_id, every(bundle, 2, bundle % 2), bundle)
        consumer.client.start()
        try:
            got, ends = read_to_the_end(consumer, 2, task_id)
        finally:
            consumer.client.close()
        assert ends == {1: end(1), 2: end(2)}
        assert got == {1: [*range(1, LENGTH, 2)], 2: [*range(0, LENGTH, 2)]}, at
        if not forgetful:
            assert output.next_run(9, 0) is None, "nothing was made again"
    assert proxy.damaged > len(places) // 2


@pytest.mark.parametrize("wrong", [block(3, 1, 1), block(0, 1, 2), block(0, 1)])
def test_a_worker_that_sends_elements_nobody_asked_for_is_refused(
    closing: ExitStack, caplog: pytest.LogCaptureFixture, wrong: Block
) -> None:
    worker = ScriptedWorker()
    closing.callback(worker.close)
    frame = b"".join(messages.encode_block(TASK, 1, wrong)[0])
    worker.follow([WELCOME, Saying(frame)])
    consumer = Consumer(worker.addresses, reads=TASK, request=whole(1), closing=closing)
    assert "it has been enough" in str(consumer.get())
    assert "where those from (0,) on of bundle 1 come next" in caplog.text
