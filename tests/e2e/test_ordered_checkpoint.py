"""The position of an ordered read in a `tf.train.Checkpoint`, restored from its files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from forebay import service
from forebay.service import Role, TaskContext
from forebay.service.client import saved_states
from forebay.service.client.positions import OrderedRead
from forebay.service.errors import FailedPrecondition, ForebayError

from ..forks import run
from ..ordered_numbers import BATCH, NUMBER, ORDER, STEPS, ordered_dataset, steps_of


def dataset(target: str, dataset_id: str, position: Any, **how: Any) -> Any:
    """Its elements come with their positions."""
    how = {"batch_size": BATCH, **how}
    return ordered_dataset(target, dataset_id, add_position=True, start_position=position, **how)


class Training:
    """A trainer as after a start: it has what the newest checkpoint in the directory says."""

    def __init__(self, directory: Path) -> None:
        self.position = service.OrderedPosition()
        self.steps = tf.Variable(0)
        checkpoint = tf.train.Checkpoint(position=self.position, steps=self.steps)
        self.manager = tf.train.CheckpointManager(checkpoint, str(directory), max_to_keep=2)
        status = checkpoint.restore(self.manager.latest_checkpoint)
        if self.manager.latest_checkpoint:
            status.assert_consumed()

    def train(self, batches: Any, steps: int | None) -> list[list[int]]:
        """Take so many steps, save, and drop the rest of the iteration."""
        seen = []
        for batch, behind in itertools.islice(batches, steps):
            seen.append(batch.numpy().tolist())
            self.steps.assign_add(1)
            self.position.assign(behind)
        self.manager.save()
        return seen


def test_each_start_goes_on_where_the_last_one_saved(
    target: str, numbers: str, tmp_path: Path
) -> None:
    """In mid-epoch, at an epoch's end, and with elements fetched ahead over it."""
    seen: list[list[int]] = []
    for steps in (5, 7, 1, 0, 3, 9):
        training = Training(tmp_path)
        assert int(training.steps) == len(seen)
        epochs = dataset(target, numbers, training.position).repeat(2)
        seen += training.train(epochs.prefetch(8), steps)
    assert seen == steps_of(target, numbers)[:25]


def test_epochs_of_one_dataset_follow_each_other(target: str, numbers: str, tmp_path: Path) -> None:
    training = Training(tmp_path)
    read = dataset(target, numbers, training.position).map(lambda batch, at: (batch, at))
    seen = training.train(read.prefetch(3), None)
    assert int(training.position) == NUMBER
    seen += training.train(read, 4)
    seen += training.train(read, 2)  # of the same dataset, without what was fetched ahead
    again = Training(tmp_path)
    assert int(again.position) == NUMBER + 6 * BATCH
    seen += again.train(dataset(target, numbers, again.position), None)
    assert seen == steps_of(target, numbers)


def test_a_dataset_may_be_made_before_the_position_is_restored(
    target: str, numbers: str, tmp_path: Path
) -> None:
    training = Training(tmp_path)
    training.train(dataset(target, numbers, training.position), 5)
    position = service.OrderedPosition()
    mine = dataset(target, numbers, position)
    other = dataset(target, numbers, position, seed=8)
    checkpoint = tf.train.Checkpoint(position=position)
    checkpoint.restore(training.manager.latest_checkpoint).expect_partial()
    assert [b.tolist() for b, _ in mine.as_numpy_iterator()] == steps_of(target, numbers, 1)[5:]
    with pytest.raises(tf.errors.OpError, match="another order"):
        next(iter(other))


class Saving(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts the steps, and saves the model behind the fifth."""

    def __init__(self, model: Any, directory: Path) -> None:
        super().__init__()
        self.steps = tf.Variable(0)
        self.checkpoint = tf.train.Checkpoint(model=model, steps=self.steps)
        self.path = str(directory / "model")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.steps.assign_add(1) == 5:
            self.checkpoint.write(self.path)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # at each epoch's end
def test_keras_fit_goes_on_by_the_steps_that_a_callback_counts(target: str, tmp_path: Path) -> None:
    pairs = tf.data.Dataset.range(NUMBER).map(
        lambda i: (tf.random.stateless_normal([4], [i, 0]), tf.fill([1], tf.cast(i, tf.float32)))
    )
    dataset_id = service.register_dataset(target, pairs)
    models = []
    for restored in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)  # a restore leaves out what isn't there
        saving = Saving(model, tmp_path)
        if restored:
            saving.checkpoint.read(saving.path)
        start = int(saving.steps)
        read = ordered_dataset(target, dataset_id, batch_size=BATCH, start_step=start)
        model.fit(read, verbose=0, shuffle=False, callbacks=[saving])
        assert int(saving.steps) == STEPS
        models.append(model)
    for mine, theirs in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_by_the_element_and_in_a_function(target: str, numbers: str, tmp_path: Path) -> None:
    """Without batch_size, whatever batches are made behind it; a tf.function takes the steps."""
    first = [x for step in steps_of(target, numbers, 1) for x in step]
    training = Training(tmp_path)
    position = training.position

    def train(batches: Any) -> Any:
        seen = tf.TensorArray(tf.int64, 3)
        for step, (batch, behind) in batches.enumerate():
            seen = seen.write(tf.cast(step, tf.int32), batch)
            position.assign(behind)
        return seen.concat()

    read = dataset(target, numbers, position, batch_size=None)
    seen = tf.function(train)(read.batch(7).take(3)).numpy().tolist()
    assert seen == first[:21]
    assert int(position) == 21
    training.manager.save()
    again = Training(tmp_path)
    read = dataset(target, numbers, again.position, batch_size=None)
    assert again.train(read.batch(1), None) == [[x] for x in first[21:]]


def test_replicas_of_a_strategy(target: str, numbers: str, tmp_path: Path) -> None:
    """Each takes a batch in turn, and the greatest of their positions counts."""
    code = """
import json
import sys

import tensorflow as tf

from forebay import service

target, directory, number, order = *sys.argv[1:3], *map(json.loads, sys.argv[3:])
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
for steps in (2, 3, 2):
    position = service.OrderedPosition()
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(position=position), directory, 2)
    manager.checkpoint.restore(manager.latest_checkpoint)
    dataset = service.distribute_across(
        lambda _: tf.data.Dataset.range(number), target, strategy, job_name="replicas",
        ordered=True, batch_size=4, add_position=True, start_position=position, **order,
    )
    batches = iter(strategy.distribute_datasets_from_function(lambda _: dataset))
    for _ in range(steps):
        batch, behind = next(batches)
        both = strategy.experimental_local_results(batch)
        print(json.dumps([each.numpy().tolist() for each in both]), flush=True)
        position.assign(behind)
    manager.save()
    print(json.dumps(int(position)))
