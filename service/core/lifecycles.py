"""Transition tables: which event may follow in which state of each kind of entity.

`apply` checks them before it changes anything. An invalid transition is a bug, or a journal that
this program did not write; the error lists the entity's recent events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .state import State

ABSENT = "absent"  # not created yet, or removed
LEASED, LOST = "leased", "lost"
RUNNING, COMPLETED, COMPLETED_LOST = "running", "completed", "completed and lost"
PENDING, ORPHANED = "pending", "orphaned"  # only in coordinated reads (rounds.py)
WAITING, FINISHED = "waiting", "finished"
WRITTEN, FAILED = "being written", "failed"
EMPTY, HAS_OTHERS = "empty", "not empty"  # of jobs, or of iterations
EITHER = "waiting or running"  # depends on its tasks
GONE = "lost or absent"  # depends on why
REGISTERED = "registered"
READING = "reading"

Table = dict[str, dict[str, str]]
"""Transitions by the event's kind: old state → new state."""

DATASET: Table = {
    "dataset_used": {EMPTY: EMPTY, HAS_OTHERS: HAS_OTHERS},
    "compression_decided": {EMPTY: EMPTY, HAS_OTHERS: HAS_OTHERS},
    "lengths_learned": {EMPTY: EMPTY, HAS_OTHERS: HAS_OTHERS},
    "dataset_removed": {EMPTY: ABSENT},  # its jobs go first
}  # dataset_registered is valid in any state (a lost graph is replaced), so it is not checked.

JOB: Table = {
    "job_created": {ABSENT: EMPTY},
    "job_forked": {ABSENT: EMPTY},
    "iteration_created": {EMPTY: HAS_OTHERS, HAS_OTHERS: HAS_OTHERS},
    "bundles_checked": {EMPTY: EMPTY, HAS_OTHERS: HAS_OTHERS},
    "job_removed": {EMPTY: ABSENT},
}  # The removal of its last iteration makes it empty, or absent if it has no name.

LEASE: Table = {
    "splits_leased": {ABSENT: LEASED},
    "lease_begun": {LEASED: ABSENT},  # all of its splits were begun
    "lease_returned": {LEASED: ABSENT},  # its last splits were not begun
    "lease_lost": {LEASED: GONE},  # kept with its task, and restored if the worker returns; absent
    # if that worker has dropped elements of it
}

TASK: Table = {
    "task_created": {
        ABSENT: RUNNING, LOST: RUNNING, COMPLETED_LOST: COMPLETED, ORPHANED: RUNNING,
    },
    "task_proposed": {ABSENT: PENDING},
    "task_started": {PENDING: RUNNING},
    "task_removed": {RUNNING: ABSENT, ORPHANED: ABSENT, PENDING: ABSENT},
    "splits_leased": {RUNNING: RUNNING, PENDING: PENDING},
    "split_skipped": {RUNNING: RUNNING, PENDING: PENDING},
    "delivery_reported": {RUNNING: RUNNING, PENDING: PENDING},
    "task_completed": {RUNNING: COMPLETED},
}  # fmt: skip
# worker_lost makes it lost, or absent if the worker deregistered; the iteration's end makes it
# absent. In a coordinated read worker_lost orphans a running task and removes a pending one.

ITERATION: Table = {
    "iteration_created": {ABSENT: WAITING},
    "task_created": {WAITING: EITHER, RUNNING: RUNNING},
    "task_proposed": {WAITING: WAITING, RUNNING: RUNNING},
    "round_targeted": {WAITING: WAITING, RUNNING: RUNNING},
    "splits_leased": {WAITING: WAITING, RUNNING: RUNNING, FINISHED: FINISHED},
    "split_skipped": {WAITING: WAITING, RUNNING: RUNNING},
    "pass_started": {WAITING: WAITING, RUNNING: RUNNING, FINISHED: FINISHED},
    "splits_found": {WAITING: WAITING, RUNNING: RUNNING, FINISHED: FINISHED},
    "consumer_joined": {WAITING: WAITING, RUNNING: RUNNING, FINISHED: FINISHED},
    "consumers_moved": {WAITING: WAITING, RUNNING: RUNNING},
    "iteration_paused": {WAITING: WAITING, RUNNING: WAITING},
    "iteration_finished": {WAITING: FINISHED},
    "iteration_summarized": {FINISHED: ABSENT},
    "iteration_collected": {WAITING: ABSENT, RUNNING: ABSENT, FINISHED: ABSENT},
}  # Without a running task it is waiting. Stock workers may ask for splits at any time.


SAVE: Table = {
    "save_started": {ABSENT: WRITTEN},
    "stream_assigned": {WRITTEN: WRITTEN},
    "save_split_assigned": {WRITTEN: WRITTEN},
    "chunk_committed": {WRITTEN: WRITTEN},
    "stream_completed": {WRITTEN: WRITTEN},
    "save_finished": {WRITTEN: FINISHED},
    "save_failed": {WRITTEN: FAILED},
}  # An ended save becomes absent when its path gets a new save, or MAX_ENDED_SAVES evicts it.

