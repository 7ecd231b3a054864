"""The order of an epoch: beside TensorFlow's interleave, and under all ways to learn lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from forebay.service.order import Deal, EpochOrder, permuted, permuted_many

Names = list[tuple[int, int]]  # of elements: (place, index)

SEEDS = st.integers(-(1 << 70), 1 << 70)
LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 20)), max_size=12)
EVEN_LENGTHS = st.integers(0, 6).flatmap(lambda n: st.lists(st.just(12), min_size=n, max_size=n))
# Lengths, cycle_length and block_length.
ORDERS = st.tuples(st.one_of(LENGTHS, EVEN_LENGTHS), st.integers(1, 6), st.integers(1, 5))


def interleaved(lengths: Sequence[int], cycle_length: int, block_length: int) -> Names:
    """What TensorFlow makes of bundles of these lengths."""
    far = 1 << 32
    dataset = tf.data.Dataset.from_tensor_slices(
        (np.arange(len(lengths)) * far, np.array(lengths, np.int64))
    ).interleave(
        lambda first, length: tf.data.Dataset.range(first, first + length),
        cycle_length=cycle_length,
        block_length=block_length,
        num_parallel_calls=None,
    )
    batches = dataset.batch(1 << 14).as_numpy_iterator()
    return [divmod(element, far) for batch in batches for element in batch.tolist()]


def names(order: EpochOrder, first: int = 0, last: int | None = None) -> Names:
    places, indexes = order.elements(first, order.known_until if last is None else last)
    assert places.dtype == indexes.dtype == np.int64
    return list(zip(places.tolist(), indexes.tolist(), strict=True))


def known(lengths: Sequence[int], cycle_length: int, block_length: int) -> EpochOrder:
    return EpochOrder(len(lengths), cycle_length, block_length, lengths)


# Permutations.


@pytest.mark.parametrize(
    ("count", "seed", "epoch", "bundles"),
    [
        (10, 0, 0, [8, 5, 1, 0, 7, 4, 3, 9, 6, 2]),
        (10, 0, 1, [7, 3, 6, 5, 8, 0, 9, 4, 1, 2]),
        (10, 1, 0, [6, 9, 4, 8, 7, 1, 5, 2, 0, 3]),
        (1, -5, 3, [0]),
        (10**6, 1 << 70, 12, [872241, 493922, 942913, 682019, 381707]),
        ((1 << 40) + 1, 42, 7, [158692447391, 697780171690]),
    ],
)
def test_permutations_never_change(count: int, seed: int, epoch: int, bundles: list[int]) -> None:
    """Saved positions depend on these values. Don't renew them: keep the function."""
    assert [permuted(place, count, seed, epoch) for place in range(len(bundles))] == bundles


@given(st.integers(1, 300), SEEDS, st.integers(0, 1 << 40))
def test_permuted_is_a_bijection(count: int, seed: int, epoch: int) -> None:
    bundles = permuted_many(np.arange(count), count, seed, epoch)
    assert bundles.dtype == np.int64
    assert sorted(bundles.tolist()) == list(range(count))


def test_a_million_bundles() -> None:
    bundles = permuted_many(np.arange(10**6), 10**6, 3, 4)
    assert np.bincount(bundles).tolist() == [1] * 10**6
    assert permuted_many(np.arange(0), 0, 3, 4).tolist() == []


@pytest.mark.parametrize("count", [2, 3, 5, 10, 17, 64])
def test_each_bundle_is_equally_likely_at_each_place(count: int) -> None:
    seeds = 2000
    times = np.zeros((count, count))
    for seed in range(seeds):
        times[np.arange(count), permuted_many(np.arange(count), count, seed, 0)] += 1
    expected = seeds / count
    freedom = (count - 1) ** 2
    chi_square = float(((times - expected) ** 2 / expected).sum())
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(("by_seed", "by_epoch"), [(1, 0), (0, 1), (1, -1)])
def test_neighboring_seeds_and_epochs_are_unrelated(by_seed: int, by_epoch: int) -> None:
    count, pairs = 50, 1000
    same = 0
    for seed in range(pairs):
        one = permuted_many(np.arange(count), count, seed, seed)
        other = permuted_many(np.arange(count), count, seed + by_seed, seed + by_epoch)
        same += int((one == other).sum())
    # Two random permutations agree in one place, with a variance of 1.
    assert abs(same / pairs - 1) < 0.2


