"""Ordered reads into tf.data: the same elements in the same order as `read` gives."""

from __future__ import annotations

import threading
from typing import Any

import tensorflow as tf

from forebay import service

from ..ordered_numbers import (
    BATCH,
    NUMBER,
    ORDER,
    STEPS,
    batches_of,
    epoch_of,
    in_steps,
    ordered_dataset,
)


def together(*datasets: Any) -> list[list[Any]]:
    """An epoch of each, read at the same time, as a group does."""
    found: list[list[Any]] = [[] for _ in datasets]

    def read(number: int) -> None:
        found[number] += [e.tolist() for e in datasets[number].as_numpy_iterator()]

    threads = [threading.Thread(target=read, args=(i,)) for i in range(len(datasets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_iteration_is_the_next_epoch_of_what_read_gives(target: str, numbers: str) -> None:
    read = ordered_dataset(target, numbers)
    epochs = [[int(x) for x in read] for _ in range(2)]
    assert epochs == [epoch_of(target, numbers, 0), epoch_of(target, numbers, 1)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == [*range(NUMBER)]
    batched = ordered_dataset(target, numbers, batch_size=BATCH)
    assert [b.tolist() for b in batched.as_numpy_iterator()] == batches_of(epochs[0])
    whole = ordered_dataset(target, numbers, batch_size=BATCH, drop_remainder=True)
    assert whole.element_spec.shape == [BATCH]
    assert [b.tolist() for b in whole.as_numpy_iterator()] == batches_of(epochs[0])[:-1]
    assert [b.tolist() for b in whole.as_numpy_iterator()] == batches_of(epochs[1])[:-1]
    repeated = ordered_dataset(target, numbers, batch_size=BATCH).repeat(2).prefetch(2)
    assert [b.tolist() for b in repeated.as_numpy_iterator()] == [
        *batches_of(epochs[0]), *batches_of(epochs[1])
    ]  # fmt: skip


def test_an_iteration_that_is_left_begins_again(target: str, numbers: str) -> None:
    read = ordered_dataset(target, numbers)
    first = epoch_of(target, numbers, 0)
    assert [int(x) for x in read.take(3)] == first[:3]
    assert [int(x) for x in read] == first


def test_distribute_reads_in_order_too(target: str) -> None:
    numbers = tf.data.Dataset.range(NUMBER)
    read = numbers.apply(service.distribute("parallel_epochs", target, ordered=True, **ORDER))
    found = [int(x) for x in read]
    assert sorted(found) == [*range(NUMBER)]
    halves = together(
        *(
            numbers.apply(
                service.distribute(
                    "parallel_epochs", target, consumer_index=i, num_consumers=2, ordered=True,
                    **ORDER,
                )
            )
            for i in range(2)
        )
    )  # fmt: skip
    assert halves == [found[::2], found[1::2]]


def test_two_consumers_go_on_where_one_has_stopped(target: str, numbers: str) -> None:
    """And the other way round, with the same global batch."""
    first = batches_of(epoch_of(target, numbers, 0))
    two = [
        ordered_dataset(
            target, numbers, batch_size=BATCH // 2, start_step=5, consumer_index=i, num_consumers=2
        )
        for i in range(2)
    ]
    assert in_steps(together(*two)) == first[5:]
    second = batches_of(epoch_of(target, numbers, 1))
    assert in_steps(together(*two)) == second
    one = ordered_dataset(target, numbers, batch_size=BATCH, start_step=STEPS + 3)
    assert [b.tolist() for b in one.as_numpy_iterator()] == second[3:]


def test_positions_travel_with_the_elements(target: str, numbers: str) -> None:
    for size in (None, BATCH):
        read = ordered_dataset(target, numbers, batch_size=size, add_position=True)
        ahead = read.prefetch(10)
        seen = [(e.tolist(), int(p)) for _ in range(2) for e, p in ahead.as_numpy_iterator()]
        step = size or 1
        steps = -(-NUMBER // step)
        assert [p for _, p in seen] == [
            *(min(step * i, NUMBER) for i in range(1, steps + 1)),
            *(NUMBER + min(step * i, NUMBER) for i in range(1, steps + 1)),
        ]
        for at in (0, 4, steps - 2, steps - 1, steps + 2):
            rest = ordered_dataset(target, numbers, batch_size=size, start_position=seen[at][1])
            until = steps if at + 1 < steps else 2 * steps
            assert [e.tolist() for e in rest.as_numpy_iterator()] == [
                e for e, _ in seen[at + 1 : until]
            ]


def test_positions_of_a_group_and_a_dropped_remainder(target: str, numbers: str) -> None:
    two = [
        ordered_dataset(
            target, numbers, batch_size=BATCH, drop_remainder=True, add_position=True,
            consumer_index=i, num_consumers=2,
        ).map(lambda _, position: position)
        for i in range(2)
    ]  # fmt: skip
    assert together(*two) == [[8, 16, 24, 32, 40, NUMBER]] * 2


def test_elements_of_any_kind_have_positions(target: str) -> None:
    kinds = tf.data.Dataset.range(8).map(
        lambda i: {"text": tf.strings.as_string(i), "ragged": tf.range(i), "wide": tf.fill([3], i)}
    )
    dataset_id = service.register_dataset(target, kinds)
    read = ordered_dataset(target, dataset_id, add_position=True)
    elements, positions = zip(*read.as_numpy_iterator(), strict=True)
    assert [*positions] == [*range(1, 9)]
    for element in elements:
        number = int(element["text"])
        assert element["ragged"].tolist() == [*range(number)]
        assert element["wide"].tolist() == [number] * 3
