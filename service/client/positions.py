"""Reads in bundles: what was asked for; of ordered ones the position, and how it is saved.

A *position* is the number of elements of the training that come before, over all consumers and
epochs. It names no worker, no consumer and no buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ...journal.datasets import MAX_POSITION, SHARES
from ...journal.proto import events_pb2 as ev
from ..delivery.read_requests import MAX_INDEX
from ..errors import FailedPrecondition, InvalidArgument
from ..order import Deal, EpochOrder, Ints, epoch_order
from ..schedule import EpochSteps, Schedule

SAME_EACH_TIME = (
    "a pipeline that gives the same each time (no clocks, no functions in Python that draw random "
    "numbers, no random numbers that decide how many elements come)"
)


class StartingPoint(NamedTuple):
    """Where an ordered read begins."""

    position: int = 0
    step: int | None = None  # instead of the position
    in_epoch: bool = False
    """Whether the position is in an epoch that goes on: at its end, the rest is empty. Otherwise
    the next epoch begins there."""


@dataclass
class OrderedEpoch:
    """An epoch of an ordered read, from one consumer's view."""

    number: int
    start: int  # elements of it that come before the read
    total: int | None  # elements of an epoch, if they were known at the beginning
    spec: ev.OrderSpec
    deal: Deal
    bundles: list[int]  # by place of the sequence
    order: EpochOrder
    drop_remainder: bool
    schedule: Schedule  # its places are offsets in the epoch, or of a mixture on its line
    complete: bool = False  # whether the consumer has received all of it
    over: bool = False  # whether the trainer has asked for more than there is

    @property
    def first_place(self) -> int:
        """Of the epoch, in the training."""
        return self.number * (self.total or 0)

    def end(self) -> int | None:
        """Where the epoch ends for all consumers, if that is known: a position in the epoch."""
        return None if self.order.length is None else self._end(self.order.length)

    def _end(self, total: int) -> int:
        positions = max(self.schedule.position_of(total), self.start)  # it may begin elsewhere yet
        return self.deal.end(positions, self.drop_remainder)

    def limit(self, before: int) -> int:
        """The position behind the last element that may be given, if those before `before` are
        planned: a position must not lie behind the epoch's end, so only steps that are whole for
        all consumers are given while that is unknown."""
        if (end := self.end()) is not None:
            return end
        return self.deal.end(max(before, self.start), True)

    def has_a_step(self) -> bool:
        """Whether it is known that not all from the start on is dropped."""
        last = self.deal.start + self.deal.consumers * self.deal.batch_size - 1
        last = self.schedule.place_of(last)
        return not self.drop_remainder or self.order.locate(last) is not None

    @property
    def round_elements(self) -> int:
        """About how many elements a round has."""
        return max(1, min(self.spec.cycle_length, self.spec.bundles) * self.spec.block_length)

    def batches(self) -> int:
        """How many batches this consumer has, once the end is known."""
        end = self.end()
        return self.deal.batches(self.start if end is None else end)

    def position(self, batches: int) -> int:
        """The position after this consumer has been given so many batches of the epoch."""
        end, total = self.end(), self.order.length
        if self.over and total is not None:
            return (self.number + 1) * total
        after = self.deal.position_after(batches, MAX_POSITION if end is None else end)
        return int(self._saved(np.array([after]))[0])

    def sources_of(self, positions: Ints) -> Ints:
        """Of a mixture: the numbers of the sources that the elements at these are from."""
        return self.schedule.sources_of(self.schedule.places_of(positions))

    def positions_behind(self, positions: Ints) -> Ints:
        """As saved states have them, the positions behind the steps of the elements at these. Their
        steps must be whole, or the epoch's end known."""
        step = self.deal.batch_size * self.deal.consumers
        return self._saved(self.deal.start + ((positions - self.deal.start) // step + 1) * step)

    def _saved(self, after: Ints) -> Ints:
        """As saved states have them: right behind what was given, whatever a consumer knows."""
        places, total = self.schedule.places_of(after - 1) + 1, self.order.length
        if total is not None:  # what was dropped is behind, too
            places[after >= self._end(total)] = total
        return places + self.first_place


CYCLE_LENGTH = 16
"""How many bundles a read has open by default: of all its sources together, at least one each."""

GROUP = "ordered/"
"""What the name of a group's job begins with that got none."""


@dataclass(eq=False)
class OrderedRead:
    """An ordered read, from epoch to epoch: its parameters, and how far the trainer has come."""

    seed: int = 0
    shuffle: bool = True
    cycle_length: int = CYCLE_LENGTH
    chooses_cycle: bool = True  # cycle_length was not given
    block_length: int = 1
    bundle_splits: int = 0  # 0: the dispatcher chooses
    batch_size: int | None = None
    drop_remainder: bool = False
    start_position: int = 0
    start_step: int | None = None  # instead of start_position
    in_epoch: bool = False  # as in StartingPoint
    consumer_index: int = 0
    num_consumers: int = 1
    add_source: bool = False  # to each element, as its last component
    add_position: bool = False  # to each element, behind that
    schedule_of: str = ""  # a job, whose schedule it reads; "": its own
    dataset: str = ""  # its content_fingerprint, once it is known
    sources: tuple[tuple[str, int], ...] = ()  # of a mixture: their names and shares
    changes: list[ev.ScheduleChange] | None = None  # of its schedule; None: it was not read yet
    changes_at_join: int = 0  # how many of them all of its group joined with
    weights: tuple[int, str] | None = None  # a state's position, and `Schedule.weights_before` it
    elements: int | None = None  # of an epoch, as the dispatcher knew before the read began
    bundles: int = 0  # of an epoch, as a saved state has it; 0: it does not say
    lengths: list[int] = field(default_factory=lambda: [-1])  # by bundle; -1: not known
    epoch: OrderedEpoch | None = None  # that is read, or was read last
    given: int = 0  # batches of it that the trainer has; elements without batch_size

    def mix(self, sources: Sequence[ev.MixtureSource]) -> None:
        """These are read; none: a dataset by itself."""
        self.sources = tuple((source.name, source.share) for source in sources)
        if self.chooses_cycle:  # each source has as many bundles open
            self.cycle_length = -(-CYCLE_LENGTH // max(1, len(sources)))

    @property
    def spec(self) -> ev.OrderSpec:
        """The order as a dispatcher is asked for it."""
        return ev.OrderSpec(
            seed=self.seed,
            shuffle=self.shuffle,
            cycle_length=self.cycle_length,
            block_length=self.block_length,
            bundle_splits=self.bundle_splits,
        )

    @property
    def member(self) -> ev.GroupMember:
        """This consumer in its group."""
        start = self.start
        return ev.GroupMember(
            index=self.consumer_index,
            consumers=self.num_consumers,
            start_position=start.position,
            batch_size=self.batch_size or 1,
            start_step=start.step,
            drop_remainder=self.drop_remainder,
        )

    @property
    def group_name(self) -> str | None:
        """The name of a job that all consumers with these parameters share; None for one alone."""
        if self.num_consumers == 1:
            return None
        return (
            f"{GROUP}{self.seed}/{self.shuffle:d}/{self.cycle_length}/{self.block_length}/"
            f"{self.bundle_splits}"
        )

    @property
    def total(self) -> int | None:
        """The elements of an epoch, if all lengths are known. A mixture has no end."""
        return None if self.sources or -1 in self.lengths else sum(self.lengths)

    def schedule(self, first_place: int = 0, changes: int | None = None) -> Schedule:
        """Of the epoch that begins at this place, with all changes, or so many."""
        shares = [share for _, share in self.sources] or [SHARES]
        return Schedule(shares, (self.changes or ())[:changes], first_place)

    @property
    def has_moved(self) -> bool:
        """Whether the trainer has been given anything, or has seen the end of an epoch."""
        return self.epoch is not None and (self.given > 0 or self.epoch.over)

    def position(self) -> int:
        """How many elements of the training come before what the trainer is given next. 0 before
        the first one if that was given as a start_step."""
        return self.start.position

    @property
    def start(self) -> StartingPoint:
        """Where another read goes on from here."""
        if self.epoch is None or not self.has_moved:
            return StartingPoint(self.start_position, self.start_step, self.in_epoch)
        return StartingPoint(self.epoch.position(self.given), None, not self.epoch.over)

    def has_given_all(self) -> bool:
        """Whether the trainer has been given all of its epoch, whose end is known."""
        epoch = self.epoch
        return epoch is not None and epoch.end() is not None and self.given >= epoch.batches()

    def finish(self) -> bool:
        """The trainer has seen the end of its iteration. Returns whether the epoch is over: an
        iteration that was stopped ends sooner."""
        if self.epoch is not None and self.epoch.complete and self.has_given_all():
            self.epoch.over = True
        return self.epoch is not None and self.epoch.over

    def _elements(self) -> int | None:
        return self.elements if self.total is None else self.total

    def length(self) -> int | None:
        """This consumer's batches of an epoch, or elements without batch_size, if it is known."""
        if (total := self._elements()) is None:
            return None
        size, consumers = self.batch_size or 1, self.num_consumers
        if self.drop_remainder:
            return total // (size * consumers)
        batches = -(-total // size)
        return -((self.consumer_index - batches) // consumers)

    def steps(self) -> int | None:
        """The steps of an epoch, over all consumers, if that is known."""
        if (total := self._elements()) is None:
            return None
        step = (self.batch_size or 1) * self.num_consumers
        return total // step if self.drop_remainder else -(-total // step)

    def move_to(self, position: int, start_step: int | None = None, in_epoch: bool = False) -> None:
        """Begin there next."""
        self.start_position, self.start_step, self.in_epoch = position, start_step, in_epoch
        self.epoch, self.given = None, 0

    def copy(self) -> OrderedRead:
        """Another one, which begins where this one is. Lengths that one learns, both know."""
        another = replace(self)
        another.move_to(*self.start)
        return another

    def __getstate__(self) -> dict[str, Any]:
        return self.copy().__dict__

    def learn(self, spec: ev.OrderSpec, lengths: Iterable[int]) -> None:
        """The dispatcher knows these lengths; -1: it does not know one. Raises FailedPrecondition
        if a saved state has another number of bundles."""
        if self.bundles and self.bundles != spec.bundles:
            raise FailedPrecondition(
                f"the state is of epochs of {self.bundles} bundles, and the dataset has "
                f"{spec.bundles} now: it was damaged, or the dataset has other splits; begin anew "
                "without the state"
            )
        if len(self.lengths) != spec.bundles:
            self.lengths[:] = [-1] * spec.bundles
        for bundle, length in enumerate(lengths):
            if length >= 0:
                self.lengths[bundle] = length

    def begin(self, spec: ev.OrderSpec) -> OrderedEpoch:
        """Begin where the trainer is. While lengths are unknown, that is taken to be in the first
        epoch: begin again once they are known. Raises InvalidArgument."""
        self.start_position, self.start_step, self.in_epoch = self.start
        total = self.total
        number, place = self._start(total)
        position = number * (total or 0) + place
        if (number + 1) * spec.bundles > MAX_INDEX or position > MAX_POSITION:
            raise InvalidArgument(
                f"the read begins at element {place} of epoch {number} of {spec.bundles} bundles "
                "each, which is too far: give a smaller start_step or start_position"
            )
        self.given = 0
        if total is not None and not self.in_epoch and self._has_no_rest(number, place, total):
            number, place = number + 1, 0
        self.epoch = self._epoch(spec, number, place, total)
        return self.epoch

    def _has_no_rest(self, number: int, place: int, total: int) -> bool:
        """Whether a group that joined with this one begins at the end of an epoch."""
        schedule = self.schedule(number * total, self.changes_at_join)
        start, step = schedule.position_of(place), (self.batch_size or 1) * self.num_consumers
        rest = schedule.position_of(total) - start
        return start > 0 and rest < (step if self.drop_remainder else 1)

    def _epoch(
        self, spec: ev.OrderSpec, number: int, place: int, total: int | None
    ) -> OrderedEpoch:
        schedule = self.schedule(number * (total or 0))
        start = schedule.position_of(place)
        deal = Deal(start, self.batch_size or 1, self.num_consumers, self.consumer_index)
        if self.sources:  # they have epochs of their own
            bundles, order = np.zeros(0, np.int64), EpochOrder(1, 1, 1)
        else:
            bundles, order = epoch_order(spec, self.lengths, number)
        return OrderedEpoch(
            number, start, total, spec, deal, bundles.tolist(), order, self.drop_remainder, schedule
        )

    def _start(self, total: int | None) -> tuple[int, int]:
        """The epoch, and the place in it."""
        step = self.num_consumers * (self.batch_size or 1)
        if self.start_step is not None:
            at_join = self.schedule(0, self.changes_at_join)
            steps = EpochSteps(at_join, step, total, self.drop_remainder)
            place = steps.place_of(self.start_step)
            return divmod(place, total) if total else (0, place)
        if self.sources:
            at, weights = self.weights or (-1, "")
            if at == self.start_position and weights != self.schedule().weights_before(at):
                raise FailedPrecondition(
                    "the state is of a job whose weights changed otherwise before it, so that each "
                    "source was somewhere else: read by that job's name, go on from a state before "
                    "the change, or give start_position instead of the state"
                )
            return 0, self.start_position
        if total == 0 and self.start_position:
            raise InvalidArgument(
                f"start_position={self.start_position} of a dataset without elements: leave it out"
            )
        if not total:
            return 0, self.start_position
        epoch, offset = divmod(self.start_position, total)
        return (epoch - 1, total) if self.in_epoch and epoch and not offset else (epoch, offset)


def claimed_options(given: Mapping[str, Any]) -> ev.OrderSpec:
    """What the keyword arguments of a read at least once mean. Raises InvalidArgument."""
    names = ["bundle_splits", "seed", "shuffle", "within_bundles"]
    if unknown := sorted(given.keys() - names):
        raise InvalidArgument(
            f"{', '.join(unknown)}: no argument of a read at least once, which takes "
            f"{', '.join(names)}"
        )
    order = {"shuffle": True, **checked(given)}
    order.pop("within_bundles", None)  # which is of the job, and not of its order
    return ev.OrderSpec(cycle_length=1, block_length=1, claimed=True, **order)


def ordered_options(
    given: Mapping[str, Any], consumer_index: int | None = None, num_consumers: int | None = None
) -> OrderedRead:
    """The keyword arguments of an ordered read, checked. Raises InvalidArgument."""
    order = checked(given)
    order.pop("within_bundles", None)
    ordered = OrderedRead(**order, chooses_cycle="cycle_length" not in order)
    if ordered.start_position and ordered.start_step is not None:
        raise InvalidArgument(
            f"start_position={ordered.start_position} and start_step={ordered.start_step}: give "
            "one of them"
        )
    if ordered.drop_remainder and ordered.batch_size is None:
        raise InvalidArgument("drop_remainder=True is about batches: give batch_size, or leave it")
    check_index(consumer_index, num_consumers)
    ordered.consumer_index = consumer_index or 0
    ordered.num_consumers = 1 if num_consumers is None else num_consumers
    return ordered


_NUMBERS = {
    "seed": (-(1 << 63), (1 << 63) - 1),
    "cycle_length": (1, MAX_POSITION),
    "block_length": (1, MAX_POSITION),
    "bundle_splits": (1, MAX_POSITION),
    "batch_size": (1, MAX_POSITION),
    "start_position": (0, MAX_POSITION),
    "start_step": (0, MAX_POSITION),
}
"""The least and the greatest value of each number that may be given."""


ORDER = (*_NUMBERS, "shuffle", "drop_remainder", "within_bundles", "add_source")
"""The arguments that only a read in bundles takes."""


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given of these, but for None. Raises InvalidArgument."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name not in _NUMBERS:
            if not isinstance(value, bool | np.bool_):
                raise InvalidArgument(f"{name}={value!r} must be True or False")
            found[name] = bool(value)
            continue
        least, most = _NUMBERS[name]
        is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not (is_number and least <= value <= most):
            raise InvalidArgument(f"{name}={value!r} must be an integer from {least} to {most}")
        found[name] = int(value)
    return found


def check_index(consumer_index: int | None, num_consumers: int | None) -> None:
    """Raises InvalidArgument unless both are given and fit, or neither is."""
    if (consumer_index is None) != (num_consumers is None):
        raise InvalidArgument(
            "Must either set both `consumer_index` and `num_consumers`, or neither. "
            f"consumer_index={consumer_index}, num_consumers={num_consumers}"
        )
    if num_consumers is None:
        return
    if not (isinstance(num_consumers, int) and num_consumers > 0):
        raise InvalidArgument(f"num_consumers={num_consumers!r} must be a positive integer")
    if not (isinstance(consumer_index, int) and 0 <= consumer_index < num_consumers):
        raise InvalidArgument(
            f"consumer_index={consumer_index!r} must be from 0 to {num_consumers - 1}, as "
            f"num_consumers={num_consumers}"
        )
