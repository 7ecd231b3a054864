"""Portions: puts elements of several bundles together, in the order of the consumer's elements.

Elements of one bundle that follow each other in that order are a *stretch*: they are given as they
come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..blocks import Block, merged, part, split
from ..delivery.read_requests import MAX_INDEX
from ..order import Deal, Ints
from .slices import Request

PORTION_BYTES, LARGE_PORTION_BYTES = 1 << 20, 4 << 20
MAX_PORTION = 1 << 16
"""The approximate bytes of a portion, the same of LARGE elements, and the most elements of one."""

UNKNOWN_PORTIONS = 8
"""How many portions a plan makes at least before it is known how large elements are."""

LARGE_BYTES = 32 << 10
"""Elements of this size and more are copied only if their trainer needs them in one array."""

_NONE = np.zeros(0, np.int64)

RECENT_BYTES = 8 << 20
"""About how many bytes that came last say how large elements are now."""


@dataclass(eq=False, slots=True)
class _Portion:
    """Some of the consumer's elements, in order."""

    positions: Ints
    needs: list[tuple[int, Ints]]  # places, and where their elements stand in the portion
    met: int = 0  # how many of the needs are met

    @property
    def is_stretch(self) -> bool:
        return len(self.needs) == 1


class Portions:
    """The portions that were planned and not given yet."""

    def __init__(self) -> None:
        self.elements = 0  # of all these portions
        self.held_bytes = 0  # of blocks that have come, and of which a part waits for its portion
        self._queues: dict[int, deque[Request]] = {}  # by place, in the order of its elements
        self._portions: deque[_Portion] = deque()
        self._ready: deque[tuple[Block, Ints]] = deque()
        self._deal: Deal | None = None  # if portions are whole batches
        self._unplanned: dict[int, int] = {}  # by place: elements that came, and are to be planned
        self._came_bytes, self._came = 0, 0  # since the beginning
        self._recent_bytes, self._recent = 0.0, 0.0  # lately

    @property
    def is_waiting(self) -> bool:
        """Whether portions are planned that were not put together yet."""
        return bool(self._portions)

    def fit(self, size: int) -> int | None:
        """How many elements fit into so many bytes, if they are as large as those that came lately,
        or as all that came: whichever are larger. None before one has come."""
        if not self._came:
            return None
        of_all = size * self._came // max(1, self._came_bytes)
        return max(1, min(of_all, int(size * self._recent / max(1, self._recent_bytes))))

    # -- the plan ------------------------------------------------------------------------------

    def plan(self, places: Ints, positions: Ints, deal: Deal | None = None) -> None:
        """The next elements to give: the places of their bundles, and their positions. With `deal`,
        portions are whole batches, each in one array."""
        self._deal = deal
        self.elements += len(places)
        most = LARGE_PORTION_BYTES if self.fit(LARGE_BYTES) == 1 else PORTION_BYTES
        size = min(self.fit(most) or max(1, len(places) // UNKNOWN_PORTIONS), MAX_PORTION)
        if deal is not None:
            size = max(1, size // deal.batch_size) * deal.batch_size
        changes = np.flatnonzero(places[1:] != places[:-1]) + 1
        ends = np.append(changes, len(places))  # of stretches
        start = 0
        while start < len(places):
            stop = int(ends[np.searchsorted(ends, start, "right")])
            if stop - start >= size:
                needs = [(int(places[start]), _NONE)]
            else:
                begun = 0 if deal is None else deal.begun(int(positions[start]))
                stop = min(start + size - begun, len(places))
                needs = [(int(places[start + at[0]]), at) for at in by_place(places[start:stop])]
            self._portions.append(_Portion(positions[start:stop], needs))
            start = stop

    def expect(self, request: Request) -> None:
        """The request brings elements of its place that follow those of the last one."""
        self._queues.setdefault(request.place, deque()).append(request)

    def count(self, block: Block) -> None:
        size = block.payload_bytes
        self.held_bytes += size
        self._came += block.count
        self._came_bytes += size
        self._recent += block.count
        self._recent_bytes += size
        if self._recent_bytes > RECENT_BYTES:
            self._recent_bytes /= 2
            self._recent /= 2

    def withdraw(self) -> int | None:
        """Plan nothing but what was put together. Returns the position of the first element that
        was planned otherwise; None if none was.

        What has come stays here for the next plan (`use`), as far as a place has no gaps: all
        requests are withdrawn.
        """
        if not self._portions:
            return None
        position = int(self._portions[0].positions[0])
        self.elements -= sum(len(portion.positions) for portion in self._portions)
        self._portions.clear()
        self.held_bytes = 0
        self._unplanned.clear()
        queues, self._queues = self._queues, {}
        for place, queue in queues.items():
            kept = Request(place, (), given=queue[0].given)
            for request in queue:
                kept.blocks += request.blocks
                if request.runs:
                    break
            if kept.blocks:
                self.expect(kept)
                self.held_bytes += sum(block.payload_bytes for block in kept.blocks)
                self._unplanned[place] = sum(block.count for block in kept.blocks) - kept.given
        return position

    def clear(self) -> None:
        """Plan nothing, and give nothing of what has come: all requests are withdrawn."""
        self._portions.clear()
        self._ready.clear()
        self._queues.clear()
        self._unplanned.clear()
        self.elements = self.held_bytes = 0

    def use(self, place: int, most: int) -> int:
        """How many of the next `most` elements of the place need not be asked for."""
        here = self._unplanned.pop(place, 0)
        if here > most:
            self._unplanned[place] = here - most
        return min(here, most)

    def lacking(self) -> Iterator[int]:
        """The places of which elements were asked for that have not come."""
        return (place for place in self._queues if self.first_lacking(place) is not None)

    def first_lacking(self, place: int) -> int | None:
        """What `Request.first` says of the first request that has not come; None if all have."""
        return next((r.first for r in self._queues.get(place, ()) if r.runs), None)

    def awaited_place(self) -> int | None:
        """The place whose elements are needed next and have not come; None if none is."""
        head = self._portions[0] if self._portions else None
        return None if head is None or self._is_here(head) else head.needs[head.met][0]

    # -- what is given -------------------------------------------------------------------------

    def take(self, limit: int) -> tuple[Block, Ints] | None:
        """The next elements before the position `limit` that are here, with their positions."""
        while not self._ready and self._portions and self._is_here(self._portions[0]):
            head = self._portions[0]
            self._ready.extend(self._begin_of(head) if head.is_stretch else self._assembled(head))
            if not len(head.positions):
                self._portions.popleft()
        if not self._ready:
            return None
        block, positions = self._ready[0]
        given = block.count
        if positions[-1] >= limit:
            given = int(np.searchsorted(positions, limit))
            if not given:
                return None
            block, rest = split(block, given)
            self._ready[0] = rest, positions[given:]
        else:
            self._ready.popleft()
        self.elements -= block.count
        return block, positions[:given]

    def has_before(self, limit: int) -> bool:
        """Whether something was planned that stands before the position `limit`."""
        return self.next_position() < limit

    def next_position(self) -> int:
        """Of what was planned and not given."""
        if self._ready:
            return int(self._ready[0][1][0])
        return int(self._portions[0].positions[0]) if self._portions else MAX_INDEX

    def _is_here(self, portion: _Portion) -> bool:
        """Whether all of the portion has come, or of a stretch its next element."""
        for place, at in portion.needs[portion.met :]:
            most = 1 if portion.is_stretch else len(at)
            if self._here(place, most) < most:
                return False
            portion.met += not portion.is_stretch
        return True

    def _here(self, place: int, most: int) -> int:
        """How many of the next `most` elements of the place have come."""
        here = 0
        for request in self._queues[place]:
            here += sum(block.count for block in request.blocks) - request.given
            if here >= most or request.runs:
                break
        return min(here, most)

    def cut(self) -> None:
        """Make two portions of the next one: what has come, of batches whole ones, and what is
        behind its first element that has not."""
        head = self._portions[0]
        if head.is_stretch:
            return
        lacking = [at[self._here(place, len(at)) :] for place, at in head.needs]
        end = min((int(at[0]) for at in lacking if len(at)), default=0)
        if self._deal is not None:
            end = max(0, end - self._deal.begun(int(head.positions[end])))
        if end:
            self._portions.popleft()
            for start, stop in ((end, len(head.positions)), (0, end)):
                parts = [(place, at[(start <= at) & (at < stop)]) for place, at in head.needs]
                needs = [(place, at - start) for place, at in parts if len(at)]
                self._portions.appendleft(_Portion(head.positions[start:stop], needs))

    def _begin_of(self, stretch: _Portion) -> Iterator[tuple[Block, Ints]]:
        """The next elements of a stretch that have come: at most those of one block."""
        ((place, _),) = stretch.needs
        request = next(each for each in self._queues[place] if each.blocks)
        count = request.blocks[0].count - request.given
        positions = stretch.positions
        given, stretch.positions = positions[:count], positions[count:]
        for block, first, at in self._pop(place, given):
            yield part(block, first, len(at)), given

    def _assembled(self, portion: _Portion) -> Iterator[tuple[Block, Ints]]:
        """The portion as blocks with the elements' positions: one block, unless ranks differ."""
        positions, portion.positions = portion.positions, _NONE
        parts = [each for place, at in portion.needs for each in self._pop(place, at)]
        ranks = {tuple(component.rank for component in block.components) for block, _, _ in parts}
        if len(ranks) == 1:
            pieces = [(part(block, first, len(at)), at) for block, first, at in parts]
            yield merged(pieces, LARGE_BYTES, stacks=self._deal is not None), positions
            return
        singles = {
            place: part(block, number, 1)
            for block, first, at in parts
            for number, place in enumerate(at.tolist(), first)
        }
        for place in range(len(positions)):
            yield singles[place], positions[place : place + 1]

    def _pop(self, place: int, at: Ints) -> Iterator[tuple[Block, int, Ints]]:
        """The next elements of a place: a block, the first of them in it, and where in `at` they
        belong."""
        queue, done = self._queues[place], 0
        while done < len(at):
            request = queue[0]
            if not request.blocks:
                queue.popleft()
                continue
            block, first = request.blocks[0], request.given
            count = min(block.count - first, len(at) - done)
            yield block, first, at[done : done + count]
            done += count
            request.given += count
            if request.given == block.count:
                request.blocks.popleft()
                request.given = 0
                self.held_bytes -= block.payload_bytes
        while queue and not (queue[0].blocks or queue[0].runs):
            queue.popleft()
        if not queue:
            del self._queues[place]


def by_place(places: Ints) -> list[Ints]:
    """Where the elements of each place are, ascending."""
    if not len(places):
        return []
    numbers = places - places.min()
    numbers = numbers.astype(np.min_scalar_type(numbers.max()))  # NumPy sorts these much faster
    order = np.argsort(numbers, kind="stable")
    found = numbers[order]
    cuts = np.flatnonzero(found[1:] != found[:-1]) + 1
    return [order[start:stop] for start, stop in pairwise([0, *cuts.tolist(), len(places)])]
