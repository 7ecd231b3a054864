"""Kinds of reads: who gets a task of an iteration, what becomes of it, and when all has been read.

What differs between them in that is here, and topics ask `kind_of` for it. What else a job says
they read themselves: whether its splits are leased (iterations.py), whether it needs a list of
workers (places.py), how many consumers a round waits for (rounds.py). A kind decides nothing that
is not in its answer: events, which the topic adds to its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...journal.proto import events_pb2 as ev
from .base import Ids
from .places import place_of
from .state import STATIC, Iteration, Job, State, Task, Worker

AnyWorker = Worker | ev.WorkerRegistered


class Shared:
    """OFF and DYNAMIC: each worker has a task, and what it makes goes to whoever asks for it."""

    ends_with_its_consumers = False
    """Whether its tasks end when the last consumer leaves. If not, they wait for the next one."""

    is_for_one_kind_of_consumers = False
    """Whether TensorFlow's and Forebay's cannot read it together."""

    stays_listed = False
    """Whether consumers ask for a task whose worker is lost, until they agree to do without it."""

    def when_somebody_joins(
        self, state: State, job: Job, iteration: Iteration, ids: Ids
    ) -> list[ev.Event]:
        """The iteration, which may be yet to begin, as its job, has a task for each worker that
        stays then."""
        if iteration.finished:
            return []
        having = {state.tasks[task_id].worker_id for task_id in iteration.all_tasks}
        return [
            event
            for worker in map(state.workers.__getitem__, staying(state))
            if worker.worker_id not in having and can_run(state, job, worker)
            for event in self._new_task(iteration, worker, place_of(state, worker.address), ids)
        ]

    def when_a_worker_comes(
        self,
        state: State,
        iteration: Iteration,
        worker: ev.WorkerRegistered,
        lost: Sequence[Task],
        ids: Ids,
    ) -> list[ev.Event]:
        """Of an iteration that has not finished. `lost` is what this process may still have."""
        place = worker.place if worker.HasField("place") else None
        mine = [
            task
            for task in lost
            if task.iteration_id == iteration.iteration_id and self._goes_on(iteration, task, place)
        ]
        if not mine and iteration.consumers and not worker.draining:  # or when somebody joins
            return self._new_task(iteration, worker, place, ids)
        return [_again(task, worker.worker_id) for task in mine]

    def when_a_worker_beats(
        self, state: State, iteration: Iteration, worker_id: int, ids: Ids
    ) -> list[ev.Event]:
        """It was here before, and does not drain."""
        return []

    def when_a_task_ends(
        self,
        state: State,
        iteration: Iteration,
        workers: Sequence[int],
        ids: Ids,
        completes: Task | None = None,
    ) -> list[ev.Event]:
        """What follows if this task completes, or one is lost; `workers` are those that stay.

        The iteration ends with its last task, unless splits were handed back that nobody is left
        to ask for: then one of `workers` gets another task, once, or, if there are none, the next
        worker. Somebody must have seen the end of the data, too: an iteration whose workers are all
        lost waits for the next worker.
        """
        if iteration.finished or iteration.running_tasks > 1:
            return []
        swept = completes is not None and completes.sweeps  # what it could
        if not swept and any(ledger.owes for ledger in iteration.ledgers):
            able = (
                w for w in workers if can_run(state, state.jobs[iteration.job_id], state.workers[w])
            )
            if (sweeper := next(able, None)) is None:
                return []
            return [created(ids.new(), iteration.iteration_id, sweeper, sweeps=True)]
        if not self._is_read(state, iteration, completes):
            return []
        finished = ev.IterationFinished(iteration_id=iteration.iteration_id)
        return [ev.Event(iteration_finished=finished)]

    def _new_task(
        self, iteration: Iteration, worker: AnyWorker, place: int | None, ids: Ids
    ) -> list[ev.Event]:
        """For a worker that has none."""
        return [created(ids.new(), iteration.iteration_id, worker.worker_id)]

    def _goes_on(self, iteration: Iteration, task: Task, place: int | None) -> bool:
        """Whether a process that comes back to this place goes on with its task."""
        return True

    def _is_read(self, state: State, iteration: Iteration, completes: Task | None) -> bool:
        """Whether somebody has seen the end of the data, once this task has completed."""
        return completes is not None or iteration.completed_tasks > 0


class Divided(Shared):
    """Static sharding: each place in the list of workers has a shard, which is read to its end."""

    def _new_task(
        self, iteration: Iteration, worker: AnyWorker, place: int | None, ids: Ids
    ) -> list[ev.Event]:
        if place is None or place in iteration.shards_read:
            return []
        return [created(ids.new(), iteration.iteration_id, worker.worker_id, shard=place)]

    def _goes_on(self, iteration: Iteration, task: Task, place: int | None) -> bool:
        """At another place it begins that one's shard."""
        return task.shard == place and (task.completed or place not in iteration.shards_read)

    def _is_read(self, state: State, iteration: Iteration, completes: Task | None) -> bool:
        shards = iteration.shards_read | ({completes.shard} if completes is not None else set())
        return shards >= set(range(len(state.places)))