# Interleaving.


@given(ORDERS)
def test_the_order_is_that_of_tensorflow(order: tuple[list[int], int, int]) -> None:
    of_all = known(*order)
    assert names(of_all) == interleaved(*order)
    assert of_all.length == sum(order[0])


@pytest.mark.parametrize(
    ("lengths", "cycle_length", "block_length"),
    [
        ([3, 1], 16, 100),
        ([300, 300, 300, 300, 300, 300], 4, 3),
        ([300, 299, 0, 301, 5, 300, 17], 3, 7),
        ([40_001, 30_000, 1, 50_000, 20_000, 7], 3, 1),
    ],
)
def test_orders_of_more_than_is_drawn(
    lengths: list[int], cycle_length: int, block_length: int
) -> None:
    order = known(lengths, cycle_length, block_length)
    assert names(order) == interleaved(lengths, cycle_length, block_length)
    assert order.length == sum(lengths)


def test_rounds_that_begin_with_an_empty_visit() -> None:
    """All bundles go on to the last of these rounds, but one begins after the first."""
    lengths = [4, 100, 100]
    order = known(lengths, 2, 2)
    whole = interleaved(lengths, 2, 2)
    assert names(order, 2, 9) == whole[order.count_before(2) : order.count_before(9)]


@given(ORDERS, st.data())
def test_any_rounds_are_a_part_of_the_whole(
    parameters: tuple[list[int], int, int], data: st.DataObject
) -> None:
    order = known(*parameters)
    whole = names(order)
    rounds = st.integers(0, order.known_until)
    first, last = sorted(data.draw(st.tuples(rounds, rounds)))
    before, behind = order.count_before(first), order.count_before(last)
    assert names(order, first, last) == whole[before:behind]
    assert order.ended(first) == (before == len(whole))
    assert order.count_before(order.known_until) == len(whole)


@given(ORDERS)
def test_every_position_is_located(parameters: tuple[list[int], int, int]) -> None:
    order = known(*parameters)
    rounds = [len(names(order, at, at + 1)) for at in range(order.known_until)]
    expected = [(at, sum(rounds[:at])) for at, count in enumerate(rounds) for _ in range(count)]
    assert [order.locate(position) for position in range(sum(rounds))] == expected


@given(ORDERS, st.data())
def test_opened_places_are_those_that_a_reader_needs(
    parameters: tuple[list[int], int, int], data: st.DataObject
) -> None:
    order = known(*parameters)
    at = data.draw(st.integers(0, order.known_until))
    ahead = data.draw(st.integers(0, order.bundles))
    earlier = {place for place, _ in names(order, 0, min(at + 1, order.known_until))}
    needed = sorted({place for place, _ in names(order, at)})
    running, coming = order.opened(at, ahead)
    assert running == [place for place in needed if place in earlier]
    assert coming == [place for place in needed if place not in earlier][:ahead]


@given(ORDERS, st.data())
def test_lengths_learned_in_any_way_lead_to_the_same_order(
    parameters: tuple[list[int], int, int], data: st.DataObject
) -> None:
    """And what was determined once stays so, and is all that is determined."""
    lengths, cycle_length, block_length = parameters
    whole = known(*parameters)
    located = [whole.locate(position) for position in range(sum(lengths))]
    # How often each place is learned. The last time it is complete.
    times = [data.draw(st.integers(0, 2)) for _ in lengths]
    least = [0 if left else length for length, left in zip(lengths, times, strict=True)]
    at_start = [-1 if left else length for length, left in zip(lengths, times, strict=True)]
    order = EpochOrder(len(lengths), cycle_length, block_length, at_start)
    until = 0
    for place in data.draw(
        st.permutations([p for p, left in enumerate(times) for _ in range(left)])
    ):
        assert order.length is None
        assert order.known_until >= until
        until = order.known_until
        assert names(order) == names(whole, 0, until)
        count = order.count_before(until)
        assert count == whole.count_before(until)
        assert [order.locate(position) for position in range(count)] == located[:count]
        assert order.locate(count) is None
        assert not order.ended(until)
        incomplete = {place for place, left in enumerate(times) if left}
        check_that_no_more_is_determined(order, least, incomplete, cycle_length)
        check_opened(order, whole, incomplete, data.draw(st.integers(0, until)))

        times[place] -= 1
        at_least = data.draw(st.integers(0, lengths[place])) if times[place] else lengths[place]
        order.learn(place, at_least, complete=not times[place])
        least[place] = max(least[place], at_least)
    assert order.known_until == whole.known_until
    assert order.length == whole.length
    assert names(order) == names(whole)


