"""Silent workers: those that send nothing although a consumer waits for what it asked of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from ..proto import forebay_pb2 as pb

log = logging.getLogger(__name__)

SLOW_S = 10.0
"""A worker that is waited for and has sent nothing for so long is *silent*; twice as long after
each time."""

AWAY_S = 2.0
"""A consumer that has not looked for so long was not waiting: what came meanwhile is unread."""

SILENT_S = 60.0
"""How long others are asked instead of a silent worker."""


class SilenceDetector:
    """Finds the tasks of silent workers. The reading thread calls all of it."""

    def __init__(self) -> None:
        self._looked_s = 0.0
        self._back_s = 0.0  # since when it has looked without a break
        self._slow_s = SLOW_S
        self._heard_s: dict[int, float] = {}  # by task: when it sent something
        self._silent: dict[int, float] = {}  # by task: until when others are asked instead

    def heard(self, task_id: int) -> None:
        """The task has sent something."""
        self._heard_s[task_id] = time.monotonic()

    def is_silent(self, task_id: int) -> bool:
        """Whether others are to be asked instead of this task."""
        return task_id in self._silent

    def avoid(self, tasks: Iterable[int]) -> None:
        """Others are to be asked instead of these tasks, for another reason."""
        self._silent.update(dict.fromkeys(tasks, time.monotonic() + SILENT_S))

    def look(
        self, tasks: Mapping[int, pb.TaskInfo], awaited: Iterable[tuple[int, float]]
    ) -> set[int]:
        """Those of `tasks` that have fallen silent. `awaited`: the tasks that the consumer waits
        for, and when each was asked; iterated once a second."""
        now = time.monotonic()
        if len(tasks) < 2 or now < self._looked_s + 1:
            return set()
        if now > self._looked_s + AWAY_S:
            self._back_s = now
        self._looked_s = now
        self._silent = {task_id: s for task_id, s in self._silent.items() if s > now}
        silent = {
            task_id
            for task_id, asked_s in awaited
            if now - max(asked_s, self._heard_s.get(task_id, 0.0), self._back_s) >= self._slow_s
        }
        if not silent:
            return silent
        log.warning(
            "nothing has come from workers %s for %.0f s: asking others",
            sorted(tasks[task_id].worker_address for task_id in silent), self._slow_s,
        )  # fmt: skip
        self._slow_s *= 2
        self._silent.update(dict.fromkeys(silent, now + SILENT_S))
        if self._silent.keys() >= tasks.keys():  # so these are not worse than the others
            self._silent = dict.fromkeys(silent, now + SILENT_S)
        return silent
