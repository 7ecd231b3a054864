"""Kinds of reads: which workers get tasks of an iteration, and when the iteration ends.

The kinds' methods return events, which the topics add to their own decisions; `kind_of` picks the
kind. Topics read a job's other settings themselves: whether its splits are leased (iterations.py),
whether it needs a list of workers (places.py), how many consumers a round waits for (rounds.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...journal.proto import events_pb2 as ev
from .base import Bodies, Ids
from .places import place_of
from .state import STATIC, Iteration, Job, State, Task, Worker, covers

AnyWorker = Worker | ev.WorkerRegistered


class ReadKind:
    """OFF and DYNAMIC: each worker has a task, and any consumer may read its elements."""

    tasks_complete = True
    """Whether its tasks reach the end of the data. Others end when the last consumer leaves."""

    has_rounds = False
    """Whether consumers agree in which round a task begins and ends (rounds.py). A lost worker's
    task then stays listed until all agree to remove it. TensorFlow's and Forebay's consumers agree
    in different ways, and cannot read it together."""

    drops_draining_workers = False
    """Whether a worker's task is removed when it begins to drain. If not, it finishes the task."""

    def on_consumer_joined(self, state: State, job: Job, iteration: Iteration, ids: Ids) -> Bodies:
        """Create tasks for the workers without one. Job and iteration need not exist yet. In a
        coordinated read that has consumers, the workers' next heartbeats propose tasks instead."""
        if iteration.finished or (self.has_rounds and iteration.consumers):
            return []
        having = {state.tasks[task_id].worker_id for task_id in iteration.all_tasks}
        return [
            event
            for worker in map(state.workers.__getitem__, staying(state))
            if worker.worker_id not in having and can_run(state, job, worker)
            for event in self._new_task(iteration, worker, place_of(state, worker.address), ids)
        ]

    def on_worker_registered(
        self,
        state: State,
        iteration: Iteration,
        worker: ev.WorkerRegistered,
        lost: Sequence[Task],
        ids: Ids,
    ) -> Bodies:
        """Create or resume tasks of an unfinished iteration. `lost`: this process's lost tasks."""
        if worker.draining and self.drops_draining_workers:
            return []
        mine = self._tasks_of(state, iteration, worker, lost)
        if not mine and iteration.consumers and not worker.draining:  # else: on_consumer_joined
            return self._new_task(iteration, worker, _given_place(worker), ids)
        return [
            task_created_event(
                task.task_id, task.iteration_id, worker.worker_id, task.sweeps, task.shard
            )
            for task in mine
        ]

    def on_worker_heartbeat(
        self, state: State, iteration: Iteration, worker_id: int, ids: Ids
    ) -> Bodies:
        """Propose a task in a coordinated read: consumers may have removed the worker's, or begun
        before it had one. The worker is not draining."""
        if not (self.has_rounds and iteration.consumers):
            return []
        if worker_id in {state.tasks[task_id].worker_id for task_id in iteration.all_tasks}:
            return []
        return [_task_proposed_event(ids.new(), iteration, worker_id)]

    def on_task_ended(
        self,
        state: State,
        iteration: Iteration,
        workers: Sequence[int],
        ids: Ids,
        completes: Task | None = None,
    ) -> Bodies:
        """The events after the task `completes`, or after a loss (None); `workers` remain.

        The iteration ends with its last task, unless returned splits are left. Then one of
        `workers`, or else the next worker to register, gets one more task. A task must also have
        reached the end of the data: an iteration that lost all its workers waits for the next one.
        """
        if not self.tasks_complete or iteration.finished or iteration.running_tasks > 1:
            return []
        swept = completes is not None and completes.sweeps  # it already swept what it could
        if not swept and any(ledger.owes for ledger in iteration.ledgers):
            job = state.jobs[iteration.job_id]
            able = (w for w in workers if can_run(state, job, state.workers[w]))
            if (sweeper := next(able, None)) is None:
                return []
            return [task_created_event(ids.new(), iteration.iteration_id, sweeper, sweeps=True)]
        if not self._is_read(state, iteration, completes):
            return []
        return [ev.IterationFinished(iteration_id=iteration.iteration_id)]

    def _new_task(
        self, iteration: Iteration, worker: AnyWorker, place: int | None, ids: Ids
    ) -> Bodies:
        """A task for a worker that has none."""
        return [task_created_event(ids.new(), iteration.iteration_id, worker.worker_id)]

    def _tasks_of(
        self, state: State, iteration: Iteration, worker: ev.WorkerRegistered, lost: Sequence[Task]
    ) -> list[Task]:
        """The tasks that a process resumes when it returns to this place."""
        return [task for task in lost if task.iteration_id == iteration.iteration_id]

    def _is_read(self, state: State, iteration: Iteration, completes: Task | None) -> bool:
        """Whether some task, `completes` included, has reached the end of the data."""
        return completes is not None or iteration.completed_tasks > 0


