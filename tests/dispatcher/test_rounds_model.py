"""Coordinated reads of Forebay's, in any order of events: the dispatcher's service, workers' policy
and the consumers' rounds as they are, with nothing between them but what is late or lost."""

from __future__ import annotations

import itertools
import threading
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.service.blocks import Block, Component
from forebay.service.client import rounds
from forebay.service.client.options import ReadOptions
from forebay.service.client.rounds import RoundsMode
from forebay.service.core import commands as c
from forebay.service.delivery import RoundsOutput, Subscription
from forebay.service.dispatcher.dispatcher import Dispatcher
from forebay.service.dispatcher.dispatcher_servicer import DispatcherServicer
from forebay.service.errors import NotFound
from forebay.service.proto import forebay_pb2 as pb
from forebay.storage import MemoryStorage

from ..hypothesis_profiles import examples
from ..transfer_servers import SERVERS
from .leading import register, run_dispatcher

ROUNDS = 200  # that a worker makes
FAR = 10_000  # between the elements of two tasks
ADDRESSES = 3


class Client:
    """In place of a connection."""

    def taken(self, block: Block) -> None: ...


class Consumer(RoundsMode):
    """Without threads and connections. Takes what it can, and keeps what that was."""

    def __init__(self, consumer_id: int, index: int, of: int) -> None:
        self._step = threading.Lock()
        self._tasks, self._round, self._limit = {}, 0, None
        self._options = ReadOptions(consumer_index=index, num_consumers=of)
        self.consumer_id = consumer_id
        self.version = 0
        self.answers: list[pb.ConsumerHeartbeatResponse] = []  # on their way
        self.told: dict[int, pb.TaskInfo] = {}
        self.subscriptions: dict[int, Subscription] = {}
        self.took: list[tuple[int, int]] = []  # (task, element)

    def request(self) -> pb.ConsumerHeartbeatRequest:
        request = pb.ConsumerHeartbeatRequest(consumer_id=self.consumer_id)
        self.report(request)
        return request

    def hear(self) -> None:
        response = self.answers.pop(0)
        self.heard(response)
        self.told = {info.task_id: info for info in response.tasks}

    def received_of(self, task_id: int) -> int:
        """How many of its elements have come from the task."""
        task = self._tasks[task_id]
        return task.received - task.starting_round

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            block = self._take()
            if block is None:
                return
            for number in np.asarray(block.components[0].values).tolist():
                self.took.append((number // FAR, number % FAR))


class Cluster:
    def __init__(self, dispatcher: Dispatcher, consumers: int) -> None:
        self.dispatcher = dispatcher
        self.servicer = DispatcherServicer(dispatcher)
        self.number = consumers
        self.uids = itertools.count(1)
        self.alive: dict[int, int] = {}  # uid of the process at each address
        self.outputs: dict[tuple[int, int], RoundsOutput] = {}  # by process and task
        self.consumers: list[Consumer] = []
        self.torn = False

    async def begin(self, workers: int) -> None:
        for address in range(workers):
            await self.worker(address, anew=True)
        await register(self.dispatcher, 9)
        request = pb.GetOrCreateJobRequest(
            dataset_id="d", job_name="rounds", num_consumers=self.number
        )
        job = await self.servicer.get_or_create_job(request)
        for index in range(self.number):
            joined = await self.servicer.join_iteration(pb.JoinIterationRequest(job_id=job.job_id))
            self.consumers.append(Consumer(joined.consumer_id, index, self.number))
        for address in range(workers):
            await self.worker(address, anew=False)
        await act(self, ("all", 5))

    async def worker(self, address: int, anew: bool) -> None:
        """It beats, perhaps as another process; and makes all that its tasks will ever give."""
        if anew or address not in self.alive:
            self.alive[address] = next(self.uids)
        uid = self.alive[address]
        for _ in range(2):  # the first may register it only
            response = await self.servicer.worker_heartbeat(
                pb.WorkerHeartbeatRequest(transfer_servers=SERVERS, address=f"w:{address}", uid=uid)
            )
        for task in response.tasks:
            assert task.num_consumers == self.number
            if (uid, task.task_id) not in self.outputs:
                output = self.outputs[uid, task.task_id] = RoundsOutput(self.number, 1 << 30)
                numbers = FAR * task.task_id + np.arange(ROUNDS * self.number)
                for part in np.split(numbers, [5, 6, 50]):
                    output.put(Block(len(part), (Component(part),)))

    async def lose(self, address: int) -> None:
        state = self.dispatcher.state
        worker_id = state.worker_at.get(f"w:{address}", 0)
        await self.dispatcher.execute(c.LoseWorker(worker_id=worker_id, reason="r"))

    async def beat(self, consumer: Consumer, lost: bool) -> None:
        try:
            response = await self.servicer.consumer_heartbeat(consumer.request())
        except NotFound as error:
            assert "within a round:" in str(error)
            self.torn = True
            return
        if not lost:
            consumer.answers.append(response)

    def arrive(self, consumer: Consumer, elements: int) -> None:
        """Of each worker that lives, some."""
        for task_id, info in consumer.told.items():
            output = self.outputs.get((info.worker_uid, task_id))
            if output is None or info.lost or info.worker_uid not in self.alive.values():
                continue
            if task_id not in consumer.subscriptions:
                opened = output.open(consumer.read_request(task_id))
                assert isinstance(opened, Subscription), opened
                consumer.subscriptions[task_id] = opened
            item = consumer.subscriptions[task_id].next(True, elements)
            if isinstance(item, tuple):
                consumer.arrived(Client(), (task_id, 0), item[0])  # type: ignore[arg-type]

    def check(self) -> None:
        """In each step all have an element of the same task's same round, in the task's order."""
        takes = [consumer.took for consumer in self.consumers]
        steps = min(map(len, takes))
        next_round: dict[int, int] = {}
        for step in range(steps):
            task_id, first = takes[0][step]
            assert [took[step] for took in takes] == [
                (task_id, first + index) for index in range(self.number)
            ]
            assert first == next_round.get(task_id, 0) * self.number
            next_round[task_id] = first // self.number + 1


ACTIONS = st.one_of(
    st.tuples(st.just("worker"), st.integers(0, ADDRESSES - 1), st.booleans()),
    st.tuples(st.just("lose"), st.integers(0, ADDRESSES - 1)),
    st.tuples(st.just("beat"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("hear"), st.integers(0, 9)),
    st.tuples(st.just("arrive"), st.integers(0, 9), st.integers(1, 9)),
    st.tuples(st.just("go on"), st.integers(0, 9), st.integers(1, 5)),
    st.tuples(st.just("all"), st.integers(1, 4)),
    st.tuples(st.just("another dispatcher")),
)


async def act(cluster: Cluster, action: tuple[Any, ...]) -> None:
    consumers = cluster.consumers
    match action:
        case ("worker", address, anew):
            await cluster.worker(address, anew)
        case ("lose", address):
            await cluster.lose(address)
        case ("beat", number, lost):
            consumer = consumers[number % len(consumers)]
            if not consumer.answers:
                await cluster.beat(consumer, lost)
        case ("hear", number):
            consumer = consumers[number % len(consumers)]
            if consumer.answers:
                consumer.hear()
        case ("arrive", number, elements):
            cluster.arrive(consumers[number % len(consumers)], elements)
        case ("go on", number, steps):
            consumers[number % len(consumers)].go_on(steps)
        case ("all", steps):
            for consumer in consumers:
                if not consumer.answers:
                    await cluster.beat(consumer, False)
                if consumer.answers:
                    consumer.hear()
                cluster.arrive(consumer, steps + 1)
            for consumer in consumers:
                consumer.go_on(steps)
        case ("another dispatcher",):  # which knows what is in the journal
            cluster.servicer = DispatcherServicer(cluster.dispatcher)


async def heal(cluster: Cluster) -> None:
    """Who lives goes on; what is lost is done without."""
    for address in range(ADDRESSES):
        await cluster.lose(address)
    cluster.alive.clear()
    before = len(cluster.consumers[0].took)
    for _ in range(40):
        await act(cluster, ("worker", 0, False))
        await act(cluster, ("all", 4))
        if cluster.torn or min(len(x.took) for x in cluster.consumers) > before + 20:
            return
    raise AssertionError("they do not go on")


@settings(max_examples=examples(80), deadline=None)
@given(
    consumers=st.integers(1, 3), workers=st.integers(0, 2), actions=st.lists(ACTIONS, max_size=60)
)
def test_any_order_of_events(consumers: int, workers: int, actions: list[tuple[Any, ...]]) -> None:
    async def run(dispatcher: Dispatcher) -> None:
        cluster = Cluster(dispatcher, consumers)
        await cluster.begin(workers)
        for action in actions:
            await act(cluster, action)
            cluster.check()
            if cluster.torn:
                return
        await heal(cluster)
        cluster.check()

    with patch.object(rounds, "TOGETHER", 2):  # or all that there is would be taken at once
        run_dispatcher(MemoryStorage(), run, worker_timeout_ms=-1, client_timeout_ms=-1)


def test_what_all_have_received_of_a_lost_worker_they_are_given() -> None:
    async def run(dispatcher: Dispatcher) -> None:
        cluster = Cluster(dispatcher, 2)
        await cluster.begin(1)
        one, other = cluster.consumers
        (task_id,) = one.told
        for consumer, elements in ((one, 5), (one, 15), (other, 5), (other, 9)):
            cluster.arrive(consumer, elements)
        one.go_on(1)
        await cluster.lose(0)
        del cluster.alive[0]
        for _ in range(3):  # it is lost; all have said where they are; it is removed
            for consumer in cluster.consumers:
                await cluster.beat(consumer, lost=False)
            for consumer in cluster.consumers:
                consumer.hear()
        received = min(consumer.received_of(task_id) for consumer in cluster.consumers)
        assert received > len(one.took) + 4
        for consumer in cluster.consumers:
            consumer.go_on(100)
            assert len(consumer.took) == received
        cluster.check()
        await heal(cluster)
        cluster.check()

    with patch.object(rounds, "TOGETHER", 2):
        run_dispatcher(MemoryStorage(), run, worker_timeout_ms=-1, client_timeout_ms=-1)
