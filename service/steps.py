"""Which elements are in a step of an ordered read, in which step an element is, and whether a
consumer was given it.

A *step* is one batch of each consumer of a group. Steps are numbered as `start_step` counts them:
over all epochs, as if the group had read the whole training. A group that starts between two of
these steps has batches of its own in its first epoch. Their step numbers count back from the end of
that epoch.

A consumer reports now and then up to which place its trainer was given everything. It reads one
epoch, or the rest of one. So what is behind its last report and in that epoch may have been given,
unless it left in order: then its last report is exact.

A *place* is what saved states, reports and `start_position` have (service/schedule.py). A position
counts within an epoch, or through all of a mixture, and leaves out what is skipped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Literal

import numpy as np

from ..journal.datasets import SHARES
from ..journal.proto import events_pb2 as ev
from .errors import InvalidArgument
from .order import Deal, Ints, epoch_order
from .schedule import EpochSteps, Schedule

NAMED = 5
"""How many bundles an error names."""

Status = Literal["given", "not yet", "not known"]
"""Whether a consumer was given something."""


class _KnownSource:
    """The epochs of a source, as far as the known lengths of bundles determine them."""

    def __init__(self, order: ev.OrderSpec, lengths: Sequence[int]) -> None:
        """`lengths`: by bundle; -1: not known."""
        self.lengths = np.array(lengths, np.int64)
        self.total = None if (self.lengths < 0).any() else int(self.lengths.sum())
        # Of an epoch; that of the last one is kept, as most questions are about one epoch.
        self._epoch = lru_cache(maxsize=1)(partial(epoch_order, order, self.lengths))

    def elements(self, epoch: int, start: int, stop: int) -> tuple[Ints, Ints]:
        """The bundles of the elements at the positions [start, stop) of the epoch, and the indexes
        in them. Raises InvalidArgument if they are not determined."""
        bundles, order = self._epoch(epoch)
        if start >= stop:
            return bundles[:0], bundles[:0]
        last, first = order.locate(stop - 1), order.locate(start)
        if last is None or first is None:
            raise InvalidArgument(f"position {stop - 1} of epoch {epoch} {self.why_not(epoch)}")
        places, indexes = order.elements(first[0], last[0] + 1)
        wanted = slice(start - first[1], stop - first[1])
        return bundles[places[wanted]], indexes[wanted]

    def find(self, epoch: int, bundle: int, index: int) -> int:
        """The position of the element in the epoch. Raises InvalidArgument."""
        bundles, order = self._epoch(epoch)
        if not 0 <= bundle < len(bundles):
            raise InvalidArgument(f"bundle {bundle} is none of {len(bundles)}: count from 0")
        if 0 <= self.lengths[bundle] <= index:
            raise InvalidArgument(
                f"index {index} is none of bundle {bundle}, which has {self.lengths[bundle]} "
                "elements: count from 0"
            )
        position = order.find(int(np.flatnonzero(bundles == bundle)[0]), index)
        if position is None:
            raise InvalidArgument(
                f"the position of element {bundle}:{index} in epoch {epoch} {self.why_not(epoch)}"
            )
        return position

    def why_not(self, epoch: int) -> str:
        """Why further positions of the epoch are not determined, and what would make them so."""
        bundles, order = self._epoch(epoch)
        opened = bundles[order.opened(order.known_until, 0)[0]]
        needed = [str(bundle) for bundle in opened if self.lengths[bundle] < 0]
        more = f" and {len(needed) - NAMED} others" if len(needed) > NAMED else ""
        return (
            f"is not determined yet: {order.count_before(order.known_until)} positions are, and "
            f"then the lengths of bundles {', '.join(needed[:NAMED])}{more} are needed; read "
            "further, or start a reader there, which has the bundles before counted"
        )


class KnownOrder:
    """The order of a job, with the changes that a group knew, as far as known lengths determine it.
    A mixture has one epoch, and its bundles are numbered through the epochs of the sources. While
    the total is not known, all is taken to be in the first epoch."""

    def __init__(
        self,
        order: ev.OrderSpec,
        lengths: Sequence[int],
        shares: Sequence[int] = (),
        changes: Iterable[ev.ScheduleChange] = (),
    ) -> None:
        """`lengths`: by bundle; -1: not known. `shares`: of the sources of a mixture."""
        self.lengths = np.array(lengths, np.int64)
        self.is_mixture = bool(shares)
        self.schedule = Schedule(shares or [SHARES], changes)
        self._bundles = order.bundles if shares else 0
        counts = [*order.source_bundles] or [order.bundles]
        self._firsts = [*accumulate(counts, initial=0)]
        self._sources = []
        for first, bundles in zip(self._firsts, counts, strict=False):
            own = ev.OrderSpec()
            own.CopyFrom(order)
            own.bundles = bundles
            self._sources.append(_KnownSource(own, lengths[first : first + bundles]))
        self.total = None if shares else self._sources[0].total

    def before(self, epoch: int) -> int:
        """How many positions the epochs before this one have."""
        return self.schedule.position_of(epoch * (self.total or 0))

    def position_of(self, place: int) -> tuple[int, int]:
        """The epoch of a place, and its position there."""
        epoch = place // self.total if self.total else 0
        return epoch, self.schedule.position_of(place) - self.before(epoch)

    def place_of(self, epoch: int, position: int) -> int:
        """The place of a position of an epoch."""
        return self.schedule.place_of(self.before(epoch) + position)

    def elements(self, epoch: int, start: int, stop: int) -> tuple[Ints, Ints]:
        """The bundles of the elements at the positions [start, stop) of the epoch, and the indexes
        in them. Raises InvalidArgument if they are not determined."""
        places = self.schedule.places_of(np.arange(start, stop) + self.before(epoch))
        bundles, indexes = np.zeros_like(places), np.zeros_like(places)
        # Where something is left out in between, the stretches on both sides one by one.
        cuts = np.flatnonzero(np.diff(places) != 1) + 1
        for at in np.split(np.arange(len(places)), cuts):
            if len(at):
                self._stretch(places[at], at, bundles, indexes)
        return bundles, indexes

    def _stretch(self, places: Ints, at: Ints, bundles: Ints, indexes: Ints) -> None:
        first, stop = int(places[0]), int(places[-1]) + 1
        for number, source in enumerate(self._sources):
            begin, end = (self.schedule.count_before(place, number) for place in (first, stop))
            mine = at[self.schedule.places(number, begin, end - begin) - first]
            while begin < end:
                epoch, offset = divmod(begin, source.total) if source.total else (0, begin)
                there = end - begin
                if source.total == 0:
                    raise InvalidArgument(f"source {number} has no elements")
                if source.total is not None:
                    there = min(there, source.total - offset)
                found, within = source.elements(epoch, offset, offset + there)
                bundles[mine[:there]] = epoch * self._bundles + self._firsts[number] + found
                indexes[mine[:there]] = within
                begin, mine = begin + there, mine[there:]

    def source_of(self, bundle: int) -> tuple[int, int, int]:
        """Of a mixture: the source of a bundle, its epoch, and the bundle's number there."""
        epoch, index = divmod(bundle, self._bundles)
        number = bisect_right(self._firsts, index) - 1
        return number, epoch, index - self._firsts[number]

    def find(self, epoch: int, bundle: int, index: int) -> int:
        """The position of an element in the epoch. Raises InvalidArgument."""
        number, own_epoch, own = self.source_of(bundle) if self.is_mixture else (0, epoch, bundle)
        source = self._sources[number]
        if own_epoch and source.total is None:
            raise InvalidArgument(
                f"the position of element {bundle}:{index} {source.why_not(own_epoch)}"
            )
        first = own_epoch * (source.total or 0) + source.find(own_epoch, own, index)
        places = self.schedule.places(number, first, 1)
        position = int(self.schedule.positions_of(places)[0]) if len(places) else -1
        if position < 0:
            raise InvalidArgument(
                f"element {bundle}:{index} has no position: a change of the schedule leaves it out"
            )
        return position - self.before(epoch)

    def why_not(self) -> str:
        """Why further positions are not determined, and what would make them so."""
        unknown = (source for source in self._sources if source.total is None)
        return "; ".join(source.why_not(0) for source in unknown)