class Coordinated(Shared):
    """Rounds (rounds.py): consumers agree on which tasks there are. No task has an end."""

    ends_with_its_consumers = True
    """Those that come count from round 0."""

    is_for_one_kind_of_consumers = True
    """They ask differently to do without a task, and wait for each other in each round."""

    stays_listed = True

    def when_somebody_joins(
        self, state: State, job: Job, iteration: Iteration, ids: Ids
    ) -> list[ev.Event]:
        """In the midst of others, that comes to the workers' next heartbeats."""
        return (
            [] if iteration.consumers else super().when_somebody_joins(state, job, iteration, ids)
        )

    def when_a_worker_comes(
        self,
        state: State,
        iteration: Iteration,
        worker: ev.WorkerRegistered,
        lost: Sequence[Task],
        ids: Ids,
    ) -> list[ev.Event]:
        """Those that it goes on with, or a new one. Of another process at the address that is only
        right for TensorFlow's, which are asked for a round by its number."""
        before = state.worker_at.get(worker.address)  # is being replaced by it

        def is_there(task: Task) -> bool:
            if task.orphan is None:
                return worker.stock and task.worker_id == before
            if worker.stock:
                return task.orphan.address == worker.address
            return task.orphan.uid == worker.uid

        tasks = [state.tasks[task_id] for task_id in iteration.tasks]
        mine = [_again(task, worker.worker_id) for task in tasks if is_there(task)]
        if not mine and iteration.consumers and not worker.draining:
            return [_proposed(ids.new(), iteration.iteration_id, worker.worker_id)]
        return mine

    def when_a_worker_beats(
        self, state: State, iteration: Iteration, worker_id: int, ids: Ids
    ) -> list[ev.Event]:
        """Consumers may have done without it, or have begun before others: it joins them."""
        having = {state.tasks[task_id].worker_id for task_id in iteration.all_tasks}
        if not iteration.consumers or worker_id in having:
            return []
        return [_proposed(ids.new(), iteration.iteration_id, worker_id)]

    def when_a_task_ends(
        self,
        state: State,
        iteration: Iteration,
        workers: Sequence[int],
        ids: Ids,
        completes: Task | None = None,
    ) -> list[ev.Event]:
        return []


def can_run(state: State, job: Job, worker: AnyWorker) -> bool:
    """Whether it can run the dataset: TensorFlow's own workers run graphs only, as some of ours."""
    if not (worker.stock or worker.no_python):
        return True
    dataset = state.datasets[job.dataset_id]
    return not dataset.definition.HasField("python_function")


def why_no_task(state: State, iteration: Iteration) -> str:
    """Why none of the workers that there are has a task, if it is that none can run it; or ""."""
    workers, job = state.workers.values(), state.jobs[iteration.job_id]
    if not workers or any(can_run(state, job, worker) for worker in workers):
        return ""
    return (
        f"dataset {job.dataset_id} is a Python dataset, and none of the workers that there are, "
        f"{len(workers)}, may run it: tf.data service's own run graphs only, and so do Forebay's "
        "that listen beyond loopback, unless they are told otherwise; start a worker with "
        "--allow-python"
    )


SHARED, DIVIDED, COORDINATED = Shared(), Divided(), Coordinated()


def kind_of(job: Job) -> Shared:
    """SHARED, DIVIDED or COORDINATED."""
    if job.num_consumers is not None:
        return COORDINATED
    return DIVIDED if job.sharding in STATIC else SHARED


def staying(state: State) -> list[int]:
    """The workers that may get something new: those that do not drain."""
    return [worker.worker_id for worker in state.workers.values() if not worker.draining]


def created(
    task_id: int,
    iteration_id: int,
    worker_id: int,
    sweeps: bool = False,
    shard: int | None = None,
) -> ev.Event:
    """A task, or one that its worker still has."""
    return ev.Event(
        task_created=ev.TaskCreated(
            task_id=task_id,
            iteration_id=iteration_id,
            worker_id=worker_id,
            sweeps=sweeps,
            shard=shard,
        )
    )


def _again(task: Task, worker_id: int) -> ev.Event:
    return created(task.task_id, task.iteration_id, worker_id, task.sweeps, task.shard)


def _proposed(task_id: int, iteration_id: int, worker_id: int) -> ev.Event:
    proposed = ev.TaskProposed(task_id=task_id, iteration_id=iteration_id, worker_id=worker_id)
    return ev.Event(task_proposed=proposed)
