"""What a job does, in one word, and what there is to say of it besides its state.

Every view has it from here: `forebay status`, `forebay doctor`, the pages and the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .state import Iteration, Job

STATES = ("running", "waiting", "failed", "idle", "finished")
"""Elements are read; readers wait, and get none; its last readers ended with an error, and nobody
has come since; nobody reads it; all of its epochs so far are over."""


class JobObservations(NamedTuple):
    """What consumers and workers have told of a job, and the events that its state does not keep.
    The fields are a status's."""

    waits: bool = False  # all who read it wait, and get nothing
    failed: bool = False  # nobody has joined it since its last error
    errors: Sequence[dict[str, Any]] = ()  # that ended reads, the latest last
    gone: Sequence[dict[str, Any]] = ()  # consumers that are silent, and not given up yet
    left: dict[str, Any] | None = None  # how the last consumer left
    losses: Sequence[dict[str, Any]] = ()  # of splits, the latest last


NOTHING = JobObservations()


def job_state(
    job: Job, iterations: Sequence[Iteration], observations: JobObservations = NOTHING
) -> str:
    """One of STATES. `iterations` are the job's own."""
    unfinished = [each for each in iterations if not each.finished]
    if (iterations or job.summarized) and not unfinished:
        return "finished"
    if sum(len(each.consumers) for each in unfinished) > len(observations.gone):
        return "waiting" if observations.waits else "running"
    return "failed" if observations.failed else "idle"
