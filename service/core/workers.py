"""Workers: they run tasks. A worker presumed dead that registers again resumes its tasks."""

from __future__ import annotations

from msgspec.structs import asdict

from ...journal.proto import events_pb2 as ev
from ..errors import FailedPrecondition, InvalidArgument, PermissionDenied
from . import tasks
from .base import Bodies, Command, Decision, EventKind, Ids, reserve_id
from .places import find_place, place_of
from .read_kinds import can_run, kind_of, staying
from .splits import all_returned, lost_leases
from .state import (
    MAX_DEPARTED,
    MAX_LOST_WORKERS,
    Grants,
    Iteration,
    Job,
    LostWorker,
    State,
    Worker,
    WorkerGrant,
    covers,
)


class RegisterWorker(Command, frozen=True, kw_only=True):
    """→ (WorkerLost of an earlier process there,) WorkerRegistered, TaskCreated …

    The worker gets a task of each iteration with consumers, and resumes its lost tasks, as the
    iteration's kind allows (read_kinds.py). Answers the worker's id. A registered one whose grants
    have changed registers again under its id: → WorkerRegistered, TaskCreated …; if it may no
    longer run what it runs, it is lost first: → LeaseLost …, WorkerLost …. For a registered
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
    grants: Grants = ()  # what it may run
    holder: bytes = b""  # a digest of who asks; empty: without an access file


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
    events: Bodies = []
    known = state.workers.get(state.worker_at.get(command.address, 0))
    require_own(state, command)
    if known is not None and known.uid == command.uid:
        if (known.grants, known.holder) != (command.grants, command.holder):
            return Decision(_granted(state, known, command), known.worker_id)
        return Decision(_beats(state, known, command.draining), known.worker_id)
    if known is not None and known.replaced_uid == command.uid:
        raise FailedPrecondition(
            f"another worker process has taken the address {command.address}: give each worker a "
            "host, port and address of its own"
        )
    ids = Ids(state)
    registered = _registration(command, find_place(state, command.address, command.stock))
    if known is not None:
        registered.replaced_uid = known.uid
        events += _lost(state, known, "another process took its address", ids)
    registered.worker_id = ids.new()
    finished = {e.iteration_id for e in events if isinstance(e, ev.IterationFinished)}
    events.append(registered)
    for iteration in state.iterations.values():
        if not iteration.finished and iteration.iteration_id not in finished:
            events += _comes(state, iteration, registered, ids)
    return Decision(events, registered.worker_id)


def require_own(state: State, command: RegisterWorker) -> None:
    """Raises PermissionDenied if the address or the number is that of another pool's worker."""
    at = state.workers.get(state.worker_at.get(command.address, 0))
    others = [at] if at is not None else []
    if at is None or at.uid != command.uid:
        others += [worker for worker in state.workers.values() if worker.uid == command.uid]
    for worker in others:
        if not worker.is_of(command.grants, command.holder):
            raise PermissionDenied(
                f"the address {command.address} or the process number {command.uid} is that of a "
                f"worker at {worker.address} with other grants; give each worker a host, port and "
                "address of its own (if its grants and its credentials were both replaced: it may "
                "come back once the dispatcher has given it up)"
            )


def _registration(command: RegisterWorker, place: int | None) -> ev.WorkerRegistered:
    """Without its id, and without whom it replaces."""
    fields = asdict(command)
    del fields["request"]
    fields["grants"] = [ev.WorkerGrant(datasets=g.datasets, jobs=g.jobs) for g in command.grants]
    return ev.WorkerRegistered(place=place, **fields)


def _comes(state: State, iteration: Iteration, registered: ev.WorkerRegistered, ids: Ids) -> Bodies:
    """Give it its part of an unfinished iteration, if it can run that."""
    job = state.jobs[iteration.job_id]
    if not can_run(state, job, _worker(registered)):
        return []
    lost = [task for task in state.lost_tasks.values() if task.lost_with == registered.uid]
    return kind_of(job).on_worker_registered(state, iteration, registered, lost, ids)


def _beats(state: State, worker: Worker, drains: bool) -> Bodies:
    """A heartbeat of a registered worker."""
    if worker.draining or drains:
        return [] if worker.draining else _drains(state, worker)
    ids = Ids(state)
    return [
        event
        for iteration in state.iterations.values()
        if not iteration.finished and can_run(state, state.jobs[iteration.job_id], worker)
        for event in kind_of(state.jobs[iteration.job_id]).on_worker_heartbeat(
            state, iteration, worker.worker_id, ids
        )
    ]


