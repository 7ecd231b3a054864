"""What a worker tells whoever runs it: what was lost, and which tasks ended before their time."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..errors import ForebayError, PipelineError
from ..proto import forebay_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Undelivered:
    """What of a task's work is lost if the task is cancelled now."""

    elements: int  # finished, and not known to be with a consumer
    unfinished: bool  # the pipeline works on more
    begun_last: tuple[str, ...]  # splits, for people

    def __str__(self) -> str:
        finished = f"{self.elements} elements that are finished"
        rest = ", and what the pipeline is working on" if self.unfinished else ""
        last = f" (begun last: splits {', '.join(self.begun_last)})" if self.begun_last else ""
        return finished + rest + last


class Observer:
    """Writes it to the log. A worker that is given another observer calls that instead.

    Its methods are called from the worker's threads, which go on when they return: they must
    neither raise nor wait, and may be called by several threads at a time.
    """

    def dropped(
        self, task: pb.Task, what: Undelivered, *, is_read: bool, drain_timeout_ms: int
    ) -> None:
        """The worker stops, was to drain, and did not deliver this, though the task `is_read`, or
        because nobody does.
        """
        log.warning(
            "of task %d of dataset %s are dropped: %s; %s",
            task.task_id, task.dataset_id, what,
            f"its readers did not take them within {drain_timeout_ms} ms: "
            "a longer --drain-timeout-ms gives them more time"
            if is_read else "nobody reads it",
        )  # fmt: skip

    def given_up(self, task: pb.Task, what: Undelivered) -> None:
        """The dispatcher lists the task no more, and nobody here reads it: this is let go."""
        log.info("task %d is given up, with %s", task.task_id, what)

    def not_handed_back(self, task_id: int, source: int, error: BaseException) -> None:
        """Splits that a draining worker had leased, and not begun, are lost with it."""
        log.warning("task %d cannot hand splits of source %d back: %r", task_id, source, error)

    def ended_early(self, task: pb.Task, error: ForebayError) -> None:
        """The dispatcher has given the task up, or cannot be reached any more."""
        log.info("task %d ends early: %s", task.task_id, error)

    def failed(self, task: pb.Task, error: ForebayError) -> None:
        """Its consumers are told: the pipeline's own computation raised, or the worker cannot
        run it.
        """
        level = logging.WARNING if isinstance(error, PipelineError) else logging.ERROR
        log.log(level, "task %d failed: %s", task.task_id, error)

    def consumers_forgotten(self, consumer_ids: list[int], elements: int) -> None:
        """While it drained: these have gone for good, and lack elements that were sent to them."""
        log.warning(
            "consumers %s have gone, and lack %d elements that were sent: they have come back "
            "neither here nor to the dispatcher", consumer_ids, elements,
        )  # fmt: skip

    def journal_changed(self, before: str, now: str) -> None:
        """All tasks are let go: the dispatcher's numbers mean others from now on."""
        log.warning(
            "the dispatcher has another journal (%s, was %s), since that was in memory, or was "
            "repaired; this worker begins anew", now, before,
        )  # fmt: skip
