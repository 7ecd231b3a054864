"""The transport under other policies than *any*: it carries whatever they give."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from forebay.service.blocks import Block
from forebay.service.delivery import (
    ANY,
    Addressed,
    AddressedOutput,
    AnyOutput,
    BundleForgotten,
    EndOfBundle,
    EndOfTask,
    Order,
    Subscription,
    TaskFailed,
    TaskOutput,
)
from forebay.service.errors import ProtocolError
from forebay.service.proto import transfer_pb2 as pb
from forebay.service.transport import BlockServer, local_worker, messages
from forebay.service.transport.sessions import MAX_STREAMS, Ended, Link, Sent, Sessions

from ..delivery.contract import Ledger, block, numbers
from ..delivery.sketches import Cached, CachedOutput, Rounds, RoundsOutput
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

    def connect(self, consumer_id: int, *orders: Order, credit: int = 1 << 34) -> Link:
        link = self.sessions.attach(consumer_id, lambda: None)
        for number, order in enumerate(orders, 1):
            self.sessions.read(link, TASK, 0, order, number)
        self.sessions.give_credit(link, credit, ())
        return link

    def sent(self, link: Link) -> list[Sent | Ended]:
        self.sessions.read(link, -1, 0)  # answered at once, so that next_batch never waits
        batch = self.sessions.next_batch(link) or ()
        return [out for out in batch if isinstance(out, Sent | Ended) and out.task_id == TASK]

    def received(self, link: Link, subscription: int, blocks: int) -> None:
        position = pb.Position(task_id=TASK, received=blocks, subscription=subscription)
        self.sessions.give_credit(link, 0, [position])


def story(sent: list[Sent | Ended]) -> list[tuple[int, object]]:
    """(subscription, its elements or its end) of each."""
    return [
        (out.subscription, numbers(out.block) if isinstance(out, Sent) else out.end) for out in sent
    ]


def bundles(*which: int, ledger: Ledger | None = None) -> AddressedOutput:
    output = AddressedOutput(1 << 30, ledger)
    for bundle in which:
        for first in range(0, LENGTH, 10):
            output.put(block(first, 10, bundle))
        output.end(bundle)
    return output


# -- sessions ----------------------------------------------------------------------------------


def test_several_bundles_at_a_time() -> None:
    world = World(bundles(1, 2))
    link = world.connect(1, Addressed(1, 0, 20), Addressed(2, 35), Addressed(3))
    assert story(world.sent(link)) == [
        (1, [0]), (2, [35, 36, 37, 38, 39]),
        (1, [20]), (2, EndOfBundle(2, LENGTH)),
        (1, EndOfBundle(1, LENGTH)),
    ]  # fmt: skip
    assert world.sessions.wait_until_received(0) == {TASK: 7}
    world.received(link, 1, 2)
    world.received(link, 2, 1)
    assert not world.sessions.wait_until_received(0)
    assert [*link.session.streams] == [(TASK, 3)], "what has ended and has come is forgotten"
    world.sessions.stop_reading(link, TASK, 3)
    assert not world.sessions.is_read(TASK)


def test_each_is_resumed_where_it_was() -> None:
    world = World(bundles(1, 2))
    orders = Addressed(1, 1, 5), Addressed(2, 0)
    first = world.connect(1, *orders, credit=1)
    assert story(world.sent(first)) == [(1, [1, 6])]
    world.sessions.detach(first, now=0)
    again = world.connect(1, *orders)
    assert story(world.sent(again))[:3] == [(1, [1, 6]), (2, [*range(10)]), (1, [11, 16])]


def test_who_was_forgotten_goes_on_by_the_address() -> None:
    """Of blocks that are anybody's, what was on its way is lost then; of a bundle, nothing."""
    output = bundles(1)
    world = World(output)
    order: Order = Addressed(1, 0, 3)
    link = world.connect(1, order, credit=1)
    (sent,) = world.sent(link)
    assert isinstance(sent, Sent)
    order = order.after(sent.block)
    world.sessions.detach(link, now=0)
    world.sessions.expire(now=11)
    link = world.sessions.attach(1, lambda: None)
    world.sessions.read(link, TASK, 1, order, 1)
    world.sessions.give_credit(link, 1 << 30, ())
    batch = [out for out in world.sent(link) if isinstance(out, Sent)]
    assert [out.number for out in batch] == [2, 3, 4]
    assert [n for out in batch for n in numbers(out.block)] == [*range(12, LENGTH, 3)]


def test_what_is_forgotten_or_of_another_policy_is_said() -> None:
    output = bundles(1)
    world = World(output)
    assert world.sent(world.connect(1, Addressed(1)))
    link = world.connect(2, Addressed(1, 3), ANY)
    gone, refused = world.sent(link)
    assert gone == Ended(TASK, BundleForgotten(1, 3, LENGTH), 1)
    assert isinstance(refused, Ended) and isinstance(refused.end, TaskFailed)


