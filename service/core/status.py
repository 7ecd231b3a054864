"""The state in words and numbers: what `forebay status` and `journal show --at` print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ...journal.proto import events_pb2 as ev
from ...journal.splits import ENDLESS
from . import ranges
from .state import Iteration, Provider, State


class Stranger(NamedTuple):
    """Who has asked for another journal, and was refused."""

    who: str
    journal_id: str
    sequence: int  # the newest event that it knows of there
    time_ms: int  # when it asked last


def status(state: State, strangers: Iterable[Stranger] = ()) -> dict[str, Any]:
    """A JSON-ready summary. Its size follows workers, jobs and iterations, not splits.

    `strangers` is no state: who asks for another journal.
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
                "tags": w.tags,
                "running_tasks": len(w.tasks),
            }
            for w in state.workers.values()
        ],
        "jobs": [
            {
                "job_id": job.job_id,
                "name": job.name or None,
                "dataset_id": job.dataset_id,
                "sharding": ev.Sharding.Name(job.sharding),
                "iterations": [
                    _iteration(state.iterations[i]) for i in sorted(job.iterations.values())
                ],
            }
            for job in state.jobs.values()
        ],
        "leases": len(state.leases),
    }


def _iteration(iteration: Iteration) -> dict[str, Any]:
    return {
        "iteration_id": iteration.iteration_id,
        "repetition": iteration.repetition,
        "finished": iteration.finished,
        "consumers": len(iteration.consumers),
        "running_tasks": iteration.running_tasks,
        "completed_tasks": iteration.completed_tasks,
        "providers": [
            _provider(p, p.size if iteration.leased_singly else p.size_together)
            for p in iteration.providers
            if p.leased_with is None or iteration.leased_singly
        ],
    }


def _provider(provider: Provider, size: int) -> dict[str, Any]:
    completed, lost = ranges.total(provider.completed), ranges.total(provider.lost)
    returned = ranges.total(provider.returned)
    return {
        "repetition": provider.repetition,
        "splits": None if size == ENDLESS else size,
        "leased": provider.next - returned - completed - lost,
        "completed": completed,
        "lost": lost,
        "returned": returned,
    }
