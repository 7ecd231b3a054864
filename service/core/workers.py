"""Workers: they run tasks. A worker presumed dead that registers again resumes its tasks."""

from __future__ import annotations

from ...journal.proto import events_pb2 as ev
from ..errors import FailedPrecondition, InvalidArgument
from . import tasks
from .base import (
    Command,
    Decide,
    Decision,
    EventKind,
    Events,
    Ids,
    reserve_id,
)
from .places import find_place
from .read_kinds import can_run, kind_of, staying
from .splits import all_returned, lost_leases
from .state import MAX_DEPARTED, MAX_LOST_WORKERS, LostWorker, State, Worker


class RegisterWorker(Command, frozen=True, kw_only=True):
    """→ (WorkerLost of an earlier process there,) WorkerRegistered, TaskCreated …

    The worker gets a task of each iteration with consumers, and resumes its lost tasks, as the
    iteration's kind allows (read_kinds.py). Answers the worker's id. For a registered
    worker: → TaskProposed for each coordinated read in which it has no task. A draining worker gets
    no new task: → WorkerDrains, once, with LeaseReturned … and TaskRemoved for each pending task,
    and for each task of an ordered read.
    """

    address: str
    uid: int
    tags: tuple[str, ...] = ()
    transfer_servers: tuple[ev.TransferServer, ...] = ()
    stock: bool = False
    draining: bool = False
    no_python: bool = False  # it does not run Python datasets


class LoseWorker(Command, frozen=True, kw_only=True):
    """→ LeaseLost …, WorkerLost, then for each iteration IterationFinished or TaskCreated."""

    worker_id: int
    reason: str
    left: bool = False  # it deregistered, so its process will not return


def _register_worker(state: State, command: RegisterWorker) -> Decision:
    if not command.address:
        raise InvalidArgument("a worker without an address; give it one that clients can reach")
    if command.uid in state.departed:  # a heartbeat that arrived after the deregistration
        raise FailedPrecondition(
            f"the worker process {command.uid} at {command.address} has said goodbye; start "
            "another one"
        )
    events: list[ev.Event] = []
    ids = Ids(state)
    known = state.workers.get(state.worker_at.get(command.address, 0))
    if known is not None:
        if known.uid == command.uid:
            if known.draining:
                return Decision([], known.worker_id)
            if command.draining:
                return Decision(_drains(state, known), known.worker_id)
            for iteration in state.iterations.values():
                job = state.jobs[iteration.job_id]
                if not iteration.finished and can_run(state, job, known):
                    events += kind_of(job).when_a_worker_beats(
                        state, iteration, known.worker_id, ids
                    )
            return Decision(events, known.worker_id)
        if known.replaced_uid == command.uid:
            raise FailedPrecondition(
                f"another worker process has taken the address {command.address}: give each "
                "worker a host, port and address of its own"
            )
    place = find_place(state, command.address, command.stock)
    if known is not None:
        events += _lost(state, known, "another process took its address", ids)
    finished = {event.iteration_finished.iteration_id for event in events}
    registered = ev.WorkerRegistered(
        worker_id=ids.new(),
        address=command.address,
        uid=command.uid,
        tags=command.tags,
        transfer_servers=command.transfer_servers,
        stock=command.stock,
        replaced_uid=known.uid if known is not None else 0,
        place=place,
        draining=command.draining,
        no_python=command.no_python,
    )
    events.append(ev.Event(worker_registered=registered))
    lost = [task for task in state.lost_tasks.values() if task.lost_with == command.uid]
    for iteration in state.iterations.values():
        over = iteration.finished or iteration.iteration_id in finished
        job = state.jobs[iteration.job_id]
        if not over and can_run(state, job, registered):
            events += kind_of(job).when_a_worker_comes(state, iteration, registered, lost, ids)
    return Decision(events, registered.worker_id)


def _worker_registered(state: State, event: ev.WorkerRegistered) -> None:
    worker_id = reserve_id(state, event.worker_id)
    state.workers[worker_id] = Worker(
        worker_id,
        event.address,
        event.uid,
        list(event.tags),
        [server.SerializeToString() for server in event.transfer_servers],
        event.stock,
        event.replaced_uid,
        draining=event.draining,
        no_python=event.no_python,
    )
    state.worker_at[event.address] = worker_id
    if event.HasField("place"):
        state.places[event.place].address = event.address
    if event.replaced_uid:  # from now on that process is refused
        tasks.forget_lost(state, lambda task: task.lost_with == event.replaced_uid)


def _lose_worker(state: State, command: LoseWorker) -> Decision:
    worker = state.workers.get(command.worker_id)
    if worker is None:
        return Decision([], None)
    return Decision(_lost(state, worker, command.reason, Ids(state), left=command.left), None)


def _drains(state: State, worker: Worker) -> list[ev.Event]:
    """Remove its pending tasks; their leases are returned, since no consumer got an element. Remove
    those that consumers can do without at once."""
    events = [ev.Event(worker_drains=ev.WorkerDrains(worker_id=worker.worker_id))]
    for task_id in sorted(worker.tasks):
        task = state.tasks[task_id]
        iteration = state.iterations[task.iteration_id]
        kind = kind_of(state.jobs[iteration.job_id])
        if task_id in iteration.tasks and not kind.drops_draining_workers:
            continue
        events += [all_returned(state.leases[lease_id]) for lease_id in task.leases]
        events.append(ev.Event(task_removed=ev.TaskRemoved(task_id=task_id)))
    return events


def _lost(
    state: State, worker: Worker, reason: str, ids: Ids, left: bool = False
) -> list[ev.Event]:
    lost = ev.WorkerLost(worker_id=worker.worker_id, reason=reason, left=left)
    events = [*lost_leases(state, sorted(worker.tasks)), ev.Event(worker_lost=lost)]
    others = [w for w in staying(state) if w != worker.worker_id]
    for task_id in sorted(worker.tasks):
        iteration = state.iterations[state.tasks[task_id].iteration_id]
        kind = kind_of(state.jobs[iteration.job_id])
        events += kind.when_a_task_ends(state, iteration, others, ids)
    return events


def _worker_drains(state: State, event: ev.WorkerDrains) -> None:
    state.workers[event.worker_id].draining = True


def _worker_lost(state: State, event: ev.WorkerLost) -> None:
    worker = state.workers.pop(event.worker_id)
    if state.worker_at.get(worker.address) == worker.worker_id:
        del state.worker_at[worker.address]
    if event.left:
        state.departed.append(worker.uid)
        del state.departed[:-MAX_DEPARTED]
    else:
        state.lost_workers.pop(worker.address, None)
        state.lost_workers[worker.address] = LostWorker(event.reason, state.time_ms)
        if len(state.lost_workers) > MAX_LOST_WORKERS:
            del state.lost_workers[next(iter(state.lost_workers))]
    tasks.lose(state, worker, not (event.left or event.for_good))


DECIDE: Decide = {RegisterWorker: _register_worker, LoseWorker: _lose_worker}
EVENTS: Events = {
    "worker_registered": EventKind(_worker_registered, may_free_stream=True),
    "worker_drains": EventKind(_worker_drains, may_free_stream=True),
    "worker_lost": EventKind(_worker_lost, may_free_stream=True),
}
