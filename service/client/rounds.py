"""A consumer of a coordinated read: in each round, one element of each task, in turn.

All consumers count rounds and visit tasks in the same order. So in each step they have elements of
the same round of the same task (service/core/rounds.py). The dispatcher lists a new task with its
first round, and stops all consumers before that round. A task is *held* if its worker is lost, or
is draining and has ended it. The consumer takes nothing more of a held task. It tells the
dispatcher the task's next round, and up to which round elements have arrived. From all reports, the
dispatcher derives the round from which on all consumers skip the task.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from ..block_limits import cost
from ..blocks import Block, Component, Strings, joined, split
from ..delivery import End, EndOfTask, Rounds, Superseded, TaskUnknown
from ..errors import FailedPrecondition
from ..proto import forebay_pb2 as pb
from .consumer import ASK_AGAIN_S, Client, Consumer
from .heartbeats import News

TOGETHER, TOGETHER_BYTES = 64, 256 << 10
"""How much is taken at once. It is far less than workers send ahead. So if a worker is lost, there
is a round that all consumers have received and no consumer has passed."""


class _Arrived:
    """A block, and the rest of it that was not taken yet."""

    def __init__(self, client: Client, block: Block) -> None:
        self.client = client
        self.block = self.rest = block


class _Task:
    """The received blocks of a task, and the consumer's position in them."""

    def __init__(self, starting_round: int) -> None:
        self.starting_round = starting_round
        self.next_round = starting_round  # of the element that is taken next
        self.received = starting_round  # the first round whose element has not arrived
        self.lost = 0  # the worker that was lost with it; 0: none
        self.ended = False  # by its worker, which drains
        self.said = False  # whether the dispatcher was told that all of an ended task was taken
        self.stop: int | None = None  # if removed, the round from which on nobody reads it
        self.blocks: deque[_Arrived] = deque()  # the first one starts with the next element

    def is_over(self) -> bool:
        return self.stop is not None and self.next_round >= self.stop

    def is_held(self) -> bool:
        return (self.lost != 0 or self.is_used_up()) and self.stop is None

    def is_used_up(self) -> bool:
        return self.ended and not self.blocks

    def take(self) -> tuple[Block, _Arrived | None]:
        """The next element, and its block if it was the last one of it."""
        arrived = self.blocks[0]
        self.next_round += 1
        if arrived.rest.count == 1:
            return arrived.rest, self.blocks.popleft()
        taken, arrived.rest = split(arrived.rest, 1)
        return taken, None


