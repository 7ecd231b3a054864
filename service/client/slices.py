"""Slices: what a consumer asks workers for, bundle by bundle, and asks others for if need be.

The places of an order go to the listed tasks in turn, so that all consumers of a group read a
bundle at the same worker. A consumer stays with a bundle's worker until that worker is gone or
silent, or refuses connections. Then it asks the next one for all that it was to read there; that
worker makes the same elements again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..blocks import Block
from ..delivery import End, EndOfSlice, Slice, TaskFailed
from ..delivery.read_requests import runs_after
from ..errors import PipelineError
from ..proto import forebay_pb2 as pb
from ..transport.messages import Key
from .links import ASK_AGAIN_S, Links, ToAskAgain, WorkerLink
from .modes import Mode

log = logging.getLogger(__name__)

MAX_HOMES = 10_000
"""With so many places, those that were passed are forgotten."""


SLOW_S = 10.0
"""A worker that is waited for and has sent nothing for so long is *silent*; twice as long after
each time."""

AWAY_S = 2.0
"""A consumer that has not looked for so long was not waiting: what came meanwhile is unread."""

SILENT_S = 60.0
"""How long others are asked instead of a silent worker."""


@dataclass(eq=False)
class Request:
    """A slice that was asked for, or shall be."""

    place: int
    runs: tuple[int, ...]  # that have not come
    first: int = 0  # elements of the place before this one were planned earlier
    offset: int = 0  # about where in the epoch its first element stands
    is_query: bool = False
    until: int = 0  # elements before this one are made for a query
    enough: int = 0  # and those before this one, if there is room
    known: int = 0  # of a query: the elements that the bundle was known to have
    is_ahead: bool = False  # a query of a bundle that nobody reads yet
    blocks: deque[Block] = field(default_factory=deque)  # that have come, and were not given
    given: int = 0  # elements of the first of these
    key: Key = (0, 0)  # as which it was asked for
    asked_s: float = 0.0

    @property
    def is_needed(self) -> bool:
        """Of a query: whether a plan waits for elements that the worker must make to answer it."""
        return self.known <= self.until and not self.is_ahead


class BundlesMode(Mode):
    """A mode that reads bundles. It may be told of further blocks before it has given one."""

    slices: Slices

    @property
    def patience_s(self) -> float:
        return self.slices.patience_s

    def gone(self, link: WorkerLink) -> None:
        self.slices.gone(link)

    def refused(self, worker_uid: int) -> None:
        """A worker that was connected seems to have ended: its address refuses connections."""
        self.slices.refused(worker_uid)


class Slices:
    """The requests of one consumer. The reading thread calls all of it."""

    def __init__(
        self, links: Links, slice_of: Callable[[Request], Slice], first_place: int = 0
    ) -> None:
        """`slice_of` is called each time that a request is sent. `first_place`: among those of all
        epochs, where the places are numbered from 0 on."""
        self.first_place = first_place
        self._links = links
        self._slice_of = slice_of
        self.tasks: dict[int, pb.TaskInfo] = {}  # that can be asked
        self._homes: dict[int, int] = {}  # by place: the task that it is read from
        self.requests: dict[Key, Request] = {}  # that are outstanding
        self._waiting: list[Request] = []  # to be asked for, once there is a worker
        self._unknown = ToAskAgain[Request]()  # whose worker did not know the task yet
        self._numbers = 0
        self._silence = SilenceDetector()

    @property
    def patience_s(self) -> float:
        """After how long `ask_again` is due."""
        return ASK_AGAIN_S if self._unknown else 1.0

    def has_home(self, place: int) -> bool:
        """Whether the place was asked for."""
        return place in self._homes

    def awaited(self) -> str:
        """In words, the bundles that were asked for."""
        if not self.tasks:
            return "a worker: none has a task of the read (see `forebay status`)"
        what = {
            (request.place, self.tasks[task_id].worker_address)
            for (task_id, _), request in self.requests.items()
            if task_id in self.tasks
        }
        found = ", ".join(f"bundle {place} from worker {at}" for place, at in sorted(what)[:3])
        return found or "nothing"

    # -- asking --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is asked for within the block is sent in few pieces, at the latest at its end."""
        with contextlib.ExitStack() as stack:
            for _, link in self._links.all():
                stack.enter_context(link.client.together())
            yield

    def ask(self, request: Request) -> None:
        """Send the request to the worker of its place; keep it if there is none."""
        task_id = self._home(request.place)
        link = self._links.get(self.tasks[task_id].worker_uid) if task_id is not None else None
        if task_id is None or link is None:  # or the consumer is being closed
            self._waiting.append(request)
            return
        self._numbers += 1
        request.key = task_id, self._numbers
        request.asked_s = time.monotonic()
        self.requests[request.key] = request
        link.reading.add(task_id)
        link.client.read(task_id, self._slice_of(request), self._numbers)

    def _home(self, place: int) -> int | None:
        """The task that the place is read from; None if there is no task."""
        task_id = self._homes.get(place, 0)
        if task_id not in self.tasks or self._silence.is_silent(task_id):
            if not self.tasks:
                return None
            tasks = sorted(self.tasks)
            at = (self.first_place + place) % len(tasks)
            in_turn = tasks[at:] + tasks[:at]
            heard = (task for task in in_turn if not self._silence.is_silent(task))
            task_id = next(heard, in_turn[0])
            self._homes[place] = task_id
        return task_id

    def withdraw(self, which: Callable[[Request], bool]) -> None:
        for request in [*filter(which, self.requests.values())]:
            self._stop(request)
            del self.requests[request.key]
        self._waiting = [r for r in self._waiting if not which(r)]

    def forget_homes(self, is_passed: Callable[[int], bool]) -> None:
        """Nothing of such places is needed any more, and nothing is asked for."""
        if len(self._homes) > MAX_HOMES:
            kept = {place: home for place, home in self._homes.items() if not is_passed(place)}
            self._homes = kept

    def forget(self, place: int) -> None:
        """Nothing of the place is needed any more: its requests end unheard."""
        self._homes.pop(place, None)
        self.requests = {key: r for key, r in self.requests.items() if r.place != place}
        self._waiting = [r for r in self._waiting if r.place != place]

    def _ask_elsewhere(self, requests: Iterable[Request]) -> None:
        """Ask for these again: their tasks are gone, or their places have other homes."""
        with self.together():
            for request in list(requests):
                del self.requests[request.key]
                self._stop(request)
                if request.runs or request.is_query:  # else only its end was missing
                    self.ask(request)

    def _stop(self, request: Request) -> None:
        task_id, number = request.key
        for _, link in self._links.all():
            if task_id in link.reading:
                link.client.stop_task(task_id, number)

    # -- what the dispatcher says --------------------------------------------------------------

    def update(self, tasks: Iterable[pb.TaskInfo]) -> None:
        """These are listed now."""
        before = self.tasks
        self.tasks = {
            task.task_id: task
            for task in self._links.reachable(task for task in tasks if not task.stock)
            if self._links.open(task) is not None
        }
        self._links.start()
        self._lose([task for task_id, task in before.items() if task_id not in self.tasks])

    def refused(self, worker_uid: int) -> None:
        """The worker seems to have ended. Others are asked at once: what they make again if it has
        not is the same. The dispatcher waits for messages that may be on their way."""
        tasks = {i for i, task in self.tasks.items() if task.worker_uid == worker_uid}
        if len(tasks) < len(self.tasks):
            self._silence.avoid(tasks)
            self._ask_elsewhere([r for r in self.requests.values() if r.key[0] in tasks])

    def gone(self, link: WorkerLink) -> None:
        self._lose([self.tasks.pop(i) for i in link.reading if i in self.tasks])

    def _lose(self, tasks: Sequence[pb.TaskInfo]) -> None:
        """Go on elsewhere with what these tasks were asked for."""
        lost = {task.task_id for task in tasks}
        self._ask_elsewhere([r for r in self.requests.values() if r.key[0] in lost])
        for task in tasks:
            if (link := self._links.get(task.worker_uid)) is not None:
                link.reading.discard(task.task_id)
                self._links.close_if_idle(task.worker_uid)
        if self.tasks:
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                self.ask(request)

    # -- what workers say ----------------------------------------------------------------------

    def delivered(self, key: Key, block: Block) -> Request | None:
        """The request that the block belongs to; None if it was withdrawn."""
        self._silence.heard(key[0])
        request = self.requests.get(key)
        if request is not None:
            request.blocks.append(block)
            request.runs = runs_after(request.runs, block.count)
        return request

    def ended(self, key: Key, end: End) -> tuple[Request, EndOfSlice] | None:
        """The request that has ended, and how; None if it was withdrawn, or is asked for again.

        Raises PipelineError if the pipeline failed.
        """
        if isinstance(end, TaskFailed):
            raise PipelineError(end.code, end.message)
        self._silence.heard(key[0])
        request = self.requests.get(key)
        if request is None:
            return None
        if not isinstance(end, EndOfSlice):  # its worker does not know the task yet, or any more
            self._unknown.add(request)
            return None
        del self.requests[key]
        return request, end

    def ask_again(self, is_awaited: Callable[[Request], bool]) -> None:
        """Ask again where a worker did not know its task, and others where one is silent.
        `is_awaited` says for which outstanding requests the consumer waits."""
        if unknown := self._unknown.due():
            self._ask_elsewhere(r for r in unknown if self.requests.get(r.key) is r)
        requests = self.requests.values()
        awaited = ((r.key[0], r.asked_s) for r in requests if is_awaited(r))
        if silent := self._silence.look(self.tasks, awaited):
            self._ask_elsewhere(r for r in requests if r.key[0] in silent)


