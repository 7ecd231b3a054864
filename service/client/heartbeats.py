"""What a consumer tells the dispatcher, and hears from it, while it reads.

A thread of its own has a heartbeat wait at the dispatcher for news. Beside that, what cannot wait
is said at once, as that a worker's address refuses the consumer: with this the dispatcher can give
up a dead worker on which the iteration waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ..connections.dispatcher_client import DispatcherClient
from ..errors import ForebayError
from ..proto import forebay_pb2 as pb
from ..transport import NobodyListens

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
"""How long one waits for news."""

SAY_NOW_S = 1.0
"""For telling the dispatcher something at once."""

News = pb.ConsumerHeartbeatResponse


class Heartbeats:
    """Of one consumer, until `closed` is set."""

    def __init__(
        self,
        dispatcher: DispatcherClient,
        consumer_id: int,
        *,
        news: News,
        report: Callable[[pb.ConsumerHeartbeatRequest], None],
        hear: Callable[[News | ForebayError], None],
        closed: threading.Event,
    ) -> None:
        """`news` is what the consumer has heard by now. `report` adds to a heartbeat what else
        there is to say, and is called by any thread; `hear` is called with news, and with the error
        that ended the thread.
        """
        self._dispatcher = dispatcher
        self._consumer_id = consumer_id
        self._joined = news
        self._told = ""  # why no worker has a task
        self._answered_s = time.monotonic()
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

    @property
    def silent_s(self) -> float:
        """Since the dispatcher last answered one."""
        return time.monotonic() - self._answered_s

    def join(self) -> None:
        """Wait for the thread, which ends once the consumer is closed."""
        self._thread.join(timeout=HEARTBEAT_S + 1)

    def refused(self, uid: int, why: NobodyListens | None) -> None:
        """A worker's address refuses us, or (None) does so no longer."""
        with self._lock:
            if why is None:
                self._refusing.pop(uid, None)
                return
            self._refusing[uid] = why
        self.say_now()

    def say_now(self) -> None:
        """All that there is to say: the heartbeat under way may wait for long yet. Errors are
        ignored, as the next one says it again, perhaps to another dispatcher.
        """
        request = pb.ConsumerHeartbeatRequest(consumer_id=self._consumer_id)
        self._fill_in(request)
        with suppress(ForebayError):
            self._dispatcher.call(
                request, News, timeout_s=SAY_NOW_S, patience_s=SAY_NOW_S, closed=self._closed
            )

    def _run(self) -> None:
        request = pb.ConsumerHeartbeatRequest(
            consumer_id=self._consumer_id,
            wait_ms=int(1000 * HEARTBEAT_S),
            version=self._joined.version,
        )
        self._warn(self._joined)
        while not self._closed.is_set():
            self._fill_in(request)
            try:
                news = self._dispatcher.call(
                    request, News, timeout_s=HEARTBEAT_S + 5, closed=self._closed
                )
            except ForebayError as error:
                if not self._closed.is_set():
                    self._hear(error)
                return
            self._answered_s = time.monotonic()
            self._warn(news)
            if news.version != request.version:
                request.version = news.version
                self._hear(news)

    def _warn(self, news: News) -> None:
        if news.no_task != self._told:
            self._told = news.no_task
            log.warning("%s", self._told or "a worker that can run the dataset has come")

    def _fill_in(self, request: pb.ConsumerHeartbeatRequest) -> None:
        with self._lock:
            by_reason = {
                reason: sorted(uid for uid, why in self._refusing.items() if why == reason)
                for reason in NobodyListens
            }
        request.refused[:] = by_reason[NobodyListens.WHERE_IT_ANSWERED]
        request.never_answered[:] = by_reason[NobodyListens.WHERE_IT_NEVER_ANSWERED]
        self._report(request)