class GroupSteps:
    """The steps of one group: the fields of `group` are as of any of its members."""

    def __init__(self, known: KnownOrder, group: ev.GroupMember) -> None:
        self.known, self.group = known, group
        self.batch = max(1, group.batch_size)
        self.size = group.consumers * self.batch  # elements of a step
        self._all = EpochSteps(known.schedule, self.size, known.total, group.drop_remainder)
        self.epoch, self.start = self._begin()  # the position in the epoch
        self.first = self.start // self.size  # the number of its first step
        if known.total is not None:
            own = self._end(self.epoch, self.start) - self.start
            self.first = self._all.before(self.epoch + 1) + -own // self.size

    def _begin(self) -> tuple[int, int]:
        """As OrderedRead.begin does: while the total is not known, it is in the first epoch."""
        group, total = self.group, self.known.total
        if not group.HasField("start_step"):
            epoch, start = (0, 0) if total == 0 else self.known.position_of(group.start_position)
        else:
            epoch, start = self._all.find(group.start_step) if self._has_steps() else (0, 0)
        if start and total is not None and self._end(epoch, start) <= start:
            return epoch + 1, 0
        return epoch, start

    def _has_steps(self) -> bool:
        """Whether an epoch of which nothing is left out has any."""
        total = self.known.total
        return total is None or total >= (self.size if self.group.drop_remainder else 1)

    def _end(self, epoch: int, start: int) -> int:
        """Where an epoch ends that the group reads from `start` on."""
        deal = Deal(start, self.batch, self.group.consumers, 0)
        elements = self.known.before(epoch + 1) - self.known.before(epoch)
        return deal.end(elements, self.group.drop_remainder)

    def has(self, step: int) -> bool:
        """Whether the group has such a step, if it goes on for long."""
        total = self.known.total
        own = total is None or self.start < self._end(self.epoch, self.start)
        return step >= self.first and (own or self._has_steps())

    def span(self, step: int) -> tuple[int, int, int]:
        """The epoch of the step, and its positions there: the first, and the one behind the last.

        Raises InvalidArgument if the group has no such step."""
        total = self.known.total
        if step < self.first:
            raise InvalidArgument(f"the group's first step is {self.first}, behind {step}")
        start = self.start + (step - self.first) * self.size
        if total is None:
            return self.epoch, start, start + self.size
        if start < (end := self._end(self.epoch, self.start)):
            return self.epoch, start, min(start + self.size, end)
        if not self._has_steps():
            raise InvalidArgument(
                f"no epoch has a step of {self.group.consumers} batches of {self.batch}: it has "
                f"{total} elements"
            )
        epoch, start = self._all.find(step)
        return epoch, start, min(start + self.size, self._end(epoch, 0))

    def status(self, step: int, reported: int | None, is_exact: bool) -> Status:
        """Whether a consumer of the group was given its batch of this step. `reported`: the place
        that it has reported last; None: none. `is_exact`: it left in order there."""
        epoch, start, stop = self.span(step)
        begin = self.epoch, self.start
        reached = begin if reported is None else max(begin, self.known.position_of(reported))
        if (epoch, stop) <= reached:
            return "given"
        end = reached if is_exact else (self.epoch + 1, 0)
        return "not yet" if (epoch, start) >= end else "not known"

    def step_of(self, epoch: int, position: int) -> tuple[int, int] | None:
        """The step with this position of the epoch, and its consumer; None if the group has it in
        no step: it is before the group's start, or dropped, or its epoch's begin is not known."""
        total, is_first = self.known.total, epoch == self.epoch
        start = self.start if is_first else 0
        if epoch < self.epoch or position < start or (total is None and not is_first):
            return None
        first = self.first
        if total is not None:
            first = self.first if is_first else self._all.before(epoch)
            if position >= self._end(epoch, start):
                return None
        step, rest = divmod(position - start, self.size)
        return first + step, rest // self.batch
