"""The audit of ordered reads can fail: it finds each broken promise.

The order of the evidence is the simulation's, which computes it with lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from forebay.chaos.ordered import BLOCK_LENGTH, CYCLE_LENGTH, SEED, next_group
from forebay.chaos.ordered_audit import check_order
from forebay.chaos.records import Began, OrderedGroup, OrderedStep, Record, Started
from forebay.chaos.trainer import BUNDLE_SPLITS

from ..simulation.ordered import GlobalOrder

ELEMENTS = 130
ORDER = GlobalOrder(
    cast(Any, SimpleNamespace(splits=ELEMENTS, kept=lambda split: 1)),
    cast(Any, SimpleNamespace(seed=SEED, shuffle=True, cycle_length=CYCLE_LENGTH,
                              block_length=BLOCK_LENGTH, bundle_splits=BUNDLE_SPLITS)),
)  # fmt: skip
FIRST, SECOND = OrderedGroup(1, 2, 6), OrderedGroup(2, 3, 5, 24, {"position": 24})

Trainers = list[list[Record]]


def reading(group: OrderedGroup, index: int, position: int, steps: int = -1) -> Iterator[Record]:
    """What a trainer records that takes so many steps, or reads to the epoch's end."""
    yield Began(group, position)
    epoch, offset = divmod(position, ELEMENTS)
    while offset < ELEMENTS and steps:
        first = offset + index * group.batch_size
        ids = [split for _, _, split, _ in ORDER.epoch(epoch)][first:][: group.batch_size]
        offset = min(offset + group.consumers * group.batch_size, ELEMENTS)
        at = epoch * ELEMENTS + offset
        if ids:
            yield OrderedStep(at, ids, state={"position": at})
        steps -= 1
    if steps:
        yield OrderedStep((epoch + 1) * ELEMENTS, [])


@pytest.fixture
def trainers() -> Trainers:
    """The first trainer was killed after 4 steps, and went on from the second one; then a group of
    another number went on from there, too."""
    found: Trainers = [[Started(f"ordered{index}.1")] for index in range(3)]
    found[0] += [*reading(FIRST, 0, 0, 4), *reading(FIRST, 0, 24, 3)]
    found[1] += reading(FIRST, 1, 0, 3)
    for index, records in enumerate(found):
        records += [*reading(SECOND, index, 24), *reading(SECOND, index, ELEMENTS)]
    return found


def test_an_older_position_is_no_broken_promise(trainers: Trainers) -> None:
    verdict = check_order(trainers, elements=ELEMENTS)
    assert verdict.broken == [] and verdict.epochs == 2
    # Two batches when the first trainer went on, and with the next group those, its next one, and
    # the second trainer's last one.
    assert verdict.twice == 6 * (2 + 3 + 1)
    assert verdict.delivered == 2 * ELEMENTS + verdict.twice


def edit(trainer: int, at: int, **changed: Any) -> Callable[[Trainers], None]:
    def lie(trainers: Trainers) -> None:
        trainers[trainer][at] = msgspec.structs.replace(trainers[trainer][at], **changed)

    return lie


def step(trainers: Trainers, trainer: int, at: int) -> OrderedStep:
    found = trainers[trainer][at]
    assert isinstance(found, OrderedStep)
    return found


def shifted(trainers: Trainers) -> None:
    one, next_one = step(trainers, 1, 2), step(trainers, 0, 3)
    edit(1, 2, ids=[*one.ids[1:], next_one.ids[0]])(trainers)


def repeated(trainers: Trainers) -> None:
    trainers[1].insert(3, trainers[1][2])


def skipped(trainers: Trainers) -> None:
    del trainers[1][2]


def ended_early(trainers: Trainers) -> None:
    trainers[2][5:] = [OrderedStep(ELEMENTS, [])]


def another_when_read_again(trainers: Trainers) -> None:
    edit(0, 7, ids=step(trainers, 1, 3).ids)(trainers)


def one_twice_in_an_epoch(trainers: Trainers) -> None:
    one = step(trainers, 0, 2)
    edit(0, 2, ids=[one.ids[0], *one.ids[:-1]])(trainers)


def nobody_before_the_second_group(trainers: Trainers) -> None:
    for records in trainers[:2]:
        records[:] = records[records.index(Began(SECOND, 24)) :]


def began_further(trainers: Trainers) -> None:
    """From a position that nobody has reached, all trainers with one accord."""
    for index, records in enumerate(trainers):
        del records[records.index(Began(SECOND, 24)) :]
        records += reading(SECOND, index, 99)


@pytest.mark.parametrize(
    ("lie", "what"),
    [
        (edit(1, 2, ids=[1, 2, 3, 4, 5, 6]), "got [1, 2, 3, 4, 5, 6] at position 6, where ["),
        (shifted, "at position 6, where ["),
        (repeated, "at position 18, where ["),
        (skipped, "at position 6, where ["),
        (ended_early, "consumer 2 of 3 (group 2) got the end at position"),
        (another_when_read_again, "position 24 had the element"),
        (one_twice_in_an_epoch, "lost, and others came twice"),
        (nobody_before_the_second_group, "24 elements (0, 1, 2, 3, 4, …) lost: these positions"),
        (began_further, "51 elements (42, 43, 44, 45, 46, …) lost: these positions"),
        (edit(1, 2, position=13), "(group 1) is at position 13, and should be at 12"),
        (edit(1, 2, damaged=[3]), "consumer 1 of 2 (group 1): 1 elements (3) damaged"),
        (lambda trainers: trainers[2].pop(), "consumer 2 of group 2 did not come to an end"),
        (lambda trainers: [records.clear() for records in trainers], "nobody began to read"),
    ],
)
def test_a_broken_promise_is_found(
    trainers: Trainers, lie: Callable[[Trainers], object], what: str
) -> None:
    lie(trainers)
    broken = check_order(trainers, elements=ELEMENTS).broken
    assert any(what in promise for promise in broken), broken


def test_a_group_goes_on_where_all_of_the_one_before_have_been(trainers: Trainers) -> None:
    before = [records[: records.index(Began(SECOND, 24))] for records in trainers[:2]]
    groups = [next_group(FIRST, 3, [*before, []]) for _ in range(100)]
    # The second trainer has taken three steps.
    assert {group.position for group in groups} == {0, 12, 24, 36}
    assert {group.batch_size for group in groups} == {4, 5}
    assert all((group.state or {"position": 0})["position"] == group.position for group in groups)
