"""How far one consumer has planned its epoch of an ordered read."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..order import Deal, EpochOrder, Ints


class PlannedPart(NamedTuple):
    """Elements that a plan has added, all of one consumer."""

    places: Ints
    indexes: Ints  # in the bundles at these places
    positions: Ints  # of all that is read
    first_indexes: dict[int, int]  # by place: the index of its first element of all consumers


class PlannedRounds:
    """The rounds that are planned, and what of the next round is, if it is planned in parts."""

    def __init__(
        self, order: EpochOrder, deal: Deal, positions_of: Callable[[int, int], Ints]
    ) -> None:
        """`positions_of`: of so many elements from an offset in the epoch on."""
        self.round = 0  # the first one that is not wholly planned
        self.before = 0  # elements of the epoch in the rounds before
        self.next = 0  # the offset in the epoch of the first element to plan, in that round
        self._order, self._deal, self._positions_of = order, deal, positions_of
        self._partly: dict[int, int] = {}  # by place: where its elements of that round go on
        self._dealt: tuple[tuple[int, int], tuple[Ints, Ints, Ints, Ints]] | None = None

    def go_to(self, round_number: int, before: int, offset: int | None = None) -> None:
        """Plan next from this offset in the epoch on, by default from the begin of the round."""
        self.round, self.before = round_number, before
        self.next = before if offset is None else offset
        self._partly.clear()
        if planned := self.next - before:
            places, indexes, _, _ = self._elements(round_number + 1)
            self._partly = _ends(places[:planned], indexes[:planned])

    def seek(self, offset: int) -> bool:
        """Plan next from this offset in the epoch on; False if its round is not known yet."""
        if (found := self._order.locate(offset)) is None:
            return False
        self.go_to(*found, offset)
        return True

    def index_at(self, place: int) -> int:
        """Elements of the place before this one are planned."""
        partly = self._partly.get(place)
        return self._order.index_at(place, self.round) if partly is None else partly

    def plan(self, last: int, most: int, most_places: int) -> PlannedPart:
        """Plan the rounds from the present one to `last`, but fewer rounds, or a part of one, if
        these have more than `most` of this consumer's elements, or in more than `most_places`."""
        before = self.before
        planned = self.next - before
        if planned:  # go on with the round
            last = self.round + 1
        places, indexes, positions, mine = self._elements(last)
        begin = int(np.searchsorted(mine, planned))
        part = mine[begin : begin + most]
        part = part[: _until_place(places[part], most_places)]
        end = len(places)
        if begin + len(part) < len(mine):
            if last > self.round + 1:
                return self.plan((self.round + 1 + last) // 2, most, most_places)
            end = int(part[-1]) + 1
        ends = _ends(places[planned:end], indexes[planned:end])
        first_indexes = {place: self.index_at(place) for place in ends}
        self.next = before + end
        if end == len(places):
            self.round, self.before = last, self.next
            self._partly.clear()
            self._dealt = None
        else:
            self._partly |= ends
        return PlannedPart(places[part], indexes[part], positions[part], first_indexes)

    def _elements(self, last: int) -> tuple[Ints, Ints, Ints, Ints]:
        """The elements of the rounds from the present one to `last`: places, indexes, positions,
        and which are this consumer's."""
        if self._dealt is None or self._dealt[0] != (self.round, last):
            places, indexes = self._order.elements(self.round, last)
            positions = self._positions_of(self.before, len(places))
            found = places, indexes, positions, self._deal.mine(positions)
            self._dealt = (self.round, last), found
        return self._dealt[1]


def _until_place(places: Ints, most: int) -> int:
    """How many of these there are before the first one that would be the place number `most`."""
    if len(places) <= most or places.max() - places.min() < most:
        return len(places)
    firsts = np.unique(places, return_index=True)[1]
    return len(places) if len(firsts) <= most else int(np.partition(firsts, most)[most])


def _ends(places: Ints, indexes: Ints) -> dict[int, int]:
    """By place: the index behind the last one of these elements, which are in order."""
    if not len(places):
        return {}
    first = places.min()
    ends = np.zeros(places.max() - first + 1, np.int64)
    ends[places - first] = indexes + 1  # of several the last one stays
    there = np.flatnonzero(ends)
    return dict(zip((there + first).tolist(), ends[there].tolist(), strict=True))
