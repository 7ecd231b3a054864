"""Datasets of a service under strategies of one process: `tf.distribute`'s guide on input.

Its ways to iterate, which are those of several processes, are in test_multi_worker.
"""

from __future__ import annotations

from pathlib import Path

from .. import forks

REPLICAS = """
import sys
import tensorflow as tf
from tensorflow.python.data.experimental.ops.distribute import replicate
from forebay import service

target = sys.argv[1]
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 5)


def mirrored(replicas):
    return tf.distribute.MirroredStrategy([f"/cpu:{i}" for i in range(replicas)])


def read(dataset, job_name=None):
    return dataset.apply(service.distribute("distributed_epoch", target, job_name))


def sizes(strategy, batch):
    return [len(own) for own in strategy.experimental_local_results(batch)]


def values(strategy, batch):
    return [int(x) for own in strategy.experimental_local_results(batch) for x in own]


# The guide's table: elements, batch, replicas; what each replica gets in each step.
for elements, replicas, expected in (
    (6, 2, [[2, 2], [1, 1]]),
    (4, 5, [[1, 1, 1, 1, 0]]),
    (8, 3, [[2, 2, 0], [2, 2, 0]]),
):
    strategy = mirrored(replicas)
    dataset = read(tf.data.Dataset.range(elements).batch(4), f"of {replicas}")
    batches = [*strategy.experimental_distribute_dataset(dataset)]
    assert [sizes(strategy, batch) for batch in batches] == expected, batches
    assert sorted(x for b in batches for x in values(strategy, b)) == [*range(elements)]

strategy = mirrored(2)

# Python's generator of what comes by the service.
dataset_id = service.register_dataset(target, tf.data.Dataset.range(6))
generated = tf.data.Dataset.from_generator(
    lambda: service.read(target, dataset_id), output_signature=tf.TensorSpec([], tf.int64)
)
batches = [*strategy.experimental_distribute_dataset(generated.batch(4))]
assert [sizes(strategy, batch) for batch in batches] == [[2, 2], [1, 1]]
assert sorted(x for b in batches for x in values(strategy, b)) == [*range(6)]

# One call, for batches of either kind.
for distribute, size in (
    (lambda dataset: strategy.experimental_distribute_dataset(dataset), 4),
    (lambda dataset: strategy.distribute_datasets_from_function(lambda _: dataset), 2),
):
    dataset = service.distribute_across(
        lambda _: tf.data.Dataset.range(8).batch(size), target, strategy, job_name=f"by {size}"
    )
    batches = [*distribute(dataset)]
    assert [sizes(strategy, batch) for batch in batches] == [[2, 2], [2, 2]]

# Keras, which takes one batch of one iteration to build the model.
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
pairs = tf.data.Dataset.range(8).map(lambda i: (tf.fill([1], tf.cast(i, tf.float32)), 0.0)).batch(4)
taken = []
ends = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: taken.append(batch))
model.fit(read(pairs, "of Keras"), epochs=2, shuffle=False, verbose=0, callbacks=[ends])
assert taken == [0, 1, 0, 1], taken

# Clones on other devices, as TPUStrategy makes them on the CPUs of its hosts. It wants batches of
# one size, whose shapes are known.
dataset = service.distribute_across(
    lambda _: tf.data.Dataset.range(9).batch(2, drop_remainder=True), target, job_name="cloned"
)
assert dataset.element_spec.shape == [2]
device = "/job:localhost/replica:0/task:0/device:CPU:1"
cloned = replicate(dataset, [device])[device]
del dataset
assert sorted(int(x) for batch in cloned for x in batch) == [*range(8)]

# One device.
strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
distributed = strategy.experimental_distribute_dataset(read(tf.data.Dataset.range(6).batch(4)))
assert [len(batch) for batch in distributed] == [4, 2]
print("done")
"""


def test_replicas_in_one_process(target: str, tmp_path: Path) -> None:
    program = tmp_path / "trainer.py"  # whose loops AutoGraph reads
    program.write_text(REPLICAS)
    run = forks.run([str(program), target], timeout_s=100)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
