"""`apply`: how an event changes the state. Total: an event that was journaled applies.

One function an event kind, found by name. Nothing is decided here and nothing can fail on
purpose: an exception in this file is a bug, or a journal that this program did not write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from ...journal.proto import events_pb2 as ev
from ...journal.splits import source_size
from . import ranges
from .state import (
    MAX_ANSWERS,
    MAX_DEPARTED,
    MAX_LOST_TASKS,
    Answer,
    Consumer,
    Dataset,
    Iteration,
    Job,
    Lease,
    LostTask,
    Provider,
    State,
    Task,
    Worker,
    lease_caller,
)

MAX_CUT_IDS = 10**12
"""More ids than a repair can have cut off, even if the journal was corrupt at its beginning."""


def apply(state: State, event: ev.Event) -> None:
    """Change `state` as `event`, the next one of the journal, says."""
    state.sequence += 1
    state.time_ms = event.time_ms
    kind = event.WhichOneof("event")
    assert kind is not None, f"event {state.sequence} is of no known kind"
    _APPLY[kind](state, getattr(event, kind))
    if event.HasField("request"):
        answers = state.answers
        answers.pop(event.request.caller, None)
        answers[event.request.caller] = Answer(event.request.number, event.SerializeToString())
        if len(answers) > MAX_ANSWERS:
            del answers[next(iter(answers))]


def fingerprint(definition: ev.DatasetDefinition) -> str:
    """What equal datasets have in common, whatever names were generated for their graphs."""
    equal = ev.DatasetDefinition()
    equal.CopyFrom(definition)
    if equal.tf_data_graph.fingerprint:
        equal.tf_data_graph.blob = ""
    return _digest(equal.SerializeToString(deterministic=True))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _taken(state: State, number: int) -> int:
    state.next_id = max(state.next_id, number + 1)
    return number


def _leader_elected(state: State, event: ev.LeaderElected) -> None:
    if event.journal_id != state.journal_id:
        _begin_anew(state, event.journal_id)
        state.born_ms = state.time_ms
        if event.after_repair:
            state.predecessors.append(state.journal_id)
    state.term = event.term
    state.leader = event.address
    state.journal_id = event.journal_id


def _begin_anew(state: State, journal_id: str) -> None:
    """The journal is new, or a repair has cut events off that somebody may have been told of.

    Nobody who worked with it goes on, and no id that may have been given out is given again.
    """
    for lease_id in list(state.leases):
        _lease_lost(state, ev.LeaseLost(lease_id=lease_id))
    for consumer_id in list(state.consumers):
        _consumer_left(state, ev.ConsumerLeft(consumer_id=consumer_id))
    for worker_id in list(state.workers):
        _worker_lost(state, ev.WorkerLost(worker_id=worker_id))
    _forget_lost_tasks(state, lambda _: True)
    begin = 1000 * (1 + int(_digest(journal_id.encode())[:8], 16) % 10**6)
    state.next_id = max(begin, state.next_id + MAX_CUT_IDS if state.journal_id else 0)


def _dataset_registered(state: State, event: ev.DatasetRegistered) -> None:
    definition = event.definition.SerializeToString(deterministic=True)
    known = state.datasets.get(event.dataset_id)  # whose graph was lost
    disabled = known.compression_disabled if known else None
    state.datasets[event.dataset_id] = Dataset(event.dataset_id, definition, disabled)
    state.dataset_by_fingerprint.setdefault(fingerprint(event.definition), event.dataset_id)
    if event.dataset_id.isdecimal() and len(event.dataset_id) < 19:
        _taken(state, int(event.dataset_id))


def _compression_decided(state: State, event: ev.CompressionDecided) -> None:
    state.datasets[event.dataset_id].compression_disabled = event.disabled


def _job_created(state: State, event: ev.JobCreated) -> None:
    job_id = _taken(state, event.job_id)
    state.jobs[job_id] = Job(
        job_id,
        event.name,
        event.dataset_id,
        event.sharding,
        event.num_consumers if event.HasField("num_consumers") else None,
        event.cross_trainer_cache,
        event.target_workers,
    )
    if event.name:
        state.job_by_name[event.name] = job_id


def _iteration_created(state: State, event: ev.IterationCreated) -> None:
    iteration_id = _taken(state, event.iteration_id)
    job = state.jobs[event.job_id]
    sources = state.datasets[job.dataset_id].definition.sources
    providers = _providers(sources) if job.sharding == ev.DYNAMIC else []
    state.iterations[iteration_id] = Iteration(
        iteration_id, event.job_id, event.repetition, providers, idle_since_ms=state.time_ms
    )
    job.iterations[event.repetition] = iteration_id


def _providers(sources: Sequence[ev.SplitSource]) -> list[Provider]:
    providers = [Provider(source_size(source)) for source in sources]
    for provider, source in zip(providers, sources, strict=True):
        if source.HasField("leased_with"):
            provider.leased_with = source.leased_with
            first = providers[source.leased_with]
            first.shared_size = min(first.size_together, provider.size)
    return providers


def _iteration_finished(state: State, event: ev.IterationFinished) -> None:
    iteration = state.iterations[event.iteration_id]
    iteration.finished = True
    iteration.version += 1
    _forget_lost_tasks(state, lambda lost: lost.task.iteration_id == iteration.iteration_id)
    _forget_tasks_nobody_reads(state, iteration)


def _iteration_collected(state: State, event: ev.IterationCollected) -> None:
    _forget_lost_tasks(state, lambda lost: lost.task.iteration_id == event.iteration_id)
    iteration = state.iterations.pop(event.iteration_id)
    job = state.jobs[iteration.job_id]
    del job.iterations[iteration.repetition]
    _forget_tasks(state, iteration)
    if not job.name and not job.iterations:
        del state.jobs[job.job_id]


def _iteration_paused(state: State, event: ev.IterationPaused) -> None:
    _forget_lost_tasks(state, lambda lost: lost.task.iteration_id == event.iteration_id)
    iteration = state.iterations[event.iteration_id]
    _forget_tasks(state, iteration)
    iteration.running_tasks = 0
    iteration.version += 1


def _consumer_joined(state: State, event: ev.ConsumerJoined) -> None:
    consumer_id = _taken(state, event.consumer_id)
    state.consumers[consumer_id] = Consumer(consumer_id, event.iteration_id)
    state.iterations[event.iteration_id].consumers.add(consumer_id)


def _consumer_left(state: State, event: ev.ConsumerLeft) -> None:
    consumer = state.consumers.pop(event.consumer_id)
    iteration = state.iterations[consumer.iteration_id]
    iteration.consumers.discard(consumer.consumer_id)
    iteration.idle_since_ms = state.time_ms
    _forget_tasks_nobody_reads(state, iteration)


def _worker_registered(state: State, event: ev.WorkerRegistered) -> None:
    worker_id = _taken(state, event.worker_id)
    state.workers[worker_id] = Worker(
        worker_id,
        event.address,
        event.uid,
        list(event.tags),
        [server.SerializeToString() for server in event.transfer_servers],
        event.stock,
        event.replaced_uid,
    )
    state.worker_at[event.address] = worker_id
    if event.replaced_uid:  # which is refused from now on
        _forget_lost_tasks(state, lambda lost: lost.uid == event.replaced_uid)


def _worker_lost(state: State, event: ev.WorkerLost) -> None:
    worker = state.workers.pop(event.worker_id)
    if state.worker_at.get(worker.address) == worker.worker_id:
        del state.worker_at[worker.address]
    if event.left:
        state.departed.append(worker.uid)
        del state.departed[:-MAX_DEPARTED]
    for task_id in [t.task_id for t in state.tasks.values() if t.worker_id == worker.worker_id]:
        task = state.tasks.pop(task_id)
        iteration = state.iterations[task.iteration_id]
        iteration.tasks.remove(task_id)
        iteration.running_tasks -= not task.completed
        iteration.version += 1
        if event.left or iteration.finished:
            _forget_answers(state, task, iteration)
        else:
            state.lost_tasks[task_id] = LostTask(worker.uid, task)
    if len(state.lost_tasks) > MAX_LOST_TASKS:
        newest = set(list(state.lost_tasks)[-MAX_LOST_TASKS:])
        _forget_lost_tasks(state, lambda lost: lost.task.task_id not in newest)


def _task_created(state: State, event: ev.TaskCreated) -> None:
    task_id = _taken(state, event.task_id)
    if (lost := state.lost_tasks.pop(task_id, None)) is not None:
        _resume(state, lost.task, event.worker_id)
    else:
        state.tasks[task_id] = Task(task_id, event.iteration_id, event.worker_id, event.sweeps)
    iteration = state.iterations[event.iteration_id]
    iteration.tasks.append(task_id)
    iteration.version += 1
    if state.tasks[task_id].completed:
        return  # and is only read
    iteration.running_tasks += 1
    worker = state.workers[event.worker_id]
    worker.tasks.add(task_id)
    worker.version += 1


def _task_completed(state: State, event: ev.TaskCompleted) -> None:
    task = state.tasks[event.task_id]
    task.completed = True
    iteration = state.iterations[task.iteration_id]
    iteration.running_tasks -= 1
    iteration.completed_tasks += 1
    iteration.version += 1
    _drop_task(state, task)
    _forget_answers(state, task, iteration)


def _splits_leased(state: State, event: ev.SplitsLeased) -> None:
    iteration = state.iterations[event.iteration_id]
    provider = iteration.providers[event.provider]
    first, stop = event.first, event.first + event.count
    current = event.repetition == provider.repetition
    if provider.shared_size is not None or provider.leased_with is not None:
        iteration.leased_singly = event.lease_id == 0
    if not current:
        left = provider.left_over[event.repetition]
        ranges.remove(left, first, stop)
        if not left:
            del provider.left_over[event.repetition]
    elif first == provider.next:
        provider.next = stop
    else:
        ranges.remove(provider.returned, first, stop)
    if event.lease_id == 0:
        if current:
            ranges.add(provider.completed, first, stop)
        return
    lease_id = _taken(state, event.lease_id)
    state.leases[lease_id] = Lease(
        lease_id,
        event.iteration_id,
        event.task_id,
        event.provider,
        event.repetition,
        first,
        event.count,
    )
    state.tasks[event.task_id].leases.append(lease_id)


def _lease_completed(state: State, event: ev.LeaseCompleted) -> None:
    lease, provider, current = _end_lease(state, event.lease_id)
    if current:
        ranges.add(provider.completed, lease.first, lease.first + lease.count)


def _lease_returned(state: State, event: ev.LeaseReturned) -> None:
    lease, provider, current = _end_lease(state, event.lease_id)
    stop = lease.first + lease.count
    if current:
        ranges.add(provider.completed, lease.first, stop - event.count)
        ranges.add(provider.returned, stop - event.count, stop)
    else:
        left = provider.left_over.setdefault(lease.repetition, [])
        ranges.add(left, stop - event.count, stop)


def _lease_lost(state: State, event: ev.LeaseLost) -> None:
    lease, provider, current = _end_lease(state, event.lease_id)
    state.tasks[lease.task_id].lost.append(lease)
    if current:
        ranges.add(provider.lost, lease.first, lease.first + lease.count)


def _repetition_started(state: State, event: ev.RepetitionStarted) -> None:
    provider = state.iterations[event.iteration_id].providers[event.provider]
    if provider.returned:
        provider.left_over[provider.repetition] = provider.returned
    provider.repetition, provider.next = event.repetition, 0
    provider.returned, provider.completed, provider.lost = [], [], []


def _end_lease(state: State, lease_id: int) -> tuple[Lease, Provider, bool]:
    """The lease, its provider, and whether that is still in the lease's repetition."""
    lease = state.leases.pop(lease_id)
    state.tasks[lease.task_id].leases.remove(lease_id)
    provider = state.iterations[lease.iteration_id].providers[lease.provider]
    return lease, provider, provider.repetition == lease.repetition


