"""Flow control: how much is in flight, and that no consumer starves beside greedy or slow ones."""

from __future__ import annotations

import collections
import itertools
import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pytest

from forebay.service.blocks import Block, Component, Strings, part, split
from forebay.service.delivery import EndOfTask, FirstComeOutput, OutputCancelled
from forebay.service.transport import BlockServer, ElementBudget, LocalClient, local_worker
from forebay.service.transport.budget import Share
from forebay.service.transport.sending import Sent

from .peers import TIMEOUT_S, Consumer, only
from .samples import SAMPLES, elements, numbered
from .test_sessions import World

TASK = 5


# -- cutting blocks ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, block in SAMPLES.items() if block.count > 1])
def test_a_block_can_be_cut_anywhere(name: str) -> None:
    block = SAMPLES[name]
    for count in range(1, block.count):
        head, rest = split(block, count)
        assert (head.count, rest.count) == (count, block.count - count)
        assert (head.bundle, rest.bundle) == (block.bundle, block.bundle)
        assert (head.index, rest.index) == (block.index, block.index + count)
        assert elements(head) + elements(rest) == elements(block)
        for half in (head, rest):
            assert half.count > 1 or all(c.shapes is None for c in half.components)


@pytest.mark.parametrize("name", SAMPLES)
def test_any_part_of_a_block(name: str) -> None:
    block = SAMPLES[name]
    for first, stop in itertools.combinations(range(min(block.count, 9) + 1), 2):
        found = part(block, first, stop - first)
        assert (found.count, found.index) == (stop - first, block.index + first)
        assert elements(found) == elements(block)[first:stop]


def test_cutting_copies_nothing() -> None:
    values = np.arange(10)
    text = Strings(np.full(10, 2), np.arange(20, dtype=np.uint8))
    head, rest = split(Block(10, (Component(values), Component(text))), 3)
    for half in (head, rest):
        numbers, strings = (component.values for component in half.components)
        assert isinstance(numbers, np.ndarray) and isinstance(strings, Strings)
        assert np.shares_memory(numbers, values) and np.shares_memory(strings.data, text.data)


# -- the budget --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_workers_never_have_more_than_the_limit_and_each_may_send_something(seed: int) -> None:
    dice = random.Random(seed)
    limit = dice.randint(1, 12)
    budget = ElementBudget(limit)
    shares: dict[Share, list[int]] = {}  # what each was granted and has not sent; and sent
    for _ in range(300):
        if not shares or (len(shares) < 5 and dice.random() < 0.1):
            shares[budget.share()] = [0, 0]
        share = dice.choice([*shares])
        have = shares[share]
        match dice.choice(["grant", "grant", "send", "send", "take", "take", "cut", "leave"]):
            case "grant":
                is_due, granted = share.is_due(), share.grant()
                assert granted or not is_due
                have[0] += granted
                assert sum(have) >= 1, "nobody waits for others to take"
            case "send" if have[0]:
                count = dice.randint(1, have[0])
                assert share.received(count)
                have[:] = have[0] - count, have[1] + count
            case "send":
                assert share.received(0) and not share.received(1)
                have[1] += 1  # it is counted, and its connection cut
            case "take" if have[1]:
                share.taken(1)
                have[1] -= 1
            case "cut":
                share.take_back()
                have[0] = 0
            case "leave" if not have[1]:
                share.leave()
                share.leave()
                del shares[share]
                assert share.grant() == 0 and not share.is_due()
        assert budget.outstanding == sum(map(sum, shares.values()))
        granted = sum(have[0] for have in shares.values())
        assert granted <= limit + max(0, len(shares) - 1), "but for the first of each"


def test_a_worker_that_joins_gets_its_share_as_others_elements_are_taken() -> None:
    budget = ElementBudget(8)
    first = budget.share()
    assert first.grant() == 8
    second = budget.share()
    assert second.is_due() and second.grant() == 1
    first.received(6)
    first.taken(6)
    assert first.grant() == 2
    second.received(1)
    second.taken(1)
    assert second.grant() == 4
    assert budget.outstanding == 8


def test_it_is_not_told_of_every_single_element() -> None:
    share = ElementBudget(16).share()
    share.grant()
    share.received(16)
    share.taken(4)
    assert not share.is_due()
    share.taken(1)
    assert share.is_due()


# -- sessions ----------------------------------------------------------------------------------


def dense(count: int, first: int = 0) -> Block:
    return Block(count, (Component(np.arange(first, first + count)),))


