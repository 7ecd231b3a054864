"""A consumer: one reader of one iteration, over all of its workers, without TensorFlow.

The thread that iterates over `blocks()` owns the state. Helper threads only fill its inbox: the
heartbeat thread adds the dispatcher's news of tasks, and the transport's readers add what workers
send. The credit of each worker bounds the inbox. The readers also tell the dispatcher when a
worker's address refuses them.

The iteration ends when the dispatcher says that it is finished and every listed task has ended
here. A task ends when its worker says so, or when it is completed and its worker is gone. Other
consumers may hold a task's last elements and hand them back. Then the task also ends once no
trainer has taken any of them for a while. If the dispatcher gives a worker up, the consumer still
reads its tasks: if the worker lives, no other one produces what it has begun. The consumer drops
them when the iteration is finished and the worker seems dead from here too.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ..blocks import Block
from ..connections.dispatcher_client import DispatcherClient
from ..connections.protocols import LOCAL, SERVED
from ..connections.tunnel import open_tunnel
from ..delivery import End, EndPending, TaskFailed, TaskUnknown
from ..errors import (
    FailedPrecondition,
    ForebayError,
    PipelineError,
    Unavailable,
    Unimplemented,
)
from ..proto import forebay_pb2 as pb
from ..transport import BlockClient, ElementBudget, LocalClient, local_worker
from ..transport.messages import Key
from . import open_iterations
from .heartbeats import HEARTBEAT_S, Heartbeats, News
from .open_iterations import Taker
from .options import DEFAULT_READ_OPTIONS, ReadOptions, TargetWorkers

log = logging.getLogger(__name__)

COLOCATED = "COLOCATED"
"""The tag of a worker on a trainer's host, as TensorFlow's clients know it."""

ASK_AGAIN_S = 0.1
"""Until the consumer asks again for a task that its worker does not know yet."""

GONE_S = 2.0
"""After this time, a given-up worker that refuses connections counts as dead."""

MUTE_S = 60.0
"""After this time, a given-up worker that is silent or cannot be reached counts as dead. Its host
may be cut off for a while, or its process stopped."""

FORGOTTEN_S = 180.0
"""After this long an absence, a worker no longer knows its consumers."""

NEVER_S = 1e9
"""How long to retry a worker's address: until the dispatcher gives the worker up."""

WARN_S = 60.0
"""After waiting this long, the log says for what; the interval doubles each time."""

GOODBYE_S = 0.5
"""How long workers have to hear which elements a leaving consumer hands back."""

CLOSED_S = 5.0
"""How long `close` waits for another thread that closes the same consumer."""

TAKE_OVER_S = 0.5
"""How long to wait at the end for elements that other trainers hold and do not take. Trainers in
lockstep may be waiting for this one."""

Client = BlockClient | LocalClient


class _Delivery(NamedTuple):
    """An item that a worker sent."""

    client: Client
    task_id: int
    item: Block | End | EndPending


class _Gone(NamedTuple):
    """The worker process is gone or going: it sends nothing more."""

    uid: int
    client: Client
    reason: str


@dataclass
class _WorkerLink:
    """The connection to one worker process, and the tasks that are read over it."""

    client: Client
    reading: set[int] = field(default_factory=set)


_Inbox = queue.SimpleQueue[_Delivery | _Gone | News | ForebayError]