def _resume(state: State, task: Task, worker_id: int) -> None:
    """The task's worker has come back, and has what it had leased."""
    state.tasks[task.task_id] = task
    task.worker_id = worker_id
    for lease in task.lost:
        state.leases[lease.lease_id] = lease
        task.leases.append(lease.lease_id)
        provider = state.iterations[lease.iteration_id].providers[lease.provider]
        if provider.repetition == lease.repetition:
            ranges.remove(provider.lost, lease.first, lease.first + lease.count)
    task.lost = []


def _forget_lost_tasks(state: State, which: Callable[[LostTask], bool]) -> None:
    for lost in [lost for lost in state.lost_tasks.values() if which(lost)]:
        del state.lost_tasks[lost.task.task_id]
        _forget_answers(state, lost.task, state.iterations[lost.task.iteration_id])


def _forget_tasks(state: State, iteration: Iteration) -> None:
    for task_id in iteration.tasks:
        task = state.tasks.pop(task_id)
        _drop_task(state, task)
        _forget_answers(state, task, iteration)
    iteration.tasks.clear()


def _drop_task(state: State, task: Task) -> None:
    """The worker need not run it any more."""
    worker = state.workers[task.worker_id]
    if task.task_id in worker.tasks:
        worker.tasks.discard(task.task_id)
        worker.version += 1


def _forget_answers(state: State, task: Task, iteration: Iteration) -> None:
    for provider in range(len(iteration.providers)):
        state.answers.pop(lease_caller(task.task_id, provider), None)


def _forget_tasks_nobody_reads(state: State, iteration: Iteration) -> None:
    if iteration.finished and not iteration.consumers:
        for task_id in iteration.tasks:
            del state.tasks[task_id]
        iteration.tasks.clear()


_APPLY: dict[str, Callable[[State, Any], None]] = {
    "leader_elected": _leader_elected,
    "dataset_registered": _dataset_registered,
    "compression_decided": _compression_decided,
    "job_created": _job_created,
    "iteration_created": _iteration_created,
    "iteration_finished": _iteration_finished,
    "iteration_collected": _iteration_collected,
    "iteration_paused": _iteration_paused,
    "consumer_joined": _consumer_joined,
    "consumer_left": _consumer_left,
    "worker_registered": _worker_registered,
    "worker_lost": _worker_lost,
    "task_created": _task_created,
    "task_completed": _task_completed,
    "splits_leased": _splits_leased,
    "lease_completed": _lease_completed,
    "lease_returned": _lease_returned,
    "lease_lost": _lease_lost,
    "repetition_started": _repetition_started,
}