def counts(world: World, connection: Any) -> list[int]:
    world.sessions.read(connection, -1, 0)  # answered at once, so that next_batch never waits
    batch = world.sessions.next_batch(connection)
    return [out.block.count for out in batch or () if isinstance(out, Sent)]


def test_blocks_are_cut_to_what_is_allowed() -> None:
    world = World()
    world.output.put(dense(10))
    world.output.put(dense(2))
    connection = world.connect(1, credit=0)
    world.sessions.give_credit(connection, 1 << 20, (), 4)
    assert counts(world, connection) == [4]
    assert counts(world, connection) == []
    world.sessions.give_credit(connection, 0, (), 7)
    assert counts(world, connection) == [6, 1]
    world.sessions.give_credit(connection, 0, (), 7)
    assert counts(world, connection) == [1]


def test_a_resent_block_is_the_same_as_before() -> None:
    world = World()
    world.output.put(dense(10))
    connection = world.connect(1, credit=0)
    world.sessions.give_credit(connection, 1 << 20, (), 8)
    assert counts(world, connection) == [8]
    world.sessions.detach(connection, 0.0)
    connection = world.connect(1, credit=0)
    world.sessions.give_credit(connection, 1 << 20, (), 3)
    assert counts(world, connection) == [8]
    world.sessions.give_credit(connection, 0, (), 3)
    assert counts(world, connection) == [2]


# -- real connections --------------------------------------------------------------------------


class Workers:
    """Some workers, and consumers that read task TASK of each."""

    def __init__(self, closing: ExitStack, count: int) -> None:
        self.closing = closing
        self.servers = [BlockServer(uid) for uid in range(1, count + 1)]
        self.outputs = [FirstComeOutput(1 << 20) for _ in self.servers]
        for server, output in zip(self.servers, self.outputs, strict=True):
            server.sessions.add_task(TASK, output)
            closing.callback(server.stop)
            server.start()

    def produce(self, uid: int, make: Callable[[int], Block], blocks: int) -> None:
        """Have a worker produce blocks, as fast as they are taken."""
        output = self.outputs[uid - 1]

        def run() -> None:
            with suppress(OutputCancelled):
                for number in range(blocks):
                    output.put(make(number))
                output.finish()

        thread = threading.Thread(target=run, name="test-producer")
        thread.start()
        self.closing.callback(thread.join)
        self.closing.callback(output.cancel)

    def consumers(self, consumer_id: int = 1, budget: ElementBudget | None = None) -> list[Any]:
        made = []
        for server in self.servers:
            share = budget.share() if budget is not None else None
            consumer = Consumer(
                only(server, "tcp"), consumer_id, server._worker_uid, TASK, elements=share,
                start=False, closing=self.closing,
            )  # fmt: skip
            made.append(consumer)
        for consumer in made:
            consumer.client.start()
        return made


def settled(value: Callable[[], int]) -> int:
    """The value once it has not changed for a while."""
    last, since = value(), time.monotonic()
    while time.monotonic() - since < 0.2:
        time.sleep(0.01)
        if value() != last:
            last, since = value(), time.monotonic()
    return last


