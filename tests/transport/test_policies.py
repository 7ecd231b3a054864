"""The transport under other policies than *any*: it carries whatever they give."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from forebay.service.block_limits import cost
from forebay.service.blocks import Block
from forebay.service.delivery import (
    ANY,
    Addressed,
    AddressedOutput,
    AnyOutput,
    BundleForgotten,
    BundleRun,
    Cached,
    CachedOutput,
    End,
    EndOfBundle,
    EndOfTask,
    Order,
    Subscription,
    Superseded,
    TaskFailed,
    TaskOutput,
    TaskUnknown,
)
from forebay.service.errors import ProtocolError
from forebay.service.proto import transfer_pb2 as pb
from forebay.service.transport import BlockServer, local_worker, messages
from forebay.service.transport.sending import Connection, Ended, Sent
from forebay.service.transport.sessions import MAX_BUFFERS, Sessions

from ..delivery.contract import Ledger, block, numbers
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
)

TASK = 5
LENGTH = 40


class World:
    """A worker with a task."""

    def __init__(self, output: TaskOutput) -> None:
        self.sessions = Sessions(linger_s=10)
        self.sessions.add_task(TASK, output)

    def connect(self, consumer_id: int, *orders: Order, credit: int = 1 << 34) -> Connection:
        connection = self.sessions.attach(consumer_id, lambda: None)
        for number, order in enumerate(orders, 1):
            self.sessions.read(connection, TASK, 0, order, number)
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


def produce(run: BundleRun) -> None:
    """A bundle of LENGTH elements, from where the run begins, in blocks to the next ten."""
    first = run.index
    while first < LENGTH:
        stop = first - first % 10 + 10
        run.put(block(first, stop - first, run.bundle))
        first = stop
    run.finish(LENGTH)


def bundles(*orders: Addressed, ledger: Ledger | None = None) -> AddressedOutput:
    """Each order's bundle, run for all who read together."""
    output = AddressedOutput(1 << 30, ledger)
    for order in orders:
        produce(output.begin(order.together()))
    return output


# -- sessions ----------------------------------------------------------------------------------


def test_several_bundles_at_a_time() -> None:
    world = World(bundles(Addressed(1, 0, 20), Addressed(2, 35)))
    connection = world.connect(1, Addressed(1, 0, 20), Addressed(2, 35), Addressed(3))
    assert story(world.sent(connection)) == [
        (1, [0]), (2, [35, 36, 37, 38, 39]),
        (1, [20]), (2, EndOfBundle(2, LENGTH)),
        (1, EndOfBundle(1, LENGTH)),
    ]  # fmt: skip
    assert world.sessions.wait_until_received(0) == {TASK: 7}
    world.received(connection, 1, 2)
    world.received(connection, 2, 1)
    assert not world.sessions.wait_until_received(0)
    for number in (1, 2, 3):
        assert world.sessions.is_read(TASK)
        world.sessions.stop_reading(connection, TASK, number)
    assert not world.sessions.is_read(TASK)


def test_an_end_is_told_until_it_is_heard() -> None:
    """Who lacks nothing but the end does not need the bundle to be run again for that."""
    output = bundles(Addressed(1))
    world = World(output)
    connection = world.connect(1, Addressed(1))
    assert story(world.sent(connection))[-1] == (1, EndOfBundle(1, LENGTH))
    world.received(connection, 1, 4)
    world.sessions.detach(connection, now=0)
    connection = world.sessions.attach(1, lambda: None)
    world.sessions.read(connection, TASK, 4, Addressed(1, LENGTH), 1)
    assert story(world.sent(connection)) == [(1, EndOfBundle(1, LENGTH))]
    world.sessions.detach(connection, now=0)
    world.connect(1)
    assert not output._runs, "it has been heard"


