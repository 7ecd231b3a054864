"""A trainer that may be preempted; its arguments: how it reads, the service, the dataset, a file,
the seconds of a step and of the grace, and 1 if it is told by another file when to begin.

It writes down each element in the file as it trains on it, and then what its save_fn was called
for. A file with the suffix .step says that a step has begun. Behind each step it waits while there
is a file "hold" beside its own.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from forebay import service

KIND, TARGET, DATASET_ID, PATH, STEP_S, GRACE_S, LATER = sys.argv[1:8]
# 60: so that no trainer is sent all of it ahead
JOB: Any = {"job_name": "training", "max_outstanding_requests": 60}
record = os.open(PATH, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def step(numbers: list[int]) -> None:
    Path(PATH).with_suffix(".step").touch()
    time.sleep(float(STEP_S))
    os.write(record, b"".join(b"%d\n" % number for number in numbers))
    while Path(PATH).with_name("hold").exists():
        time.sleep(0.01)


def save(remaining_s: float) -> None:
    os.write(record, b"saved\n")
    assert 0 <= remaining_s <= float(GRACE_S)


class Waits(logging.Handler):
    """Writes down that an epoch waits for the dispatcher to begin."""

    def emit(self, said: logging.LogRecord) -> None:
        if "cannot begin to read" in said.getMessage():
            os.write(record, b"waits\n")


def wait_to_begin() -> None:
    if LATER == "1":
        logging.getLogger("forebay").addHandler(Waits())
        os.write(record, b"opened\n")
        while not Path(PATH).with_suffix(".begin").exists():
            time.sleep(0.05)


def in_order() -> None:
    """Two epochs of 25 steps, from the checkpoint on that the last such program saved."""
    import tensorflow as tf

    position, steps = service.OrderedPosition(), tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(position=position, steps=steps)
    manager = tf.train.CheckpointManager(checkpoint, f"{PATH} saved", max_to_keep=1)
    checkpoint.restore(manager.latest_checkpoint)
    how: Any = {"ordered": True, "seed": 3, "bundle_splits": 20, "batch_size": 16}
    dataset = service.from_dataset_id(
        "distributed_epoch", TARGET, DATASET_ID, add_position=True, start_position=position, **how
    )

    def save_position(remaining_s: float) -> None:
        manager.save()
        save(remaining_s)

    with service.PreemptionHandler(save_position, grace_period_s=float(GRACE_S)):
        for numbers, behind in dataset.repeat().take(50 - steps.numpy()).prefetch(2):
            step(numbers.numpy()[:, 0].tolist())
            position.assign(behind)
            steps.assign_add(1)


def main() -> None:
    mode = "distributed_epoch"
    if KIND == "in order":
        in_order()
        return
    if KIND in ("read", "at least once"):
        how: Any = {"processing_mode": mode, **JOB}
        if KIND == "at least once":
            how = {"delivery": "at_least_once", "bundle_splits": 20, "job_name": "training"}
        with service.PreemptionHandler(save, grace_period_s=float(GRACE_S)):
            reading = service.read(TARGET, DATASET_ID, **how)
            wait_to_begin()
            for numbers in reading:
                step([int(numbers[0])])
        return
    import tensorflow as tf

    dataset = service.from_dataset_id(mode, TARGET, DATASET_ID, **JOB)
    if KIND == "repeated loop":
        dataset = dataset.repeat()
    dataset = dataset.map(lambda numbers: numbers[0]).batch(2)
    if "loop" in KIND:
        with service.PreemptionHandler(save, grace_period_s=float(GRACE_S)):
            wait_to_begin()
            for numbers in dataset.prefetch(2):
                step(numbers.numpy().tolist())
        return
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])

    class Recording(tf.keras.Model):  # type: ignore[misc]
        def call(self, numbers: tf.Tensor) -> tf.Tensor:
            return model(tf.cast(numbers[:, None], tf.float32))

        def train_step(self, numbers: tf.Tensor) -> dict[str, tf.Tensor]:
            tf.py_function(lambda n: step(n.numpy().tolist()), [numbers], [])
            return {"loss": tf.reduce_sum(self(numbers))}

    keras_model = Recording()
    keras_model.compile()
    with service.PreemptionHandler(save, grace_period_s=float(GRACE_S)) as preemption:
        over = tf.keras.callbacks.LambdaCallback(on_epoch_end=preemption.check)
        keras_model.fit(dataset, epochs=1, verbose=0, callbacks=[over])


print("begins", flush=True)
main()
print("ends", flush=True)
