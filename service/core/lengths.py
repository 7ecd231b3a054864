"""Lengths: how many elements the bundles of a dataset have, as ordered reads learn them. A later
read finds its position with them without running the bundles before it. Workers report them when
they have run a bundle, and consumers when they need them. With an access file only workers are
believed: a dataset may be shared by teams that do not trust each other. `register_tfds` knows
lengths from the files' metadata, and declares them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ...journal.proto import events_pb2 as ev
from ..errors import InvalidArgument
from .base import Command, Decision, EventKind, find_consumer, find_dataset, require_one_of_each
from .bundles import Part, parts_of, splits_of
from .state import Dataset, Job, State

UNKNOWN = -1


class LearnLengths(Command, frozen=True, kw_only=True):
    """→ LengthsLearned of the unknown ones, or nothing.

    Answers the bundles whose known length is another: it stays as it is.
    """

    consumer_id: int
    bundles: tuple[int, ...]
    lengths: tuple[int, ...]  # of each


def _learn_lengths(state: State, command: LearnLengths) -> Decision:
    consumer = find_consumer(state, command.consumer_id)
    job = state.jobs[state.iterations[consumer.iteration_id].job_id]
    if job.order is None:
        raise InvalidArgument(
            f"consumer {consumer.consumer_id} reports lengths of bundles, and job "
            f"{job.user_name} is not read in order"
        )
    who = f"consumer {consumer.consumer_id}"
    return _learn(state, job, command.bundles, command.lengths, who)


class CountBundles(Command, frozen=True, kw_only=True):
    """As LearnLengths, of a worker that has run these bundles from their beginning to their end."""

    job_id: int
    bundles: tuple[int, ...]  # numbered through all epochs
    lengths: tuple[int, ...]  # of each


def _count_bundles(state: State, command: CountBundles) -> Decision:
    job = state.jobs.get(command.job_id)
    if job is None or job.order is None or not (job.is_ordered and job.order.bundles):
        return Decision([], [])  # the job was removed, or nobody needs them
    bundles = [bundle % job.order.bundles for bundle in command.bundles]
    who = f"a worker, of job {job.user_name},"
    return _learn(state, job, bundles, command.lengths, who)


def _learn(
    state: State, job: Job, bundles: Sequence[int], lengths: Sequence[int], who: str
) -> Decision:
    order = job.order
    assert order is not None
    require_one_of_each(who, "lengths", lengths, bundles)
    parts = parts_of(state.datasets[job.dataset_id], order)
    firsts = [part.first for part in parts]
    new: list[dict[int, int]] = [{} for _ in parts]
    mismatches = []
    for bundle, length in zip(bundles, lengths, strict=True):
        if not 0 <= bundle < order.bundles or length < 0:
            raise InvalidArgument(
                f"{who} reports length {length} of bundle {bundle}: lengths are at least 0, and "
                f"the bundles are 0 to {order.bundles - 1}"
            )
        number = bisect_right(firsts, bundle) - 1
        part, own = parts[number], bundle - firsts[number]
        known = _known(state, part)
        before = known[own] if own < len(known) else UNKNOWN
        if before == UNKNOWN:
            before = new[number].setdefault(own, length)
        if before != length:
            mismatches.append(bundle)
    events = [
        ev.LengthsLearned(
            dataset_id=part.dataset_id,
            bundle_splits=part.bundle_splits,
            bundles=learned.keys(),
            lengths=learned.values(),
        )
        for part, learned in zip(parts, new, strict=True)
        if learned
    ]
    return Decision(events, mismatches)


def _known(state: State, part: Part) -> list[int]:
    """The lengths of the part's first bundles; there may be none."""
    return state.datasets[part.dataset_id].lengths.get(part.bundle_splits, [])


class DeclareLengths(Command, frozen=True, kw_only=True):
    """→ LengthsLearned of the unknown ones, or nothing: what a read has learned stays."""

    dataset_id: str
    lengths: tuple[int, ...]  # of bundles of one split, by number


def _declare_lengths(state: State, command: DeclareLengths) -> Decision:
    dataset = find_dataset(state, command.dataset_id)
    if len(command.lengths) != (splits := splits_of(dataset)):
        raise InvalidArgument(
            f"{len(command.lengths)} lengths were given for dataset {command.dataset_id} of "
            f"{splits} splits: give one for each"
        )
    if negative := [n for n, length in enumerate(command.lengths) if length < 0]:
        raise InvalidArgument(
            f"split {negative[0]} of dataset {command.dataset_id} cannot have "
            f"{command.lengths[negative[0]]} elements: give at least 0"
        )
    known = dataset.lengths.get(1, [])
    known = known + [UNKNOWN] * (splits - len(known))
    new = {n: length for n, length in enumerate(command.lengths) if known[n] == UNKNOWN}
    learned = ev.LengthsLearned(
        dataset_id=command.dataset_id, bundle_splits=1, bundles=new.keys(), lengths=new.values()
    )
    return Decision([learned] if new else [], None)


def _lengths_learned(state: State, event: ev.LengthsLearned) -> None:
    lengths = state.datasets[event.dataset_id].lengths.setdefault(event.bundle_splits, [])
    lengths += [UNKNOWN] * (max(event.bundles) + 1 - len(lengths))
    for bundle, length in zip(event.bundles, event.lengths, strict=True):
        lengths[bundle] = length


def lengths_of(state: State, job: Job) -> list[int]:
    """Of the bundles of an ordered job, by number; UNKNOWN where nobody has learned it."""
    assert job.order is not None
    found: list[int] = []
    for part in parts_of(state.datasets[job.dataset_id], job.order):
        known = _known(state, part)
        found += known + [UNKNOWN] * (part.bundles - len(known))
    return found


def elements_of(dataset: Dataset) -> int | None:
    """Of an epoch, if the lengths of all bundles are known."""
    for size, lengths in dataset.lengths.items():
        if UNKNOWN not in lengths and len(lengths) * size >= splits_of(dataset):
            return sum(lengths)
    return None


def count_known(dataset: Dataset) -> dict[int, int]:
    """How many lengths of the dataset are known, by the size of bundles."""
    return {
        size: len(lengths) - lengths.count(UNKNOWN) for size, lengths in dataset.lengths.items()
    }


DECIDE = {
    CountBundles: _count_bundles,
    DeclareLengths: _declare_lengths,
    LearnLengths: _learn_lengths,
}
EVENTS = {"lengths_learned": EventKind(_lengths_learned, is_quiet=True)}
