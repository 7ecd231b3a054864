"""The mode of an ordered read's consumer: its elements of one global order (service/order.py).

The consumer knows the order by arithmetic, as far as the lengths of bundles are known. It asks
workers for slices of bundles, and puts their elements in order. A *query* asks a worker for a
bundle's length.

**Plan.** Of the rounds that are known, the consumer asks for its own elements, one slice a bundle,
until WINDOW_BYTES are on their way or here. It gives them in *portions*, each once it is complete.

**Where.** The places of the order go to the listed tasks in turn, so that all consumers of a group
read a bundle at the same worker. A consumer stays with a bundle's worker until that worker is gone
or silent. Then it asks the next one for all that it was to read there; that worker makes the same
elements again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..blocks import Block, Component, merged, picked, rank, split
from ..delivery import End, EndOfSlice, Slice, TaskFailed
from ..delivery.orders import MAX_INDEX, MAX_SLICE_RUNS, runs_after
from ..errors import FailedPrecondition, PipelineError
from ..order import Ints
from ..proto import forebay_pb2 as pb
from ..transport.messages import Key
from .heartbeats import News
from .links import ASK_AGAIN_S, Client, Links, WorkerLink
from .positions import OrderedRead

log = logging.getLogger(__name__)

WINDOW_BYTES = 64 << 20
"""How much is asked for ahead of the trainer."""

FIRST_WINDOW = 256
"""How many elements are asked for before it is known how large they are."""

PORTION_BYTES = 1 << 20
MAX_PORTION = 1 << 16
"""A portion has about so many bytes, and at most so many elements."""

ALONE_BYTES = 32 << 10
"""Elements of this size and more are given one by one, as they came: a portion would copy them."""

MAX_REQUESTS = 2000
"""When so many slices are outstanding, no more are asked for: a worker bounds them."""

AHEAD = 16
"""How many bundles behind those that are read have their lengths asked for."""

SLOW_S = 10.0
"""A worker that is waited for and has sent nothing for so long is *silent*; twice as long after
each time."""

SILENT_S = 60.0
"""How long others are asked instead of a silent worker."""

MAX_LENGTHS = 10_000
"""Of bundles, in one heartbeat."""


@dataclass(eq=False)
class _Portion:
    """Some of this consumer's elements, in order."""

    positions: Ints
    needs: list[tuple[int, Ints]]  # places, and where their elements stand in the portion
    met: int = 0  # so many of the needs are met


@dataclass(eq=False)
class _Request:
    """A slice that was asked for, or shall be."""

    place: int
    runs: tuple[int, ...]  # that have not come
    first: int = 0  # elements of the place before this one were planned earlier
    is_query: bool = False
    until: int = 0  # elements before this one are made for a query
    blocks: deque[Block] = field(default_factory=deque)  # that have come, and were not given
    key: Key = (0, 0)  # as which it was asked for
    asked_s: float = 0.0


