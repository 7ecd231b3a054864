"""Train on handwritten digits in two processes, under MultiWorkerMirroredStrategy.

python examples/digits_multi_worker.py
"""

import contextlib
import json
import multiprocessing
import os
import socket
from collections.abc import Mapping
from multiprocessing.synchronize import Barrier

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from forebay import service

EPOCHS, TESTED, BATCH = 5, 300, 32

PIXELS, LABELS = load_digits(return_X_y=True)
PIXELS = (PIXELS / 16).astype(np.float32)


def digits(context: tf.distribute.InputContext) -> tf.data.Dataset:
    examples = tf.data.Dataset.from_tensor_slices((PIXELS[TESTED:], LABELS[TESTED:]))
    return examples.shuffle(2000).batch(context.get_per_replica_batch_size(BATCH))


def train(cluster: Mapping[str, list[str]], index: int, target: str, ended: Barrier) -> None:
    """What each machine of the cluster runs; its TF_CONFIG says which of them it is."""
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights, bias = tf.Variable(tf.zeros([64, 10])), tf.Variable(tf.zeros([10]))

    def gradients(pixels: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, pixels @ weights + bias)
            loss = tf.reduce_sum(losses) / BATCH
        return tape.gradient(loss, [weights, bias])

    @tf.function
    def step(batch: tuple[tf.Tensor, tf.Tensor]) -> None:
        per_replica = strategy.run(gradients, args=batch)
        for variable, own in zip([weights, bias], per_replica, strict=True):
            variable.assign_sub(strategy.reduce("SUM", own, axis=None))

    dataset = service.distribute_across(digits, target, strategy, job_name="digits")
    batches = strategy.distribute_datasets_from_function(lambda _: dataset)
    for _ in range(EPOCHS):
        for batch in batches:
            step(batch)
    if service.TaskContext.from_env().is_chief:
        found = np.argmax(PIXELS[:TESTED] @ weights.numpy() + bias.numpy(), axis=1)
        accuracy = float(np.mean(found == LABELS[:TESTED]))
        assert accuracy > 0.7, accuracy
        print(
            f"learned: {accuracy:.0%} of {TESTED} digits that it had not seen are right", flush=True
        )
    ended.wait(60)  # TensorFlow ends the cluster with the first that leaves
    os._exit(0)


def main() -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("localhost", 0))) for _ in range(3)]
        port, *ports = [server.getsockname()[1] for server in servers]
    cluster = {"worker": [f"localhost:{port}" for port in ports]}
    processes = multiprocessing.get_context("fork")  # while there are no threads
    ended = processes.Barrier(2)
    trainers = [
        processes.Process(
            target=train, args=(cluster, index, f"localhost:{port}", ended), daemon=True
        )
        for index in range(2)
    ]
    for trainer in trainers:
        trainer.start()
    with (
        service.DispatchServer(service.DispatcherConfig(port=port)) as dispatcher,
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
    ):
        for trainer in trainers:
            trainer.join(90)
    assert [trainer.exitcode for trainer in trainers] == [0, 0]


if __name__ == "__main__":
    main()
