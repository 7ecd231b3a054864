"""Tasks: one worker's part of one iteration."""

from __future__ import annotations

from collections.abc import Callable

from ...journal.proto import events_pb2 as ev
from .base import Bodies, Command, Decision, EventKind, Ids, find_task, reserve_id
from .read_kinds import kind_of, staying
from .splits import ledger_of
from .state import MAX_LOST_TASKS, Iteration, Orphan, State, Task, Worker, lease_caller, skip_caller


class CompleteTask(Command, frozen=True, kw_only=True):
    """→ LeaseBegun …, TaskCompleted, (IterationFinished or TaskCreated).

    Ignores unknown tasks, and those of coordinated and ordered reads, which never complete.
    """

    task_id: int


def _complete_task(state: State, command: CompleteTask) -> Decision:
    if (task := find_task(state, command.task_id)) is None or task.completed:
        return Decision([], None)
    iteration = state.iterations[task.iteration_id]
    kind = kind_of(state.jobs[iteration.job_id])
    if not kind.tasks_complete:
        return Decision([], None)
    events: Bodies = [ev.LeaseBegun(lease_id=lease_id) for lease_id in task.leases]
    events.append(ev.TaskCompleted(task_id=task.task_id))
    events += kind.on_task_ended(state, iteration, staying(state), Ids(state), task)
    return Decision(events, None)


def _task_created(state: State, event: ev.TaskCreated) -> None:
    task_id = reserve_id(state, event.task_id)
    worker, iteration = state.workers[event.worker_id], state.iterations[event.iteration_id]
    if (task := state.tasks.get(task_id) or state.lost_tasks.pop(task_id, None)) is None:
        shard = event.shard if event.HasField("shard") else None
        task = Task(task_id, event.iteration_id, event.worker_id, shard, event.sweeps)
    elif task.lost_with == worker.uid:
        _find_leases(state, task)
    else:  # another process at the address resumes it, in a coordinated read
        task.lost = []
        _forget_answers(state, task)
    task.worker_id, task.orphan = worker.worker_id, None
    if task_id not in state.tasks:
        state.tasks[task_id] = task
        iteration.tasks.append(task_id)
        iteration.running_tasks += not task.completed
    iteration.version += 1
    if not task.completed:  # a completed one is only read
        worker.tasks.add(task_id)
        worker.version += 1


def _find_leases(state: State, task: Task) -> None:
    """Restore the leases of a task whose worker has returned."""
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
    _end(state, task)


def lose(state: State, worker: Worker, comes_back: bool) -> None:
    """Drop the tasks of a lost worker; if it may return, keep them with their leases."""
    lost = [t.task_id for t in state.tasks.values() if t.worker_id == worker.worker_id]
    for task_id in lost:
        task = state.tasks[task_id]
        iteration = state.iterations[task.iteration_id]
        iteration.version += 1
        if kind_of(state.jobs[iteration.job_id]).has_rounds:
            if task_id in iteration.tasks:
                task.orphan = Orphan(worker.uid, worker.address)
            else:
                remove(state, task)
            continue
        del state.tasks[task_id]
        iteration.tasks.remove(task_id)
        iteration.running_tasks -= not task.completed
        if comes_back and not iteration.finished:
            task.orphan = Orphan(worker.uid, worker.address)
            state.lost_tasks[task_id] = task
        else:
            _forget_answers(state, task)
    if len(state.lost_tasks) > MAX_LOST_TASKS:
        newest = set(list(state.lost_tasks)[-MAX_LOST_TASKS:])
        forget_lost(state, lambda task: task.task_id not in newest)


def forget_lost(state: State, which: Callable[[Task], bool]) -> None:
    """Forget these lost tasks: a worker that returns does not get them again."""
    for task in [task for task in state.lost_tasks.values() if which(task)]:
        del state.lost_tasks[task.task_id]
        _forget_answers(state, task)


def forget(state: State, iteration: Iteration) -> None:
    """Remove all tasks of the iteration, so that its workers stop running them."""
    forget_lost(state, lambda task: task.iteration_id == iteration.iteration_id)
    for task_id in iteration.all_tasks:
        task = state.tasks.pop(task_id)
        _end(state, task)
    iteration.tasks.clear()
    iteration.barrier = None
    iteration.begun_indices.clear()
    iteration.removed.clear()
    iteration.running_tasks = 0


def remove(state: State, task: Task) -> None:
    """Remove a running or pending task of a coordinated or ordered read; the others continue."""
    iteration = state.iterations[task.iteration_id]
    if task.task_id in iteration.tasks:
        iteration.tasks.remove(task.task_id)
        iteration.running_tasks -= 1
    else:
        no_longer_pending(iteration, task.task_id)
    iteration.version += 1
    del state.tasks[task.task_id]
    _end(state, task)


def no_longer_pending(iteration: Iteration, task_id: int) -> None:
    """Remove the task from the barrier; the last one lifts the barrier, and consumers continue."""
    assert iteration.barrier is not None
    iteration.barrier.tasks.remove(task_id)
    if not iteration.barrier.tasks:
        iteration.barrier = None


def _end(state: State, task: Task) -> None:
    """Its worker has it no longer, and nobody repeats its requests."""
    worker = state.workers.get(task.worker_id)
    if worker is not None and task.task_id in worker.tasks:
        worker.tasks.discard(task.task_id)
        worker.version += 1
    _forget_answers(state, task)


def _forget_answers(state: State, task: Task) -> None:
    for source in range(len(state.iterations[task.iteration_id].ledgers)):
        state.answers.pop(lease_caller(task.task_id, source), None)
    state.answers.pop(skip_caller(task.task_id), None)


DECIDE = {CompleteTask: _complete_task}
EVENTS = {"task_created": EventKind(_task_created), "task_completed": EventKind(_task_completed)}
