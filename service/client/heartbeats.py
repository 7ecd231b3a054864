"""A consumer's heartbeats: its reports to the dispatcher, and the dispatcher's news.

A thread sends heartbeats, each of which waits at the dispatcher for news (long poll). Urgent
reports go out at once, such as a worker's address that refuses the consumer. Then the dispatcher
can give up a dead worker for which the iteration waits.
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
from ..transport import ConnectionRefused

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
"""How long a heartbeat waits for news."""

SAY_NOW_S = 1.0
"""The timeout of an urgent report."""

News = pb.ConsumerHeartbeatResponse


class Heartbeats:
    """The heartbeats of one consumer, until `closed` is set."""

    def __init__(
        self,
        dispatcher: DispatcherClient,
        consumer_id: int,
        *,
        news: News,
        report: Callable[[pb.ConsumerHeartbeatRequest], None],
        answered: Callable[[News], None],
        hear: Callable[[News | ForebayError], None],
        closed: threading.Event,
    ) -> None:
        """`news` is what the consumer has heard by now. `report` completes a heartbeat; any thread
        may call it. The heartbeat thread calls `answered` with each answer, and `hear` with news
        and with the error that ends it.
        """
        self._dispatcher = dispatcher
        self._consumer_id = consumer_id
        self._joined = news
        self._version = news.version  # the last one that was heard
        self._told = ""  # the last logged reason why no worker has a task
        self._has_warned = False  # of what the reader of bundles should know
        self._answered_s = time.monotonic()
        # For data connections, the newest; and how many there were.
        self.credential = news.data_credential, 1
        self._report = report
        self._answered = answered
        self._hear = hear
        self._closed = closed
        self._refusing: dict[int, ConnectionRefused] = {}  # by uid of the worker
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
        """Seconds since the dispatcher last answered a heartbeat."""
        return time.monotonic() - self._answered_s

    def join(self) -> None:
        """Wait for the thread, which ends once the consumer is closed."""
        self._thread.join(timeout=HEARTBEAT_S + 1)

    def refused(self, uid: int, why: ConnectionRefused | None) -> None:
        """A worker's address refuses us, or with None no longer does."""
        with self._lock:
            if why is None:
                self._refusing.pop(uid, None)
                return
            self._refusing[uid] = why
        self.say_now()

    def has_ended(self, uid: int) -> bool:
        """Whether the process of a worker that was connected seems to have ended."""
        return self._refusing.get(uid) is ConnectionRefused.ONCE_CONNECTED

    def say_now(self) -> None:
        """Sends the full report at once, because the pending heartbeat may wait for long. Ignores
        errors: the next heartbeat repeats the report, perhaps to another dispatcher.
        """
        request = pb.ConsumerHeartbeatRequest(consumer_id=self._consumer_id, version=self._version)
        self._fill_in(request)
        with suppress(ForebayError):
            self._dispatcher.call(
                request, News, timeout_s=SAY_NOW_S, patience_s=SAY_NOW_S, closed=self._closed
            )

    def _run(self) -> None:
        request = pb.ConsumerHeartbeatRequest(
            consumer_id=self._consumer_id, wait_ms=int(1000 * HEARTBEAT_S), version=self._version
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
            self.credential = news.data_credential, self.credential[1] + 1
            self._warn(news)
            self._answered(news)
            if news.version != request.version:
                self._version = request.version = news.version
                self._hear(news)

    def _warn(self, news: News) -> None:
        if news.no_task != self._told:
            self._told = news.no_task
            log.warning("%s", self._told or "a worker that can run the dataset has come")
        if news.warning and not self._has_warned:
            self._has_warned = True
            log.warning("%s", news.warning)

    def _fill_in(self, request: pb.ConsumerHeartbeatRequest) -> None:
        with self._lock:
            by_reason = {
                reason: sorted(uid for uid, why in self._refusing.items() if why == reason)
                for reason in ConnectionRefused
            }
        request.refused[:] = by_reason[ConnectionRefused.ONCE_CONNECTED]
        request.never_answered[:] = by_reason[ConnectionRefused.NEVER_CONNECTED]
        self._report(request)
