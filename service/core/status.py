"""The state in words and numbers: what `forebay status` and `journal show --at` print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ...journal.proto import events_pb2 as ev
from ...journal.splits import ENDLESS
from . import ranges, saves
from .jobs import readers_of
from .kinds import why_no_task
from .ledger import Ledger
from .places import place_of
from .state import Dataset, EndedSave, Iteration, Job, Save, State


class Stranger(NamedTuple):
    """Who has asked for another journal, and was refused."""

    who: str
    journal_id: str
    sequence: int  # the newest event that it knows of there
    time_ms: int  # when it asked last


def status(
    state: State,
    strangers: Iterable[Stranger] = (),
    metrics: Mapping[int, dict[str, Any]] = MappingProxyType({}),
) -> dict[str, Any]:
    """A JSON-ready summary. Its size follows workers, jobs and iterations, not splits.

    These are no state: `strangers`, who ask for another journal, and `metrics`, by iteration, that
    users' code has counted.
    """
    return {
        "journal_id": state.journal_id,
        "born_ms": state.born_ms,
        "strangers": [s._asdict() for s in strangers],
        "sequence": state.sequence,
        "time_ms": state.time_ms,
        "leader": state.leader,
        "term": state.term,
        "datasets": [
            {"dataset_id": d.dataset_id, "unsplittable": d.definition.unsplittable or None}
            for d in state.datasets.values()
        ],
        "workers": [
            {
                "worker_id": w.worker_id,
                "address": w.address,
                "stock": w.stock,
                "draining": w.draining,
                "tags": w.tags,
                "running_tasks": len(w.tasks),
                "place": place_of(state, w.address),
            }
            for w in state.workers.values()
        ],
        "worker_addresses": [place.configured for place in state.places],
        "jobs": [
            {
                "job_id": job.job_id,
                "name": job.name or None,
                "dataset_id": job.dataset_id,
                "sharding": ev.Sharding.Name(job.sharding),
                "summarized": [[first, stop - 1] for first, stop in job.summarized],
                "lost_splits": job.lost_splits,
                "skipped_splits": job.skipped_splits,
                "cross_trainer_cache": job.cross_trainer_cache,
                "iterations": [
                    _iteration(state, state.iterations[i]) | {"metrics": metrics.get(i)}
                    for i in sorted(job.iterations.values())
                ],
            }
            for job in state.jobs.values()
        ],
        "leases": len(state.leases),
        "saves": [
            *(_save(state, save) for save in state.saves.values()),
            *map(_ended_save, state.ended_saves.values()),
        ],
    }


def _save(state: State, save: Save) -> dict[str, Any]:
    sizes = [source.size for source in save.sources]
    return {
        "path": save.path,
        "state": "being written",
        "waits_for": saves.waits_for(state, save) or None,
        "streams": len(save.streams),
        "completed_streams": ranges.total(saves.completed_streams(save)),
        "splits": [None if size == ENDLESS else size for size in sizes],
        "assigned": saves.given_out(save),
        "elements": sum(stream.elements for stream in save.streams),
    }


def _ended_save(save: EndedSave) -> dict[str, Any]:
    if save.failed:
        error = f"{save.failed}: {save.message}"
        return {"path": save.path, "state": "failed", "error": error}
    return {
        "path": save.path,
        "state": "finished",
        "streams": save.streams,
        "completed_streams": ranges.total(save.completed),
        "assigned": save.assigned,
        "elements": save.elements,
    }


def datasets(state: State) -> list[dict[str, Any]]:
    """A JSON-ready list of what is registered, and by whom it is read."""
    jobs: dict[str, list[Job]] = {}
    for job in state.jobs.values():
        jobs.setdefault(job.dataset_id, []).append(job)
    return [_dataset(state, d, jobs.get(d.dataset_id, [])) for d in state.datasets.values()]


def _dataset(state: State, dataset: Dataset, jobs: list[Job]) -> dict[str, Any]:
    definition = dataset.definition
    return {
        "dataset_id": dataset.dataset_id,
        "structure": definition.structure or None,
        "graph_bytes": dataset.graph_bytes or None,
        "registered_ms": dataset.registered_ms or None,
        "used_ms": dataset.used_ms or None,
        "jobs": [job.name for job in jobs if job.name],
        "consumers": sum(len(readers_of(state, job)) for job in jobs),
    }


def _iteration(state: State, iteration: Iteration) -> dict[str, Any]:
    definition = state.datasets[state.jobs[iteration.job_id].dataset_id].definition
    return {
        "iteration_id": iteration.iteration_id,
        "epoch": iteration.epoch,
        "finished": iteration.finished,
        "consumers": len(iteration.consumers),
        "running_tasks": iteration.running_tasks,
        "completed_tasks": iteration.completed_tasks,
        "skipped": iteration.skipped,
        "skips": [
            {
                "worker_address": skip.worker_address,
                "split": skip.split,
                "element": skip.element,
                "reason": skip.reason,
            }
            for skip in iteration.skips
        ],
        "no_task": (not iteration.finished and why_no_task(state, iteration)) or None,
        "sources": [
            {
                **_ledger(x, x.size if iteration.leased_singly else x.size_together),
                "waits_for": _waits_for(iteration, x, source),
            }
            for x, source in zip(iteration.ledgers, definition.sources, strict=False)  # or none
            if x.leased_with is None or iteration.leased_singly
        ],
    }


def _waits_for(iteration: Iteration, ledger: Ledger, source: ev.SplitSource) -> str | None:
    """The save of which somebody reads all that there is, and which is not complete."""
    all_given_out = ledger.next >= ledger.size and not ledger.owes
    waits = ledger.grows and all_given_out and bool(iteration.consumers)
    return source.saved_chunks.path if waits else None


def _ledger(ledger: Ledger, size: int) -> dict[str, Any]:
    return {
        "pass": ledger.pass_number,
        "splits": None if size == ENDLESS else size,
        "leased": ledger.leased,
        "begun": ranges.total(ledger.begun),
        "lost": ranges.total(ledger.lost),
        "returned": ranges.total(ledger.returned),
    }
