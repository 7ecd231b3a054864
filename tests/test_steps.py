"""The steps of a group: beside what its consumers compute for themselves."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from forebay.journal.proto import events_pb2 as ev
from forebay.service.client.positions import OrderedRead
from forebay.service.errors import InvalidArgument
from forebay.service.steps import GroupSteps, KnownOrder

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def spec(bundles: int, **fields: Any) -> ev.OrderSpec:
    how = {"seed": 3, "shuffle": True, "cycle_length": 3, "block_length": 2, **fields}
    return ev.OrderSpec(bundle_splits=1, bundles=bundles, **how)


def batches(read: OrderedRead, order: ev.OrderSpec, lengths: list[int]) -> tuple[int, Any]:
    """The epoch where a consumer begins, and its batches there, as it computes them."""
    read.learn(order, lengths)
    epoch = read.begin(order)
    places, indexes = epoch.order.elements(0, epoch.order.known_until)
    end = epoch.deal.end(len(places), read.drop_remainder)
    mine = epoch.deal.mine(np.arange(end))
    names = [(epoch.bundles[places[at]], int(indexes[at])) for at in mine.tolist()]
    size = read.batch_size or 1
    return epoch.number, [names[at : at + size] for at in range(0, len(names), size)]


@given(
    LENGTHS, st.integers(1, 3), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 60)
)
def test_steps_are_the_consumers_batches(
    lengths: list[int], consumers: int, size: int, drop: bool, by_step: bool, start: int
) -> None:
    """In the epoch where the group starts, and in the one behind it."""
    total, step_size = sum(lengths), consumers * size
    steps_of_epoch = total // step_size if drop else -(-total // step_size)
    assume(steps_of_epoch)
    order = spec(len(lengths))
    known = KnownOrder(order, lengths)
    where = {"start_step": start} if by_step else {"start_position": start}
    reads = [
        OrderedRead(
            **{**{k: getattr(order, k) for k in ("seed", "shuffle", "cycle_length")}, **where},
            block_length=order.block_length, batch_size=size, drop_remainder=drop,
            consumer_index=n, num_consumers=consumers,
        )
        for n in range(consumers)
    ]  # fmt: skip
    steps = GroupSteps(known, reads[0].member)
    if by_step:
        assert steps.first == start
    elif start % total % step_size == 0 and steps.start:
        assert steps.first == start // total * steps_of_epoch + start % total // step_size
    number = steps.first
    for read in reads:
        read_epoch, mine = batches(read, order, lengths)
        assert read_epoch == steps.epoch
        for at, batch in enumerate(mine):
            epoch, first, stop = steps.span(number + at)
            assert epoch == steps.epoch
            bundles, indexes = known.elements(epoch, first, stop)
            got = list(zip(bundles.tolist(), indexes.tolist(), strict=True))
            here = slice(read.consumer_index * size, (read.consumer_index + 1) * size)
            assert got[here] == batch
            for bundle, index in batch:
                position = known.find(epoch, bundle, index)
                assert first <= position < stop
                assert steps.step_of(epoch, position) == (number + at, read.consumer_index)
    behind = (steps.epoch + 1) * steps_of_epoch
    assert steps.span(behind)[:2] == (steps.epoch + 1, 0)
    assert steps.span(behind - 1)[0] == steps.epoch
    with pytest.raises(InvalidArgument, match=f"first step is {number}"):
        steps.span(number - 1)


def test_what_a_group_does_not_have() -> None:
    known = KnownOrder(spec(2), [5, 6])
    member = ev.GroupMember(consumers=2, batch_size=2, start_position=3, drop_remainder=True)
    steps = GroupSteps(known, member)
    assert [steps.step_of(0, p) is None for p in (2, 3, 10)] == [True, False, False]
    assert (
        GroupSteps(known, ev.GroupMember(**{**fields(member), "start_position": 4})).step_of(0, 8)
        is None
    )  # dropped: 4 … 7 is its only step
    assert steps.step_of(1, 0) == (2, 0)
    large = GroupSteps(known, ev.GroupMember(consumers=3, batch_size=4, drop_remainder=True))
    with pytest.raises(InvalidArgument, match="step of 3 batches of 4: it has 11 elements"):
        large.span(1)


def fields(member: ev.GroupMember) -> dict[str, Any]:
    return {field.name: value for field, value in member.ListFields()}


def test_what_unknown_lengths_leave_open() -> None:
    order = spec(4, shuffle=False, cycle_length=2, block_length=1)
    known = KnownOrder(order, [3, -1, 2, -1])
    assert known.total is None
    member = ev.GroupMember(consumers=1, batch_size=2)
    steps = GroupSteps(known, member)
    with pytest.raises(
        InvalidArgument, match=re.escape("position 1 of epoch 0 is not determined yet: 0 positions")
    ):
        known.elements(*steps.span(0))
    known = KnownOrder(order, [3, 3, -1, -1])
    steps = GroupSteps(known, member)
    assert [x.tolist() for x in known.elements(*steps.span(0))] == [[0, 1], [0, 0]]
    assert [x.tolist() for x in known.elements(*steps.span(2))] == [[0, 1], [2, 2]]
    assert steps.step_of(0, 5) == (2, 0)
    assert steps.step_of(1, 0) is None
    with pytest.raises(InvalidArgument, match="then the lengths of bundles 2, 3 are needed; read"):
        known.elements(*steps.span(3))
    with pytest.raises(InvalidArgument, match="element 3:0 in epoch 0 is not determined"):
        known.find(0, 3, 0)


def test_elements_that_do_not_exist() -> None:
    known = KnownOrder(spec(2), [5, -1])
    for bundle, index, why in ((2, 0, "none of 2"), (0, 5, "bundle 0, which has 5 elements")):
        with pytest.raises(InvalidArgument, match=why):
            known.find(0, bundle, index)


def test_an_empty_dataset() -> None:
    known = KnownOrder(spec(0), [])
    steps = GroupSteps(known, ev.GroupMember(consumers=1, batch_size=2, start_position=9))
    assert (steps.epoch, steps.start, steps.first) == (0, 0, 0)
    assert np.concatenate(known.elements(0, 0, 0)).size == 0


def test_a_consumer_that_goes_on_says_where() -> None:
    """What a group started with is true of its first epoch only."""
    read = OrderedRead(start_step=2, batch_size=2, drop_remainder=True)
    order = spec(2)
    read.learn(order, [5, 6])
    assert read.member == ev.GroupMember(
        consumers=1, batch_size=2, start_step=2, drop_remainder=True
    )
    epoch = read.begin(order)
    assert read.member.start_step == 2  # nothing was given yet: the same start
    read.given, epoch.over = 3, True
    assert not read.member.HasField("start_step")
    assert read.member.start_position == 11
