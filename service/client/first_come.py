"""First come, first served: a consumer is given each block of its tasks as it comes.

The iteration ends when the dispatcher says that it is finished and every listed task has ended
here. A task ends when its worker says so, or when it is completed and its worker is gone. Other
consumers may hold a task's last elements and hand them back. Then the task also ends once no
trainer has taken any of them for a while. If the dispatcher gives a worker up, the consumer still
reads its tasks: if the worker lives, no other one produces what it has begun. The consumer drops
them when the iteration is finished and the worker seems dead from here too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Set

from ..blocks import Block
from ..delivery import End, TaskFailed, TaskUnknown
from ..errors import PipelineError
from ..proto import forebay_pb2 as pb
from ..transport.messages import Key
from .heartbeats import News
from .links import ASK_AGAIN_S, Client, Links, ToAskAgain, WorkerLink, read_task, task_awaited
from .modes import Mode
from .options import ReadOptions, ShardingPolicy, TargetWorkers

log = logging.getLogger(__name__)

COLOCATED = "COLOCATED"
"""The tag of a worker on a trainer's host, as TensorFlow's clients know it."""

DEAD_IF_REFUSED_S = 2.0
"""After this time, a given-up worker that refuses connections counts as dead."""

DEAD_IF_SILENT_S = 60.0
"""After this time, a given-up worker that is silent or cannot be reached counts as dead. Its host
may be cut off for a while, or its process stopped."""

FORGOTTEN_S = 180.0
"""After this long an absence, a worker no longer knows its consumers."""

TAKE_OVER_S = 0.5
"""How long to wait at the end for elements that other trainers hold and do not take. Trainers in
lockstep may be waiting for this one."""


class FirstComeMode(Mode):
    """The tasks of a consumer that takes blocks as they come."""

    def __init__(self, options: ReadOptions, links: Links) -> None:
        self._options = options
        self._links = links
        self._next: tuple[Client, int, Block] | None = None  # the block to be given
        self._finished = False
        self._listed: dict[int, pb.TaskInfo] = {}
        self._ended: set[int] = set()
        self._held_by_others: set[int] = set()  # tasks whose last elements other consumers hold
        self._held_at_s = 0.0  # when a worker last said so
        self._given_up: dict[int, pb.TaskInfo] = {}  # no longer listed, and not ended
        self._given_up_at_s = 0.0  # when the latest one was
        self._unknown = ToAskAgain[int]()
        self._asked_for_the_last_time: Set[int] = set()

    # -- what the consumer gives ---------------------------------------------------------------

    def take(self) -> tuple[Block, tuple[Client, int] | None] | None:
        if self._next is None:
            return None
        (client, task_id, block), self._next = self._next, None
        return block, (client, task_id)

    @property
    def patience_s(self) -> float:
        return ASK_AGAIN_S if self._unknown or self._held_by_others else 1.0

    def has_ended(self) -> bool:
        mine = {i for i, task in self._listed.items() if self._is_for_us(task)}
        # If other readers have tasks of their own, wait only for ours. But with dynamic splits
        # our workers may still get new tasks for what the others' workers lost.
        more = (
            self._options.policy == ShardingPolicy.DYNAMIC
            and self._options.targets != TargetWorkers.LOCAL
        )
        others = len(mine) < len(self._listed) and not more
        all_ended = mine <= self._ended and (self._finished or (others and bool(mine)))
        rest = mine - self._ended
        others_have_it = bool(rest) and rest <= self._held_by_others
        if self._given_up:
            self._drop_given_up(all_ended or others_have_it)
        waited_s = time.monotonic() - self._held_at_s
        over = all_ended or (others_have_it and waited_s >= TAKE_OVER_S)
        return over and not self._given_up

    def awaited(self) -> str:
        tasks = {**self._given_up, **self._listed}
        if not tasks:
            return "a worker: none has a task of the epoch (see `forebay status`)"
        mine = {i: task for i, task in tasks.items() if self._is_for_us(task)}
        if not mine:
            return (
                f"a worker to read from: with target_workers={self._options.targets.name}, those "
                f"that have tasks are not: {', '.join(t.worker_address for t in tasks.values())}"
            )
        return "; ".join(
            task_awaited(
                task,
                self._links.get(task.worker_uid),
                held_by_others=i in self._held_by_others,
                given_up=i in self._given_up,
            )
            for i, task in mine.items()
            if i not in self._ended
        ) or (
            "the end of the epoch: this reader has read all of its tasks, but other readers have "
            "not, or a worker of the list is missing"
        )

    # -- what the dispatcher says --------------------------------------------------------------

    def update(self, news: News) -> None:
        self._finished = news.finished
        listed = {task.task_id: task for task in news.tasks}
        lost = {i: t for i, t in self._listed.items() if i not in listed and self._is_read(t)}
        if lost:
            self._given_up_at_s = time.monotonic()
        back = self._given_up.keys() & listed.keys()
        self._given_up = {i: t for i, t in {**self._given_up, **lost}.items() if i not in back}
        self._asked_for_the_last_time -= back
        self._listed = listed
        for task in filter(self._is_for_us, news.tasks):
            link = self._links.open(task)
            if link is None:
                self._end_if_completed(task)
            elif task.task_id not in self._ended:
                read_task(link, task.task_id, self._options.read_request)
        self._links.start()
        for uid, link in self._links.all():
            for task_id in link.reading - self._listed.keys() - self._given_up.keys():
                self._links.stop_task(uid, task_id)
            self._links.close_if_idle(uid)

    def _is_read(self, task: pb.TaskInfo) -> bool:
        link = self._links.get(task.worker_uid)
        return link is not None and task.task_id in link.reading - self._ended

    def _is_for_us(self, task: pb.TaskInfo) -> bool:
        uid, targets = task.worker_uid, self._options.targets
        if uid in self._links or self._links.is_local(uid):
            return True
        # A worker on another trainer's host should serve that trainer only.
        colocated = any(tag.upper() == COLOCATED for tag in task.worker_tags)
        return targets == TargetWorkers.ANY or (targets == TargetWorkers.AUTO and not colocated)

    # -- what workers say ----------------------------------------------------------------------

    def deliver(self, client: Client, key: Key, block: Block) -> None:
        task_id = key[0]
        self._held_by_others.discard(task_id)
        if block.skipped and self._options.cache is not None:
            self._options.cache.skip(block.skipped)
        self._next = client, task_id, block

    def held_by_others(self, task_id: int) -> None:
        self._held_by_others.add(task_id)
        self._held_at_s = time.monotonic()

    def end(self, key: Key, end: End) -> None:
        task_id = key[0]
        self._held_by_others.discard(task_id)
        if isinstance(end, TaskFailed):
            raise PipelineError(end.code, end.message)
        task = self._listed.get(task_id) or self._given_up.get(task_id)
        last_time = task_id in self._asked_for_the_last_time & self._given_up.keys()
        if isinstance(end, TaskUnknown) and last_time:
            self._drop(task_id)
        elif isinstance(end, TaskUnknown) and task is not None and not task.completed:
            self._unknown.add(task_id)
        else:  # a completed task that its worker no longer knows has ended too
            self._ended.add(task_id)

    def gone(self, link: WorkerLink) -> None:
        """The dispatcher will stop listing its unfinished tasks."""
        for task in self._listed.values():
            if task.task_id in link.reading:
                self._end_if_completed(task)

    def _end_if_completed(self, task: pb.TaskInfo) -> None:
        if task.completed:
            self._ended.add(task.task_id)

    def ask_again(self) -> None:
        if not (due := self._unknown.due()):
            return
        tasks = {**self._given_up, **self._listed}
        for task_id in due & tasks.keys():
            link = self._links.get(tasks[task_id].worker_uid)
            if link is not None:
                link.client.read(task_id, self._options.read_request)
        # A given-up worker that has not begun the task by now begins it once it is listed again.
        self._asked_for_the_last_time = due & self._given_up.keys()

    def _drop_given_up(self, all_others_ended: bool) -> None:
        """Drops the given-up tasks whose workers seem dead."""
        for task_id, task in list(self._given_up.items()):
            link = self._links.get(task.worker_uid)
            if link is not None and task_id not in self._ended:
                refused, silent_s = link.client.silent()
                if not refused:
                    silent_s = min(silent_s, time.monotonic() - self._given_up_at_s)
                patience_s = DEAD_IF_REFUSED_S if refused else DEAD_IF_SILENT_S
                if silent_s < (patience_s if all_others_ended else FORGOTTEN_S):
                    continue
                log.warning(
                    "worker %s was given up, and nothing comes from it: what it had begun is lost",
                    task.worker_address,
                )
                link.client.stop_task(task_id)
            self._drop(task_id)

    def _drop(self, task_id: int) -> None:
        uid = self._given_up.pop(task_id).worker_uid
        link = self._links.get(uid)
        if link is not None:
            link.reading.discard(task_id)
            self._links.close_if_idle(uid)
