"""Coordinated reads: trainers that step together, whoever starts them again, and their promises.

After the documentation of tf.data service's `num_consumers`, and docs/limitations.md on it: in each
step all consumers get elements of the same round of the same worker's task, those that follow one
another there, each its own. No round is skipped. If they cannot go on like that, since a worker was
lost within a round, or a consumer was restarted without the others, it is an error, of which all of
them hear that were there; and then all are started again together. Who is restarted alone begins
another read until then, with round 0.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing

from forebay.journal.reasons import GOODBYE
from forebay.service.client.options import ReadOptions, ShardingPolicy
from forebay.service.client.reader import Reader
from forebay.service.errors import FailedPrecondition, NotFound, PipelineError

from .kernel import Kernel, Process, Violation
from .nodes import Job, Trainer
from .oracle import Element, Oracle
from .pipeline import elements_of
from .threads import WaitingRoom

TOLD_S = 300.0
"""So soon all consumers hear that they cannot go on: the longest is one of them cut off."""

TOGETHER_S = 2.0
"""For a launcher to start all consumers again."""


Read = tuple[int, int]
"""An iteration, and how often it had begun anew."""


class Rounds:
    """What consumers were given since they were started together, held against the promises."""

    def __init__(self, oracle: Oracle, num_consumers: int) -> None:
        self._oracle = oracle
        self._num_consumers = num_consumers
        self._had: set[tuple[int, int]] = set()  # elements of runs
        self.begin()

    def begin(self) -> None:
        """All of them begin anew."""
        books = self._oracle.books
        self.taken: Counter[int] = Counter()  # by consumer
        self._steps: dict[tuple[Read, int], tuple[int, int]] = {}  # whose round: (run, round)
        self._reads: dict[int, Read] = {}  # by consumer, since it was started
        self._taken: Counter[tuple[Read, int]] = Counter()  # the same of each (read, consumer)
        self._due: dict[tuple[int, int], int] = {}  # by consumer and run: the element that follows
        self._workers_lost = self._count_lost_workers()
        self._left = set(books.left)
        self.is_disturbed = bool(books.consumers.keys() - books.left.keys())
        """Whether consumers may be out of step by no fault of the service: those of before are
        taken to be there yet, or one was started without the others."""

    def begin_alone(self, consumer: int) -> None:
        """It was restarted without the others."""
        self.is_disturbed = True
        self._reads.pop(consumer, None)

    def deliver(self, consumer: int, element: Element) -> None:
        """A consumer has taken the element of its next step."""
        read = self._oracle.books.reads[element.task_id]
        number = self._taken[read, consumer]
        name = f"consumer {consumer}, step {number} of read {read}"
        if self._reads.setdefault(consumer, read) != read:
            raise Violation(f"{name}: it was in read {self._reads[consumer]}, and did not end")
        round_, whose = divmod(element.number, self._num_consumers)
        if whose != consumer:
            raise Violation(f"{name}: {element} is consumer {whose}'s")
        there = element.run, round_
        step = self._steps.setdefault((read, number), there)
        if step != there:
            raise Violation(
                f"{name}: {element} is of (run, round) {there}; another consumer had {step}"
            )
        if (element.run, element.number) in self._had:
            raise Violation(f"{name}: {element} had come to a consumer")
        self._had.add((element.run, element.number))
        self._oracle.element_count += 1
        due = self._due.get((consumer, element.run), consumer)
        if element.number != due:
            raise Violation(f"{name}: {element} came, and element {due} of its run was due")
        self._due[consumer, element.run] = due + self._num_consumers
        self._taken[read, consumer] += 1
        self.taken[consumer] += 1

    def go_on_without(self, consumer: int) -> bool:
        """Whether the read that it was in has begun anew."""
        iteration, pauses = self._reads.get(consumer, (0, 0))
        books = self._oracle.books
        return iteration in books.collected or books.pauses[iteration] > pauses

    def may_fail(self) -> bool:
        """Whether there is a reason for an error."""
        books = self._oracle.books
        left = books.left.keys() - self._left
        given_up = any(books.left[consumer] != GOODBYE for consumer in left)
        return self.is_disturbed or given_up or self._count_lost_workers() > self._workers_lost

    def _count_lost_workers(self) -> int:
        """Those that tore a round, perhaps. One that drains does not, if it can talk to others."""
        reasons = self._oracle.books.lost_workers.values()
        may_fail = self._oracle.hand_back_may_fail
        return sum(may_fail or reason != GOODBYE for reason in reasons)


class Gang:
    """A launcher: if one of the trainers ends early, it starts all of them again, together."""

    def __init__(self, this: Kernel, rounds: Rounds, steps: int, together: bool) -> None:
        self.kernel = this
        self.rounds = rounds
        self.steps = steps
        self.together = together
        self.members: list[Consumer] = []
        self.changed = WaitingRoom()
        self.generation = 0
        self.ending = False  # and nobody is to be started before all have ended
        self._told = False  # whether all must hear that they cannot go on

    @property
    def finished(self) -> bool:
        """Whether everybody has taken all steps."""
        return all(self.rounds.taken[m.index] >= self.steps for m in self.members)

    def tick(self) -> None:
        self.changed.notify_all()

    def failed(self, member: Consumer, error: Exception | None) -> None:
        """A trainer was killed, or raised this."""
        rng = self.kernel.rng
        if self.ending or self.finished:
            return
        if error is None and not self._told and rng.random() < 0.3:
            self.rounds.begin_alone(member.index)
            # Who waits for others, or has had enough, reads no more, and does not hear of it.
            self.kernel.at(TOLD_S, self._give_up, self.generation)
            return
        if error is not None and not self.rounds.may_fail():
            self.kernel.fail(f"{member.name} failed without a reason: {error!r}")
        self.ending = True
        torn = error is not None and "within a round:" in str(error)
        # Who waits for others does not hear of it from the service.
        self._told = torn and not (self.rounds.is_disturbed or self.together)
        if self._told and rng.random() < 0.7:
            self.kernel.at(TOLD_S, self._all_were_told, self.generation)
            self._wait(self.generation)
        else:
            self.kernel.at(TOGETHER_S * rng.random(), self._end, self.generation)

    def _give_up(self, generation: int) -> None:
        if generation == self.generation and not (self.ending or self.finished):
            self.ending = True
            self._end(generation)

    def _all_were_told(self, generation: int) -> None:
        """Of all that had begun to read, nobody reads on."""
        if generation != self.generation:
            return
        for member in self.members:
            reads = 0 < self.rounds.taken[member.index] < self.steps
            if member.alive and reads and not self.rounds.is_disturbed:
                self.kernel.fail(f"{member.name} was not told that it cannot go on")
        self._end(generation)

    def _wait(self, generation: int) -> None:
        if generation == self.generation:
            if any(member.alive for member in self.members):
                self.kernel.at(0.5, self._wait, generation)
            else:
                self._end(generation)

    def _end(self, generation: int) -> None:
        if generation != self.generation:
            return
        for member in self.members:
            member.resume()
            member.kill()
        self.kernel.at(TOGETHER_S * self.kernel.rng.random(), self._begin, generation)

    def _begin(self, generation: int) -> None:
        if generation != self.generation:
            return
        self.generation = generation + 1
        self.ending = self._told = False
        self.kernel.trace("together", self.generation)
        self.rounds.begin()
        for member in self.members:
            member.start()


class Consumer(Trainer):
    """One of the trainers of a coordinated read."""

    def __init__(self, this: Kernel, name: str, host: str, job: Job, gang: Gang) -> None:
        super().__init__(this, name, host, job)
        self.index = len(gang.members)
        self._gang = gang
        self._knows_journal = False  # it has joined
        gang.members.append(self)

    @property
    def began(self) -> bool:
        return self._knows_journal

    def start(self) -> None:
        if not self._gang.ending:
            super().start()

    def main(self) -> None:
        job, gang = self.job, self._gang
        self._knows_journal = False
        how = ReadOptions(
            policy=job.policy, consumer_index=self.index, num_consumers=len(gang.members)
        )
        reader = Reader(job.service, job.dataset_id(), job.name, how, credit_bytes=job.credit_bytes)
        self.reading = True
        try:
            self._step(reader)
        except (FailedPrecondition, NotFound, PipelineError, TimeoutError) as error:
            self.kernel.trace("failed", self.name, error)
            gang.failed(self, error)
            return
        self.done = True

    def _step(self, reader: Reader) -> None:
        gang, rng = self._gang, self.kernel.rng
        with closing(reader.iterate()) as blocks:
            while gang.rounds.taken[self.index] < gang.steps:
                block = next(blocks)
                self._knows_journal = True
                for element in elements_of(block):
                    if self.job.policy is ShardingPolicy.DYNAMIC:  # who has leased its split
                        self.job.deliver(self.name, element)
                    gang.rounds.deliver(self.index, element)
                    gang.tick()
                    while gang.together and self._is_ahead() and not gang.finished:
                        self._wait_for_others()
                if self.job.step_s:
                    self.kernel.sleep(self.job.step_s * rng.uniform(0.1, 2))
            while not gang.finished:  # who leaves is one less to agree with
                self._wait_for_others()

    def _wait_for_others(self) -> None:
        """As in a collective operation: meanwhile it reads nothing, and hears of nothing. So these
        have a timeout, which is the launcher's only news of who read with somebody that had died,
        and was left alone as that one came back."""
        gang = self._gang
        if not gang.changed.wait(TOLD_S) and gang.rounds.go_on_without(self.index):
            raise TimeoutError(f"{self.name} waits for others, who have begun anew")

    def _is_ahead(self) -> bool:
        taken = self._gang.rounds.taken
        return any(taken[m.index] < taken[self.index] for m in self._gang.members)

    def killed(self, process: Process) -> None:
        super().killed(process)
        self._gang.failed(self, None)
