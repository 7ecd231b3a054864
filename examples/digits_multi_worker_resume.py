"""Train under MultiWorkerMirroredStrategy. Two processes are killed, and three go on.

python examples/digits_multi_worker_resume.py
"""

import contextlib
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from multiprocessing.synchronize import Barrier, Event

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from forebay import service

EPOCHS, TESTED, GLOBAL_BATCH = 3, 297, 30
EPOCH_STEPS = 50
FORK = multiprocessing.get_context("fork")

PIXELS, LABELS = load_digits(return_X_y=True)
PIXELS = (PIXELS / 16).astype(np.float32)


def digits(context: tf.distribute.InputContext) -> tf.data.Dataset:
    numbers = np.arange(TESTED, len(LABELS))
    return tf.data.Dataset.from_tensor_slices((PIXELS[TESTED:], LABELS[TESTED:], numbers))


def train(
    cluster: Mapping[str, list[str]], index: int, target: str, folder: str, killed_at: int,
    begins: Event, ended: Barrier,
) -> None:  # fmt: skip
    """What each machine of the cluster runs; its TF_CONFIG says which of them it is."""
    begins.wait(90)
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights, bias = tf.Variable(tf.zeros([64, 10])), tf.Variable(tf.zeros([10]))
    position = service.OrderedPosition()
    checkpoint = tf.train.Checkpoint(weights=weights, bias=bias, position=position)
    manager = tf.train.CheckpointManager(checkpoint, f"{folder}/{index}", max_to_keep=2)
    checkpoint.restore(tf.train.latest_checkpoint(f"{folder}/0"))  # all save, the chief's counts
    dataset = service.distribute_across(
        digits, target, strategy, job_name="digits", ordered=True, add_position=True,
        batch_size=GLOBAL_BATCH // strategy.num_replicas_in_sync, start_position=position,
    )  # fmt: skip

    def gradients(pixels: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, pixels @ weights + bias)
            loss = tf.reduce_sum(losses) / GLOBAL_BATCH
        return tape.gradient(loss, [weights, bias])

    @tf.function
    def learn(pixels: tf.Tensor, labels: tf.Tensor) -> None:
        per_replica = strategy.run(gradients, args=(pixels, labels))
        for variable, own in zip([weights, bias], per_replica, strict=True):
            variable.assign_sub(0.2 * strategy.reduce("SUM", own, axis=None))

    batches = strategy.distribute_datasets_from_function(lambda _: dataset)
    step = int(position) // GLOBAL_BATCH
    while step < EPOCHS * EPOCH_STEPS:
        for (pixels, labels, numbers), behind in batches:
            (own,) = strategy.experimental_local_results(numbers)
            with open(f"{folder}/seen", "a") as seen:
                seen.write(json.dumps([step, own.numpy().tolist()]) + "\n")
            learn(pixels, labels)
            position.assign(behind)
            step += 1
            if step % 10 == 0:
                manager.save()
            if step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
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
        servers = [stack.enter_context(socket.create_server(("localhost", 0))) for _ in range(6)]
        hosts = [f"localhost:{server.getsockname()[1]}" for server in servers]
    target = hosts.pop()
    folder = tempfile.mkdtemp()
    groups = []
    for number, killed_at in (2, 37), (3, 0):
        cluster, ended = {"worker": [hosts.pop() for _ in range(number)]}, FORK.Barrier(number)
        begins = FORK.Event()
        trainers = []
        for index in range(number):
            how = cluster, index, target, folder, killed_at, begins, ended
            trainers.append(FORK.Process(target=train, args=how, daemon=True))
        for trainer in trainers:  # now, while there are no threads
            trainer.start()
        groups.append((trainers, begins))
    (killed, begin_first), (others, begin_then) = groups
    port = int(target.rpartition(":")[2])
    with (
        service.DispatchServer(service.DispatcherConfig(port=port)) as dispatcher,
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
    ):
        begin_first.set()
        killed[0].join(90)
        for trainer in killed:
            trainer.kill()
        begin_then.set()
        for trainer in others:
            trainer.join(90)
    assert [killed[0].exitcode, *(other.exitcode for other in others)] == [-9, 0, 0, 0]
    steps = [set() for _ in range(EPOCHS * EPOCH_STEPS)]
    for line in pathlib.Path(folder, "seen").read_text().splitlines():
        step, numbers = json.loads(line)
        steps[step].update(numbers)
    shutil.rmtree(folder)
    for epoch in range(EPOCHS):
        seen = steps[epoch * EPOCH_STEPS : (epoch + 1) * EPOCH_STEPS]
        assert all(len(numbers) == GLOBAL_BATCH for numbers in seen), f"epoch {epoch}"
        assert len(set().union(*seen)) == len(LABELS) - TESTED


if __name__ == "__main__":
    main()
