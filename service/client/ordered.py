"""The mode of an ordered read's consumer: its elements of one global order (service/order.py).

The consumer knows the order by arithmetic, as far as the lengths of bundles are known. It asks
workers for slices of bundles, and puts their elements in order. A *query* asks a worker for a
bundle's length.

**Plan.** The known rounds are cut into *chunks*. Of each, the consumer asks for its own elements,
bundle by bundle, and gives them once all have come. So many elements are asked for ahead as fill
WINDOW_BYTES.

**Where.** The places of the order go to the listed tasks in turn, so that all consumers of a group
read a bundle at the same worker. A consumer stays with a bundle's worker until that worker is gone,
or is silent for too long. Then it asks another one, which makes the same elements again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..blocks import Block, merged, picked, rank, split
from ..delivery import End, EndOfSlice, Slice, TaskFailed
from ..delivery.orders import MAX_INDEX, MAX_SLICE_RUNS, runs_after
from ..errors import FailedPrecondition, PipelineError
from ..order import Ints
from ..proto import forebay_pb2 as pb
from ..transport.messages import Key
from .heartbeats import News
from .links import ASK_AGAIN_S, Client, Links, WorkerLink
from .positions import Ordered

log = logging.getLogger(__name__)

WINDOW_BYTES = 32 << 20
"""How much is asked for ahead of the trainer."""

CHUNK_BYTES = 1 << 20
CHUNKS = 1 << 16
"""A chunk has about so many bytes, and at most so many elements."""

MAX_REQUESTS = 2000
"""When so many slices are outstanding, no further chunk is asked for: a worker bounds them."""

AHEAD = 16
"""How many bundles behind those that are read have their lengths asked for."""

SLOW_S = 10.0
"""When a worker has been silent for so long about a bundle that is waited for, another one is
asked; twice as long after each time."""

MAX_LENGTHS = 10_000
"""Of bundles, in one heartbeat."""


@dataclass(eq=False)
class _Chunk:
    """Elements of this consumer, in order."""

    count: int
    positions: Ints
    missing: int  # parts
    parts: list[tuple[Block, Ints]] = field(default_factory=list)


@dataclass(eq=False)
class _Part:
    """The elements of one bundle in a chunk."""

    chunk: _Chunk
    at: Ints  # where they stand in the chunk
    came: int = 0


@dataclass(eq=False)
class _Request:
    """A slice that was asked for, or shall be."""

    place: int
    runs: tuple[int, ...]
    part: _Part | None  # None: a query
    first: int = 0  # element of the place in the chunk, whichever consumer has it
    key: Key = (0, 0)  # as which it was asked for
    asked_s: float = 0.0
    patience_s: float = SLOW_S


class OrderedMode:
    """A Mode (consumer.py) that gives this consumer's elements of the order."""

    def __init__(self, ordered: Ordered, links: Links, joined: pb.JoinIterationResponse) -> None:
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
        self._querying: dict[int, int] = {}  # by place: what was planned then
        self._outstanding: dict[int, set[_Request]] = {}  # by place, for elements
        self._planned: dict[int, int] = {}  # by place: elements before this one were planned
        self._begun: dict[int, int] = {}  # by place that no worker has told of: the first planned
        self._at_least: dict[int, int] = {}  # by place: elements that it is known to have
        self._floor = 0  # nothing of places before this one is needed any more
        self._looked_s = 0.0  # when slow workers were looked for
        self._numbers = 0
        self._round = 0  # the next one to plan
        self._before = 0  # elements in the rounds before
        self._chunks: deque[_Chunk] = deque()
        self._ready: deque[tuple[Block, Ints]] = deque()
        self._asked = 0  # elements that were asked for and not given
        self._bytes, self._elements = 0, 0  # that have come
        self._chunk = 1  # elements, of the next chunk
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
            for known in (self._homes, self._at_least):
                known.clear()
        if self.epoch.start:
            found = self.epoch.order.locate(self.epoch.start)
            if found is None:
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

    def _bundle(self, place: int) -> int:
        return self.epoch.bundle(place)

    # -- what it gives -------------------------------------------------------------------------

    def take(self) -> tuple[Block, tuple[Client, int] | None] | None:
        self._plan()
        while self._chunks and not self._chunks[0].missing:
            chunk = self._chunks.popleft()
            self._ready.extend(_assembled(chunk))
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
        return block, None

    def _limit(self) -> int:
        """The position behind the last element that may be given."""
        epoch = self.epoch
        if not epoch.drop_remainder:
            return MAX_INDEX
        if (end := epoch.end()) is not None:
            return end
        return epoch.deal.end(max(self._before, epoch.start), True)

    @property
    def patience_s(self) -> float:
        return ASK_AGAIN_S if self._unknown else 1.0

    def has_ended(self) -> bool:
        if self._chunks or not self._located or not self.epoch.order.ended(self._round):
            return False
        self.epoch.over = not self._ready or int(self._ready[0][1][0]) >= self._limit()
        return self.epoch.over

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
        if not self._locate():
            self._query()
            return
        order = self.epoch.order
        while not order.ended(self._round):
            rounds = order.known_until - self._round
            room = self._window() - self._asked
            is_full = room < self._chunk // 2 or len(self._requests) >= MAX_REQUESTS
            if rounds <= 0 or (self._chunks and is_full):
                break
            wanted = -(-self._chunk * self._ordered.num_consumers // self._visited())
            if rounds < wanted // 2 and self._chunks and order.length is None:
                break  # more will be known soon
            self._plan_chunk(self._round + min(rounds, max(1, wanted)))
        self._query()

    def _visited(self) -> int:
        """About how many elements a round has."""
        slots = min(self._spec.cycle_length, self._spec.bundles)
        return max(1, slots * self._spec.block_length)

    def _window(self) -> int:
        """How many elements may be asked for ahead of the trainer."""
        if not self._elements:
            return max(2 * self._chunk, 2 * (self._ordered.batch_size or 1))
        return max(2 * self._chunk, WINDOW_BYTES * self._elements // max(1, self._bytes))

    def _plan_chunk(self, last: int) -> None:
        """Ask for this consumer's elements of the rounds from the present one to `last`."""
        places, indexes = self.epoch.order.elements(self._round, last)
        first, self._before = self._before, self._before + len(places)
        self._round = last
        mine = self.epoch.deal.mine(first, len(places))
        by_place = np.argsort(places, kind="stable")
        begins = by_place[np.diff(places[by_place], prepend=-1) != 0]
        firsts = dict(zip(places[begins].tolist(), indexes[begins].tolist(), strict=True))
        for place, index in firsts.items():
            if place not in self._planned:
                self._begun[place] = index
        ends = np.flatnonzero(np.diff(places[by_place], append=-1))
        self._planned.update(
            zip(
                places[by_place][ends].tolist(), (indexes[by_place][ends] + 1).tolist(), strict=True
            )
        )
        if not len(mine):
            return
        places, indexes = places[mine], indexes[mine]
        chunk = _Chunk(len(mine), first + mine, 0)
        self._chunks.append(chunk)
        self._asked += chunk.count
        by_place = np.argsort(places, kind="stable")
        cuts = np.flatnonzero(np.diff(places[by_place])) + 1
        for of_place in np.split(by_place, cuts):
            for at in _parts(indexes[of_place], of_place):
                chunk.missing += 1
                runs = _runs(indexes[at])
                place = int(places[at[0]])
                self._ask(_Request(place, runs, _Part(chunk, at), firsts[place]))
        per_chunk = CHUNK_BYTES * self._elements // max(1, self._bytes) if self._elements else 1024
        self._chunk = max(1, min(2 * self._chunk, per_chunk, CHUNKS))

    def _query(self) -> None:
        """Ask for the lengths of the bundles that are read now or soon. Those in front of the start
        are only counted: workers keep nothing of them.
        """
        order = self.epoch.order
        here = self._round if self._located else order.known_until
        opened, coming = order.opened(here, AHEAD)
        outstanding = min(self._outstanding, default=None)
        starts = [*opened[:1], *coming[:1], *([] if outstanding is None else [outstanding])]
        self._floor = min(starts, default=self._spec.bundles)
        for place in (*opened, *coming):
            if self._is_known(place):
                continue
            # A worker makes more than a reader has planned only if it says so.
            planned, known = self._planned.get(place, 0), self._at_least.get(place, 0)
            if place not in self._querying or self._querying[place] < known <= planned:
                self._querying[place] = planned
                self._ask(_Request(place, (), None))

    def _is_known(self, place: int) -> bool:
        return self._ordered.lengths[self._bundle(place)] >= 0

    # -- requests ------------------------------------------------------------------------------

    def _ask(self, request: _Request) -> None:
        """Send the request to the worker of its place; keep it if there is none."""
        task_id = self._home(request.place)
        if request.part is not None:
            self._outstanding.setdefault(request.place, set()).add(request)
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
        counted = request.part is None and not self._located
        planned = self._planned.get(place, 0)
        firsts = (r.first for r in self._outstanding.get(place, ()) if r.runs)
        keep = self._begun.get(place, min(firsts, default=planned))
        return Slice(
            bundle=number * spec.bundles + self._bundle(place),
            place=number * spec.bundles + place,
            runs=request.runs,
            until=MAX_INDEX if counted else planned,
            known=MAX_INDEX if counted else self._at_least.get(place, 0),
            keep=MAX_INDEX if counted else keep,
            floor=number * spec.bundles + self._floor,
            reader=self._ordered.consumer_index,
            readers=self._ordered.num_consumers,
        )

    def _home(self, place: int) -> int | None:
        """The task that the place is read from; None if there is no task."""
        task_id = self._homes.get(place, 0)
        if task_id not in self._tasks:
            if not self._tasks:
                return None
            tasks = sorted(self._tasks)
            task_id = tasks[(self.epoch.number * self._spec.bundles + place) % len(tasks)]
            self._homes[place] = task_id
        return task_id

    def _ask_elsewhere(self, requests: Iterable[_Request]) -> None:
        """Ask for these again: their tasks are gone, or their places have other homes."""
        for request in list(requests):
            del self._requests[request.key]
            self._stop(request)
            self._ask(request)

    def _stop(self, request: _Request) -> None:
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
        request = self._requests.get(key)
        if request is None or request.part is None:
            return
        part = request.part
        part.chunk.parts.append((block, part.at[part.came : part.came + block.count]))
        part.came += block.count
        request.runs = runs_after(request.runs, block.count)
        request.asked_s = time.monotonic()
        self._elements += block.count
        self._bytes += block.payload_bytes

    def held_by_others(self, task_id: int) -> None:
        pass

    def end(self, key: Key, end: End) -> None:
        if isinstance(end, TaskFailed):
            raise PipelineError(end.code, end.message)
        request = self._requests.get(key)
        if request is None:
            return
        if not isinstance(end, EndOfSlice):  # its worker does not know the task yet, or any more
            self._unknown.append(request)
            self._unknown_s = time.monotonic() + ASK_AGAIN_S
            return
        del self._requests[key]
        self._learn(request.place, end.length, end.complete)
        if request.part is None:
            self._querying.pop(request.place, None)
            return
        if request.runs:
            raise self._differs(
                request.place, f"had element {request.runs[0]} before, and has {end.length} now"
            )
        request.part.chunk.missing -= 1
        outstanding = self._outstanding[request.place]
        outstanding.discard(request)
        if not outstanding:
            del self._outstanding[request.place]

    def _learn(self, place: int, length: int, complete: bool) -> None:
        try:
            self.epoch.order.learn(place, length, complete)
        except ValueError as error:
            raise self._differs(place, str(error)) from None
        self._at_least[place] = max(self._at_least.get(place, 0), length)
        self._begun.pop(place, None)
        bundle = self._bundle(place)
        if complete and self._ordered.lengths[bundle] < 0:
            self._ordered.lengths[bundle] = length
            self._unsaid.append(bundle)

    def _differs(self, place: int, how: str) -> FailedPrecondition:
        return FailedPrecondition(
            f"the dataset is not deterministic: bundle {self._bundle(place)} "
            f"{how}. An ordered read needs the same elements each time: give random filters and "
            "the like fixed seeds, or read without ordered=True"
        )

    def ask_again(self) -> None:
        now = time.monotonic()
        if self._unknown and now >= self._unknown_s:
            unknown, self._unknown = self._unknown, []
            self._ask_elsewhere(r for r in unknown if self._requests.get(r.key) is r)
        if len(self._tasks) < 2 or now < self._looked_s + 1:
            return
        self._looked_s = now
        head = self._chunks[0] if self._chunks else None
        slow = [
            request
            for request in self._requests.values()
            if (request.part.chunk if request.part is not None else None) is head
            and now - request.asked_s >= request.patience_s
        ]
        for request in slow:
            request.patience_s *= 2
            tasks = sorted(self._tasks)
            here = self._homes[request.place]
            after = tasks.index(here) + 1 if here in tasks else 0
            self._homes[request.place] = tasks[after % len(tasks)]
            log.warning(
                "worker %s has been silent about a bundle for %.0f s: asking worker %s",
                self._tasks[here].worker_address if here in self._tasks else here,
                now - request.asked_s,
                self._tasks[self._homes[request.place]].worker_address,
            )
        self._ask_elsewhere(slow)


def _parts(indexes: Ints, at: Ints) -> list[Ints]:
    """`at`, cut so that the indexes of each part have at most MAX_SLICE_RUNS runs."""
    firsts = np.flatnonzero(np.diff(indexes) != 1) + 1
    return np.split(at, firsts[MAX_SLICE_RUNS - 1 :: MAX_SLICE_RUNS])


def _runs(indexes: Ints) -> tuple[int, ...]:
    """Ascending indexes as pairs of a first one and a count."""
    firsts = np.flatnonzero(np.diff(indexes, prepend=indexes[0] - 2) != 1)
    counts = np.diff(firsts, append=len(indexes))
    return tuple(np.stack([indexes[firsts], counts], axis=1).ravel().tolist())


def _assembled(chunk: _Chunk) -> Iterator[tuple[Block, Ints]]:
    """The chunk as blocks with the elements' positions: one block, unless ranks differ."""
    ranks = {tuple(map(rank, block.components)) for block, _ in chunk.parts}
    if len(ranks) == 1:
        yield merged(chunk.parts), chunk.positions
        return
    singles = {}
    for block, at in chunk.parts:
        for number, place in enumerate(at.tolist()):
            singles[place] = picked(block, range(number, number + 1))
    for place in range(chunk.count):
        yield singles[place], chunk.positions[place : place + 1]
