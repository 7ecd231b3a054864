"""Logs what a worker loses. Tests look here for it, so its functions are called by module."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..proto import forebay_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Undelivered:
    """The work that is lost if a task is cancelled now."""

    elements: int  # finished, not acknowledged
    unfinished: bool  # the pipeline works on more
    begun_last: tuple[str, ...]  # splits, for messages

    def __str__(self) -> str:
        finished = f"{self.elements} elements that are finished"
        rest = ", and what the pipeline is working on" if self.unfinished else ""
        last = f" (begun last: splits {', '.join(self.begun_last)})" if self.begun_last else ""
        return finished + rest + last


def dropped(task: pb.Task, what: Undelivered, *, is_read: bool, drain_timeout_ms: int) -> None:
    """The worker drained without delivering this. `is_read`: the task has consumers, but they
    were too slow.
    """
    log.warning(
        "of task %d of dataset %s are dropped: %s; %s",
        task.task_id, task.dataset_id, what,
        f"its readers did not take them within {drain_timeout_ms} ms: "
        "a longer --drain-timeout-ms gives them more time"
        if is_read else "nobody reads it",
    )  # fmt: skip


def given_up(task: pb.Task, what: Undelivered) -> None:
    """The dispatcher no longer lists the task, which has no consumers here: this is lost."""
    log.info("task %d is given up, with %s", task.task_id, what)


def parked(task: pb.Task, what: Undelivered) -> None:
    """A task without consumers was parked. Its pipeline restarts with the remaining splits when
    a consumer comes. Begun splits are lost if `what.unfinished`."""
    if what.unfinished:
        log.warning(
            "nobody reads task %d of dataset %s: its pipeline was ended within splits, whose "
            "remaining elements are lost (splits begun last: %s); %d elements are kept",
            task.task_id, task.dataset_id, ", ".join(what.begun_last), what.elements,
        )  # fmt: skip
    else:
        log.info("task %d is parked: nobody reads it; %d elements are kept for whoever comes",
                 task.task_id, what.elements)  # fmt: skip


def shed(task: pb.Task, elements: int) -> None:
    """These elements of a task without consumers were evicted, and are lost."""
    log.warning(
        "%d elements of task %d of dataset %s are dropped: nobody reads it, and this worker "
        "keeps only so much for epochs that were left; a larger --memory-budget may keep more",
        elements, task.task_id, task.dataset_id,
    )  # fmt: skip


def not_handed_back(task_id: int, source: int, error: BaseException) -> None:
    """A worker could not return unstarted splits; they are lost if it stops."""
    log.warning("task %d cannot hand splits of source %d back: %r", task_id, source, error)