def test_who_waits_is_told_of_a_newer_generation() -> None:
    world = World(AddressedOutput())
    older = world.connect(1, Addressed(1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(world.sessions.next_batch, older)
        while older not in world.sessions._idle:
            threading.Event().wait(0.001)
        world.connect(2, Addressed(1, generation=1))
        try:
            assert waiting.result(TIMEOUT_S) == [Ended(TASK, Superseded(1), 1)]
        finally:
            world.sessions.forget_all()


def test_each_is_resumed_where_it_was() -> None:
    orders = Addressed(1, 1, 5), Addressed(2, 0)
    world = World(bundles(Addressed(1, 0, 5), Addressed(2)))
    first = world.connect(1, *orders, credit=1)
    assert story(world.sent(first)) == [(1, [1, 6])]
    world.sessions.detach(first, now=0)
    again = world.connect(1, *orders)
    assert story(world.sent(again))[:3] == [(1, [1, 6]), (2, [*range(10)]), (1, [11, 16])]


def test_who_was_forgotten_goes_on_by_the_address() -> None:
    """Of blocks that are anybody's, what was on its way is lost then; of a bundle, nothing."""
    output = bundles(Addressed(1, 0, 3))
    world = World(output)
    order = Addressed(1, 0, 3)
    connection = world.connect(1, order, credit=1)
    (sent,) = world.sent(connection)
    assert isinstance(sent, Sent)
    order = order.after(sent.block)
    world.sessions.detach(connection, now=0)
    world.sessions.expire(now=11)
    connection = world.sessions.attach(1, lambda: None)
    world.sessions.read(connection, TASK, 1, order, 1)
    assert story(world.sent(connection)) == [(1, BundleForgotten(1, 12))]
    produce(output.begin([order]))
    world.sessions.read(connection, TASK, 1, order, 2)
    world.sessions.give_credit(connection, 1 << 30, ())
    batch = [out for out in world.sent(connection) if isinstance(out, Sent)]
    assert [out.number for out in batch] == [2, 3, 4]
    assert [n for out in batch for n in numbers(out.block)] == [*range(12, LENGTH, 3)]


def test_what_is_forgotten_or_of_another_policy_is_said() -> None:
    output = bundles(Addressed(1, generation=1))
    world = World(output)
    assert world.sent(world.connect(1, Addressed(1, generation=1)))
    connection = world.connect(2, Addressed(1, 3, generation=1), Addressed(1), ANY)
    gone, superseded, refused = world.sent(connection)
    assert gone == Ended(TASK, BundleForgotten(1, 3), 1)
    assert superseded == Ended(TASK, Superseded(1), 2)
    assert isinstance(refused, Ended) and isinstance(refused.end, TaskFailed)


def test_the_ledger_hears_of_all() -> None:
    ledger = Ledger()
    for output in (bundles(Addressed(1), ledger=ledger), AnyOutput(1 << 30, ledger)):
        ledger.acknowledged_parts.clear()
        ledger.dropped_parts.clear()
        order: Order = Addressed(1)
        if isinstance(output, AnyOutput):
            order = ANY
            for first in range(0, LENGTH, 10):
                output.put(block(first, 10))
        output.finish()
        world = World(output)
        connection = world.connect(1, order)
        assert world.sent(connection)
        assert ledger.total == 0
        world.received(connection, 1, 3)
        assert [part.count for part in ledger.acknowledged_parts] == [30]
        world.sessions.detach(connection, now=0)
        assert not ledger.dropped_parts, "it may come again"
        world.sessions.expire(now=11)
        assert [part.count for part in ledger.dropped_parts] == [10]


def test_a_consumer_has_a_bounded_number_of_subscriptions() -> None:
    world = World(bundles())
    connection = world.connect(1)
    with pytest.raises(ProtocolError, match="10000 tasks and bundles are read already"):
        for number in range(1, MAX_BUFFERS + 2):
            world.sessions.read(connection, TASK, 0, Addressed(number), number)
    connection = world.connect(1, *map(Addressed, range(MAX_BUFFERS)))
    assert len(connection.session.buffers) == MAX_BUFFERS, "all are resumed"


def test_what_is_refused_is_not_waited_for() -> None:
    output = bundles(Addressed(1))
    world = World(output)
    connection = world.connect(1)
    with pytest.raises(ProtocolError, match="nobody can have received"):
        world.sessions.read(connection, TASK, 1 << 63, Addressed(1, 1, 2), 1)
    reader = world.connect(2, Addressed(1))
    assert world.sent(reader)
    output.finish()
    assert output.wait_drained(0)


def test_a_block_of_the_cache_is_one_object_for_all_sessions() -> None:
    """Blocks are made once, and kept once, however many consumers they are on the way to."""
    cached = CachedOutput(1 << 30)
    world = World(cached)
    connections = [world.connect(i, Cached(f"trainer {i}")) for i in range(3)]
    cached.put(block(0, 2))
    blocks = []
    for connection in connections:
        (sent,) = world.sent(connection)
        assert isinstance(sent, Sent)
        blocks.append(sent.block)
    assert blocks[1] is blocks[2] is blocks[0]


def test_a_trainer_that_comes_again_goes_on_behind_what_was_sent() -> None:
    """As another consumer: after a cut connection it is the same one, and gets that again."""
    cached = CachedOutput(1 << 30)
    world = World(cached)
    connection = world.connect(1, Cached("trainer"))
    cached.put(block(0, 2))
    assert story(world.sent(connection)) == [(1, [0, 1])]
    world.sessions.detach(connection, now=0)
    assert story(world.sent(world.connect(1, Cached("trainer")))) == [(1, [0, 1])]
    cached.put(block(2, 2))
    cached.finish()
    again = world.connect(2, Cached("trainer"))
    assert story(world.sent(again)) == [(1, [2, 3]), (1, EndOfTask())]


@pytest.mark.parametrize("protocol", ["tcp", "unix", "local"])
def test_what_was_skipped_is_said_over_any_connection(
    server: BlockServer, closing: ExitStack, protocol: str
) -> None:
    output = CachedOutput(2 * cost(block(0, 5)))
    server.add_task(TASK, output)
    slow, fast = (output.open(Cached(name)) for name in ("slow", "fast"))
    assert isinstance(slow, Subscription) and isinstance(fast, Subscription)
    for first in range(0, 25, 5):
        output.put(block(first, 5))
        assert isinstance(fast.next(True), tuple)
        if not first:
            assert isinstance(slow.next(True, 3), tuple)
    output.finish()
    local = local_worker(UID) if protocol == "local" else None
    consumer = Consumer(only(server, protocol), local=local)
    closing.callback(consumer.client.close)
    consumer.client.read(TASK, Cached("slow"))
    got = [consumer.take_numbered()[2] for _ in range(3)]
    assert got[2] == EndOfTask()
    assert [(numbers(b), b.skipped) for b in got if isinstance(b, Block)] == [
        ([*range(15, 20)], 12), ([*range(20, 25)], 0),
    ]  # fmt: skip


class _Returning(AnyOutput):
    """What a consumer leaves behind goes to the others: at least once."""

    def open(self, order: Order, *, notify: bool = True) -> Subscription:
        output = self

        class Returns(Subscription):
            def next(
                self, credit: bool, max_elements: int | None = None
            ) -> tuple[Block, int] | None:
                with output.changed:
                    return output._blocks.popleft() if credit and output._blocks else None

            def received(self, blocks: Sequence[Block]) -> None: ...

            def close(self, lacking: Sequence[Block] = ()) -> None:
                with output.changed:
                    output._blocks.extend((block, 0) for block in lacking)

        return Returns(self)


@pytest.mark.parametrize("how", ["stop", "goodbye", "expire", "gone", "not resumed"])
def test_whoever_waits_is_given_what_another_leaves(how: str) -> None:
    output = _Returning()
    world = World(output)
    leaves = world.connect(1, ANY)
    output.put(block(0, 3))
    assert story(world.sent(leaves)) == [(1, [0, 1, 2])]
    stays = world.connect(2, ANY)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(world.sessions.next_batch, stays)
        while stays not in world.sessions._idle:
            threading.Event().wait(0.001)
        match how:
            case "stop":
                world.sessions.stop_reading(leaves, TASK, 1)
            case "goodbye":
                world.sessions.forget(leaves)
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


def read_to_the_end(consumer: Consumer, ends: int) -> tuple[Elements, dict[int, End]]:
    """What each of so many subscriptions gives, and how it ends."""
    got: Elements = {}
    ended: dict[int, End] = {}
    while len(ended) < ends:
        task_id, number, item = consumer.take_numbered()
        assert task_id == TASK and number not in ended
        if isinstance(item, Block):
            got.setdefault(number, []).extend(numbers(item))
        else:
            ended[number] = item
    return got, ended


@pytest.mark.parametrize("protocol", ["tcp", "unix", "local"])
def test_trainers_read_bundles_together(
    server: BlockServer, closing: ExitStack, protocol: str
) -> None:
    output = AddressedOutput(1 << 20)
    server.add_task(TASK, output)
    consumers = []
    for i in range(3):
        local = local_worker(UID) if protocol == "local" else None
        consumer = Consumer(only(server, protocol), i + 1, local=local)
        closing.callback(consumer.client.close)
        for bundle in (1, 2):
            consumer.client.read(TASK, Addressed(bundle, i, 3), bundle)
        consumers.append(consumer)
    for bundle in (2, 1):
        produce(output.begin(Addressed(bundle, 0, 3).together()))
    for i, consumer in enumerate(consumers):
        got, ends = read_to_the_end(consumer, 2)
        assert got == {1: [*range(i, LENGTH, 3)], 2: [*range(i, LENGTH, 3)]}
        assert ends == {1: EndOfBundle(1, LENGTH), 2: EndOfBundle(2, LENGTH)}
    consumers[0].client.read(TASK, Addressed(1, 7), 3)
    assert consumers[0].take_numbered() == (TASK, 3, BundleForgotten(1, 7))
    give_up_s = time.monotonic() + TIMEOUT_S
    while output._runs or server.is_read(TASK):
        assert time.monotonic() < give_up_s, "what all have read is not forgotten"
        time.sleep(0.001)


@pytest.mark.parametrize("protocol", ["tcp", "unix", "local"])
def test_each_of_several_ends_is_told_apart(
    server: BlockServer, closing: ExitStack, protocol: str
) -> None:
    output = bundles(Addressed(1))
    output.begin([Addressed(2)]).fail("DATA_LOSS", "torn")
    server.add_task(TASK, output)
    local = local_worker(UID) if protocol == "local" else None
    consumer = Consumer(only(server, protocol), local=local)
    closing.callback(consumer.client.close)
    orders: list[Order] = [Addressed(1), Addressed(2), ANY, Addressed(1, 5, 2), Addressed(3)]
    for number, order in enumerate(orders, 10):
        consumer.client.read(TASK, order, number)
    got, ends = read_to_the_end(consumer, 4)
    assert got == {10: [*range(LENGTH)]}
    assert isinstance(refused := ends.pop(12), TaskFailed) and refused.code == "INVALID_ARGUMENT"
    assert ends == {
        10: EndOfBundle(1, LENGTH),
        11: TaskFailed("DATA_LOSS", "torn"),
        13: BundleForgotten(1, 5),
    }
    output.cancel()
    assert consumer.take_numbered() == (TASK, 14, TaskUnknown())


def read_with_reruns(
    consumer: Consumer, task_id: int, output: AddressedOutput
) -> tuple[dict[int, list[int]], int]:
    """Two of two fellows' bundles; what is forgotten is run again. By bundle; how many reruns."""
    reading = {bundle: Addressed(bundle, bundle % 2, 2) for bundle in (1, 2)}  # by subscription
    got: dict[int, list[int]] = {1: [], 2: []}
    following = itertools.count(3)
    while reading:
        of, number, item = consumer.take_numbered()
        assert of == task_id
        order = reading[number]
        if isinstance(item, Block):
            got[order.bundle] += numbers(item)
            reading[number] = order.after(item)
            continue
        del reading[number]
        if isinstance(item, BundleForgotten):
            assert item == BundleForgotten(order.bundle, order.index)
            produce(output.begin([order]))
            again = next(following)
            reading[again] = order
            consumer.client.read(task_id, order, again)
        else:
            assert item == EndOfBundle(order.bundle, LENGTH)
    return got, next(following) - 3


@pytest.mark.parametrize("to_worker", [False, True])
@pytest.mark.parametrize("forgetful", [False, True])
def test_connections_that_are_cut(
    server: BlockServer, closing: ExitStack, forgetful: bool, to_worker: bool
) -> None:
    """Nothing twice, nothing missing, whatever is on its way then, and even if the worker has
    forgotten its consumer when it comes again.
    """
    if forgetful:
        done = threading.Event()

        def forget() -> None:
            while not done.wait(0.0005):
                server._sessions.expire(float("inf"))

        forgetting = threading.Thread(target=forget, name="test-forgetting")
        forgetting.start()
        closing.callback(forgetting.join)
        closing.callback(done.set)
    damages: list[Damage] = []
    proxy = MeddlingProxy(server.port, lambda: damages.pop() if damages else None)
    closing.callback(proxy.close)
    places = range(20, 300, 10) if to_worker else range(30, 3000, 110)
    for task_id, at in enumerate(places, 100):
        # For the sake of a fellow all blocks are kept.
        output = bundles(Addressed(1, 0, 2), Addressed(2, 0, 2))
        server.add_task(task_id, output)
        damages[:] = [Damage(to_worker, where, cut=True) for where in (at, at // 2 + 15)]
        consumer = Consumer(proxy.addresses, task_id, start=False)
        for bundle in (1, 2):
            consumer.client.read(task_id, Addressed(bundle, bundle % 2, 2), bundle)
        consumer.client.start()
        try:
            got, reruns = read_with_reruns(consumer, task_id, output)
        finally:
            consumer.client.close()
        assert forgetful or not reruns
        assert got == {1: [*range(1, LENGTH, 2)], 2: [*range(0, LENGTH, 2)]}, at
    assert proxy.damaged > len(places) // 2


@pytest.mark.parametrize("wrong", [block(3, 1, 1), block(0, 1, 2), block(0, 1)])
def test_a_worker_that_sends_other_elements_is_not_believed(
    closing: ExitStack, caplog: pytest.LogCaptureFixture, wrong: Block
) -> None:
    worker = ScriptedWorker()
    closing.callback(worker.close)
    frame = b"".join(messages.encode_block(TASK, 1, wrong)[0])
    worker.follow([WELCOME, Saying(frame)])
    consumer = Consumer(worker.addresses, start=False)
    closing.callback(consumer.client.close)
    consumer.client.read(TASK, Addressed(1))
    consumer.client.start()
    assert "it has been enough" in str(consumer.get())
    assert "where bundle 1 from 0 on was asked for" in caplog.text
