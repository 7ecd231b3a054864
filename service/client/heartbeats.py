"""What a consumer tells the dispatcher, and hears from it, while it reads.

A thread of its own has a heartbeat wait at the dispatcher for news. Beside that, what cannot wait
is said at once: that a worker's address refuses the consumer, with which the dispatcher can give up
a dead worker on which the iteration waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from ..connections.dispatcher_client import DispatcherClient
from ..errors import ForebayError
from ..proto import forebay_pb2 as pb
from ..transport import NobodyListens

log = logging.getLogger(__name__)

WAIT_MS = 5_000

REPORT_S = 1.0
"""For telling the dispatcher at once that a worker's address refuses us."""

News = pb.ConsumerHeartbeatResponse


class Heartbeats:
    """Of one consumer, until `closed` is set."""

    def __init__(
        self,
        dispatcher: DispatcherClient,
        consumer_id: int,
        *,
        version: int,
        report: Callable[[pb.ConsumerHeartbeatRequest], None],
        hear: Callable[[News | ForebayError], None],
        closed: threading.Event,
    ) -> None:
        """`version` is that of the news that the consumer has. `report` adds to a heartbeat what
        else there is to say; `hear` is called with news, and with the error that is the last.
        """
        self._dispatcher = dispatcher
        self._consumer_id = consumer_id
        self._version = version
        self._report = report
        self._hear = hear
        self._closed = closed
        self._refusing: dict[int, NobodyListens] = {}  # by uid of the worker
        self._lock = threading.Lock()  # of these
        self._thread = threading.Thread(
            target=self._run, name=f"forebay-consumer-{consumer_id}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether news may come."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread, which ends once the consumer is closed."""
        self._thread.join(timeout=WAIT_MS / 1000 + 1)

    def refused(self, uid: int, why: NobodyListens | None) -> None:
        """A worker's address refuses us, or (None) does so no longer."""
        with self._lock:
            if why is None:
                self._refusing.pop(uid, None)
                return
            self._refusing[uid] = why
        # The next heartbeat says it again, perhaps to another dispatcher.
        request = pb.ConsumerHeartbeatRequest(consumer_id=self._consumer_id)
        self._name_refusing(request)
        self.say_now(request)

    def say_now(self, request: pb.ConsumerHeartbeatRequest) -> None:
        """The heartbeat under way may wait for long yet. If it is not heard, that is all."""
        with suppress(ForebayError):
            self._dispatcher.call(
                request, News, timeout_s=REPORT_S, patience_s=REPORT_S, closed=self._closed
            )

    def _run(self) -> None:
        request = pb.ConsumerHeartbeatRequest(
            consumer_id=self._consumer_id, wait_ms=WAIT_MS, version=self._version
        )
        told = ""  # why no worker has a task
        while not self._closed.is_set():
            self._name_refusing(request)
            self._report(request)
            try:
                news = self._dispatcher.call(
                    request, News, timeout_s=WAIT_MS / 1000 + 5, closed=self._closed
                )
            except ForebayError as error:
                if not self._closed.is_set():
                    self._hear(error)
                return
            if news.no_task != told:
                told = news.no_task
                log.warning("%s", told or "a worker that can run the dataset has come")
            if news.version != request.version:
                request.version = news.version
                self._hear(news)

    def _name_refusing(self, request: pb.ConsumerHeartbeatRequest) -> None:
        with self._lock:
            by_reason = {
                reason: sorted(uid for uid, why in self._refusing.items() if why == reason)
                for reason in NobodyListens
            }
        request.refused[:] = by_reason[NobodyListens.WHERE_IT_ANSWERED]
        request.never_answered[:] = by_reason[NobodyListens.WHERE_IT_NEVER_ANSWERED]
