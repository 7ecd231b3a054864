"""The order of an epoch's elements, and which consumer gets which of them.

The order is a pure function of (number of bundles, their lengths, seed, epoch, cycle_length,
block_length). No worker, consumer or clock has a part in it.

- `permuted` shuffles: it says which bundle stands at a *place* of the epoch's sequence of bundles.
- `EpochOrder` interleaves the bundles of that sequence.
- `Deal` divides the interleaved elements among consumers, batch by batch.

**Interleaving** has the order of `tf.data.Dataset.interleave(…, cycle_length, block_length)`. There
are cycle_length slots, and each *round* visits every slot once, in the order of the slots. A visit
takes up to block_length elements. A visit that finds fewer has found the bundle's end, and the
slot's next visit, a round later, starts the next bundle of the sequence. So a bundle of length L
that starts in slot s in round t behaves like this:

- It has L // block_length + 1 visits. The last one may give no elements.
- Its element j lies in round t + j // block_length.
- The order sorts elements by (t + j // block_length, s, j % block_length). An element's *position*
  is its rank.
- The slot is free again in round t + L // block_length + 1. The sequence's next bundle starts in
  the slot with the smallest (free round, slot).
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapreplace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def permuted(place: int, count: int, seed: int, epoch: int) -> int:
    """The bundle at this place (0 … count - 1) of the epoch's sequence of `count` bundles.

    Raises ValueError if there is no such place.
    """
    return int(permuted_many(np.array([place]), count, seed, epoch)[0])


def permuted_many(places: Ints, count: int, seed: int, epoch: int) -> Ints:
    """`permuted` of each of these places, int64 (n,): the result has the same shape and dtype.

    Each (seed, epoch) has a permutation of its own, which never changes between releases. It takes
    no memory: a Feistel network permutes the numbers of an even number of bits, and numbers that
    are too large are permuted again ("cycle walking": Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002).
    """
    for place in (places.min(), places.max()) if places.size else ():
        _check_place(int(place), count)
    keys, half = _round_keys(seed, epoch), max(1, ((count - 1).bit_length() + 1) // 2)
    bundles: npt.NDArray[np.uint64] = _feistel(places.astype(np.uint64), half, keys)
    outside = np.flatnonzero(bundles >= count)
    while len(outside):
        again = bundles[outside] = _feistel(bundles[outside], half, keys)
        outside = outside[again >= count]
    return bundles.astype(np.int64)


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), person=b"forebay.order").digest()
    return tuple(int.from_bytes(digest[at : at + 8], "little") for at in range(0, 64, 8))


def _feistel(numbers: Any, half: int, keys: tuple[int, ...]) -> Any:
    """Permute numbers of twice `half` bits, uint64. Each round's function is the finalizer of
    SplitMix64. A new array for each step would take twice as long."""
    left, right = numbers >> half, numbers & ((1 << half) - 1)
    mixed, shifted = np.empty_like(numbers), np.empty_like(numbers)
    for key in keys:
        np.add(right, key, mixed)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed ^= np.right_shift(mixed, shift, shifted)
            mixed *= factor
        mixed ^= np.right_shift(mixed, 31, shifted)
        left ^= np.right_shift(mixed, 64 - half, mixed)
        left, right = right, left
    return (left << half) | right


def epoch_order(spec: Any, lengths: Sequence[int] | Ints, epoch: int) -> tuple[Ints, EpochOrder]:
    """An epoch's bundles by place, and their interleaved order. `spec` is an ev.OrderSpec, and
    `lengths` are by bundle; -1: not known."""
    bundles = np.arange(spec.bundles)
    if spec.shuffle:
        bundles = permuted_many(bundles, spec.bundles, spec.seed, epoch)
    of_places = np.array(lengths, np.int64)[bundles]
    return bundles, EpochOrder(spec.bundles, spec.cycle_length, spec.block_length, of_places)


class EpochOrder:
    """The interleaved order of one epoch, as far as the known lengths of its bundles determine it.

    It speaks of *places*, 0 … bundles - 1, of the epoch's sequence; `permuted` says which bundles
    stand there. `lengths` may give lengths that are known at the start, by place, and -1 for a
    length that is not known. `learn` adds others later. Whatever was determined once stays so.

    Memory: O(bundles). Not thread-safe.
    """

    def __init__(
        self,
        bundles: int,
        cycle_length: int,
        block_length: int,
        lengths: Sequence[int] | Ints | None = None,
    ) -> None:
        _check_least(0, bundles=bundles)
        _check_least(1, cycle_length=cycle_length, block_length=block_length)
        self.bundles = bundles
        self.block_length = block_length
        self._slots = min(cycle_length, bundles)  # the other slots remain empty
        self._lengths = _zeros(bundles)  # by place; of an incomplete one the least it can be
        self._complete = bytearray(bundles)
        self._incomplete = bundles
        self._known = 0  # the sum of _lengths
        self._placed = 0  # how many places, from the first on, have these three
        self._start = _zeros(bundles)  # the round; ascending
        self._slot = _zeros(bundles)
        self._before = _zeros(bundles)  # how many elements the slot has in earlier places
        self._of_slot = [array("q") for _ in range(self._slots)]  # its places, ascending
        # A heap of round * slots + slot. A slot is not free before that round; it is free then if
        # its last bundle is complete. An entry may be too early after `learn`.
        self._free = list(range(self._slots))
        self._known_until: int | None = None  # unless it must be computed again
        self._holding = 0  # incomplete places that end there, as far as is known
        if lengths is not None:
            self._start_with(np.asarray(lengths, np.int64))
        self._place()

    def _start_with(self, lengths: Ints) -> None:
        if lengths.shape != (self.bundles,):
            raise ValueError(f"lengths of shape {lengths.shape}: give {self.bundles}, one a bundle")
        if self.bundles and lengths.min() < -1:
            raise ValueError(f"a length is {lengths.min()}: give -1 if it is unknown")
        known = lengths >= 0
        self._lengths = array("q", np.where(known, lengths, 0).tobytes())
        self._complete = bytearray(known.tobytes())
        self._incomplete = self.bundles - int(known.sum())
        self._known = int(lengths[known].sum())

    def learn(self, place: int, at_least: int, complete: bool) -> None:
        """The bundle at this place has at least so many elements, or exactly so many if complete.

        Raises ValueError if that contradicts what was known.
        """
        _check_place(place, self.bundles)
        _check_least(0, at_least=at_least)
        known, was_complete = self._lengths[place], self._complete[place]
        if (complete and at_least < known) or (was_complete and at_least > known):
            raise ValueError(
                f"the bundle at place {place} has {'' if complete else 'at least '}{at_least} "
                f"elements, and had {'' if was_complete else 'at least '}{known} before: its "
                "pipeline must yield the same elements each time"
            )
        if was_complete or (at_least <= known and not complete):
            return
        if complete:
            self._complete[place] = True
            self._incomplete -= 1
        self._known += at_least - known
        self._lengths[place] = at_least
        block = self.block_length
        if not self._incomplete:
            self._known_until = None
        elif place < self._placed and self._start[place] + known // block == self._known_until:
            if complete or at_least // block > known // block:
                self._holding -= 1
            if not self._holding:
                self._known_until = None
        self._place()

    def _place(self) -> None:
        """Give places to slots, as long as it is certain which slot is free next."""
        slots, block, free = self._slots, self.block_length, self._free
        while self._placed < self.bundles:
            place = self._placed
            at, slot = divmod(free[0], slots)
            if of_slot := self._of_slot[slot]:
                last = of_slot[-1]
                free_round = self._start[last] + self._lengths[last] // block + 1
                if free_round > at:
                    heapreplace(free, free_round * slots + slot)
                    continue
                if not self._complete[last]:
                    return
                self._before[place] = self._before[last] + self._lengths[last]
            self._start[place], self._slot[place] = at, slot
            of_slot.append(place)
            self._placed += 1
            heapreplace(free, (at + self._lengths[place] // block + 1) * slots + slot)

    def knows(self, place: int) -> bool:
        """Whether the bundle's length is known."""
        return bool(self._complete[place])

    @property
    def length(self) -> int | None:
        """How many elements the epoch has, or None if a bundle is incomplete."""
        return None if self._incomplete else self._known

    @property
    def known_until(self) -> int:
        """All elements of the rounds before this one are determined.

        If all bundles are complete, it is the number of rounds.
        """
        if self._known_until is None:
            last = [of_slot[-1] for of_slot in self._of_slot]
            partial = [place for place in last if not self._complete[place]]
            ends = [self._start[p] + self._lengths[p] // self.block_length for p in partial or last]
            # Without incomplete bundles all are placed: a place waits only for an incomplete one.
            self._known_until = min(ends) if partial else max(ends, default=-1) + 1
            self._holding = ends.count(self._known_until)
        return self._known_until

    def ended(self, round_: int) -> bool:
        """Whether it is certain that this round and all later ones have no elements."""
        return self.length == self.count_before(min(round_, self.known_until))

    def opened(self, round_: int, ahead: int) -> tuple[list[int], list[int]]:
        """The places that a reader needs in this round, and `ahead` more that it may prefetch.

        First, ascending: the places that start in this round or an earlier one, and may have
        elements in this round or a later one. Places whose start is not determined are left out.
        Second: the next places in order of their start, determined or not, that may have elements.
        """
        started = bisect_right(self._start, round_, 0, self._placed)
        running = sorted(self._running(round_, started))
        coming = (
            place
            for place in range(started, self.bundles)
            if self._lengths[place] or not self._complete[place]
        )
        return running, list(islice(coming, ahead))

    def has_started(self, place: int, round_: int) -> bool:
        """Whether the place is known to start in this round or an earlier one."""
        return place < self._placed and self._start[place] <= round_

    def _latest(self, started: int) -> list[int]:
        """Each slot's last place before `started`. Round 0 starts a place in every slot."""
        return [places[bisect_left(places, started) - 1] for places in self._of_slot if started]

    def _running(self, round_: int, started: int) -> list[int]:
        """The slots' latest places that may have elements in this round or later, by slot."""
        blocks = round_ * self.block_length
        return [
            place
            for place in self._latest(started)
            if not self._complete[place]
            or self._start[place] * self.block_length + self._lengths[place] > blocks
        ]

    def count_before(self, round_: int) -> int:
        """How many elements lie in earlier rounds.

        Raises ValueError if that is not determined: see `known_until`.
        """
        self._check_known(round_)
        started, count = bisect_left(self._start, round_, 0, self._placed), 0
        for place in self._latest(started):
            given = (round_ - self._start[place]) * self.block_length
            count += self._before[place] + min(given, self._lengths[place])
        return count

    def index_at(self, place: int, round_: int) -> int:
        """How many of the place's elements lie in earlier rounds; 0 if its start is not known."""
        if place >= self._placed:
            return 0
        given = (round_ - self._start[place]) * self.block_length
        return max(0, min(given, self._lengths[place]))

    def locate(self, position: int) -> tuple[int, int] | None:
        """The round of the element at this position, and how many elements lie in earlier rounds.

        Returns None if it is not determined yet. Raises ValueError if the epoch has no such
        position.
        """
        length = self.length
        if position < 0 or (length is not None and position >= length):
            raise ValueError(
                f"position {position} is not in this epoch of {length} elements: count from its "
                "first element, and look in the next epoch from its length on"
            )
        rounds = range(self.known_until)
        round_ = bisect_right(rounds, position, key=lambda at: self.count_before(at + 1))
        return (round_, self.count_before(round_)) if round_ < len(rounds) else None

    def find(self, place: int, index: int) -> int | None:
        """The position of the element at this index of the bundle at this place.

        Returns None if it is not determined yet. Raises ValueError if there is no such element.
        """
        _check_place(place, self.bundles)
        _check_least(0, index=index)
        if self._complete[place] and index >= self._lengths[place]:
            raise ValueError(
                f"index {index} of a bundle of {self._lengths[place]} elements: count from 0"
            )
        if place >= self._placed:
            return None
        round_ = self._start[place] + index // self.block_length
        if round_ >= self.known_until:
            return None
        places, indexes = self.elements(round_, round_ + 1)
        at = np.flatnonzero((places == place) & (indexes == index))
        return self.count_before(round_) + int(at[0])

    def elements(self, first_round: int, last_round: int) -> tuple[Ints, Ints]:
        """The elements of the rounds [first_round, last_round) in order.

        Returns two int64 arrays of equal length: the elements' places, and their indexes in the
        bundles there. Raises ValueError if they are not determined: see `known_until`.
        """
        self._check_known(first_round)
        self._check_known(last_round)
        if first_round > last_round:
            raise ValueError(f"rounds {first_round} to {last_round} descend: swap them")
        block = self.block_length
        started = bisect_left(self._start, first_round, 0, self._placed)
        starting = bisect_left(self._start, last_round, started, self._placed)
        running = np.array(self._running(first_round, started), np.int64)
        places = np.concatenate([running, np.arange(started, starting)])
        starts, lengths = np.asarray(self._start)[places], np.asarray(self._lengths)[places]
        rounds = last_round - first_round
        if starting == started and (lengths >= (last_round - starts) * block).all():
            return _even_rounds(places, (first_round - starts) * block, rounds, block)

        # Visits, bundle by bundle.
        begin = np.maximum(starts, first_round)
        visits = np.maximum(np.minimum(starts - (-lengths // block), last_round) - begin, 0)
        round_ = np.repeat(begin, visits) + _counting(visits)
        index = (round_ - np.repeat(starts, visits)) * block
        slot = np.repeat(np.asarray(self._slot)[places], visits)
        key = (round_ - first_round) * self._slots + slot
        if rounds * self._slots <= 1 << 16:
            key = key.astype(np.uint16)  # NumPy sorts these much faster
        in_order = np.argsort(key, kind="stable")
        of_visit, index = np.repeat(places, visits)[in_order], index[in_order]
        if block == 1:
            return of_visit, index
        count = np.minimum(np.repeat(lengths, visits)[in_order] - index, block)
        return np.repeat(of_visit, count), np.repeat(index, count) + _counting(count)

    def _check_known(self, round_: int) -> None:
        if not 0 <= round_ <= (until := self.known_until):
            raise ValueError(f"round {round_} is not within 0 to {until}: learn more lengths first")


def _even_rounds(places: Ints, indexes: Ints, rounds: int, block: int) -> tuple[Ints, Ints]:
    """Rounds that take `block` elements of each of these bundles, from these indexes on."""
    shape = (rounds, len(places), block)
    within = np.arange(rounds * block).reshape(rounds, 1, block)
    of_slots = np.broadcast_to(places[:, np.newaxis], shape)
    return of_slots.reshape(-1), (indexes[:, np.newaxis] + within).reshape(-1)


def _counting(counts: Ints) -> Ints:
    """0 … n - 1 for each n of these counts, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts, counts)


def _zeros(count: int) -> array[int]:
    return array("q", bytes(8 * count))


def _check_place(place: int, count: int) -> None:
    if not 0 <= place < count:
        raise ValueError(f"place {place} is not among those of {count} bundles: count from 0")


def _check_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise ValueError(f"{name} is {number}: give {least} or more")


@dataclass(frozen=True, slots=True)
class Deal:
    """Which elements of an epoch's order the consumer `index` of `consumers` gets.

    Batch q has the positions from start + q * batch_size on, and belongs to consumer q % consumers.
    Positions count from the epoch's first element. Nobody gets positions before `start`.
    """

    start: int
    batch_size: int
    consumers: int
    index: int

    def __post_init__(self) -> None:
        _check_least(1, batch_size=self.batch_size, consumers=self.consumers)
        _check_least(0, start=self.start, index=self.index)
        if self.index >= self.consumers:
            raise ValueError(f"index is {self.index} of {self.consumers} consumers: count from 0")

    def mine(self, positions: Ints) -> Ints:
        """Which of the elements at these positions belong to this consumer: indexes into them,
        ascending, int64."""
        turns = (positions - self.start) // self.batch_size % self.consumers
        return np.flatnonzero((turns == self.index) & (positions >= self.start))

    def _mine_before(self, offset: int) -> int:
        """How many of this consumer's elements come before start + offset."""
        steps, rest = divmod(max(offset, 0), self.consumers * self.batch_size)
        rest -= self.index * self.batch_size
        return steps * self.batch_size + min(max(rest, 0), self.batch_size)

    def end(self, total: int, drop_remainder: bool) -> int:
        """The position behind the last element that any consumer gets, if the epoch has `total`.

        With drop_remainder all consumers get equally many full batches. What is dropped depends on
        consumers * batch_size alone.

        Raises ValueError if the epoch ends before `start`.
        """
        if total < self.start:
            raise ValueError(f"start is {self.start} of {total} elements: start in the next epoch")
        step = self.consumers * self.batch_size
        return total - (total - self.start) % step if drop_remainder else total

    @property
    def size(self) -> int:
        """How many elements a step has: one batch of each consumer."""
        return self.batch_size * self.consumers

    def begun(self, position: int) -> int:
        """How many elements of its batch stand before the one at this position."""
        return (position - self.start) % self.batch_size

    def step_begin(self, position: int) -> int:
        """The last position at this one or before it with which a step begins."""
        return position - (position - self.start) % self.size

    def step_end(self, position: int) -> int:
        """The first position at this one or behind it with which a step begins."""
        return position + (self.start - position) % self.size

    def batches(self, end: int) -> int:
        """How many batches this consumer has until `end`, which the method `end` says."""
        return -(-self._mine_before(end - self.start) // self.batch_size)

    def position_after(self, batches: int, end: int) -> int:
        """The position that all consumers have reached after so many batches of each.

        `end` is what the method `end` says.
        """
        _check_least(0, batches=batches)
        return min(self.start + batches * self.consumers * self.batch_size, end)
