"""A consumer: one reader of one iteration, over all of its workers, without TensorFlow.

Whoever iterates over `blocks()` owns everything. Helper threads put things into its inbox: that of
the heartbeats what the dispatcher says of the iteration's tasks, the transport's readers what
workers send. How much may lie in the inbox is bounded by the credit that each worker has been
given. The readers tell the dispatcher, too, if a worker's address refuses them.

The iteration ends when the dispatcher has said that it is finished, and every task that it has
listed has ended here. A task ends when its worker says so, or when it is completed and its worker
is gone. Where others may hand back what their trainers do not take, one that has handed out all
that it made ends as well, once nobody has taken any of that for a while. One that the dispatcher
lists no more, because it has given its worker up, is read on: the worker may live, and then what it
has begun comes from nowhere else. It is let go when the iteration is finished and the worker seems
dead from here, too.
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
from ..delivery import End, HeldByOthers, TaskFailed, TaskUnknown
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
from . import leaving
from .heartbeats import HEARTBEAT_S, Heartbeats, News
from .leaving import Taker
from .options import AS_EVER, ReadOptions, TargetWorkers

log = logging.getLogger(__name__)

COLOCATED = "COLOCATED"
"""The tag of a worker on a trainer's host, as TensorFlow's clients know it."""

ASK_AGAIN_S = 0.1
"""A worker may hear of a new task later than the consumer does."""

GONE_S = 2.0
"""A worker that was given up, and refuses connections, counts as dead."""

MUTE_S = 60.0
"""The same if nothing comes over its connection, or none comes about: its host may be cut off for
a while, its process stopped."""

FORGOTTEN_S = 180.0
"""Of absence, and a worker knows its consumers no more."""

NEVER_S = 1e9
"""How long a worker is looked for: until the dispatcher gives it up."""

WARN_S = 60.0
"""Of waiting, and the log says what for; again when that has lasted twice as long, and so on."""

GOODBYE_S = 0.5
"""For workers to hear what a consumer that leaves hands back."""

CLOSED_S = 5.0
"""For another thread that closes the same consumer."""

TAKE_OVER_S = 0.5
"""How long to wait at the end for what other trainers have, if they take none of it meanwhile:
those that train in step may wait for this one."""

Client = BlockClient | LocalClient


class _Delivery(NamedTuple):
    """A worker has sent this."""

    client: Client
    task_id: int
    item: Block | End | HeldByOthers


class _Gone(NamedTuple):
    """The worker process has gone, or goes: nothing more comes from it."""

    uid: int
    client: Client
    reason: str


@dataclass
class _WorkerLink:
    """The connection to one worker process, and its tasks that are read over it."""

    client: Client
    reading: set[int] = field(default_factory=set)


_Inbox = queue.SimpleQueue[_Delivery | _Gone | News | ForebayError]


class Consumer:
    """Reads the iteration that it has joined. For one thread at a time; close it, in any thread."""

    def __init__(
        self,
        dispatcher: DispatcherClient,
        joined: pb.JoinIterationResponse,
        *,
        credit_bytes: int,
        reading: ReadOptions = AS_EVER,
        taker: Taker | None = None,
    ) -> None:
        self.taker = taker
        self._dispatcher = dispatcher
        self._process_id = os.getpid()
        self._reading = reading
        self.consumer_id = joined.consumer_id
        self.last_task_id = 0  # whose block came last; 0 in rounds, where one is of several tasks
        self._credit_bytes = credit_bytes
        self._budget = ElementBudget(reading.max_elements) if reading.max_elements else None
        self._inbox: _Inbox = queue.SimpleQueue()
        self._links: dict[int, _WorkerLink | None] = {}  # by uid; None: the process has gone
        self._ended: set[int] = set()
        self._held_by_others: set[int] = set()  # tasks of which only others have something
        self._held_at_s = 0.0  # as we heard last how much
        self._listed: dict[int, pb.TaskInfo] = {}
        self._given_up: dict[int, pb.TaskInfo] = {}  # listed no more, and not ended
        self._given_up_at_s = 0.0  # the latest of them
        self._waits_from_s: float | None = None  # if nothing has come since
        self._warn_after_s = WARN_S  # of waiting
        self._ask_again_at_s = 0.0
        self._ask_again: set[int] = set()  # tasks that their worker did not know yet
        self._asked_for_the_last_time: set[int] = set()
        self._finished = False
        self._given: tuple[Client, Key, Block] | None = None  # which is not handed back
        self._leaving = False
        self._closed = threading.Event()
        # Guards `_links`, `_given` and `_closed`; garbage that is collected meanwhile may close us.
        self._lock = threading.RLock()
        self._closer: int | None = None  # the thread that closes this
        self._is_left = threading.Event()  # it has
        self.not_handed_back: list[int] = []  # tasks whose workers did not hear what was, at last
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
        leaving.opened(self)

    def blocks(self, nothing: Block | None = None) -> Iterator[Block]:
        """Yield blocks as they come, until the iteration ends.

        `nothing`, if it is given, comes in their place after a second without one.

        Waits for the dispatcher as long as it is away, which it is as well while one answers
        that has not the journal that this iteration is in: a training program that ended there
        would be started again, and begin on whatever that one has.

        Raises PipelineError when the pipeline fails on a worker, NotFound when the dispatcher
        has lost its state in a way that was to be expected: it was in memory, or was repaired.
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
        """To the trainer, unless the consumer was closed meanwhile."""
        with self._lock:
            if self._closed.is_set():
                return False
            self._given = client, (task_id, 0), block
            self.last_task_id = task_id
            return True

    def _next_delivered(self) -> tuple[Client, int, Block] | None:
        """What comes next into the inbox: a block of a task, or something else, which is done.

        Raises queue.Empty if nothing comes for a while, and what `blocks` does.
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
        elif isinstance(item.item, HeldByOthers):
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
        """An element comes."""
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
        """What has not ended, by its worker."""
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
        # Tasks that others read may go on; then ours are all that there is to wait for, unless
        # our workers are given tasks yet for what theirs have lost.
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
        """Of the tasks whose workers were given up, wait no more for those who seem dead."""
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
            return True  # all consumers read from the same workers
        if uid in self._links or local_worker(uid) is not None:
            return True
        # The host of another trainer has enough to do.
        colocated = any(tag.upper() == COLOCATED for tag in task.worker_tags)
        return targets == TargetWorkers.ANY or (targets == TargetWorkers.AUTO and not colocated)

    def is_ours(self) -> bool:
        """Whether this is not a fork of the process that reads, whose connections it shares."""
        return os.getpid() == self._process_id

    def leave(self) -> None:
        """Have `blocks` end, and close this: now, or when a taker has given its last element.

        Called by any thread.
        """
        self._leaving = True
        if self.taker is None:
            self.close()
            return
        self.taker.leave()
        self._inbox.put(Unavailable("the consumer leaves"))  # for `blocks`, if it waits

    def close(self, left: int = 0) -> None:
        """Leave the iteration, and let every worker know. Idempotent, in any thread: who comes
        while another closes waits for that.

        What may be handed back is: all that `blocks` did not yield, and of the block that it
        yielded last the `left` elements at its end.
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
        leaving.closed(self)
        self._inbox.put(Unavailable("the consumer was closed"))  # for `blocks`, if it waits
        for link in links:  # all of them first: one that is being connected to takes its time
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
        """Called by the thread of the heartbeats."""
        if not isinstance(news, ForebayError):
            self._heard(news)
        self._inbox.put(news)

    def _report(self, request: pb.ConsumerHeartbeatRequest) -> None:
        """Say what else there is to say. Called by any thread."""

    def _heard(self, news: News) -> None:
        """Before whoever reads hears of it. Called by the thread of the heartbeats."""

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
        for link in new:  # once all of them share the budget of elements
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
        """Raises Unavailable once this was closed."""
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

        def deliver(task_id: int, _: int, item: Block | End | HeldByOthers) -> None:
            if isinstance(item, Block):
                self._arrived(client, task_id, item)
            self._inbox.put(_Delivery(client, task_id, item))

        def lost(reason: str) -> None:
            self._inbox.put(_Gone(uid, client, reason))

        # In this process what a cache keeps for others would be handed over, to be written to.
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
        """Before whoever reads is given it. Called by a thread of the transport."""

    def _addresses(self, task: pb.TaskInfo) -> list[tuple[str, str]]:
        """Where the task's worker is to be reached, as was asked for."""
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
        """Give up a worker's process. The dispatcher will no longer list its unfinished tasks."""
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
        else:  # a completed task that its worker does not know any more has ended, too
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
        # If a worker that was given up has not begun it by now, it will once it is listed again.
        self._asked_for_the_last_time = self._ask_again & self._given_up.keys()
        self._ask_again.clear()
