"""Logs for what a consumer waits when it has received no element for long."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..proto import forebay_pb2 as pb
from .heartbeats import HEARTBEAT_S
from .links import WorkerLink

log = logging.getLogger(__name__)

FIRST_S = 5.0
"""After waiting this long, the log says for what; it may be a mistake in the set-up."""

WARN_S = 60.0
"""Later waits are said after so long; the interval doubles each time."""


class WaitLog:
    """How long a consumer has waited for an element."""

    def __init__(self) -> None:
        self._from_s: float | None = None  # None: an element has just come
        self._warn_after_s = FIRST_S

    def restart(self) -> None:
        """An element has come."""
        self._from_s, self._warn_after_s = None, min(WARN_S, self._warn_after_s)

    def warn(self, now_s: float, awaited: Callable[[], str], dispatcher_silent_s: float) -> None:
        """Warn if it is time: `awaited` says for what the consumer waits."""
        if self._from_s is None:
            self._from_s = now_s
        waited_s = now_s - self._from_s
        if waited_s < self._warn_after_s:
            return
        self._warn_after_s = max(2 * self._warn_after_s, WARN_S)
        text = f"waiting for {awaited()}"
        if dispatcher_silent_s > 2 * HEARTBEAT_S:
            text = f"the dispatcher has not answered for {dispatcher_silent_s:.0f} s; {text}"
        log.warning("no element for %.0f s: %s", waited_s, text)


def task_awaited(
    task: pb.TaskInfo,
    link: WorkerLink | None,
    *,
    held_by_others: bool = False,
    given_up: bool = False,
) -> str:
    """In words, a task that has not ended, and what is heard of its worker."""
    if link is None:
        state = "which has gone"
    elif held_by_others:
        state = "of which other trainers have the rest, and have not used it"
    else:
        refuses, silent_s = link.client.silent()
        at = ", ".join(f"{server.protocol} {server.address}" for server in task.transfer_servers)
        state = f"which refuses connections ({at})" if refuses else "which sends nothing"
        state += f"; nothing was heard of it for {silent_s:.0f} s" if silent_s >= 1 else ""
    whose = f"task {task.task_id} of worker {task.worker_address}"
    return f"{whose}{', given up by the dispatcher' if given_up else ''}, {state}"
