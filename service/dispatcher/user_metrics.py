"""User metrics: counts by users' code that workers report, kept as long as their iteration.

They are neither state nor journaled. A new leader learns the metrics of the tasks that live workers
still have, and none of workers that are gone. It also misses the counts of a task between its
worker's last heartbeat and the task's cancellation.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from ..core.state import State
from ..proto import forebay_pb2 as pb
from ..proto import metrics_pb2
from ..user_metrics import Totals, shown


class UserMetrics:
    """Totals by task; a worker's newest report replaces its earlier ones."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._told: dict[int, dict[tuple[int, int], metrics_pb2.Metrics]] = {}  # by iteration

    def told(self, known: pb.JournalPosition, metrics: Iterable[metrics_pb2.TaskMetrics]) -> None:
        """Record a worker's report; ignores workers of another journal."""
        if known.journal_id != self._state.journal_id:
            return
        for task in metrics:
            if task.iteration_id not in self._state.iterations:
                continue
            if task.iteration_id not in self._told:
                self._forget()
            of_iteration = self._told.setdefault(task.iteration_id, {})
            before = of_iteration.get((task.task_id, task.run))
            if before is None or before.splits <= task.totals.splits:  # else it arrived late
                # A copy: a message keeps alive the whole request that it is part of.
                of_iteration[task.task_id, task.run] = copy.copy(task.totals)

    def total(self, iteration_id: int) -> metrics_pb2.Metrics | None:
        """The iteration's total; None without reports."""
        told = self._told.get(iteration_id)
        return None if told is None else Totals(told.values()).told()

    def shown(self, iteration_id: int) -> dict[str, Any] | None:
        """The same for the status."""
        total = self.total(iteration_id)
        return None if total is None else shown(total)

    def _forget(self) -> None:
        self._told = {i: of for i, of in self._told.items() if i in self._state.iterations}
