"""Iterations: one epoch of the trainers over a job's dataset."""

from __future__ import annotations

from ...journal.proto import events_pb2 as ev
from .. import ranges
from ..errors import FailedPrecondition
from . import tasks
from .base import Bodies, Command, Decision, EventKind, find_iteration, reserve_id
from .splits import ledgers, lost_leases
from .state import Claims, Iteration, Job, State


class CollectIteration(Command, frozen=True, kw_only=True):
    """Collect an iteration that has been idle for long.

    → IterationSummarized if it is finished; else LeaseLost …, then IterationCollected, or
    IterationPaused if its splits must not be leased again when a consumer joins later.
    If its job has no name: → LeaseLost …, IterationCollected.
    """

    iteration_id: int


def _collect_iteration(state: State, command: CollectIteration) -> Decision:
    iteration = find_iteration(state, command.iteration_id)
    if iteration.consumers:
        raise FailedPrecondition(
            f"iteration {iteration.iteration_id} has {len(iteration.consumers)} consumers; "
            "only an iteration that nobody reads is collected"
        )
    if not state.jobs[iteration.job_id].name:
        return Decision(collected(state, iteration), None)
    if iteration.finished:
        return Decision([ev.IterationSummarized(iteration_id=iteration.iteration_id)], None)
    if iteration.keeps_progress and not iteration.all_tasks:
        return Decision([], None)
    return Decision(let_go(state, iteration), None)


def let_go(state: State, iteration: Iteration) -> Bodies:
    """End its tasks, and pause it if its splits must not be leased again, else collect it."""
    return [*lost_leases(state, iteration.all_tasks), over(iteration)]


def over(iteration: Iteration) -> ev.IterationPaused | ev.IterationCollected:
    """Like `let_go`, for an iteration without leases."""
    kind = ev.IterationPaused if iteration.keeps_progress else ev.IterationCollected
    return kind(iteration_id=iteration.iteration_id)


def collected(state: State, iteration: Iteration) -> Bodies:
    """Remove the iteration with its tasks and leases."""
    event = ev.IterationCollected(iteration_id=iteration.iteration_id)
    return [*lost_leases(state, iteration.all_tasks), event]


def _iteration_created(state: State, event: ev.IterationCreated) -> None:
    iteration_id = reserve_id(state, event.iteration_id)
    job = state.jobs[event.job_id]
    over = ranges.holds(job.summarized, event.epoch)  # no split left: it finishes next
    if over:
        ranges.remove(job.summarized, event.epoch, event.epoch + 1)
    sources = state.datasets[job.dataset_id].outline.sources
    state.iterations[iteration_id] = Iteration(
        iteration_id,
        event.job_id,
        event.epoch,
        ledgers(sources) if job.sharding == ev.DYNAMIC and not over else [],
        idle_since_ms=state.time_ms,
        claims=None if job.order is None or not job.order.claimed else Claims(job.order.bundles),
    )
    job.iterations[event.epoch] = iteration_id


def _iteration_finished(state: State, event: ev.IterationFinished) -> None:
    iteration = state.iterations[event.iteration_id]
    iteration.finished = True
    iteration.version += 1
    tasks.forget_lost(state, lambda task: task.iteration_id == iteration.iteration_id)
    forget_tasks_nobody_reads(state, iteration)


def _iteration_summarized(state: State, event: ev.IterationSummarized) -> None:
    iteration = state.iterations[event.iteration_id]
    job = _forget(state, iteration)
    ranges.add(job.summarized, iteration.epoch, iteration.epoch + 1)
    job.lost_splits += lost_splits(iteration)
    job.skipped_splits += iteration.skipped


def lost_splits(iteration: Iteration) -> int:
    """Lost splits of the current pass; sources that are leased together count once."""
    return sum(ranges.total(x.lost) for x in iteration.ledgers if iteration.counts(x))


def _iteration_collected(state: State, event: ev.IterationCollected) -> None:
    iteration = state.iterations[event.iteration_id]
    job = _forget(state, iteration)
    if job.is_ordered:  # the next one leaves out the same again
        job.skipped_splits = max(job.skipped_splits, iteration.skipped)
    if not job.name and not job.iterations:
        del state.jobs[job.job_id]


def _forget(state: State, iteration: Iteration) -> Job:
    """Remove the iteration and its tasks; returns its job."""
    tasks.forget(state, iteration)
    del state.iterations[iteration.iteration_id]
    job = state.jobs[iteration.job_id]
    del job.iterations[iteration.epoch]
    return job


def _iteration_paused(state: State, event: ev.IterationPaused) -> None:
    iteration = state.iterations[event.iteration_id]
    tasks.forget(state, iteration)
    iteration.version += 1


def first_epoch(job: Job) -> int:
    """The number that requests and events have for the job's first epoch. Clients count from 1, as
    tf.data service's do, but for jobs of one iteration: those without a name, and ordered ones."""
    return 0 if job.is_ordered or 0 in job.iterations or ranges.holds(job.summarized, 0) else 1


def used(state: State, iteration: Iteration) -> None:
    """Renew `used_ms` after a consumer has joined or left."""
    job = state.jobs[iteration.job_id]
    job.used_ms = state.datasets[job.dataset_id].used_ms = state.time_ms


def forget_tasks_nobody_reads(state: State, iteration: Iteration) -> None:
    """Remove the tasks of a finished iteration without consumers: nobody can read them."""
    if iteration.finished and not iteration.consumers:
        for task_id in iteration.tasks:
            del state.tasks[task_id]
        iteration.tasks.clear()


DECIDE = {CollectIteration: _collect_iteration}
EVENTS = {
    "iteration_created": EventKind(_iteration_created),
    "iteration_finished": EventKind(_iteration_finished),
    "iteration_summarized": EventKind(_iteration_summarized),
    "iteration_collected": EventKind(_iteration_collected),
    "iteration_paused": EventKind(_iteration_paused),
}
