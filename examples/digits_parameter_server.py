"""Train on handwritten digits with parameter servers: a chief, two workers and a server.

python examples/digits_parameter_server.py
"""

import contextlib
import json
import multiprocessing
import os
import socket
from collections.abc import Mapping

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from forebay import service

EPOCHS, TESTED, BATCH = 5, 300, 32

PIXELS, LABELS = load_digits(return_X_y=True)
PIXELS = (PIXELS / 16).astype(np.float32)


def digits(context: tf.distribute.InputContext) -> tf.data.Dataset:
    examples = tf.data.Dataset.from_tensor_slices((PIXELS[TESTED:], LABELS[TESTED:]))
    return examples.shuffle(2000).repeat().batch(context.get_per_replica_batch_size(BATCH))


def run(cluster: Mapping[str, list[str]], kind: str, index: int, target: str) -> None:
    """What each machine of the cluster runs; its TF_CONFIG says which of them it is."""
    task = {"type": kind, "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if kind != "chief":
        spec = resolver.cluster_spec()
        tf.distribute.Server(spec, job_name=kind, task_index=index, protocol="grpc").join()
    coordinate(tf.distribute.ParameterServerStrategy(resolver), target)
    os._exit(0)  # as TensorFlow cannot take the others down


def coordinate(strategy: tf.distribute.Strategy, target: str) -> None:
    """What the chief has the workers do."""
    with strategy.scope():
        weights, bias = tf.Variable(tf.zeros([64, 10])), tf.Variable(tf.zeros([10]))
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    dataset = service.distribute_across(digits, target, strategy, job_name="digits")
    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    @tf.function
    def step(iterator: tf.distribute.DistributedIterator) -> None:
        pixels, labels = next(iterator)
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, pixels @ weights + bias)
            loss = tf.reduce_mean(losses)
        for variable, own in zip(
            [weights, bias], tape.gradient(loss, [weights, bias]), strict=True
        ):
            variable.assign_sub(own)

    for _ in range(EPOCHS * (len(LABELS) - TESTED) // BATCH):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    found = np.argmax(PIXELS[:TESTED] @ weights.numpy() + bias.numpy(), axis=1)
    accuracy = float(np.mean(found == LABELS[:TESTED]))
    assert accuracy > 0.7, accuracy
    print(f"learned: {accuracy:.0%} of {TESTED} digits that it had not seen are right", flush=True)


def main() -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("localhost", 0))) for _ in range(5)]
        port, *ports = [server.getsockname()[1] for server in servers]
    tasks = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]
    cluster: dict[str, list[str]] = {}
    for (kind, _), own in zip(tasks, ports, strict=True):
        cluster.setdefault(kind, []).append(f"localhost:{own}")
    processes = multiprocessing.get_context("fork")  # while there are no threads
    chief, *others = [
        processes.Process(target=run, args=(cluster, *task, f"localhost:{port}"), daemon=True)
        for task in tasks
    ]
    for process in (chief, *others):
        process.start()
    with (
        service.DispatchServer(service.DispatcherConfig(port=port)) as dispatcher,
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
    ):
        chief.join(90)
    for process in others:
        process.kill()
    assert chief.exitcode == 0, chief.exitcode


if __name__ == "__main__":
    main()
