"""The mode of a coordinated read's consumer: in each round, one element of each task, in turn.

All consumers count rounds and visit tasks in the same order. So in each step they have elements of
the same round of the same task (service/core/rounds.py). The dispatcher lists a new task with its
first round, and stops all consumers before that round. A task is *held* if its worker is lost, or
is draining and has ended it. The consumer takes nothing more of a held task. It tells the
dispatcher the task's next round, and up to which round elements have arrived. From all reports, the
dispatcher derives the round from which on all consumers skip the task.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ..block_limits import cost
from ..blocks import Block, joined, split
from ..delivery import End, EndOfTask, Rounds, Superseded, TaskFailed, TaskUnknown
from ..errors import FailedPrecondition, PipelineError
from ..proto import forebay_pb2 as pb
from ..transport.messages import Key
from .heartbeats import News
from .links import ASK_AGAIN_S, Client, Links, ToAskAgain, WorkerLink, read_task, task_awaited
from .modes import Mode
from .options import ReadOptions

TOGETHER, TOGETHER_BYTES = 64, 256 << 10
"""How much is taken at once. It is far less than workers send ahead. So if a worker is lost, there
is a round that all consumers have received and no consumer has passed."""


class _Arrived:
    """A block, and the rest of it that was not taken yet."""

    def __init__(self, client: Client, block: Block) -> None:
        self.client: Client | None = client  # whose credit it takes up
        self.block = self.rest = block

    def free_credit(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            client.taken(self.block)


class _TaskRounds:
    """The received blocks of a task, and the consumer's position in them."""

    def __init__(self, starting_round: int) -> None:
        self.starting_round = starting_round
        self.next_round = starting_round  # of the element that is taken next
        self.received = starting_round  # the first round whose element has not arrived
        self.lost = 0  # the worker that was lost with it; 0: none
        self.ended = False  # by its worker, which drains
        self.reported = False  # whether the dispatcher knows that all of an ended task was taken
        self.stop: int | None = None  # if removed, the round from which on nobody reads it
        self.is_freed = False  # whether it takes up no credit any more
        self.blocks: deque[_Arrived] = deque()  # the first one starts with the next element

    def is_over(self) -> bool:
        return self.stop is not None and self.next_round >= self.stop

    def is_all_here(self) -> bool:
        return self.stop is not None and self.received >= self.stop

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


