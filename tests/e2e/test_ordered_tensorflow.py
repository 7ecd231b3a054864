"""Ordered reads into tf.data: the same elements in the same order as `read` gives."""

from __future__ import annotations

import itertools
import json
import pathlib
import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from forebay import service
from forebay.service import Role, TaskContext
from forebay.service.errors import ForebayError

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


def test_what_makes_no_sense_is_refused(target: str, numbers: str) -> None:
    def says(
        *words: str, ordered: bool = True, mode: Any = "distributed_epoch", **how: Any
    ) -> None:
        for call in (
            lambda: service.from_dataset_id(mode, target, numbers, ordered=ordered, **how),
            lambda: service.distribute(mode, target, ordered=ordered, **how),
        ):
            with pytest.raises(ForebayError) as refused:
                call()
            assert all(word in str(refused.value) for word in words), refused.value

    says("processing_mode=FILE", "OFF or DYNAMIC", mode=service.ShardingPolicy.FILE)
    says("max_outstanding_requests=3", max_outstanding_requests=3)
    says("cross_trainer_cache", cross_trainer_cache=service.CrossTrainerCache("a"), job_name="j")
    says("initial_epoch=2", "start_step", initial_epoch=2, job_name="j")
    says("target_workers='LOCAL'", target_workers="LOCAL")
    says("start_position=1 and start_step=1", start_position=1, start_step=1)
    says("drop_remainder=True", "batch_size", drop_remainder=True)
    says("cycle_length=0", cycle_length=0)
    says("consumer_index=2", consumer_index=2, num_consumers=2)
    says("add_position=True", "ordered=True", ordered=False, add_position=True)
    says("seed, batch_size", "ordered=True", ordered=False, seed=1, batch_size=2)


WORKER = TaskContext(role=Role.WORKER, index=0, rank=1, num_consumers=2)
CHIEF = TaskContext(num_consumers=2)
EVALUATOR = TaskContext(role=Role.EVALUATOR, rank=None, num_consumers=2)


def test_tasks_of_a_cluster_read_in_order(target: str) -> None:
    """Which may go on with another number of tasks, as the service makes the batches."""

    def read(context: TaskContext, size: int, **how: Any) -> Any:
        return service.distribute_across(
            lambda _: tf.data.Dataset.range(NUMBER), target, context, job_name="in order",
            ordered=True, batch_size=size, **ORDER | how,
        )  # fmt: skip

    both = [read(context, BATCH // 2) for context in (CHIEF, WORKER)]
    first, second = in_steps(together(*both)), in_steps(together(*both))
    assert sorted(itertools.chain.from_iterable(first)) == [*range(NUMBER)]
    assert first != second
    alone = read(TaskContext(), BATCH, start_step=5)
    assert [b.tolist() for b in alone.as_numpy_iterator()] == first[5:]
    assert [b.tolist() for b in alone.as_numpy_iterator()] == second
    evaluator = read(EVALUATOR, BATCH, start_step=5)
    assert [b.tolist() for b in evaluator.as_numpy_iterator()] == first
    policy = alone.options().experimental_distribute.auto_shard_policy
    assert policy == tf.data.experimental.AutoShardPolicy.OFF
    with pytest.raises(ForebayError, match="num_consumers=2: leave it out"):
        read(CHIEF, BATCH, num_consumers=2)
    with pytest.raises(ForebayError, match="does not go with cross_trainer_cache"):
        read(CHIEF, BATCH, cross_trainer_cache=True)


class Losses(keras.callbacks.Callback):  # type: ignore[misc]
    """The loss after each step: the mean of the epoch so far."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(logs["loss"]))


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # at each epoch's end
def test_a_training_that_is_resumed_by_its_step_is_the_same(
    target: str, tmp_path: pathlib.Path
) -> None:
    """Bit by bit."""
    pairs = tf.data.Dataset.range(NUMBER).map(
        lambda i: (
            tf.random.stateless_normal([4], [i, 0]),
            tf.cast(tf.fill([1], i % 3), tf.float32),
        )
    )
    dataset_id = service.register_dataset(target, pairs)

    def model() -> Any:
        keras.utils.set_random_seed(0)
        made = keras.Sequential([keras.Input([4]), keras.layers.Dense(8), keras.layers.Dense(1)])
        made.compile(keras.optimizers.SGD(0.05), "mse")
        return made

    def fit(made: Any, steps: int, start_step: int) -> list[float]:
        losses = []
        read = ordered_dataset(target, dataset_id, batch_size=BATCH, start_step=start_step)
        for x, y in read.repeat(2).take(steps):
            losses.append(float(made.train_on_batch(x, y)))
            made.reset_metrics()
        return losses

    undisturbed = fit(model(), 2 * STEPS, 0)
    assert len({*undisturbed}) == 2 * STEPS
    stopped = model()
    resumed = fit(stopped, 8, 0)
    saved = tf.train.Checkpoint(model=stopped).save(str(tmp_path / "model"))
    started_again = model()
    tf.train.Checkpoint(model=started_again).restore(saved).assert_existing_objects_matched()
    resumed += fit(started_again, 2 * STEPS - 8, 8)
    assert json.dumps(resumed) == json.dumps(undisturbed)

    losses = Losses()
    model().fit(
        ordered_dataset(target, dataset_id, batch_size=BATCH),
        epochs=2,
        verbose=0,
        shuffle=False,
        callbacks=[losses],
    )
    means = [np.float32(losses.seen[STEPS - 1]), np.float32(losses.seen[-1])]
    assert np.allclose(means[0], np.average(undisturbed[:STEPS], weights=[4] * 12 + [2]), rtol=1e-5)
    assert np.allclose(means[1], np.average(undisturbed[STEPS:], weights=[4] * 12 + [2]), rtol=1e-5)