class OrderedMode:
    """A Mode (consumer.py) that gives this consumer's elements of the order."""

    def __init__(
        self, ordered: OrderedRead, links: Links, joined: pb.JoinIterationResponse
    ) -> None:
        self._ordered = ordered
        self._spec = joined.order
        self._links = links
        self._unsaid: deque[int] = deque()  # bundles whose lengths the dispatcher was not told of
        ordered.learn(joined.order, joined.lengths)
        self.epoch = ordered.begin(joined.order)
        self._tasks: dict[int, pb.TaskInfo] = {}  # that can be asked
        self._homes: dict[int, int] = {}  # by place: the task that it is read from
        self._requests: dict[tuple[int, int], _Request] = {}  # by task and number
        self._waiting: list[_Request] = []  # to be asked for, once there is a worker
        self._unknown: list[_Request] = []  # whose worker did not know the task yet
        self._unknown_s = 0.0
        self._querying: dict[int, int] = {}  # by place: what a query's `until` is
        self._queues: dict[int, deque[_Request]] = {}  # by place, for elements that were not given
        self._begun: dict[int, int] = {}  # by place that no worker was told of: its first element
        self._at_least: dict[int, int] = {}  # by place: elements that it is known to have
        self._floor = 0  # nothing of places before this one is needed any more
        self._looked_s = 0.0  # when silent workers were looked for
        self._patience_s = SLOW_S
        self._heard_s: dict[int, float] = {}  # by task: when it sent something
        self._silent: dict[int, float] = {}  # by task: until when others are asked instead
        self._numbers = 0
        self._round = 0  # the next one to plan
        self._before = 0  # elements in the rounds before
        self._portions: deque[_Portion] = deque()
        self._ready: deque[tuple[Block, Ints]] = deque()
        self._asked = 0  # elements that were asked for and not given
        self._bytes, self._elements = 0, 0  # that have come
        self._horizon = 1  # elements to ask for at a time
        self._is_stale = True  # whether there is something new to plan with
        self._refill_at = -1  # plan again when no more elements than these are asked for
        self._located = False

    # -- where it begins -----------------------------------------------------------------------

    def _locate(self) -> bool:
        """Find the round of the start; False if more lengths are needed for that."""
        if self._located:
            return True
        total = self._ordered.total
        if self.epoch.total is None and total is not None:  # it may start in another epoch
            self.epoch = self._ordered.begin(self._spec)
            self._stop_counting()
            self._homes.clear()
            self._at_least.clear()
        if self.epoch.start:
            found = self.epoch.order.locate(self.epoch.start)
            if found is None or not (total is not None or self._has_a_step()):
                return False
            self._round, self._before = found
            self._stop_counting()
        self._located = True
        return True

    def _stop_counting(self) -> None:
        """Stop the queries that count bundles in order to find the start."""
        for request in self._requests.values():
            self._stop(request)
        for requests in (self._requests, self._waiting, self._unknown, self._querying):
            requests.clear()

    def _has_a_step(self) -> bool:
        """Whether it is known that not all from the start on is dropped."""
        deal = self.epoch.deal
        last = deal.start + deal.consumers * deal.batch_size - 1
        return not self.epoch.drop_remainder or self.epoch.order.locate(last) is not None

    def _bundle(self, place: int) -> int:
        return self.epoch.bundles[place]

    # -- what it gives -------------------------------------------------------------------------

    def take(self) -> tuple[Block, tuple[Client, int] | None] | None:
        if self._is_stale or self._asked <= self._refill_at:
            self._plan()
        while not self._ready and self._portions and self._is_here(self._portions[0]):
            self._ready.extend(self._assembled(self._portions.popleft()))
        if not self._ready:
            return None
        block, positions = self._ready[0]
        given = int(np.searchsorted(positions, self._limit()))
        if not given:
            return None
        if given < block.count:
            block, rest = split(block, given)
            self._ready[0] = rest, positions[given:]
        else:
            self._ready.popleft()
        self._asked -= block.count
        if self._ordered.add_position:
            behind = Component(self.epoch.positions_behind(positions[:given]))
            block = replace(
                block, components=(*block.components, behind), encodings=None, loan=None
            )
        return block, None

    def _next_position(self) -> int:
        """Of what was asked for and not given."""
        if self._ready:
            return int(self._ready[0][1][0])
        return int(self._portions[0].positions[0]) if self._portions else MAX_INDEX

    def _limit(self) -> int:
        """The position behind the last element that may be given."""
        epoch = self.epoch
        if (end := epoch.end()) is not None:
            return end
        # Only steps that are whole for all consumers: a position must not lie behind the end.
        return epoch.deal.end(max(self._before, epoch.start), True)

    @property
    def patience_s(self) -> float:
        return ASK_AGAIN_S if self._unknown else 1.0

    def has_ended(self) -> bool:
        if not self._located or not self.epoch.order.ended(self._round):
            return False
        self.epoch.complete = self._next_position() >= self._limit()
        return self.epoch.complete

    def awaited(self) -> str:
        if not self._tasks:
            return "a worker: none has a task of the ordered read"
        epoch = self.epoch
        if not self._located:
            return (
                f"the lengths of the bundles before position {epoch.start} of epoch "
                f"{epoch.number}, which are run to be counted"
            )
        what = sorted(
            (request.place, self._tasks[task_id].worker_address)
            for (task_id, _), request in self._requests.items()
            if task_id in self._tasks
        )
        return f"position {self._before} of epoch {epoch.number}: " + (
            ", ".join(f"bundle {place} from worker {address}" for place, address in what[:3])
            or "nothing"
        )

    # -- the plan ------------------------------------------------------------------------------

    def _plan(self) -> None:
        if not self._tasks:
            return
        self._is_stale, self._refill_at = False, -1
        if not self._locate():
            self._query()
            return
        order = self.epoch.order
        while not order.ended(self._round):
            rounds = order.known_until - self._round
            window = self._window()
            if rounds > 0:
                self._refill_at = window // 2
            is_full = self._asked > window // 2 or len(self._requests) >= MAX_REQUESTS
            if rounds <= 0 or (self._portions and is_full):
                break
            self._horizon = min(2 * self._horizon, window // 2)
            wanted = max(1, self._horizon * self._ordered.num_consumers // self._visited())
            has_more = self._next_position() < self._limit()
            if rounds < wanted // 2 and has_more and order.length is None:
                break  # more will be known soon
            self._ask_for_rounds(self._round + min(rounds, wanted))
        self._query()

    def _visited(self) -> int:
        """About how many elements a round has."""
        slots = min(self._spec.cycle_length, self._spec.bundles)
        return max(1, slots * self._spec.block_length)

    def _fit(self, size: int) -> int:
        """How many elements fit into so many bytes."""
        return max(1, size * self._elements // max(1, self._bytes))

    def _window(self) -> int:
        """How many elements may be asked for ahead of the trainer."""
        window = self._fit(WINDOW_BYTES) if self._elements else FIRST_WINDOW
        return max(window, 2 * (self._ordered.batch_size or 1))

    def _ask_for_rounds(self, last: int) -> None:
        """Ask for this consumer's elements of the rounds from the present one to `last`."""
        order = self.epoch.order
        places, indexes = order.elements(self._round, last)
        firsts = {place: order.index_at(place, self._round) for place in set(places.tolist())}
        for place in firsts.keys() - self._homes.keys():
            self._begun.setdefault(place, firsts[place])
        first, self._before = self._before, self._before + len(places)
        self._round = last
        mine = self.epoch.deal.mine(first, len(places))
        places, indexes = places[mine], indexes[mine]
        self._asked += len(mine)
        for of_place in _by_place(places):
            for at in _parts(indexes[of_place], of_place):
                place = int(places[at[0]])
                request = _Request(place, _runs(indexes[at]), firsts[place])
                self._queues.setdefault(request.place, deque()).append(request)
                self._ask(request)
        size = min(self._fit(PORTION_BYTES), MAX_PORTION) if self._elements else 1
        for start in range(0, len(mine), size):
            of_portion = places[start : start + size]
            needs = [(int(of_portion[at[0]]), at) for at in _by_place(of_portion)]
            self._portions.append(_Portion(first + mine[start : start + size], needs))

    def _is_here(self, portion: _Portion) -> bool:
        """Whether all of the portion has come."""
        for place, at in portion.needs[portion.met :]:
            missing = len(at)
            for request in self._queues[place]:
                missing -= sum(block.count for block in request.blocks)
                if missing <= 0 or request.runs:
                    break
            if missing > 0:
                return False
            portion.met += 1
        return True

    def _assembled(self, portion: _Portion) -> Iterator[tuple[Block, Ints]]:
        """The portion as blocks with the elements' positions: one block, unless elements are large,
        or their ranks differ."""
        parts = [(block, at) for place, at in portion.needs for block, at in self._pop(place, at)]
        ranks = {tuple(map(rank, block.components)) for block, _ in parts}
        if len(ranks) == 1 and (self._fit(ALONE_BYTES) > 1 or len(parts) == 1):
            yield merged(parts), portion.positions
            return
        singles = {
            place: picked(block, range(number, number + 1))
            for block, at in parts
            for number, place in enumerate(at.tolist())
        }
        for place in range(len(portion.positions)):
            yield singles[place], portion.positions[place : place + 1]

    def _pop(self, place: int, at: Ints) -> Iterator[tuple[Block, Ints]]:
        """The next elements of a place, and where in `at` they belong."""
        queue, done = self._queues[place], 0
        while done < len(at):
            request = queue[0]
            if not request.blocks:
                queue.popleft()
                continue
            block = request.blocks.popleft()
            if block.count > len(at) - done:
                block, rest = split(block, len(at) - done)
                request.blocks.appendleft(rest)
            yield block, at[done : done + block.count]
            done += block.count
        while queue and not (queue[0].blocks or queue[0].runs):
            queue.popleft()
        if not queue:
            del self._queues[place]

    def _query(self) -> None:
        """Ask for the lengths of the bundles that are read now or soon. Those in front of the start
        are only counted: workers keep nothing of them.
        """
        order = self.epoch.order
        here = self._round if self._located else order.known_until
        opened, coming = order.opened(here, AHEAD)
        lacking = filter(self._lacks, self._queues)
        self._floor = min((*opened, *coming, *lacking), default=self._spec.bundles)
        for place in opened:  # no further round is known without another block of each
            more = self._planned(place) + self._spec.block_length
            self._query_place(place, more if self._located else 0)
        for place in coming:
            self._query_place(place, 0)

    def _query_place(self, place: int, until: int) -> None:
        if self._querying.get(place, -1) < until and not self._is_known(place):
            self._querying[place] = until
            self._ask(_Request(place, (), is_query=True, until=until))

    def _is_known(self, place: int) -> bool:
        return self._ordered.lengths[self._bundle(place)] >= 0

    # -- requests ------------------------------------------------------------------------------

    def _ask(self, request: _Request) -> None:
        """Send the request to the worker of its place; keep it if there is none."""
        task_id = self._home(request.place)
        if task_id is None:
            self._waiting.append(request)
            return
        link = self._links.get(self._tasks[task_id].worker_uid)
        assert link is not None
        self._numbers += 1
        request.key = task_id, self._numbers
        request.asked_s = time.monotonic()
        self._requests[request.key] = request
        link.reading.add(task_id)
        link.client.read(task_id, self._slice(request), self._numbers)

    def _slice(self, request: _Request) -> Slice:
        spec, number, place = self._spec, self.epoch.number, request.place
        counted = request.is_query and not self._located
        return Slice(
            bundle=number * spec.bundles + self._bundle(place),
            place=number * spec.bundles + place,
            runs=request.runs,
            until=MAX_INDEX if counted else max(self._planned(place), request.until),
            known=MAX_INDEX if counted else self._at_least.get(place, 0),
            keep=MAX_INDEX if counted else self._keep(place),
            floor=number * spec.bundles + self._floor,
            reader=self._ordered.consumer_index,
            readers=self._ordered.num_consumers,
        )

    def _planned(self, place: int) -> int:
        """Elements of the place before this one lie in the rounds that were planned."""
        return self.epoch.order.index_at(place, self._round)

    def _lacks(self, place: int) -> bool:
        """Whether elements of the place were asked for and have not come."""
        return any(request.runs for request in self._queues.get(place, ()))

    def _keep(self, place: int) -> int:
        """This consumer needs no element of the place before this one. Others of its group may need
        those that follow, so a worker begins a run here. The first time it is the same for all."""
        lacking = (r.first for r in self._queues.get(place, ()) if r.runs)
        first = next(lacking, self._planned(place))
        return min(first, self._begun.pop(place, first))

    def _home(self, place: int) -> int | None:
        """The task that the place is read from; None if there is no task."""
        task_id = self._homes.get(place, 0)
        if task_id not in self._tasks or task_id in self._silent:
            if not self._tasks:
                return None
            tasks = sorted(self._tasks)
            at = (self.epoch.number * self._spec.bundles + place) % len(tasks)
            in_turn = tasks[at:] + tasks[:at]
            task_id = next((task for task in in_turn if task not in self._silent), in_turn[0])
            self._homes[place] = task_id
        return task_id

    def _ask_elsewhere(self, requests: Iterable[_Request]) -> None:
        """Ask for these again: their tasks are gone, or their places have other homes."""
        for request in list(requests):
            del self._requests[request.key]
            self._stop(request)
            self._ask(request)

    def _stop(self, request: _Request) -> None:
        """Ask for it no longer."""
        task_id, number = request.key
        for _, link in self._links.all():
            if task_id in link.reading:
                link.client.stop_task(task_id, number)

    # -- what the dispatcher says --------------------------------------------------------------

    def report(self, request: pb.ConsumerHeartbeatRequest) -> None:
        unsaid = self._unsaid
        bundles = [unsaid.popleft() for _ in range(min(len(unsaid), MAX_LENGTHS))]
        request.bundles[:] = bundles
        request.lengths[:] = [self._ordered.lengths[bundle] for bundle in bundles]

    def heard(self, news: News) -> None:
        pass

    def update(self, news: News) -> None:
        before = self._tasks
        self._is_stale = True
        self._tasks = {
            task.task_id: task
            for task in news.tasks
            if not task.stock and self._links.open(task) is not None
        }
        self._links.start()
        self._lose([task for task_id, task in before.items() if task_id not in self._tasks])

    def gone(self, link: WorkerLink) -> None:
        lost = [self._tasks.pop(i) for i in link.reading if i in self._tasks]
        self._lose(lost)

    def _lose(self, tasks: Sequence[pb.TaskInfo]) -> None:
        """Go on elsewhere with what these tasks were asked for."""
        lost = {task.task_id for task in tasks}
        self._ask_elsewhere([r for r in self._requests.values() if r.key[0] in lost])
        for task in tasks:
            if (link := self._links.get(task.worker_uid)) is not None:
                link.reading.discard(task.task_id)
                self._links.close_if_idle(task.worker_uid)
        if self._tasks:
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                self._ask(request)

    # -- what workers say ----------------------------------------------------------------------

    def arrived(self, client: Client, key: Key, block: Block) -> None:
        pass

    def deliver(self, client: Client, key: Key, block: Block) -> None:
        client.taken(block)  # what is asked for bounds what is here
        self._heard_s[key[0]] = time.monotonic()
        request = self._requests.get(key)
        if request is None:
            return
        request.blocks.append(block)
        request.runs = runs_after(request.runs, block.count)
        self._elements += block.count
        self._bytes += block.payload_bytes

    def held_by_others(self, task_id: int) -> None:
        pass

    def end(self, key: Key, end: End) -> None:
        if isinstance(end, TaskFailed):
            raise PipelineError(end.code, end.message)
        self._heard_s[key[0]] = time.monotonic()
        request = self._requests.get(key)
        if request is None:
            return
        if not isinstance(end, EndOfSlice):  # its worker does not know the task yet, or any more
            self._unknown.append(request)
            self._unknown_s = time.monotonic() + ASK_AGAIN_S
            return
        del self._requests[key]
        self._is_stale = True
        self._learn(request.place, end.length, end.complete)
        if request.is_query:
            self._querying.pop(request.place, None)
            return
        if request.runs:
            raise self._differs(
                request.place,
                f"the bundle at place {request.place} had more than {request.runs[0]} elements, "
                f"and now has {end.length}",
            )

    def _learn(self, place: int, length: int, complete: bool) -> None:
        try:
            self.epoch.order.learn(place, length, complete)
        except ValueError as error:
            raise self._differs(place, str(error)) from None
        self._at_least[place] = max(self._at_least.get(place, 0), length)
        bundle = self._bundle(place)
        if complete and self._ordered.lengths[bundle] < 0:
            self._ordered.lengths[bundle] = length
            self._unsaid.append(bundle)

    def _differs(self, place: int, how: str) -> FailedPrecondition:
        return FailedPrecondition(
            f"{how}. It is bundle {self._bundle(place)} of epoch {self.epoch.number}. An ordered "
            "read needs a pipeline that gives the same each time (no clocks, no functions in "
            "Python that draw random numbers): change it, or read it without ordered=True. If its "
            "files have changed, remove the dataset and register it again"
        )

    def ask_again(self) -> None:
        now = time.monotonic()
        if self._unknown and now >= self._unknown_s:
            unknown, self._unknown = self._unknown, []
            self._ask_elsewhere(r for r in unknown if self._requests.get(r.key) is r)
        if len(self._tasks) < 2 or now < self._looked_s + 1:
            return
        self._looked_s = now
        self._silent = {task_id: s for task_id, s in self._silent.items() if s > now}
        head = self._portions[0] if self._portions else None
        awaited = None if head is None or self._is_here(head) else head.needs[head.met][0]
        silent = {
            request.key[0]
            for request in self._requests.values()
            if (request.is_query if awaited is None else request.place == awaited)
            and now - self._last_s(request) >= self._patience_s
        }
        if not silent:
            return
        log.warning(
            "nothing has come from workers %s for %.0f s: asking others",
            sorted(self._tasks[task].worker_address for task in silent), self._patience_s,
        )  # fmt: skip
        self._patience_s *= 2
        self._silent.update(dict.fromkeys(silent, now + SILENT_S))
        if self._silent.keys() >= self._tasks.keys():  # so this one is not worse than the others
            self._silent = dict.fromkeys(silent, now + SILENT_S)
        self._ask_elsewhere([r for r in self._requests.values() if r.key[0] in silent])

    def _last_s(self, request: _Request) -> float:
        """When the request was sent, or its worker sent something afterwards."""
        return max(request.asked_s, self._heard_s.get(request.key[0], 0.0))


def _parts(indexes: Ints, at: Ints) -> list[Ints]:
    """`at`, cut so that the indexes of each part have at most MAX_SLICE_RUNS runs."""
    firsts = np.flatnonzero(np.diff(indexes) != 1) + 1
    return np.split(at, firsts[MAX_SLICE_RUNS - 1 :: MAX_SLICE_RUNS])


def _runs(indexes: Ints) -> tuple[int, ...]:
    """Ascending indexes as pairs of a first one and a count."""
    firsts = np.flatnonzero(np.diff(indexes, prepend=indexes[0] - 2) != 1)
    counts = np.diff(firsts, append=len(indexes))
    return tuple(np.stack([indexes[firsts], counts], axis=1).ravel().tolist())


def _by_place(places: Ints) -> list[Ints]:
    """Where the elements of each place are, ascending."""
    if not len(places):
        return []
    order = np.argsort(places, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(places[order])) + 1)