class RoundsConsumer(Consumer):
    """A consumer whose `blocks` have elements round by round, and within a round in the order of
    tasks. A block may have elements of several tasks.

    `blocks` raises NotFound, with the reason, if the consumers are out of step for good: some lack
    an element that others have passed, or one of them was restarted without the others. It raises
    FailedPrecondition, or PipelineError of that code, if another consumer has the same index.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._step = threading.Lock()  # guards all fields below
        self._tasks: dict[int, _Task] = {}  # in the order in which they are visited
        self._round = 0  # the current one
        self._limit: int | None = None  # a round that must not begin yet
        super().__init__(*arguments, **options)

    def blocks(self, nothing: Block | None = None) -> Iterator[Block]:
        while True:
            while not self._inbox.empty():  # `_arrived` added its blocks to the tasks already
                self._next_delivered()
            taken = self._take()
            self._let_removed_go()
            if taken is not None:
                self._waits_anew()
                yield taken
                continue
            self._say_what_is_used_up()
            try:
                self._next_delivered()
            except queue.Empty:
                if nothing is not None:
                    yield nothing

    def _take(self) -> Block | None:
        """The next elements; None if the next one is not here, or must not be taken yet."""
        taken: list[Block] = []
        emptied: list[_Arrived] = []
        size = 0
        with self._step:
            while len(taken) < TOGETHER and size < TOGETHER_BYTES:
                task = self._whose_turn()
                if task is None or task.is_held() or not task.blocks:
                    break
                if taken and not _alike(taken[0], task.blocks[0].rest):
                    break
                block, over = task.take()
                taken.append(block)
                size += cost(block)
                if over is not None:
                    emptied.append(over)
        for arrived in emptied:
            arrived.client.taken(arrived.block)
        return joined(taken) if taken else None

    def _whose_turn(self) -> _Task | None:
        """The next task of the round, or of the following one; None if that must not begin."""
        while True:
            following = None
            for task in self._tasks.values():
                if task.is_over():
                    continue
                if task.next_round == self._round:
                    return task
                if following is None or task.next_round < following:
                    following = task.next_round
            if following is None or (self._limit is not None and following >= self._limit):
                return None
            self._round = following

    # -- the dispatcher ------------------------------------------------------------------------

    def _report(self, request: pb.ConsumerHeartbeatRequest) -> None:
        with self._step:
            request.rounds.CopyFrom(
                pb.RoundReport(
                    current=self._round,
                    blocked=self._limit,
                    consumer_index=self._reading.consumer_index,
                    held=[
                        pb.HeldTask(
                            task_id=task_id,
                            lost=task.lost,
                            round=task.next_round,
                            received=task.received,
                        )
                        for task_id, task in self._tasks.items()
                        if task.is_held()
                    ],
                )
            )

    def _say_what_is_used_up(self) -> None:
        with self._step:
            new = [task for task in self._tasks.values() if task.is_used_up() and not task.said]
            for task in new:
                task.said = True
        if not new:
            return
        self._heartbeats.say_now()

    def _awaited(self) -> str:
        with self._step:
            due = [(task.next_round, i) for i, task in self._tasks.items() if not task.is_over()]
            round_, task_id = min(due, key=lambda one: one[0], default=(0, 0))
            if not due:
                return "a worker: none has a task of the epoch"
            if self._limit is not None and round_ >= self._limit:
                return f"the other consumers, before round {self._limit}"
            if self._tasks[task_id].is_held():
                return f"the others' word on task {task_id}, whose worker is lost or stops"
        whose = f"task {task_id}"
        if (info := self._listed.get(task_id)) is not None:
            whose = self._awaited_of(info)
        return f"round {round_}, for which the other consumers may not have come: {whose}"

    def _heard(self, news: News) -> None:
        with self._step:
            for info in news.tasks:
                if info.task_id not in self._tasks:
                    self._tasks[info.task_id] = _Task(info.starting_round)
                self._tasks[info.task_id].lost = info.lost
            listed = {info.task_id for info in news.tasks}
            for task_id in self._tasks.keys() - listed:
                task = self._tasks[task_id]
                if task.stop is None:
                    task.stop = news.removed.get(task_id, task.next_round)
            if not news.HasField("block_round"):
                self._limit = None
            elif self._round < news.block_round:
                self._limit = news.block_round

    def _update(self, news: News) -> None:
        self._listed = {task.task_id: task for task in news.tasks}
        new = []
        for info in news.tasks:
            if info.lost or not self._wants(info.task_id):
                continue
            linked = info.worker_uid in self._links
            link = self._link(info)
            if link is not None and info.task_id not in link.reading:
                link.reading.add(info.task_id)
                link.client.read(info.task_id, self._order(info.task_id))
            if link is not None and not linked:
                new.append(link)
        for link in new:  # only after all of them got a share of the element budget
            link.client.start()

    def _wants(self, task_id: int) -> bool:
        """Whether to read the task. The heartbeat thread may know by now that it is over."""
        with self._step:
            task = self._tasks.get(task_id)
            return task is not None and not task.is_over()

    def _let_removed_go(self) -> None:
        with self._step:
            over = {task_id: task for task_id, task in self._tasks.items() if task.is_over()}
            for task_id in over:
                del self._tasks[task_id]
        if not over:
            return
        for task in over.values():
            for arrived in task.blocks:
                arrived.client.taken(arrived.block)
        for uid, link in list(self._links.items()):
            if link is not None:
                for task_id in link.reading & over.keys():
                    link.client.stop_task(task_id)
                    link.reading.discard(task_id)
                self._close_if_idle(uid)

    # -- workers -------------------------------------------------------------------------------

    def _order(self, task_id: int) -> Rounds:
        with self._step:
            task = self._tasks[task_id]
            number = task.received - task.starting_round
        return Rounds(self._reading.consumer_index, self._reading.num_consumers or 1, number)

    def _arrived(self, client: Client, task_id: int, block: Block) -> None:
        with self._step:
            task = self._tasks.get(task_id)
            if task is not None:
                task.blocks.append(_Arrived(client, block))
                task.received += block.count
        if task is None:  # it is over
            client.taken(block)

    def _end(self, task_id: int, end: End) -> None:
        if isinstance(end, Superseded):
            raise FailedPrecondition(
                f"another consumer of the same job reads with consumer_index="
                f"{self._reading.consumer_index}: give each of them its own"
            )
        if isinstance(end, TaskUnknown):
            self._ask_again.add(task_id)
            self._ask_again_at_s = time.monotonic() + ASK_AGAIN_S
        elif not isinstance(end, EndOfTask):
            super()._end(task_id, end)
        else:
            with self._step:
                if (task := self._tasks.get(task_id)) is not None:
                    task.ended = True

    def _read_again(self) -> None:
        for task_id in self._ask_again & self._listed.keys() & self._tasks.keys():
            link = self._links.get(self._listed[task_id].worker_uid)
            if link is not None and task_id in link.reading:
                link.client.read(task_id, self._order(task_id))
        self._ask_again.clear()


def _alike(one: Block, other: Block) -> bool:
    """Whether one block may hold elements of both."""
    ranks = [[_rank(component) for component in block.components] for block in (one, other)]
    return ranks[0] == ranks[1]


def _rank(component: Component) -> int:
    """The rank of one element."""
    if component.shapes is not None:
        return int(component.shapes.shape[1])
    values = component.values
    return (values.lengths if isinstance(values, Strings) else values).ndim - 1
