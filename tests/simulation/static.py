"""Static sharding: what is promised of shards and places.

After docs/limitations.md: each place in the list of workers has a shard, and a worker there reads
it to its end; one that is started again begins it anew, and so does who comes in its place, and
then elements come again, and only then. No two workers have a place at the same time. An epoch ends
when each shard was read to its end, and what was read arrived: nothing is lost but with a trainer.
"""

from __future__ import annotations

from collections.abc import Iterable

from forebay.journal.proto import events_pb2 as ev

from .kernel import Violation
from .oracle import Element, Oracle


class Shards:
    """The journal's events and the trainers' elements, held against the promises."""

    def __init__(self, oracle: Oracle, num_shards: int) -> None:
        self._oracle = oracle
        self._num_shards = num_shards
        self._place: dict[int, int] = {}  # of workers
        self._shard: dict[int, int] = {}  # of tasks
        self._begun: dict[tuple[int, int], int] = {}  # the task, by iteration and shard
        self._read: set[tuple[int, int]] = set()  # the same, of those that were read to their end
        self._delivered: dict[tuple[int, ...], set[int]] = {}  # the processes, by place

    def _worker_registered(self, event: ev.WorkerRegistered) -> None:
        if not event.HasField("place"):
            raise Violation(f"the worker {event.address} has no place")
        books = self._oracle.books
        for worker, place in self._place.items():
            if place == event.place and worker not in books.lost_workers:
                raise Violation(f"{event.address} has place {place}, and so has worker {worker}")
        self._place[event.worker_id] = event.place

    def _task_created(self, event: ev.TaskCreated) -> None:
        if self._place[event.worker_id] != event.shard:
            raise Violation(
                f"shard {event.shard} goes to a worker at place {self._place[event.worker_id]}"
            )
        key = event.iteration_id, event.shard
        before = self._begun.get(key, event.task_id)
        if before != event.task_id:
            if key in self._read:
                raise Violation(f"shard {event.shard} is read again as task {event.task_id}")
            if self._oracle.books.tasks[before][1] not in self._oracle.books.lost_workers:
                raise Violation(f"shard {event.shard} has the tasks {before} and {event.task_id}")
        self._begun[key] = event.task_id
        self._shard[event.task_id] = event.shard

    def _task_completed(self, event: ev.TaskCompleted) -> None:
        iteration, _ = self._oracle.books.tasks[event.task_id]
        self._read.add((iteration, self._shard[event.task_id]))

    def _iteration_paused(self, event: ev.IterationPaused) -> None:
        """Who comes to it begins anew."""
        for key in [key for key in self._begun if key[0] == event.iteration_id]:
            del self._begun[key]

    def _iteration_finished(self, event: ev.IterationFinished) -> None:
        books = self._oracle.books
        if books.epochs[event.iteration_id] in books.summarized:
            return  # it only says so to somebody who comes late
        for shard in range(self._num_shards):
            if (event.iteration_id, shard) not in self._read:
                raise Violation(f"an epoch ended, and shard {shard} was not read")

    def deliver(self, consumer: str, element: Element) -> None:
        """A trainer has taken it."""
        shard = self._shard[element.task_id]
        if element.split % self._num_shards != shard:
            raise Violation(f"{element} came to {consumer} of shard {shard}")
        tasks = self._delivered.setdefault(element.place, set())
        if element.task_id in tasks:
            raise Violation(f"{element} came again, to {consumer}, though nobody began anew")
        tasks.add(element.task_id)
        self._oracle.element_count += 1

    def account(
        self, iteration_id: int, wanted: Iterable[tuple[int, int, int]], on_their_way: int
    ) -> int:
        """How many elements of a finished iteration came to nobody: at most what may have been on
        its way to trainers that left."""
        missing = [p for p in wanted if (iteration_id, *p) not in self._delivered]
        if len(missing) > on_their_way * self._oracle.excused_consumers:
            raise Violation(
                f"{len(missing)} elements of iteration {iteration_id} came to nobody, such as "
                f"{missing[:5]}; {self._oracle.excused_consumers} trainers left"
            )
        return len(missing)
