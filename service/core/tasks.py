"""Tasks: one worker's part of one iteration."""

from __future__ import annotations

from collections.abc import Callable

from ...journal.proto import events_pb2 as ev
from .base import Apply, Command, Decide, Decision, Ids, find_task, is_coordinated, taken
from .places import place_of
from .splits import lease_begun, ledger_of
from .state import (
    MAX_LOST_TASKS,
    Iteration,
    LostTask,
    Orphan,
    State,
    Task,
    Worker,
    lease_caller,
)


class CompleteTask(Command, frozen=True, kw_only=True):
    """→ LeaseBegun …, TaskCompleted, (IterationFinished or TaskCreated).

    Unknown tasks are ignored, and those of coordinated reads, which have no end.
    """

    task_id: int


def _complete_task(state: State, command: CompleteTask) -> Decision:
    task = find_task(state, command.task_id)
    if task is None or task.completed:
        return Decision([], None)
    iteration = state.iterations[task.iteration_id]
    if is_coordinated(state, iteration):
        return Decision([], None)
    events = [lease_begun(lease_id) for lease_id in task.leases]
    events.append(ev.Event(task_completed=ev.TaskCompleted(task_id=task.task_id)))
    workers = None if task.sweeps else list(state.workers)  # it swept what it could
    seen = seen_the_end(state, iteration, True, task)
    return Decision([*events, *what_follows(iteration, seen, workers, Ids(state))], None)


def seen_the_end(state: State, iteration: Iteration, one: bool, task: Task | None = None) -> bool:
    """Whether somebody has seen the end of the data: any `one` of the tasks; under static sharding
    one for each shard. `task` is about to complete."""
    if not state.jobs[iteration.job_id].is_static:
        return one
    shards = iteration.shards_read | ({task.shard} if task is not None else set())
    return shards >= set(range(len(state.places)))


def what_follows(
    iteration: Iteration, seen_the_end: bool, workers: list[int] | None, ids: Ids
) -> list[ev.Event]:
    """What follows when one of an iteration's running tasks completes or is lost.

    The iteration ends with its last task, unless splits were handed back that nobody is left
    to ask for: then one of `workers` gets another task, once (None: that was it), or, if there
    are none, the next worker. Somebody must have seen the end of the data, too: an iteration
    whose workers are all lost waits for the next worker.
    """
    if iteration.finished or iteration.running_tasks > 1:
        return []
    if workers is not None and any(ledger.owes for ledger in iteration.ledgers):
        if not workers:
            return []
        return [created(ids.new(), iteration.iteration_id, workers[0], sweeps=True)]
    finished = ev.IterationFinished(iteration_id=iteration.iteration_id)
    return [ev.Event(iteration_finished=finished)] if seen_the_end else []


def created(task_id: int, iteration_id: int, worker_id: int, sweeps: bool = False) -> ev.Event:
    """A task, or one that its worker still has."""
    return ev.Event(
        task_created=ev.TaskCreated(
            task_id=task_id, iteration_id=iteration_id, worker_id=worker_id, sweeps=sweeps
        )
    )


def _task_created(state: State, event: ev.TaskCreated) -> None:
    task_id = taken(state, event.task_id)
    if task_id in state.tasks:
        _adopt(state, state.tasks[task_id], state.workers[event.worker_id])
        return
    if (lost := state.lost_tasks.pop(task_id, None)) is not None:
        task = lost.task
        _find_leases(state, task)
        task.worker_id = event.worker_id
    else:
        task = Task(task_id, event.iteration_id, event.worker_id, sweeps=event.sweeps)
        if state.jobs[state.iterations[event.iteration_id].job_id].is_static:
            task.shard = place_of(state, state.workers[event.worker_id].address)
    state.tasks[task_id] = task
    iteration = state.iterations[event.iteration_id]
    iteration.tasks.append(task_id)
    iteration.version += 1
    if task.completed:
        return  # and is only read
    iteration.running_tasks += 1
    worker = state.workers[event.worker_id]
    worker.tasks.add(task_id)
    worker.version += 1