def _granted(state: State, worker: Worker, command: RegisterWorker) -> Bodies:
    """A registered worker whose grants are others than before."""
    ids = Ids(state)
    if not all(covers(command.grants, _job_of(state, task_id)) for task_id in worker.tasks):
        return _lost(state, worker, "the access file no longer grants it what it ran", ids)
    registered = _registration(command, place_of(state, worker.address))
    registered.worker_id = worker.worker_id
    registered.draining |= worker.draining
    events: Bodies = [registered]
    for iteration in state.iterations.values():
        before = can_run(state, state.jobs[iteration.job_id], worker) or any(
            state.tasks[task_id].worker_id == worker.worker_id for task_id in iteration.all_tasks
        )
        if not iteration.finished and not before:
            events += _comes(state, iteration, registered, ids)
    return events


def _job_of(state: State, task_id: int) -> Job:
    return state.jobs[state.iterations[state.tasks[task_id].iteration_id].job_id]


def _worker(event: ev.WorkerRegistered) -> Worker:
    servers = [server.SerializeToString() for server in event.transfer_servers]
    grants = tuple(WorkerGrant(tuple(g.datasets), tuple(g.jobs)) for g in event.grants)
    return Worker.of(event, transfer_servers=servers, grants=grants)


def _worker_registered(state: State, event: ev.WorkerRegistered) -> None:
    if (known := state.workers.get(event.worker_id)) is not None:
        registered = _worker(event)
        known.grants, known.holder = registered.grants, registered.holder
        return
    worker_id = reserve_id(state, event.worker_id)
    state.workers[worker_id] = _worker(event)
    state.worker_at[event.address] = worker_id
    if event.HasField("place"):
        state.places[event.place].address = event.address
    if event.replaced_uid:  # from now on that process is refused
        tasks.forget_lost(state, lambda task: task.lost_with == event.replaced_uid)


def _lose_worker(state: State, command: LoseWorker) -> Decision:
    if (worker := state.workers.get(command.worker_id)) is None:
        return Decision([], None)
    return Decision(_lost(state, worker, command.reason, Ids(state), left=command.left), None)


def _drains(state: State, worker: Worker) -> Bodies:
    """Remove its pending tasks; their leases are returned, since no consumer got an element. Remove
    those that consumers can do without at once."""
    events: Bodies = [ev.WorkerDrains(worker_id=worker.worker_id)]
    for task_id in sorted(worker.tasks):
        task = state.tasks[task_id]
        iteration = state.iterations[task.iteration_id]
        kind = kind_of(state.jobs[iteration.job_id])
        if task_id in iteration.tasks and not kind.drops_draining_workers:
            continue
        events += [all_returned(state.leases[lease_id]) for lease_id in task.leases]
        events.append(ev.TaskRemoved(task_id=task_id))
    return events


def _lost(state: State, worker: Worker, reason: str, ids: Ids, left: bool = False) -> Bodies:
    lost = ev.WorkerLost(worker_id=worker.worker_id, reason=reason, left=left)
    events: Bodies = [*lost_leases(state, sorted(worker.tasks)), lost]
    others = [w for w in staying(state) if w != worker.worker_id]
    for task_id in sorted(worker.tasks):
        iteration = state.iterations[state.tasks[task_id].iteration_id]
        kind = kind_of(state.jobs[iteration.job_id])
        events += kind.on_task_ended(state, iteration, others, ids)
    return events


def _worker_drains(state: State, event: ev.WorkerDrains) -> None:
    state.workers[event.worker_id].draining = True


def _worker_lost(state: State, event: ev.WorkerLost) -> None:
    worker = state.workers.pop(event.worker_id)
    if state.worker_at.get(worker.address) == worker.worker_id:
        del state.worker_at[worker.address]
    state.lost_workers.pop(worker.address, None)  # it may have come back
    if event.left:
        state.departed.append(worker.uid)
        del state.departed[:-MAX_DEPARTED]
    else:
        state.lost_workers[worker.address] = LostWorker(event.reason, state.time_ms)
        if len(state.lost_workers) > MAX_LOST_WORKERS:
            del state.lost_workers[next(iter(state.lost_workers))]
    tasks.lose(state, worker, not (event.left or event.for_good))


DECIDE = {RegisterWorker: _register_worker, LoseWorker: _lose_worker}
EVENTS = {
    "worker_registered": EventKind(_worker_registered),
    "worker_drains": EventKind(_worker_drains),
    "worker_lost": EventKind(_worker_lost),
}