def check_that_no_more_is_determined(
    order: EpochOrder, least: list[int], incomplete: set[int], cycle_length: int
) -> None:
    """Two epochs with such lengths differ in the round that isn't known."""
    until, block = order.known_until, order.block_length
    more = [length + (block if place in incomplete else 0) for place, length in enumerate(least)]
    ends, goes_on = (known(lengths, cycle_length, block) for lengths in (least, more))
    assert names(ends, until, min(until + 1, ends.known_until)) != names(
        goes_on, until, min(until + 1, goes_on.known_until)
    )


def check_opened(order: EpochOrder, whole: EpochOrder, incomplete: set[int], at: int) -> None:
    running, coming = order.opened(at, order.bundles)
    assert running + coming == sorted(set(running + coming))
    needed = {place for place, _ in names(whole, at)}
    assert needed <= set(running + coming) <= needed | incomplete
    if at < order.known_until:
        assert {place for place, _ in names(order, at, at + 1)} <= set(running)


def test_an_order_that_grows() -> None:
    """A reader that has seen parts of two bundles side by side."""
    order = EpochOrder(4, cycle_length=2, block_length=2)
    assert order.known_until == 0
    assert order.opened(0, 1) == ([0, 1], [2])
    order.learn(0, 5, complete=False)
    order.learn(1, 3, complete=False)
    assert order.known_until == 1
    assert names(order) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    order.learn(1, 3, complete=True)
    assert order.known_until == 2
    assert names(order, 1) == [(0, 2), (0, 3), (1, 2)]
    # Bundle 0 may end in round 2, but slot 1 is free before.
    assert order.opened(2, 1) == ([0, 2], [3])
    assert order.locate(6) == (1, 4)
    assert order.locate(7) is None
    order.learn(3, 0, complete=True)
    assert order.opened(2, 1) == ([0, 2], [])


def test_the_same_may_be_learned_again() -> None:
    order = EpochOrder(1, 1, 1)
    for at_least, complete in [
        (3, False),
        (2, False),
        (4, True),
        (4, True),
        (4, False),
        (1, False),
    ]:
        order.learn(0, at_least, complete)
    assert order.length == 4


@pytest.mark.parametrize(
    ("at_least", "complete", "then", "then_complete", "message"),
    [
        (5, False, 4, True, "has 4 elements, and had at least 5 before"),
        (5, True, 4, True, "has 4 elements, and had 5 before"),
        (5, True, 6, True, "has 6 elements, and had 5 before"),
        (5, True, 6, False, "has at least 6 elements, and had 5 before"),
    ],
)
def test_contradictions(
    at_least: int, complete: bool, then: int, then_complete: bool, message: str
) -> None:
    order = EpochOrder(2, 1, 1)
    order.learn(0, at_least, complete)
    before = names(order), order.known_until
    with pytest.raises(ValueError, match=f"the bundle at place 0 {message}: its pipeline must"):
        order.learn(0, then, then_complete)
    assert (names(order), order.known_until) == before


# Dealing.

DEALS = st.tuples(st.integers(0, 40), st.integers(1, 6), st.integers(1, 5))


@given(DEALS, st.integers(0, 60), st.integers(0, 60))
def test_every_element_from_the_start_on_is_dealt_to_one_consumer(
    deal: tuple[int, int, int], first: int, count: int
) -> None:
    start, batch_size, consumers = deal
    mine = [
        Deal(start, batch_size, consumers, index).mine(np.arange(first, first + count))
        for index in range(consumers)
    ]
    assert all(indexes.dtype == np.int64 for indexes in mine)
    owners = [
        (position - start) // batch_size % consumers if position >= start else None
        for position in range(first, first + count)
    ]
    assert [indexes.tolist() for indexes in mine] == [
        [at for at, owner in enumerate(owners) if owner == index] for index in range(consumers)
    ]