class StaticRead(ReadKind):
    """Static sharding: each place in the list of workers has a shard, which is read to its end."""

    def _new_task(
        self, iteration: Iteration, worker: AnyWorker, place: int | None, ids: Ids
    ) -> Bodies:
        if place is None or place in iteration.shards_read:
            return []
        return [
            task_created_event(ids.new(), iteration.iteration_id, worker.worker_id, shard=place)
        ]

    def _tasks_of(
        self, state: State, iteration: Iteration, worker: ev.WorkerRegistered, lost: Sequence[Task]
    ) -> list[Task]:
        """A process that moved to another place reads that place's shard instead."""
        place = _given_place(worker)
        return [
            task
            for task in super()._tasks_of(state, iteration, worker, lost)
            if task.shard == place and (task.completed or place not in iteration.shards_read)
        ]

    def _is_read(self, state: State, iteration: Iteration, completes: Task | None) -> bool:
        shards = iteration.shards_read | ({completes.shard} if completes is not None else set())
        return shards >= set(range(len(state.places)))


class RoundsRead(ReadKind):
    """Coordinated reads (rounds.py): consumers agree on the set of tasks. Tasks never complete, and
    the next consumers count from round 0."""

    tasks_complete = False
    has_rounds = True

    def _new_task(
        self, iteration: Iteration, worker: AnyWorker, place: int | None, ids: Ids
    ) -> Bodies:
        if iteration.consumers:
            return [_task_proposed_event(ids.new(), iteration, worker.worker_id)]
        return super()._new_task(iteration, worker, place, ids)

    def _tasks_of(
        self, state: State, iteration: Iteration, worker: ev.WorkerRegistered, lost: Sequence[Task]
    ) -> list[Task]:
        """Only a TensorFlow worker may resume those of another process at its address: consumers
        request rounds from it by number."""
        before = state.worker_at.get(worker.address)  # the worker that it replaces

        def is_there(task: Task) -> bool:
            if task.orphan is None:
                return worker.stock and task.worker_id == before
            if worker.stock:
                return task.orphan.address == worker.address
            return task.orphan.uid == worker.uid

        return [*filter(is_there, map(state.tasks.__getitem__, iteration.tasks))]


class BundleRead(ReadKind):
    """Reads in order (ordered.py) or at least once (claims.py): a worker runs any bundle when a
    consumer asks for it. Consumers open a draining worker's bundles at other workers, from the
    element where they are."""

    tasks_complete = False
    drops_draining_workers = True


def can_run(state: State, job: Job, worker: Worker) -> bool:
    """Whether the worker can and may run the job's tasks: TensorFlow's run no bundles, and these
    and some of ours run graphs only."""
    if not covers(worker.grants, job) or (job.order is not None and worker.stock):
        return False
    if not (worker.stock or worker.no_python):
        return True
    dataset = state.datasets[job.dataset_id].outline
    sources = (state.datasets[source.dataset_id].outline for source in dataset.mixture.sources)
    return all(
        not outline.HasField("python_function")
        or (outline.python_function.no_code and not worker.stock)
        for outline in (dataset, *sources)
    )


def why_no_task(state: State, iteration: Iteration) -> str:
    """Why no registered worker can run the iteration; "" if one can, or none is registered."""
    workers, job = state.workers.values(), state.jobs[iteration.job_id]
    if not workers or any(can_run(state, job, worker) for worker in workers):
        return ""
    if not any(covers(worker.grants, job) for worker in workers):
        return (
            f"none of the {len(workers)} registered workers is in a pool to which the access file "
            f"grants dataset {job.dataset_id} and job {job.user_name!r}; start a worker of such a "
            "pool, or grant both to another pool"
        )
    if job.order is not None and all(worker.stock for worker in workers):
        return (
            f"job {job.user_name} is read in bundles, and the registered workers ({len(workers)}) "
            "are all tf.data service's own, which cannot run bundles; start a worker of Forebay"
        )
    return (
        f"dataset {job.dataset_id} is a Python dataset, and none of the {len(workers)} registered "
        "workers may run it: tf.data service's own run graphs only, and so do Forebay's that "
        "listen beyond loopback without --allow-python; start a worker with --allow-python"
    )


SHARED_READ, STATIC_READ = ReadKind(), StaticRead()
ROUNDS_READ, BUNDLE_READ = RoundsRead(), BundleRead()


def kind_of(job: Job) -> ReadKind:
    """One of the four above."""
    if job.order is not None:
        return BUNDLE_READ
    if job.num_consumers is not None:
        return ROUNDS_READ
    return STATIC_READ if job.sharding in STATIC else SHARED_READ


def _given_place(worker: ev.WorkerRegistered) -> int | None:
    return worker.place if worker.HasField("place") else None


def staying(state: State) -> list[int]:
    """The workers that may get new tasks: those that are not draining."""
    return [worker.worker_id for worker in state.workers.values() if not worker.draining]


def task_created_event(
    task_id: int, iteration_id: int, worker_id: int, sweeps: bool = False, shard: int | None = None
) -> ev.TaskCreated:
    """A new task, or one that its worker resumes."""
    return ev.TaskCreated(
        task_id=task_id, iteration_id=iteration_id, worker_id=worker_id, sweeps=sweeps, shard=shard
    )


def _task_proposed_event(task_id: int, iteration: Iteration, worker_id: int) -> ev.TaskProposed:
    return ev.TaskProposed(
        task_id=task_id, iteration_id=iteration.iteration_id, worker_id=worker_id
    )