"""
    ended = run(["-c", code, target, str(tmp_path), str(NUMBER), json.dumps(ORDER)])
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    positions = [line for line in lines if isinstance(line, int)]
    assert positions == [16, 40, NUMBER]
    seen = [batch for line in lines if isinstance(line, list) for batch in line]
    assert [batch for batch in seen if batch] == steps_of(target, numbers, 1)


def test_the_position_of_another_read_is_refused(target: str, numbers: str, tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.train(dataset(target, numbers, training.position), 3)
    position = Training(tmp_path).position
    others = service.register_dataset(target, tf.data.Dataset.range(NUMBER + 1))
    for said, dataset_id, how in (
        ("another dataset", others, {}),
        ("another order", numbers, {"seed": 8}),
        ("another global batch", numbers, {"batch_size": BATCH + 1}),
    ):
        with pytest.raises(FailedPrecondition, match=said):
            dataset(target, dataset_id, position, **how)
    with pytest.raises(tf.errors.FailedPreconditionError, match="another order"):
        dataset(target, numbers, position, cycle_length=2)
    larger = dataset(target, numbers, int(position), batch_size=6)
    batch, behind = next(iter(larger))
    assert batch.numpy().tolist() == [x for s in steps_of(target, numbers, 1)[3:5] for x in s][:6]
    assert int(behind) == 18


def test_two_reads_need_two_positions(target: str, numbers: str) -> None:
    position = service.OrderedPosition()
    both = [dataset(target, numbers, position, seed=seed) for seed in (1, 2)]
    next(iter(both[0]))
    with pytest.raises(tf.errors.OpError, match="another order"):
        next(iter(both[1]))
    with pytest.raises(FailedPrecondition, match="one OrderedPosition for two reads"):
        position.describe(OrderedRead(seed=2))  # if both have begun at the same time


def test_a_position_of_the_version_before_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    read, position = OrderedRead(), service.OrderedPosition()
    with monkeypatch.context() as before:
        before.setattr(saved_states, "VERSION", 1)
        position.describe(read)
    position.begin(read)
    position.describe(read)


def test_what_makes_no_sense_is_refused(target: str, numbers: str, tmp_path: Path) -> None:
    position = service.OrderedPosition()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"ordered": True}, "add_position=True"),
        ({"add_position": True}, "ordered=True"),
        ({"ordered": True, "add_position": True, "start_step": 0}, "start_step=0"),
    ]
    for how, said in refused:
        with pytest.raises(ForebayError, match=said):
            service.from_dataset_id(
                "parallel_epochs", target, numbers, start_position=position, **how
            )
        with pytest.raises(ForebayError, match=said):
            service.distribute("parallel_epochs", target, start_position=position, **how)
    with pytest.raises(ForebayError, match="start_position"):
        service.read(target, numbers, ordered=True, start_position=position)
    with pytest.raises(ValueError):
        position.assign(tf.constant(1.5))
    position._read.described = "{"
    with pytest.raises(ForebayError, match="no state of an ordered read"):
        dataset(target, numbers, position)


def test_tasks_of_a_cluster_take_a_position_and_an_evaluator_begins_anew(
    target: str, numbers: str
) -> None:
    position = service.OrderedPosition()
    position.assign(5 * BATCH)
    steps = steps_of(target, numbers, 1)
    evaluator = TaskContext(role=Role.EVALUATOR, rank=None, num_consumers=1)
    for context, taken in ((TaskContext(), steps[5:]), (evaluator, steps)):
        read = service.distribute_across(
            lambda _: tf.data.Dataset.range(NUMBER), target, context, job_name="begins behind 5",
            ordered=True, add_position=True, start_position=position, batch_size=BATCH, **ORDER,
        )  # fmt: skip
        assert [batch.tolist() for batch, _ in read.as_numpy_iterator()] == taken
