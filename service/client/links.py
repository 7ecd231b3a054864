"""A consumer's links: its connections to the worker processes whose tasks it reads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from ..blocks import Block
from ..connections.protocols import LOCAL, SERVED
from ..connections.tunnel import open_tunnel
from ..delivery import End, EndPending, ReadRequest
from ..errors import FailedPrecondition, ForebayError, Unavailable, Unimplemented
from ..proto import forebay_pb2 as pb
from ..transport import BlockClient, ConnectionRefused, ElementBudget, LocalClient, local_worker
from ..transport.messages import Key
from .options import ReadOptions

log = logging.getLogger(__name__)

ASK_AGAIN_S = 0.1
"""Until the consumer asks again for a task that its worker does not know yet."""

NEVER_S = 1e9
"""How long to retry a worker's address: until the dispatcher gives the worker up."""

Client = BlockClient | LocalClient


@dataclass
class WorkerLink:
    """The connection to one worker process, and the tasks that are read over it."""

    client: Client
    reading: set[int] = field(default_factory=set)


class Links:
    """A link for each worker process, by its uid. `close_all` may be called by any thread; all
    else by the one that reads.
    """

    def __init__(
        self,
        consumer_id: int,
        options: ReadOptions,
        credit_bytes: int,
        *,
        deliver: Callable[[Client, Key, Block | End | EndPending], None],
        lost: Callable[[int, Client, str], None],
        refused: Callable[[int, ConnectionRefused | None], None],
        reconnected: Callable[[], None],
        credential: Callable[[], tuple[bytes, int]],
        fail: Callable[[ForebayError], None],
    ) -> None:
        """Transport threads call these: `deliver` with what a worker sends of a task; `lost` when a
        process is gone or going, which sends nothing more, with the reason; `refused` when an
        address refuses connections, and with None when it no longer does; `reconnected` when a
        connection that was cut is there again; `fail` when nothing may be read here. `credential`
        returns the newest one for data connections, and its number.
        """
        self._consumer_id = consumer_id
        self._options = options
        self._credit_bytes = credit_bytes
        self._deliver, self._lost, self._refused = deliver, lost, refused
        self._reconnected = reconnected
        self._credential, self._fail = credential, fail
        self._budget = ElementBudget(options.max_elements) if options.max_elements else None
        self._links: dict[int, WorkerLink | None] = {}  # None: the process has gone
        self._new: list[WorkerLink] = []  # not started yet
        self._passed_over: set[int] = set()  # processes that no protocol leads to
        self._closed = False
        self._traceparent = ""
        # Guards these. Reentrant: garbage collection may call `close_all`.
        self._lock = threading.RLock()

    def __contains__(self, uid: object) -> bool:
        """Whether there is a link to this process, or was one until the process was gone."""
        return uid in self._links

    def get(self, uid: int) -> WorkerLink | None:
        return self._links.get(uid)

    def is_local(self, uid: int) -> bool:
        return local_worker(uid) is not None

    def all(self) -> list[tuple[int, WorkerLink]]:
        """Those whose processes are not gone."""
        return [(uid, link) for uid, link in list(self._links.items()) if link is not None]

    def open(self, task: pb.TaskInfo) -> WorkerLink | None:
        """The link to the task's worker; None if that process is gone.

        Raises Unavailable after `close_all`, Unimplemented for a stock worker, and
        FailedPrecondition if no protocol fits.
        """
        uid = task.worker_uid
        with self._lock:
            if self._closed:
                raise Unavailable("the consumer was closed")
            if uid not in self._links:
                self._links[uid] = link = WorkerLink(self._connected(task))
                self._new.append(link)
            return self._links[uid]

    def reachable(self, tasks: Iterable[pb.TaskInfo]) -> list[pb.TaskInfo]:
        """Those at workers that a protocol leads to, and, with a warning, no others. Raises
        FailedPrecondition if there are only others; Unimplemented for a stock worker."""
        found, others = [], {}
        for task in tasks:
            try:
                if not self.is_local(task.worker_uid):
                    _addresses(task, self._options.protocol)
                found.append(task)
            except FailedPrecondition as error:
                others[task.worker_uid] = error
        if others and not found and not self._links:
            raise next(iter(others.values()))
        for uid in others.keys() - self._passed_over:
            log.warning("reads without a worker: %s", others[uid])
        self._passed_over |= others.keys()
        return found

    def trace(self, traceparent: str) -> None:
        """The consumer waits, and what workers do for it is part of that trace; "": it does not."""
        self._traceparent = traceparent
        for _, link in self.all():
            link.client.trace(traceparent)

    def start(self) -> None:
        """Start the links that were opened: only now have all a share of the element budget."""
        new, self._new = self._new, []
        for link in new:
            link.client.start()

    def stop_task(self, uid: int, task_id: int) -> None:
        if (link := self.get(uid)) is not None:
            link.client.stop_task(task_id)
            link.reading.discard(task_id)

    def close_if_idle(self, uid: int) -> None:
        """Close the link if no task is read over it."""
        with self._lock:
            link = self._links.get(uid)
            if link is None or link.reading:
                return
            del self._links[uid]
        link.client.close()
        self._refused(uid, None)

    def remove(self, uid: int, client: Client) -> WorkerLink | None:
        """The process at this client is gone. Returns its link, which is closed; None if it has
        another one by now.
        """
        with self._lock:
            link = self._links.get(uid)
            if link is None or link.client is not client:
                return None
            self._links[uid] = None
        link.client.close()
        self._refused(uid, None)
        return link

    def close_all(self) -> list[WorkerLink]:
        """Open no more, and return those that the caller is to close."""
        with self._lock:
            self._closed = True
            links = [link for _, link in self.all()]
            self._links = {}
            return links

    def _connected(self, task: pb.TaskInfo) -> Client:
        uid = task.worker_uid
        client: Client

        def deliver(task_id: int, number: int, item: Block | End | EndPending) -> None:
            self._deliver(client, (task_id, number), item)

        def lost(reason: str) -> None:
            self._lost(uid, client, reason)

        # A local client shares memory: a trainer could write to what the cache keeps for others.
        may_share = self._options.protocol in (None, LOCAL) and self._options.cache is None
        worker = local_worker(uid) if may_share else None
        elements = self._budget.share() if self._budget is not None else None
        common: Any = {
            "consumer_id": self._consumer_id, "deliver": deliver, "lost": lost,
            "credit_bytes": self._credit_bytes, "elements": elements,
        }  # fmt: skip
        if worker is not None:
            client = LocalClient(worker, **common)
        else:
            client = BlockClient(
                _addresses(task, self._options.protocol),
                **common,
                worker_uid=uid,
                give_up_s=NEVER_S,
                open_tunnel=open_tunnel,
                refused=partial(self._refused, uid),
                reconnected=self._reconnected,
                credential=self._credential,
                fail=self._fail,
                map_memory=self._options.map_memory,
            )
        if self._traceparent:
            client.trace(self._traceparent)
        return client


T = TypeVar("T")


class ToAskAgain(Generic[T]):
    """Tasks, or requests of them, that their worker did not know yet."""

    def __init__(self) -> None:
        self._waiting: dict[T, None] = {}  # in order
        self._at_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, one: T) -> None:
        self._waiting[one] = None
        self._at_s = time.monotonic() + ASK_AGAIN_S

    def due(self) -> Set[T]:
        """Those to ask for now, which are then no longer among these."""
        if not self._waiting or time.monotonic() < self._at_s:
            return set()
        due, self._waiting = self._waiting, {}
        return due.keys()


def read_task(link: WorkerLink, task_id: int, request: ReadRequest) -> None:
    """Begin to read the task over this link, unless it is read."""
    if task_id not in link.reading:
        link.reading.add(task_id)
        link.client.read(task_id, request)


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


def _addresses(task: pb.TaskInfo, wanted: str | None) -> list[tuple[str, str]]:
    """The worker's usable (protocol, address) pairs. Raises as `Links.open` does."""
    if task.stock:
        raise Unimplemented(
            f"the worker {task.worker_address} is tf.data service's own, and Forebay's clients "
            "read from Forebay's workers only: replace it, or use tf.data service's client"
        )
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