@pytest.mark.parametrize(("limit", "workers"), [(1, 1), (7, 1), (8, 2), (9, 4), (2, 3)])
def test_never_more_elements_than_asked_for(closing: ExitStack, limit: int, workers: int) -> None:
    """The bound holds over all workers together, with one element of each to spare."""
    there = Workers(closing, workers)
    for uid in range(1, workers + 1):
        there.produce(uid, lambda n: dense(1 + n % 50), 30)
    budget = ElementBudget(limit)
    consumers = there.consumers(budget=budget)

    def waiting() -> int:
        items = (item for c in consumers for item in list(c.arrived.queue))
        return sum(item[2].count for item in items if isinstance(item[2], Block))

    allowed = max(limit, workers)
    assert settled(waiting) == (allowed if limit <= workers else limit // workers * workers)
    got = [0] * workers
    ended = 0
    while ended < workers:
        for at, consumer in enumerate(consumers):
            if consumer.arrived.empty():
                time.sleep(0.0001)
                continue
            item = consumer.take()[1]
            if isinstance(item, Block):
                got[at] += item.count
            else:
                ended += 1
            assert waiting() <= allowed and budget.outstanding <= allowed
    assert got == [sum(1 + n % 50 for n in range(30))] * workers


def test_a_worker_that_sends_nothing_holds_up_no_other(closing: ExitStack) -> None:
    there = Workers(closing, 3)
    for uid in (1, 2):
        there.produce(uid, numbered, 200)
    consumers = there.consumers(budget=ElementBudget(3))
    for consumer in consumers[:2]:
        assert consumer.numbers() == [*range(200)]
    assert consumers[2].arrived.empty()


@pytest.mark.parametrize("protocol", ["tcp", "unix", "local"])
def test_a_greedy_consumer_does_not_starve_the_others(closing: ExitStack, protocol: str) -> None:
    """One asks for a hundred times as much; all of them take as fast as they can."""
    there = Workers(closing, 1)
    there.produce(1, lambda n: numbered(n, 16 << 10), 1_000_000)
    server = there.servers[0]
    enough = threading.Event()
    got: collections.Counter[int] = collections.Counter()

    def consume(number: int, credit_bytes: int) -> None:
        worker = local_worker(1) if protocol == "local" else None
        addresses = only(server, protocol)
        consumer = Consumer(
            addresses, number, 1, reads=TASK, local=worker, credit_bytes=credit_bytes
        )
        try:
            while not enough.is_set():
                consumer.take()
                got[number] += 1
        finally:
            consumer.client.close()

    sizes = [64 << 20, 640 << 10, 640 << 10]
    threads = [
        threading.Thread(target=consume, args=(number, size), name="test-consumer")
        for number, size in enumerate(sizes)
    ]
    for thread in threads:
        thread.start()
    give_up_s = time.monotonic() + TIMEOUT_S
    while min(got[n] for n in range(3)) < 200 and time.monotonic() < give_up_s:
        time.sleep(0.01)
    enough.set()
    for thread in threads:
        thread.join()
    assert min(got[n] for n in range(3)) > sum(got.values()) / 100, got


# -- in one process ----------------------------------------------------------------------------


class TestLocal:
    def consumer(self, closing: ExitStack, there: Workers, **options: Any) -> Consumer:
        consumer = Consumer([], 1, 1, reads=TASK, local=local_worker(1), **options, closing=closing)
        assert isinstance(consumer.client, LocalClient)
        return consumer

    def test_blocks_are_handed_over_as_they_are(self, closing: ExitStack) -> None:
        there = Workers(closing, 1)
        blocks = [numbered(n) for n in range(10)]
        there.produce(1, blocks.__getitem__, 10)
        consumer = self.consumer(closing, there)
        for block in blocks:
            got = consumer.take()[1]
            assert isinstance(got, Block) and got.components is block.components
        assert consumer.take() == (TASK, EndOfTask())

    def test_credit_bounds_what_comes(self, closing: ExitStack) -> None:
        there = Workers(closing, 1)
        there.produce(1, lambda n: numbered(n, 1000), 1000)
        consumer = self.consumer(closing, there, credit_bytes=50_000)
        assert 30 <= settled(consumer.waiting_blocks) <= 35
        assert consumer.numbers() == [*range(1000)]

    def test_elements_are_counted(self, closing: ExitStack) -> None:
        there = Workers(closing, 1)
        there.produce(1, lambda n: dense(100, 100 * n), 5)
        budget = ElementBudget(7)
        consumer = self.consumer(closing, there, elements=budget.share())
        values: list[int] = []
        while isinstance(block := consumer.take()[1], Block):
            assert block.count <= 7 and budget.outstanding <= 7
            numbers = block.components[0].values
            assert isinstance(numbers, np.ndarray)
            values += numbers.tolist()
        assert values == [*range(500)]

    def test_a_worker_that_stops_says_so(self, closing: ExitStack) -> None:
        there = Workers(closing, 1)
        there.produce(1, numbered, 3)
        consumer = self.consumer(closing, there)
        consumer.numbers()
        assert not there.servers[0].sessions.wait_until_received(TIMEOUT_S)
        there.servers[0].stop()
        assert consumer.get() == "the worker stops"
        assert local_worker(1) is None

    def test_a_consumer_that_connects_while_the_worker_stops_is_told(
        self, closing: ExitStack
    ) -> None:
        there = Workers(closing, 1)
        worker = local_worker(1)
        there.servers[0].stop()
        consumer = Consumer([], 1, 1, reads=TASK, local=worker, closing=closing)
        assert consumer.get() == "the worker stops"

    def test_closing_leaves_nothing(self, closing: ExitStack) -> None:
        there = Workers(closing, 1)
        there.produce(1, numbered, 100_000)
        consumer = self.consumer(closing, there)
        consumer.take()
        consumer.client.close()
        consumer.client.close()
        assert TASK not in there.servers[0].sessions.read_tasks()
        assert not [t for t in threading.enumerate() if t.name.startswith("forebay-blocks-of")]