def _adopt(state: State, task: Task, worker: Worker) -> None:
    """A worker has come to the address where consumers ask for the task."""
    assert task.orphan is not None
    if worker.uid == task.orphan.uid:
        _find_leases(state, task)
    else:
        task.lost = []
        _forget_answers(state, task)
    task.worker_id, task.orphan = worker.worker_id, None
    state.iterations[task.iteration_id].version += 1
    worker.tasks.add(task.task_id)
    worker.version += 1


def _find_leases(state: State, task: Task) -> None:
    """The task's worker has come back, and has what it had leased."""
    for lease in task.lost:
        state.leases[lease.lease_id] = lease
        task.leases.append(lease.lease_id)
        ledger_of(state, lease).find(lease.pass_number, lease.first, lease.stop)
    task.lost = []


def _task_completed(state: State, event: ev.TaskCompleted) -> None:
    task = state.tasks[event.task_id]
    task.completed = True
    iteration = state.iterations[task.iteration_id]
    iteration.running_tasks -= 1
    iteration.completed_tasks += 1
    if task.shard is not None:
        iteration.shards_read.add(task.shard)
    iteration.version += 1
    _take_from_worker(state, task)
    _forget_answers(state, task)


def lose(state: State, worker: Worker, comes_back: bool) -> None:
    """The tasks of a worker that is lost: kept, with their leases, if it may come back."""
    lost = [t.task_id for t in state.tasks.values() if t.worker_id == worker.worker_id]
    for task_id in lost:
        task = state.tasks[task_id]
        iteration = state.iterations[task.iteration_id]
        iteration.version += 1
        if is_coordinated(state, iteration):
            if task_id in iteration.tasks:  # consumers ask for it at its place in each round
                task.orphan = Orphan(worker.address, worker.uid)
            else:
                remove(state, task)
            continue
        del state.tasks[task_id]
        iteration.tasks.remove(task_id)
        iteration.running_tasks -= not task.completed
        if comes_back and not iteration.finished:
            state.lost_tasks[task_id] = LostTask(worker.uid, task)
        else:
            _forget_answers(state, task)
    if len(state.lost_tasks) > MAX_LOST_TASKS:
        newest = set(list(state.lost_tasks)[-MAX_LOST_TASKS:])
        forget_lost(state, lambda lost: lost.task.task_id not in newest)


def forget_lost(state: State, which: Callable[[LostTask], bool]) -> None:
    """If their worker comes back, it does not get these again."""
    for lost in [lost for lost in state.lost_tasks.values() if which(lost)]:
        del state.lost_tasks[lost.task.task_id]
        _forget_answers(state, lost.task)


def forget(state: State, iteration: Iteration) -> None:
    """All of the iteration's tasks: its workers need not run them any more."""
    forget_lost(state, lambda lost: lost.task.iteration_id == iteration.iteration_id)
    for task_id in iteration.all_tasks:
        task = state.tasks.pop(task_id)
        _take_from_worker(state, task)
        _forget_answers(state, task)
    iteration.tasks.clear()
    iteration.barrier = None
    iteration.running_tasks = 0


def remove(state: State, task: Task) -> None:
    """A running or pending task of a coordinated read goes, and the others go on."""
    iteration = state.iterations[task.iteration_id]
    if task.task_id in iteration.tasks:
        iteration.tasks.remove(task.task_id)
        iteration.running_tasks -= 1
    else:
        no_longer_pending(iteration, task.task_id)
    iteration.version += 1
    del state.tasks[task.task_id]
    _take_from_worker(state, task)
    _forget_answers(state, task)


def no_longer_pending(iteration: Iteration, task_id: int) -> None:
    """Consumers go on once none is."""
    assert iteration.barrier is not None
    iteration.barrier.tasks.remove(task_id)
    if not iteration.barrier.tasks:
        iteration.barrier = None


def _take_from_worker(state: State, task: Task) -> None:
    worker = state.workers.get(task.worker_id)
    if worker is not None and task.task_id in worker.tasks:
        worker.tasks.discard(task.task_id)
        worker.version += 1


def _forget_answers(state: State, task: Task) -> None:
    for source in range(len(state.iterations[task.iteration_id].ledgers)):
        state.answers.pop(lease_caller(task.task_id, source), None)


DECIDE: Decide = {CompleteTask: _complete_task}
APPLY: Apply = {"task_created": _task_created, "task_completed": _task_completed}
