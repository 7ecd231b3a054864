"""Coordinated reads in any order of events: what consumers do by themselves, as TensorFlow's do."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.service.core import commands as c

from ..hypothesis_profiles import examples
from .test_rounds import Rounds


@dataclass
class Consumer:
    """A client of TensorFlow's: its tasks in order, each with its first round; where it is."""

    consumer_id: int
    tasks: dict[int, int] = field(default_factory=dict)
    round: int = 0
    visited: set[int] = field(default_factory=set)  # in this round
    limit: int | None = None
    answer: tuple[int | None, dict[int, int]] | None = None  # on its way
    took: list[tuple[int, int]] = field(default_factory=list)  # (round, task)

    def take(self, task_id: int) -> None:
        self.took.append((self.round, task_id))
        self.visited.add(task_id)

    def next_task(self) -> int | None:
        """The one to visit next; None if it must not go on."""
        for _ in range(100):  # or all are removed, and it counts rounds until it is told of more
            if self.limit is not None and self.round >= self.limit:
                return None
            for task_id, first in self.tasks.items():
                if task_id not in self.visited and first <= self.round:
                    return task_id
            if not self.tasks:
                return None
            self.round, self.visited = self.round + 1, set()
        return None

    def hear(self) -> None:
        assert self.answer is not None
        block, listed = self.answer
        if block is None:
            self.limit = None
        elif self.limit != block and self.round < block:
            self.limit = block
        self.tasks = {i: first for i, first in self.tasks.items() if i in listed}
        for task_id, first in listed.items():
            if task_id not in self.tasks:
                assert self.round <= first, "it has passed the starting round"
                assert self.round < first or not self.visited
                self.tasks[task_id] = first
        self.answer = None


class Clients(RuleBasedStateMachine):
    """Consumers, workers that come and go, answers that are lost, dispatchers that begin anew."""

    NUMBER = 3

    @initialize(workers=st.integers(0, 2))
    def begin(self, workers: int) -> None:
        self.rounds = Rounds(self.NUMBER)
        for number in range(workers):
            self.rounds.worker(number)
        self.consumers = [Consumer(self.rounds.join()) for _ in range(self.NUMBER)]

    @rule(number=st.integers(0, 3))
    def worker_beats(self, number: int) -> None:
        self.rounds.worker(number)

    @rule(number=st.integers(0, 3))
    def worker_is_lost(self, number: int) -> None:
        worker_id = self.rounds.state.worker_at.get(f"w:{number}")
        if worker_id is not None:
            self.rounds.when(c.LoseWorker(worker_id=worker_id, reason="r"))

    @rule(number=st.integers(0, NUMBER - 1), lost=st.booleans())
    def beat(self, number: int, lost: bool) -> None:
        """Asks, and is answered; it hears of it later, or never."""
        consumer = self.consumers[number]
        if consumer.answer is not None:
            return
        self.rounds.report(consumer.consumer_id, consumer.round, consumer.limit)
        iteration = self.rounds.read
        listed = {i: self.rounds.state.tasks[i].starting_round for i in iteration.tasks}
        if not lost:
            consumer.answer = (self.rounds.target or None, listed)

    @rule(number=st.integers(0, NUMBER - 1))
    def hear(self, number: int) -> None:
        if self.consumers[number].answer is not None:
            self.consumers[number].hear()

    @rule(number=st.integers(0, NUMBER - 1), steps=st.integers(1, 5))
    def go_on(self, number: int, steps: int) -> None:
        """As far as workers let it: they give a round's elements once all have asked for them."""
        for _ in range(steps):
            consumer = self.consumers[number]
            task_id = consumer.next_task()
            if task_id is None or self.leads_by(consumer, task_id) > 0:
                return
            consumer.take(task_id)

    def leads_by(self, consumer: Consumer, task_id: int) -> int:
        """How many times it took of the task more often than the slowest."""
        slowest = min(sum(i == task_id for _, i in x.took) for x in self.consumers)
        return sum(i == task_id for _, i in consumer.took) - slowest

    @precondition(lambda self: hasattr(self, "consumers"))
    @rule()
    def remove(self) -> None:
        """All are at one task, in one round, and do not get its element."""
        at = {(x.next_task(), x.round) for x in self.consumers}
        if len(at) == 1 and (task_id := next(iter(at))[0]) is not None:
            self.rounds.when(c.RemoveTask(task_id=task_id, round=self.consumers[0].round))
            for consumer in self.consumers:
                consumer.visited.add(task_id)
                consumer.tasks[task_id] = 1 << 40  # until it hears that it is listed no more

    @rule()
    def restart(self) -> None:
        self.rounds.restart()

    @invariant()
    def all_take_the_same(self) -> None:
        if hasattr(self, "consumers"):
            takes = [x.took for x in self.consumers]
            shortest = min(map(len, takes))
            assert all(took[:shortest] == takes[0][:shortest] for took in takes)


TestClients = Clients.TestCase
TestClients.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)
