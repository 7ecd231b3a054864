"""TaskConsumers: who reads a worker's tasks. Some leave without telling the worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..connections.dispatcher_client import DispatcherClient
from ..errors import ForebayError
from ..proto import forebay_pb2 as pb
from ..transport.sessions import Sessions
from .tf_data_worker_servicer import TfDataWorkerServicer

log = logging.getLogger(__name__)

GONE_CHECK_S = 0.5
"""A draining worker asks the dispatcher this often whether disconnected consumers are gone."""


@dataclass(eq=False)
class TaskConsumers:
    """The consumers of a worker's blocks, and the stock clients of its TfDataWorkerServicer."""

    _sessions: Sessions
    _servicer: TfDataWorkerServicer
    _dispatcher: DispatcherClient

    def is_read(self, task_id: int) -> bool:
        return task_id in self.read_tasks()

    def read_tasks(self) -> set[int]:
        """The tasks for which `is_read` is true."""
        return self._sessions.read_tasks() | self._servicer.read_tasks()

    def wait(self, done: Callable[[float], bool], give_up_s: float) -> None:
        """Call `done(within_s)` until it is true, and meanwhile forget consumers that are gone."""
        while not done(max(0.0, min(GONE_CHECK_S, give_up_s - time.monotonic()))):
            if time.monotonic() >= give_up_s:
                return
            self._forget_gone()

    def forget_left(self) -> None:
        """Forget consumers that the dispatcher has given up, and tasks that no stock client reads
        any more: those don't tell the worker when they leave."""
        self._forget_gone(left=True, task_ids=self._servicer.read_tasks())

    def _forget_gone(self, *, left: bool = False, task_ids: Iterable[int] = ()) -> None:
        """Over TCP a killed process looks like a network cut. A consumer counts as gone if it has
        not reconnected to the dispatcher either."""
        request = pb.FindGoneConsumersRequest(
            consumer_ids=self._sessions.away(), left=left, task_ids=task_ids
        )
        if not (request.consumer_ids or request.task_ids):
            return
        try:
            found = self._dispatcher.call(
                request, pb.FindGoneConsumersResponse, timeout_s=1, patience_s=GONE_CHECK_S
            )
        except ForebayError as error:
            log.info("could not ask the dispatcher which consumers are gone: %s", error)
            return
        self._servicer.forget(found.unread_task_ids)
        if lacking := self._sessions.forget_gone(found.gone):
            log.warning(
                "consumers %s are gone, and did not receive %d elements that were sent to them: "
                "they reconnected neither to this worker nor to the dispatcher",
                [*found.gone], lacking,
            )  # fmt: skip