@given(ORDERS, DEALS, DEALS, st.data())
def test_cut_anywhere(
    parameters: tuple[list[int], int, int],
    before: tuple[int, int, int],
    after: tuple[int, int, int],
    data: st.DataObject,
) -> None:
    """Some steps of some consumers, and then others from that position on, are the whole once."""
    order = known(*parameters)
    whole = names(order)
    total = len(whole)
    batches = data.draw(st.integers(0, 20))
    first_deal = Deal(0, *before[1:], 0)
    cut = first_deal.position_after(batches, first_deal.end(total, drop_remainder=False))
    read = [name for index in range(before[2]) for name in dealt(whole[:cut], 0, before, index)]
    if cut < total:
        located = order.locate(cut)
        assert located is not None
        round_, first = located
        rest = names(order, round_)
        for index in range(after[2]):
            mine = Deal(cut, after[1], after[2], index).mine(np.arange(first, first + len(rest)))
            read += [rest[at] for at in mine]
    assert sorted(read) == sorted(whole)


def dealt(whole: Names, start: int, deal: tuple[int, int, int], index: int) -> Names:
    return [whole[at] for at in Deal(start, *deal[1:], index).mine(np.arange(len(whole)))]


@given(st.integers(0, 20), st.integers(0, 100), st.booleans(), st.integers(0, 20))
def test_steps_and_ends_depend_on_the_global_batch_alone(
    start: int, more: int, drop_remainder: bool, batches: int
) -> None:
    total, global_batch = start + more, 12
    results = []
    for consumers in (1, 2, 3, 4, 6, 12):
        batch_size = global_batch // consumers
        deals = [Deal(start, batch_size, consumers, index) for index in range(consumers)]
        (end,) = {deal.end(total, drop_remainder) for deal in deals}
        (position,) = {deal.position_after(batches, end) for deal in deals}
        steps: list[set[int]] = [set() for _ in range(-(-(end - start) // global_batch))]
        for deal in deals:
            for at, index in enumerate(deal.mine(np.arange(end)).tolist()):
                steps[at // batch_size].add(index)
        results.append((end, position, steps))
    assert all(result == results[0] for result in results)
    end, position, steps = results[0]
    assert total - end == ((total - start) % global_batch if drop_remainder else 0)
    assert position == start + sum(len(step) for step in steps[:batches])


# Arguments.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: permuted(3, 3, 0, 0), "place 3 is not among those of 3 bundles"),
        (lambda: permuted(-1, 3, 0, 0), "place -1 is not"),
        (lambda: permuted_many(np.array([0, 3]), 3, 0, 0), "place 3 is not"),
        (lambda: EpochOrder(-1, 1, 1), "bundles is -1: give 0 or more"),
        (lambda: EpochOrder(1, 0, 1), "cycle_length is 0: give 1 or more"),
        (lambda: EpochOrder(1, 1, 0), "block_length is 0: give 1 or more"),
        (lambda: EpochOrder(2, 1, 1, [3]), r"lengths of shape \(1,\): give 2, one a bundle"),
        (lambda: EpochOrder(1, 1, 1, [-2]), "a length is -2: give -1 if it is unknown"),
        (lambda: EpochOrder(1, 1, 1).learn(1, 0, True), "place 1 is not among those of 1 bundles"),
        (lambda: EpochOrder(1, 1, 1).learn(0, -1, True), "at_least is -1: give 0 or more"),
        (lambda: EpochOrder(1, 1, 1).count_before(1), "round 1 is not within 0 to 0: learn more"),
        (lambda: EpochOrder(1, 1, 1).elements(0, 1), "round 1 is not within 0 to 0: learn more"),
        (lambda: known([4], 1, 1).elements(2, 1), "rounds 2 to 1 descend"),
        (lambda: known([4], 1, 1).locate(4), "position 4 is not in this epoch of 4 elements"),
        (lambda: EpochOrder(1, 1, 1).locate(-1), "position -1 is not"),
        (lambda: Deal(-1, 1, 1, 0), "start is -1: give 0 or more"),
        (lambda: Deal(0, 0, 1, 0), "batch_size is 0: give 1 or more"),
        (lambda: Deal(0, 1, 0, 0), "consumers is 0: give 1 or more"),
        (lambda: Deal(0, 1, 2, 2), "index is 2 of 2 consumers: count from 0"),
        (lambda: Deal(5, 1, 1, 0).end(4, False), "start is 5 of 4 elements: start in the next"),
        (lambda: Deal(0, 1, 1, 0).position_after(-1, 4), "batches is -1: give 0 or more"),
    ],
)
def test_wrong_arguments(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