WORKER: Table = {
    "worker_registered": {ABSENT: REGISTERED, REGISTERED: REGISTERED},  # its grants have changed
    "worker_drains": {REGISTERED: REGISTERED},
    "task_created": {REGISTERED: REGISTERED},
    "task_proposed": {REGISTERED: REGISTERED},
    "worker_lost": {REGISTERED: ABSENT},
}

CONSUMER: Table = {
    "consumer_joined": {ABSENT: READING},
    "consumer_began": {READING: READING},
    "consumer_blocked": {READING: READING},
    "bundles_claimed": {READING: READING},
    "claims_moved": {READING: READING},
    "consumer_left": {READING: ABSENT},
}


class WrongTransition(Exception):
    """An event that is invalid in the current state: a bug, or another program's journal."""


def dataset_state(state: State, dataset_id: str) -> str:
    """EMPTY (without jobs), HAS_OTHERS or ABSENT."""
    if dataset_id not in state.datasets:
        return ABSENT
    has_jobs = any(job.dataset_id == dataset_id for job in state.jobs.values())
    return HAS_OTHERS if has_jobs else EMPTY


def job_state(state: State, job_id: int) -> str:
    """EMPTY (without iterations), HAS_OTHERS or ABSENT."""
    job = state.jobs.get(job_id)
    return ABSENT if job is None else HAS_OTHERS if job.iterations else EMPTY


def lease_state(state: State, lease_id: int) -> str:
    """Leased, lost or absent."""
    if lease_id in state.leases:
        return LEASED
    if lease_id >= state.next_id:  # a new lease: skip the long search below
        return ABSENT
    tasks = [*state.tasks.values(), *state.lost_tasks.values()]
    return LOST if any(lease.lease_id == lease_id for t in tasks for lease in t.lost) else ABSENT


def task_state(state: State, task_id: int) -> str:
    """RUNNING, COMPLETED, LOST, COMPLETED_LOST, PENDING, ORPHANED or ABSENT."""
    if (task := state.tasks.get(task_id)) is not None:
        if task.orphan is not None:
            return ORPHANED
        barrier = state.iterations[task.iteration_id].barrier
        if barrier is not None and task_id in barrier.tasks:
            return PENDING
        return COMPLETED if task.completed else RUNNING
    if (lost := state.lost_tasks.get(task_id)) is not None:
        return COMPLETED_LOST if lost.completed else LOST
    return ABSENT


def iteration_state(state: State, iteration_id: int) -> str:
    """WAITING (for workers or consumers), RUNNING, FINISHED or ABSENT."""
    if (iteration := state.iterations.get(iteration_id)) is None:
        return ABSENT
    return FINISHED if iteration.finished else RUNNING if iteration.running_tasks else WAITING


def save_state(state: State, save_id: int) -> str:
    """Being written, finished, failed or absent."""
    if save_id in state.saves:
        return WRITTEN
    ended = state.ended_saves.get(save_id)
    return ABSENT if ended is None else FINISHED if ended.finished else FAILED


class Entity(NamedTuple):
    name: str
    states: Callable[[State, Any], str]  # of the id
    table: Table


ENTITIES = (
    Entity("dataset", dataset_state, DATASET),
    Entity("job", job_state, JOB),
    Entity("lease", lease_state, LEASE),
    Entity("task", task_state, TASK),
    Entity("iteration", iteration_state, ITERATION),
    Entity("save", save_state, SAVE),
    Entity("worker", lambda s, i: REGISTERED if i in s.workers else ABSENT, WORKER),
    Entity("consumer", lambda s, i: READING if i in s.consumers else ABSENT, CONSUMER),
)


def check(state: State, kind: str, body: Any) -> None:
    """Raise WrongTransition if the event is invalid in the current state."""
    for entity in ENTITIES:
        transitions = entity.table.get(kind)
        if transitions is None:
            continue
        field = f"{entity.name}_id"
        entity_id = getattr(body, field)
        if not entity_id and kind == "splits_leased":
            continue  # a split through GetSplit, which names neither lease nor task
        found = entity.states(state, entity_id)
        if found not in transitions:
            raise WrongTransition(
                f"event {state.sequence + 1}, {kind}, cannot be applied: {entity.name} {entity_id} "
                f"is {found}, and must be {' or '.join(transitions)}. "
                f"{_story(state, field, entity_id)}"
            )


def _story(state: State, field: str, entity_id: Any) -> str:
    story = [
        f"{sequence} {kind} {{{str(body).strip()}}}".replace("\n", ", ")
        for sequence, event in state.recent
        if (kind := event.WhichOneof("event") or "")
        and getattr(body := getattr(event, kind), field, None) == entity_id
    ]
    if not story:
        return f"None of the last {len(state.recent)} events is of it"
    return "What happened to it: " + "; ".join(story)
