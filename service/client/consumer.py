"""A consumer: one reader of one iteration, over all of its workers, without TensorFlow.

A consumer has three parts: its membership of the iteration (heartbeats.py, and `close` here), its
links to workers (links.py), and a *mode*. The mode decides what to read and which block comes next:
first come, first served (first_come.py), rounds (rounds.py), an order (ordered.py), or claims
(claims.py).

The thread that iterates over `blocks()` owns the state. Helper threads only fill its inbox with
calls for that thread: the heartbeat thread adds the dispatcher's news of tasks, and the transport's
readers add what workers send. The credit of each worker bounds the inbox. The readers also tell the
dispatcher when a worker's address refuses them.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NoReturn

from google.protobuf.message import Message

from ..blocks import Block
from ..connections.dispatcher_client import DispatcherClient
from ..delivery import End, EndPending
from ..errors import ForebayError, Unavailable, cut_error
from ..proto import forebay_pb2 as pb
from ..tracing import WaitSpans
from ..transport import ConnectionRefused
from ..transport.messages import Key
from . import open_iterations
from .claimer import Claimer
from .claims import ClaimsMode
from .first_come import FirstComeMode
from .heartbeats import HEARTBEAT_S, Heartbeats, News
from .links import Client, Links
from .metrics import Meter
from .modes import Mode
from .open_iterations import Taker
from .options import DEFAULT_READ_OPTIONS, ReadOptions
from .ordered import OrderedMode
from .rounds import RoundsMode
from .slices import BundlesMode

log = logging.getLogger(__name__)

GOODBYE_S = 0.5
"""How long workers have to hear which elements a leaving consumer hands back."""

CLOSED_S = 5.0
"""How long `close` waits for another thread that closes the same consumer."""

SHORT_S = 0.01
"""A shorter wait is for workers: why else, it does not ask."""

FIRST_S = 5.0
"""After waiting this long, the log says for what; it may be a mistake in the set-up."""

WARN_S = 60.0
"""Later waits are said after so long; the interval doubles each time."""


_Inbox = queue.SimpleQueue[Callable[[], None]]


class Consumer:
    """Reads the iteration that it joined. One thread at a time reads; any thread may close it."""

    def __init__(
        self,
        dispatcher: DispatcherClient,
        joined: pb.JoinIterationResponse,
        *,
        credit_bytes: int,
        options: ReadOptions = DEFAULT_READ_OPTIONS,
        taker: Taker | None = None,
    ) -> None:
        """With `options.num_consumers`, the blocks have elements round by round (RoundsMode)."""
        self.taker = taker
        self.consumer_id = joined.consumer_id
        self.last_task_id = 0  # of the last block; stays 0 in rounds, whose blocks mix tasks
        self._dispatcher = dispatcher
        self._process_id = os.getpid()
        self._hands_back = options.hands_back
        self._inbox: _Inbox = queue.SimpleQueue()
        self._is_urgent = threading.Event()  # to handle it although blocks are here
        self._wait_log = WaitLog()
        self._meter = Meter()
        self._given: tuple[Client, Key, Block] | None = None  # the block the trainer has now
        self._listed: Sequence[pb.TaskInfo] = ()
        self._leaving = threading.Event()
        self._closed = threading.Event()
        # Guards `_given` and `_closed`. Reentrant: garbage collection may call `close`.
        self._lock = threading.RLock()
        self._closer: int | None = None  # the thread that closes this
        self._is_left = threading.Event()  # set when closing is done
        self._heartbeats = Heartbeats(
            dispatcher,
            joined.consumer_id,
            news=joined.news,
            report=self._report,
            answered=self._answered,
            hear=self._hear,
            closed=self._closed,
        )
        self.links = Links(
            joined.consumer_id,
            options,
            credit_bytes,
            deliver=self._deliver,
            lost=lambda *gone: self._inbox.put(partial(self._handle_gone, *gone)),
            refused=self._on_refusal,
            reconnected=self._meter.reconnected,
            credential=lambda: self._heartbeats.credential,
            fail=self._hear,
        )
        self._spans = WaitSpans(self.links.trace, job=joined.job_id, consumer=joined.consumer_id)
        self.mode: Mode
        if options.ordered is not None:
            self.mode = OrderedMode(options.ordered, self.links, joined)
        elif options.claimed is not None:
            claimer = Claimer(
                dispatcher, joined.consumer_id, fail=self._hear,
                wake=partial(self._inbox.put, _wake), closed=self._closed, taker=taker,
            )  # fmt: skip
            self.mode = ClaimsMode(self.links, joined, claimer)
        elif options.num_consumers is not None:
            now = self._heartbeats.say_now
            self.mode = RoundsMode(options, self.links, self.handle_inbox, now)
        else:
            self.mode = FirstComeMode(options, self.links)
        if joined.HasField("news"):
            self._hear(joined.news)
        self.is_over = False  # all blocks were given
        self._failed = ""  # the error that ended `blocks`
        self._heartbeats.start()
        self._meter.open()
        open_iterations.opened(self)

    def blocks(self, nothing: Block | None = None) -> Iterator[Block]:
        """Yield blocks as they come, until the iteration ends.

        `nothing`, if given, is yielded after each second without a block.

        Waits for an absent dispatcher without limit. A dispatcher with another journal counts as
        absent: a training program that failed there would restart on the wrong journal.

        Raises PipelineError when the pipeline fails on a worker, and NotFound when the dispatcher
        lost its state as expected: it was in memory, or was repaired. In rounds, it raises NotFound
        too, with the reason, if the consumers are out of step for good: some lack an element that
        others have passed, or one of them was restarted without the others. It raises
        FailedPrecondition, or PipelineError of that code, if another consumer has the same index.
        """
        while not self._leaving.is_set():
            try:
                if isinstance(self.mode, BundlesMode) and self._is_urgent.is_set():
                    self._is_urgent.clear()
                    self.handle_inbox()
                taken = self.mode.take()
                if taken is None:  # else the block is given, even if its worker is gone by now
                    # The news that waits behind an end may list further tasks.
                    if self._inbox.empty() and self.mode.has_ended():
                        self.is_over = True
                        return
                    if self._inbox.empty():
                        self._spans.begin()
                    self._handle_next()
                    continue
            except queue.Empty:
                if nothing is not None:
                    yield nothing
                continue
            except ForebayError as error:
                if self._leaving.is_set():
                    return
                self._failed = str(error)
                raise
            self._wait_log.restart()
            block, source = taken
            self._spans.end(block.count)
            if source is None:
                yield block
                self.mode.used(block)
                continue
            client, task_id = source
            with self._lock:
                if self._closed.is_set():
                    return
                self._given = client, (task_id, 0), block
                self.last_task_id = task_id
            yield block
            with self._lock:
                if not self._closed.is_set():
                    self._given = None
                    client.taken(block, (task_id, 0))

    def handle_inbox(self) -> None:
        """Handle what is in the inbox, without waiting. Raises what `blocks` raises."""
        while not self._inbox.empty():
            self._handle_next()

    def _handle_next(self) -> None:
        """Handle the next item of the inbox.

        Raises queue.Empty if nothing comes for a while, and what `blocks` raises.
        """
        since_s = time.monotonic()
        self._wait_log.warn(since_s, self.mode.awaited, self._heartbeats.silent_s)
        self.mode.ask_again()
        try:
            handle = self._inbox.get(timeout=self.mode.patience_s)
        except queue.Empty:
            if not (self._heartbeats.alive or self._closed.is_set()):
                raise Unavailable("the consumer's heartbeat has failed; read again") from None
            raise
        finally:
            waited_s = time.monotonic() - since_s
            self._meter.waited("workers" if waited_s < SHORT_S else self._awaits(), waited_s)
        if self._closed.is_set():
            raise Unavailable("the consumer was closed")
        handle()

    def _handle_item(self, client: Client, key: Key, item: Block | End | EndPending) -> None:
        if isinstance(item, EndPending):
            self.mode.held_by_others(key[0])
        elif isinstance(item, Block):
            self._meter.received(item)
            self.mode.deliver(client, key, item)
        else:
            self.mode.end(key, item)

    def _handle_gone(self, uid: int, client: Client, reason: str) -> None:
        """The worker process is gone or going: it sends nothing more."""
        log.info("worker %s is gone: %s", uid, reason)
        if (link := self.links.remove(uid, client)) is not None:
            self.mode.gone(link)

    def _awaits(self) -> str:
        """For what it waits: one of CAUSES (metrics.py)."""
        heard = self._heartbeats
        clients = [link.client for uid, link in self.links.all() if not heard.has_ended(uid)]
        is_barred = any(task.worker_uid not in self.links for task in self._listed)
        if (clients or is_barred) and not any(client.connected for client in clients):
            return "network"
        if self._heartbeats.silent_s > 2 * HEARTBEAT_S:
            return "dispatcher"
        return "workers" if clients else "no_task"

    def is_ours(self) -> bool:
        """Whether this process made the consumer. A fork shares its connections: leave them be."""
        return os.getpid() == self._process_id

    def leave(self) -> None:
        """End `blocks`, and close: now, or when a taker has given its last element. Thread-safe."""
        self._leaving.set()
        if self.taker is None:
            self.close()
            return
        self.taker.leave()
        self._inbox.put(partial(_fail, Unavailable("the consumer leaves")))

    def close(self, left: int = 0) -> None:
        """Leave the iteration, and tell every worker. Idempotent and thread-safe: a second thread
        waits for the one that closes.

        If the job allows it, this hands back all elements that `blocks` did not yield, and the last
        `left` elements of the block that it yielded last.
        """
        if not self.is_ours():
            self._closed.set()
            return
        with self._lock:
            first = self._closer is None
            if first:
                self._closer = threading.get_ident()
                self._closed.set()
        if first:
            try:
                self._close(left)
            finally:
                self._is_left.set()
        elif self._closer != threading.get_ident():
            self._is_left.wait(CLOSED_S)

    def _close(self, left: int) -> None:
        self._meter.close()
        self._spans.end()
        links = self.links.close_all()
        open_iterations.closed(self)
        self._inbox.put(_wake)
        for link in links:  # start all before waiting: a link that still connects is slow
            if self._hands_back:
                link.client.hand_back(self._given_by(link.client, left))
            else:
                link.client.hang_up()
        give_up_s = time.monotonic() + GOODBYE_S
        for link in links:
            if not link.client.close(give_up_s):
                log.warning("a worker has not heard what is handed back to it, which is lost")
        goodbye = pb.LeaveIterationRequest(
            consumer_id=self.consumer_id,
            position=self.mode.position(),
            error=cut_error(self._failed),
        )
        patience_s = 2
        last: list[tuple[Message, type[Message]]] = [(goodbye, pb.LeaveIterationResponse)]
        for request, answer in [*self.mode.final_reports(self.consumer_id, left), *last]:
            try:
                self._dispatcher.call(request, answer, timeout_s=2, patience_s=patience_s)
            except Unavailable:
                log.info("leaves while no dispatcher answers: the next one notices by itself")
                if not isinstance(self.mode, OrderedMode):
                    break  # what was given of claims must be known before they return
                patience_s = 0  # an answer may have been late: the goodbye is still sent, once
            except ForebayError as error:
                log.info("could not say goodbye to the dispatcher: %s", error)
        self._heartbeats.join()

    def _given_by(self, client: Client, left: int) -> tuple[Key, int] | None:
        if self._given is None or self._given[0] is not client:
            return None
        _, key, block = self._given
        return key, block.count - left

    # -- called by other threads ---------------------------------------------------------------

    def _on_refusal(self, uid: int, why: ConnectionRefused | None) -> None:
        """An address refuses us, or with None no longer does."""
        if why is ConnectionRefused.ONCE_CONNECTED and isinstance(self.mode, BundlesMode):
            self._inbox.put(partial(self.mode.refused, uid))
            self._is_urgent.set()
        self._heartbeats.refused(uid, why)

    def _report(self, request: pb.ConsumerHeartbeatRequest) -> None:
        self._meter.report(request.load)
        self.mode.report(request)

    def _answered(self, news: News) -> None:
        if self.mode.answered(news):
            self._inbox.put(_wake)

    def _hear(self, news: News | ForebayError) -> None:
        if isinstance(news, ForebayError):
            self._inbox.put(partial(_fail, news))
            return
        self.mode.heard(news)
        self._inbox.put(partial(self._update, news))
        self._is_urgent.set()

    def _update(self, news: News) -> None:
        self.mode.update(news)
        self._listed = news.tasks

    def _deliver(self, client: Client, key: Key, item: Block | End | EndPending) -> None:
        if isinstance(item, Block):
            self.mode.arrived(client, key, item)
        self._inbox.put(partial(self._handle_item, client, key, item))


class WaitLog:
    """Logs for what a consumer waits when it has received no element for long."""

    def __init__(self) -> None:
        self._from_s: float | None = None  # None: an element has just come
        self._warn_after_s = FIRST_S

    def restart(self) -> None:
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


def _wake() -> None:
    """There is something new."""


def _fail(error: ForebayError) -> NoReturn:
    raise error