def test_the_ledger_hears_of_all() -> None:
    for output in (bundles(1, ledger=(ledger := Ledger())), AnyOutput(1 << 30, ledger)):
        ledger.acknowledged_parts.clear()
        ledger.dropped_parts.clear()
        order: Order = Addressed(1)
        if isinstance(output, AnyOutput):
            order = ANY
            for first in range(0, LENGTH, 10):
                output.put(block(first, 10))
        output.finish()
        world = World(output)
        link = world.connect(1, order)
        assert world.sent(link)
        assert ledger.total == 0
        world.received(link, 1, 3)
        assert [part.count for part in ledger.acknowledged_parts] == [30]
        world.sessions.detach(link, now=0)
        assert not ledger.dropped_parts, "it may come again"
        world.sessions.expire(now=11)
        assert [part.count for part in ledger.dropped_parts] == [10]


def test_a_consumer_has_a_bounded_number_of_subscriptions() -> None:
    world = World(bundles())
    link = world.connect(1)
    with pytest.raises(ProtocolError, match="10000 tasks and bundles are read already"):
        for number in range(1, MAX_STREAMS + 2):
            world.sessions.read(link, TASK, 0, Addressed(number), number)
    link = world.connect(1, *map(Addressed, range(MAX_STREAMS)))
    assert len(link.session.streams) == MAX_STREAMS, "all are resumed"


def test_what_is_refused_is_not_waited_for() -> None:
    output = bundles(1)
    world = World(output)
    link = world.connect(1)
    with pytest.raises(ProtocolError, match="nobody can have received"):
        world.sessions.read(link, TASK, 1 << 63, Addressed(1, 1, 2), 1)
    reader = world.connect(2, Addressed(1))
    assert world.sent(reader)
    output.finish()
    assert output.wait_drained(0)


def test_policies_to_come_fit() -> None:
    rounds = RoundsOutput(1 << 30)
    world = World(rounds)
    links = [world.connect(i, Rounds(i, 2)) for i in range(2)]
    rounds.put(block(0, 5))
    rounds.finish()
    assert story(world.sent(links[1])) == [(1, [1]), (1, [3]), (1, EndOfTask())]
    assert story(world.sent(links[0])) == [(1, [0]), (1, [2]), (1, [4]), (1, EndOfTask())]

    cached = CachedOutput(1 << 30)
    world = World(cached)
    links = [world.connect(i, Cached(f"trainer {i}")) for i in range(2)]
    cached.put(block(0, 2))
    cached.finish()
    for link in links:
        assert story(world.sent(link)) == [(1, [0]), (1, [1]), (1, EndOfTask())]


class _Returning(AnyOutput):
    """What a consumer leaves behind goes to the others: at least once."""

    def open(self, order: Order) -> Subscription:
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


Elements = dict[int | None, list[int]]  # by their bundle


def read_to_the_end(consumer: Consumer, ends: int) -> tuple[Elements, list[object]]:
    got: Elements = {}
    ended: list[object] = []
    while len(ended) < ends:
        item = consumer.take()[1]
        if isinstance(item, Block):
            got.setdefault(item.bundle, []).extend(numbers(item))
        else:
            ended.append(item)
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
        for first in range(0, LENGTH, 10):
            output.put(block(first, 10, bundle))
        output.end(bundle)
    for i, consumer in enumerate(consumers):
        got, ends = read_to_the_end(consumer, 2)
        assert got == {1: [*range(i, LENGTH, 3)], 2: [*range(i, LENGTH, 3)]}
        assert set(ends) == {EndOfBundle(1, LENGTH), EndOfBundle(2, LENGTH)}
    consumers[0].client.read(TASK, Addressed(1, 7), 3)
    assert consumers[0].take() == (TASK, BundleForgotten(1, 7, LENGTH))


@pytest.mark.parametrize("forgetful", [False, True])
def test_connections_that_are_cut(server: BlockServer, closing: ExitStack, forgetful: bool) -> None:
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
    for task_id, at in enumerate(range(30, 3000, 110), 100):
        server.add_task(task_id, bundles(1, 2))
        damages[:] = [Damage(False, at, cut=True), Damage(False, at // 2 + 15, cut=True)]
        consumer = Consumer(proxy.addresses, task_id, start=False)
        for bundle in (1, 2):
            # Half of the elements: for the sake of a fellow all blocks are kept.
            consumer.client.read(task_id, Addressed(bundle, bundle, 2), bundle)
        consumer.client.start()
        try:
            got, ends = read_to_the_end(consumer, 2)
        finally:
            consumer.client.close()
        assert got == {1: [*range(1, LENGTH, 2)], 2: [*range(2, LENGTH, 2)]}, at
        assert set(ends) == {EndOfBundle(1, LENGTH), EndOfBundle(2, LENGTH)}
    assert proxy.damaged


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