class SilenceDetector:
    """Finds the tasks of silent workers: those that send nothing although a consumer waits for what
    it asked of them."""

    def __init__(self) -> None:
        self._looked_s = 0.0
        self._back_s = 0.0  # since when it has looked without a break
        self._slow_s = SLOW_S
        self._heard_s: dict[int, float] = {}  # by task: when it sent something
        self._silent: dict[int, float] = {}  # by task: until when others are asked instead

    def heard(self, task_id: int) -> None:
        self._heard_s[task_id] = time.monotonic()

    def is_silent(self, task_id: int) -> bool:
        """Whether others are to be asked instead of this task."""
        return task_id in self._silent

    def avoid(self, tasks: Iterable[int]) -> None:
        """Others are to be asked instead of these tasks, for another reason."""
        self._silent.update(dict.fromkeys(tasks, time.monotonic() + SILENT_S))

    def look(
        self, tasks: Mapping[int, pb.TaskInfo], awaited: Iterable[tuple[int, float]]
    ) -> set[int]:
        """Those of `tasks` that have fallen silent. `awaited`: the tasks that the consumer waits
        for, and when each was asked; iterated once a second."""
        now = time.monotonic()
        if len(tasks) < 2 or now < self._looked_s + 1:
            return set()
        if now > self._looked_s + AWAY_S:
            self._back_s = now
        self._looked_s = now
        self._silent = {task_id: s for task_id, s in self._silent.items() if s > now}
        silent = {
            task_id
            for task_id, asked_s in awaited
            if now - max(asked_s, self._heard_s.get(task_id, 0.0), self._back_s) >= self._slow_s
        }
        if not silent:
            return silent
        log.warning(
            "nothing has come from workers %s for %.0f s: asking others",
            sorted(tasks[task_id].worker_address for task_id in silent), self._slow_s,
        )  # fmt: skip
        self._slow_s *= 2
        self._silent.update(dict.fromkeys(silent, now + SILENT_S))
        if self._silent.keys() >= tasks.keys():  # so these are not worse than the others
            self._silent = dict.fromkeys(silent, now + SILENT_S)
        return silent
