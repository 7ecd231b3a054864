"""What the dispatcher keeps of the counts that workers report."""

from __future__ import annotations

from forebay.service.core.state import Iteration, State
from forebay.service.dispatcher.user_metrics import UserMetrics
from forebay.service.proto import forebay_pb2 as pb


def test_counts_do_not_keep_the_heartbeat_that_they_came_with() -> None:
    """It has those of all of the worker's tasks."""
    state = State(journal_id="j", iterations={1: Iteration(1, 1, 0, [])})
    metrics = UserMetrics(state)
    heartbeat = pb.WorkerHeartbeatRequest(known=pb.JournalPosition(journal_id="j"))
    heartbeat.metrics.add(iteration_id=1, task_id=2, run=1).totals.splits = 3
    metrics.told(heartbeat.known, heartbeat.metrics)
    heartbeat.metrics[0].totals.splits = 5
    total = metrics.total(1)
    assert total is not None and total.splits == 3
