"""What users' code has counted, as workers tell it, for as long as there is the iteration.

It is no state, and journaled nowhere: a dispatcher that has just begun knows what the workers that
are there tell again, of tasks that they have; not what those have counted that have gone. Nor does
it hear what a task has counted between its worker's last heartbeat and its being cancelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..core.state import State
from ..metrics import Totals
from ..proto import forebay_pb2 as pb
from ..proto import metrics_pb2


class UserMetrics:
    """Totals by task, of which the last that a worker told replace those before."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._told: dict[int, dict[tuple[int, int], metrics_pb2.Metrics]] = {}  # by iteration

    def told(self, known: pb.JournalPosition, metrics: Iterable[metrics_pb2.TaskMetrics]) -> None:
        """By a worker that knows this journal; what is of another one is not taken."""
        if known.journal_id != self._state.journal_id:
            return
        for task in metrics:
            if task.iteration_id not in self._state.iterations:
                continue
            if task.iteration_id not in self._told:
                self._forget()
            of_iteration = self._told.setdefault(task.iteration_id, {})
            before = of_iteration.get((task.task_id, task.run))
            if before is None or before.splits <= task.totals.splits:  # or it was overtaken
                of_iteration[task.task_id, task.run] = task.totals

    def totals(self) -> Mapping[int, metrics_pb2.Metrics]:
        """By iteration."""
        self._forget()
        return {i: Totals(of.values()).told() for i, of in self._told.items()}

    def _forget(self) -> None:
        self._told = {i: of for i, of in self._told.items() if i in self._state.iterations}