class RoundsMode(Mode):
    """Gives elements round by round, and within a round in the order of tasks.

    A block may have elements of several tasks. It is acknowledged when it is given.
    """

    def __init__(
        self,
        options: ReadOptions,
        links: Links,
        handle_inbox: Callable[[], None],
        report_now: Callable[[], None],
    ) -> None:
        """`handle_inbox` handles all that has come, and `report_now` sends a heartbeat."""
        self._options = options
        self._links = links
        self._handle_inbox = handle_inbox
        self._report_now = report_now
        self._listed: dict[int, pb.TaskInfo] = {}
        self._unknown = ToAskAgain[int]()
        self._step = threading.Lock()  # guards all fields below
        self._tasks: dict[int, _TaskRounds] = {}  # in the order in which they are visited
        self._round = 0  # the current one
        self._limit: int | None = None  # a round that must not begin yet

    # -- what the consumer gives ---------------------------------------------------------------

    def take(self) -> tuple[Block, None] | None:
        self._handle_inbox()  # `arrived` added its blocks to the tasks already
        taken = self._take()
        self._drop_removed()
        if taken is not None:
            return taken, None
        self._report_used_up()
        return None

    @property
    def patience_s(self) -> float:
        return ASK_AGAIN_S if self._unknown else 1.0

    def has_ended(self) -> bool:
        return False

    def awaited(self) -> str:
        with self._step:
            due = [(task.next_round, i) for i, task in self._tasks.items() if not task.is_over()]
            round_, task_id = min(due, key=lambda one: one[0], default=(0, 0))
            if not due:
                return "a worker: none has a task of the epoch (see `forebay status`)"
            if self._limit is not None and round_ >= self._limit:
                return f"the other consumers, before round {self._limit}"
            if self._tasks[task_id].is_held():
                return f"the others' word on task {task_id}, whose worker is lost or stops"
        whose = f"task {task_id}"
        if (info := self._listed.get(task_id)) is not None:
            whose = task_awaited(info, self._links.get(info.worker_uid))
        return f"round {round_}, for which the other consumers may not have come: {whose}"

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
            arrived.free_credit()
        return joined(taken) if taken else None

    def _whose_turn(self) -> _TaskRounds | None:
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

    # -- what the dispatcher says --------------------------------------------------------------

    def report(self, request: pb.ConsumerHeartbeatRequest) -> None:
        with self._step:
            request.rounds.CopyFrom(
                pb.RoundReport(
                    current=self._round,
                    blocked=self._limit,
                    consumer_index=self._options.consumer_index,
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

    def _report_used_up(self) -> None:
        with self._step:
            new = [task for task in self._tasks.values() if task.is_used_up() and not task.reported]
            for task in new:
                task.reported = True
        if new:
            self._report_now()

    def heard(self, news: News) -> None:
        with self._step:
            for info in news.tasks:
                if info.task_id not in self._tasks:
                    self._tasks[info.task_id] = _TaskRounds(info.starting_round)
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

    def update(self, news: News) -> None:
        self._listed = {task.task_id: task for task in news.tasks}
        for info in news.tasks:
            if info.lost or not self._wants(info.task_id):
                continue
            link = self._links.open(info)
            if link is not None:
                read_task(link, info.task_id, self.read_request(info.task_id))
        self._links.start()

    def _wants(self, task_id: int) -> bool:
        """Whether to read the task. The heartbeat thread may know by now that it was removed."""
        with self._step:
            task = self._tasks.get(task_id)
            return task is not None and not task.is_all_here()

    def _drop_removed(self) -> None:
        """Read no more of removed tasks, and free the credit that their elements take up.

        The rounds up to the removal are still to come. If the worker has returned, they need
        elements of its new task as well, which shares the credit.
        """
        with self._step:
            here = {i: task for i, task in self._tasks.items() if task.is_all_here()}
            for task_id in [i for i, task in here.items() if task.is_over()]:
                del self._tasks[task_id]
            here = {i: task for i, task in here.items() if not task.is_freed}
            blocks = [arrived for task in here.values() for arrived in task.blocks]
            for task in here.values():
                task.is_freed = True
        if not here:
            return
        for arrived in blocks:
            arrived.free_credit()
        for uid, link in self._links.all():
            for task_id in link.reading & here.keys():
                self._links.stop_task(uid, task_id)
            self._links.close_if_idle(uid)

    # -- what workers say ----------------------------------------------------------------------

    def read_request(self, task_id: int) -> Rounds:
        """What to ask the task's worker for: what follows the elements that have come."""
        with self._step:
            task = self._tasks[task_id]
            number = task.received - task.starting_round
        return Rounds(self._options.consumer_index, self._options.num_consumers or 1, number)

    def arrived(self, client: Client, key: Key, block: Block) -> None:
        task_id = key[0]
        with self._step:
            task = self._tasks.get(task_id)
            if task is not None and task.is_all_here():
                task = None
            if task is not None:
                task.blocks.append(_Arrived(client, block))
                task.received += block.count
        if task is None:
            client.taken(block)

    def deliver(self, client: Client, key: Key, block: Block) -> None:
        pass

    def end(self, key: Key, end: End) -> None:
        task_id = key[0]
        if isinstance(end, TaskFailed):
            raise PipelineError(end.code, end.message)
        if isinstance(end, Superseded):
            raise FailedPrecondition(
                f"another consumer of the same job reads with consumer_index="
                f"{self._options.consumer_index}: give each of them its own"
            )
        if isinstance(end, TaskUnknown):
            self._unknown.add(task_id)
        elif isinstance(end, EndOfTask):
            with self._step:
                if (task := self._tasks.get(task_id)) is not None:
                    task.ended = True

    def gone(self, link: WorkerLink) -> None:
        pass

    def ask_again(self) -> None:
        for task_id in self._unknown.due() & self._listed.keys() & self._tasks.keys():
            link = self._links.get(self._listed[task_id].worker_uid)
            if link is not None and task_id in link.reading:
                link.client.read(task_id, self.read_request(task_id))


def _alike(one: Block, other: Block) -> bool:
    """Whether one block may hold elements of both."""
    ranks = [[component.rank for component in block.components] for block in (one, other)]
    return ranks[0] == ranks[1]