class Consumer:
    """Reads the iteration that it joined. One thread at a time reads; any thread may close it."""

    def __init__(
        self,
        dispatcher: DispatcherClient,
        joined: pb.JoinIterationResponse,
        *,
        credit_bytes: int,
        reading: ReadOptions = DEFAULT_READ_OPTIONS,
        taker: Taker | None = None,
    ) -> None:
        self.taker = taker
        self._dispatcher = dispatcher
        self._process_id = os.getpid()
        self._reading = reading
        self.consumer_id = joined.consumer_id
        self.last_task_id = 0  # of the last block; stays 0 in rounds, whose blocks mix tasks
        self._credit_bytes = credit_bytes
        self._budget = ElementBudget(reading.max_elements) if reading.max_elements else None
        self._inbox: _Inbox = queue.SimpleQueue()
        self._links: dict[int, _WorkerLink | None] = {}  # by uid; None: the process has gone
        self._ended: set[int] = set()
        self._held_by_others: set[int] = set()  # tasks whose last elements other consumers hold
        self._held_at_s = 0.0  # when a worker last said so
        self._listed: dict[int, pb.TaskInfo] = {}
        self._given_up: dict[int, pb.TaskInfo] = {}  # no longer listed, and not ended
        self._given_up_at_s = 0.0  # when the latest one was
        self._waits_from_s: float | None = None  # None: an element has just come
        self._warn_after_s = WARN_S  # of waiting
        self._ask_again_at_s = 0.0
        self._ask_again: set[int] = set()  # tasks that their worker did not know yet
        self._asked_for_the_last_time: set[int] = set()
        self._finished = False
        self._given: tuple[Client, Key, Block] | None = None  # the block the trainer has now
        self._leaving = False
        self._closed = threading.Event()
        # Guards `_links`, `_given` and `_closed`. Reentrant: garbage collection may call `close`.
        self._lock = threading.RLock()
        self._closer: int | None = None  # the thread that closes this
        self._is_left = threading.Event()  # set when closing is done
        self.not_handed_back: list[int] = []  # tasks whose workers missed the final handback
        self._heartbeats = Heartbeats(
            dispatcher,
            joined.consumer_id,
            news=joined.news,
            report=self._report,
            hear=self._hear,
            closed=self._closed,
        )
        if joined.HasField("news"):
            self._inbox.put(joined.news)
        self._heartbeats.start()
        open_iterations.opened(self)

    def blocks(self, nothing: Block | None = None) -> Iterator[Block]:
        """Yield blocks as they come, until the iteration ends.

        `nothing`, if given, is yielded after each second without a block.

        Waits for an absent dispatcher without limit. A dispatcher with another journal counts as
        absent: a training program that failed there would restart on the wrong journal.

        Raises PipelineError when the pipeline fails on a worker, and NotFound when the dispatcher
        lost its state as expected: it was in memory, or was repaired.
        """
        while not self._has_ended():
            try:
                delivered = self._next_delivered()
            except queue.Empty:
                if nothing is not None:
                    yield nothing
                continue
            except ForebayError:
                if self._leaving:
                    return
                raise
            if delivered is None:
                continue
            client, task_id, block = delivered
            if not self._give(client, task_id, block):
                return
            yield block
            with self._lock:
                if not self._closed.is_set():
                    self._given = None
                    client.taken(block, (task_id, 0))

    def _give(self, client: Client, task_id: int, block: Block) -> bool:
        """Records the block as the trainer's. Returns False if the consumer was closed."""
        with self._lock:
            if self._closed.is_set():
                return False
            self._given = client, (task_id, 0), block
            self.last_task_id = task_id
            return True

    def _next_delivered(self) -> tuple[Client, int, Block] | None:
        """Handles the next item of the inbox; returns it if it is a block, else None.

        Raises queue.Empty if nothing comes for a while, and what `blocks` raises.
        """
        now_s = time.monotonic()
        self._warn_of_waiting(now_s)
        if self._ask_again and now_s >= self._ask_again_at_s:
            self._read_again()
        try:
            soon = self._ask_again or self._held_by_others
            item = self._inbox.get(timeout=ASK_AGAIN_S if soon else 1)
        except queue.Empty:
            if not (self._heartbeats.alive or self._closed.is_set()):
                raise Unavailable("the consumer's heartbeat has failed; read again") from None
            raise
        if self._closed.is_set():
            raise Unavailable("the consumer was closed")
        if isinstance(item, ForebayError):
            raise item
        if isinstance(item, News):
            self._update(item)
        elif isinstance(item, _Gone):
            log.info("worker %s is gone: %s", item.uid, item.reason)
            link = self._links.get(item.uid)
            if link is not None and link.client is item.client:
                self._forget(item.uid)
        elif isinstance(item.item, EndPending):
            self._held_by_others.add(item.task_id)
            self._held_at_s = time.monotonic()
        elif isinstance(item.item, Block):
            self._held_by_others.discard(item.task_id)
            self._waits_anew()
            if item.item.skipped and self._reading.cache is not None:
                self._reading.cache.skip(item.item.skipped)
            return item.client, item.task_id, item.item
        else:
            self._end(item.task_id, item.item)
        return None

    def _waits_anew(self) -> None:
        """Restarts the waiting time, because an element came."""
        self._waits_from_s, self._warn_after_s = None, WARN_S

    def _warn_of_waiting(self, now_s: float) -> None:
        if self._waits_from_s is None:
            self._waits_from_s = now_s
        waited_s = now_s - self._waits_from_s
        if waited_s < self._warn_after_s:
            return
        self._warn_after_s *= 2
        awaited, silent_s = self._awaited(), self._heartbeats.silent_s
        if silent_s > 2 * HEARTBEAT_S:
            awaited += f"; and the dispatcher has not answered for {silent_s:.0f} s"
        log.warning("no element for %.0f s: waiting for %s", waited_s, awaited)

    def _awaited(self) -> str:
        """In words, the tasks that have not ended, with their workers."""
        tasks = {**self._given_up, **self._listed}
        if not tasks:
            return "a worker: none has a task of the epoch"
        mine = {i: task for i, task in tasks.items() if self._is_for_us(task)}
        if not mine:
            return (
                f"a worker to read from: with target_workers={self._reading.targets.name}, those "
                f"that have tasks are not: {', '.join(t.worker_address for t in tasks.values())}"
            )
        open_ones = [self._awaited_of(task) for i, task in mine.items() if i not in self._ended]
        return "; ".join(open_ones) or (
            "the end of the epoch, of which this reader has its part: other readers, or a worker "
            "on the list that is missing"
        )

    def _awaited_of(self, task: pb.TaskInfo) -> str:
        link = self._links.get(task.worker_uid)
        if link is None:
            state = "which has gone"
        elif task.task_id in self._held_by_others:
            state = "of which other trainers have the rest, and have not used it"
        else:
            refuses, silent_s = link.client.silent()
            state = "which refuses connections" if refuses else "which sends nothing"
            state += f"; nothing was heard of it for {silent_s:.0f} s" if silent_s >= 1 else ""
        given_up = ", given up by the dispatcher" if task.task_id in self._given_up else ""
        return f"task {task.task_id} of worker {task.worker_address}{given_up}, {state}"

    def _has_ended(self) -> bool:
        if self._leaving:
            return True
        mine = {i for i, task in self._listed.items() if self._is_for_us(task)}
        # If other readers have tasks of their own, wait only for ours. But with dynamic splits
        # our workers may still get new tasks for what the others' workers lost.
        more = self._reading.dynamic and self._reading.targets != TargetWorkers.LOCAL
        others = len(mine) < len(self._listed) and not more
        all_ended = mine <= self._ended and (self._finished or (others and bool(mine)))
        rest = mine - self._ended
        others_have_it = bool(rest) and rest <= self._held_by_others
        if self._given_up:
            self._let_go(all_ended or others_have_it)
        waited_s = time.monotonic() - self._held_at_s
        over = all_ended or (others_have_it and waited_s >= TAKE_OVER_S)
        return over and not self._given_up

    def _let_go(self, all_others_ended: bool) -> None:
        """Drops the given-up tasks whose workers seem dead."""
        for task_id, task in list(self._given_up.items()):
            link = self._links.get(task.worker_uid)
            if link is not None and task_id not in self._ended:
                refused, silent_s = link.client.silent()
                if not refused:
                    silent_s = min(silent_s, time.monotonic() - self._given_up_at_s)
                patience_s = GONE_S if refused else MUTE_S
                if silent_s < (patience_s if all_others_ended else FORGOTTEN_S):
                    continue
                log.warning(
                    "worker %s was given up, and nothing comes from it: what it had begun is lost",
                    task.worker_address,
                )
                link.client.stop_task(task_id)
            self._forgo(task_id)

    def _forgo(self, task_id: int) -> None:
        uid = self._given_up.pop(task_id).worker_uid
        link = self._links.get(uid)
        if link is not None:
            link.reading.discard(task_id)
            self._close_if_idle(uid)

    def _is_for_us(self, task: pb.TaskInfo) -> bool:
        uid, targets = task.worker_uid, self._reading.targets
        if self._reading.num_consumers is not None:
            return True  # all consumers must read from the same workers
        if uid in self._links or local_worker(uid) is not None:
            return True
        # A worker on another trainer's host should serve that trainer only.
        colocated = any(tag.upper() == COLOCATED for tag in task.worker_tags)
        return targets == TargetWorkers.ANY or (targets == TargetWorkers.AUTO and not colocated)

    def is_ours(self) -> bool:
        """Whether this process made the consumer. A fork shares its connections: leave them be."""
        return os.getpid() == self._process_id

    def leave(self) -> None:
        """End `blocks`, and close: now, or when a taker has given its last element. Thread-safe."""
        self._leaving = True
        if self.taker is None:
            self.close()
            return
        self.taker.leave()
        self._inbox.put(Unavailable("the consumer leaves"))  # wakes `blocks`

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
            links = [link for link in self._links.values() if link is not None]
            self._links = {}
        if first:
            try:
                self._close(links, left)
            finally:
                self._is_left.set()
        elif self._closer != threading.get_ident():
            self._is_left.wait(CLOSED_S)

    def _close(self, links: list[_WorkerLink], left: int) -> None:
        open_iterations.closed(self)
        self._inbox.put(Unavailable("the consumer was closed"))  # wakes `blocks`
        for link in links:  # start all before waiting: a link that still connects is slow
            if self._reading.hands_back:
                link.client.hand_back(self._given_by(link.client, left))
            else:
                link.client.hang_up()
        give_up_s = time.monotonic() + GOODBYE_S
        for link in links:
            if not link.client.close(give_up_s):
                self.not_handed_back += link.reading
                log.warning("a worker has not heard what is handed back to it, which is lost")
        try:
            self._dispatcher.call(
                pb.LeaveIterationRequest(consumer_id=self.consumer_id),
                pb.LeaveIterationResponse,
                timeout_s=2,
                patience_s=2,
            )
        except ForebayError as error:
            log.info("could not say goodbye to the dispatcher: %s", error)
        self._heartbeats.join()

    def _given_by(self, client: Client, left: int) -> tuple[Key, int] | None:
        if self._given is None or self._given[0] is not client:
            return None
        _, key, block = self._given
        return key, block.count - left

    # -- the dispatcher ------------------------------------------------------------------------

    def _hear(self, news: News | ForebayError) -> None:
        """Called by the heartbeat thread."""
        if not isinstance(news, ForebayError):
            self._heard(news)
        self._inbox.put(news)

    def _report(self, request: pb.ConsumerHeartbeatRequest) -> None:
        """Adds a subclass's report to the heartbeat. Called by any thread."""

    def _heard(self, news: News) -> None:
        """Handles news before the reading thread gets it. Called by the heartbeat thread."""

    def _update(self, news: News) -> None:
        self._finished = news.finished
        listed = {task.task_id: task for task in news.tasks}
        lost = {i: t for i, t in self._listed.items() if i not in listed and self._is_read(t)}
        if lost:
            self._given_up_at_s = time.monotonic()
        back = self._given_up.keys() & listed.keys()
        self._given_up = {i: t for i, t in {**self._given_up, **lost}.items() if i not in back}
        self._asked_for_the_last_time -= back
        self._listed = listed
        new = []
        for task in filter(self._is_for_us, news.tasks):
            linked = task.worker_uid in self._links
            link = self._link(task)
            if link is None:
                self._end_if_completed(task)
            elif task.task_id not in self._ended | link.reading:
                link.reading.add(task.task_id)
                link.client.read(task.task_id, self._reading.order)
            if link is not None and not linked:
                new.append(link)
        for link in new:  # only after all of them got a share of the element budget
            link.client.start()
        for uid, link in list(self._links.items()):
            if link is None:
                continue
            for task_id in link.reading - self._listed.keys() - self._given_up.keys():
                link.client.stop_task(task_id)
                link.reading.discard(task_id)
            self._close_if_idle(uid)

    def _is_read(self, task: pb.TaskInfo) -> bool:
        link = self._links.get(task.worker_uid)
        return link is not None and task.task_id in link.reading - self._ended

    def _close_if_idle(self, uid: int) -> None:
        with self._lock:
            link = self._links.get(uid)
            if link is None or link.reading:
                return
            del self._links[uid]
        link.client.close()
        self._heartbeats.refused(uid, None)

    # -- workers -------------------------------------------------------------------------------

    def _link(self, task: pb.TaskInfo) -> _WorkerLink | None:
        """The worker's link; None if its process is gone. Raises Unavailable once closed."""
        uid = task.worker_uid
        with self._lock:
            if self._closed.is_set():
                raise Unavailable("the consumer was closed")
            if uid not in self._links:
                self._links[uid] = _WorkerLink(self._open(task))
            return self._links[uid]

    def _open(self, task: pb.TaskInfo) -> Client:
        uid = task.worker_uid
        client: Client

        def deliver(task_id: int, _: int, item: Block | End | EndPending) -> None:
            if isinstance(item, Block):
                self._arrived(client, task_id, item)
            self._inbox.put(_Delivery(client, task_id, item))

        def lost(reason: str) -> None:
            self._inbox.put(_Gone(uid, client, reason))

        # A local client shares memory: a trainer could write to what the cache keeps for others.
        is_ours = self._reading.protocol in (None, LOCAL) and self._reading.cache is None
        worker = local_worker(uid) if is_ours else None
        elements = self._budget.share() if self._budget is not None else None
        if worker is not None:
            client = LocalClient(
                worker,
                consumer_id=self.consumer_id,
                deliver=deliver,
                lost=lost,
                credit_bytes=self._credit_bytes,
                elements=elements,
            )
        else:
            client = BlockClient(
                self._addresses(task),
                worker_uid=uid,
                consumer_id=self.consumer_id,
                deliver=deliver,
                lost=lost,
                credit_bytes=self._credit_bytes,
                give_up_s=NEVER_S,
                open_tunnel=open_tunnel,
                elements=elements,
                refused=partial(self._heartbeats.refused, uid),
            )
        return client

    def _arrived(self, client: Client, task_id: int, block: Block) -> None:
        """Handles a block before the reading thread gets it. Called by a transport thread."""

    def _addresses(self, task: pb.TaskInfo) -> list[tuple[str, str]]:
        """The worker's usable (protocol, address) pairs. Raises Unimplemented for stock workers,
        FailedPrecondition if no protocol fits."""
        if task.stock:
            raise Unimplemented(
                f"the worker {task.worker_address} is tf.data service's own, and Forebay's clients "
                "read from Forebay's workers only: replace it, or use tf.data service's client"
            )
        wanted = self._reading.protocol
        servers = [(server.protocol, server.address) for server in task.transfer_servers]
        usable = [s for s in servers if s[0] in SERVED and wanted in (None, s[0])]
        if not usable:
            raise FailedPrecondition(
                f"the worker {task.worker_address} cannot be reached by "
                f"{wanted or ' or '.join(SERVED)} from this process, only by "
                f"{[s[0] for s in servers]}: leave data_transfer_protocol out, here or where that "
                "worker is started"
            )
        return usable

    def _forget(self, uid: int) -> None:
        """Give up a worker's process, whose unfinished tasks the dispatcher will stop listing."""
        with self._lock:
            link = self._links.get(uid)
            if link is None:
                return
            self._links[uid] = None
        link.client.close()
        self._heartbeats.refused(uid, None)
        for task in self._listed.values():
            if task.task_id in link.reading:
                self._end_if_completed(task)

    def _end(self, task_id: int, end: End) -> None:
        self._held_by_others.discard(task_id)
        if isinstance(end, TaskFailed):
            raise PipelineError(end.code, end.message)
        task = self._listed.get(task_id) or self._given_up.get(task_id)
        last_time = task_id in self._asked_for_the_last_time & self._given_up.keys()
        if isinstance(end, TaskUnknown) and last_time:
            self._forgo(task_id)
        elif isinstance(end, TaskUnknown) and task is not None and not task.completed:
            self._ask_again.add(task_id)
            self._ask_again_at_s = time.monotonic() + ASK_AGAIN_S
        else:  # a completed task that its worker no longer knows has ended too
            self._ended.add(task_id)

    def _end_if_completed(self, task: pb.TaskInfo) -> None:
        if task.completed:
            self._ended.add(task.task_id)

    def _read_again(self) -> None:
        tasks = {**self._given_up, **self._listed}
        for task_id in self._ask_again & tasks.keys():
            link = self._links.get(tasks[task_id].worker_uid)
            if link is not None:
                link.client.read(task_id, self._reading.order)
        # A given-up worker that has not begun the task by now begins it once it is listed again.
        self._asked_for_the_last_time = self._ask_again & self._given_up.keys()
        self._ask_again.clear()
