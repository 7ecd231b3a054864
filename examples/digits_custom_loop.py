"""Train on handwritten digits in a loop of one's own, over the replicas of a strategy.

python examples/digits_custom_loop.py

The strategy is a MirroredStrategy, which trains in this process alone; for one model on several
machines see digits_multi_worker.py. A SIGTERM saves the weights, and hands back what was not used.
"""

import pathlib
import tempfile

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


def main() -> None:
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
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

    with (
        service.DispatchServer() as dispatcher,
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
    ):
        dataset = service.distribute_across(digits, dispatcher.target, strategy, job_name="digits")
        batches = strategy.distribute_datasets_from_function(lambda _: dataset)
        weights_path = pathlib.Path(tempfile.gettempdir(), "digits.npz")

        def save(remaining_s: float) -> None:
            np.savez(weights_path, weights=weights.numpy(), bias=bias.numpy())

        with service.PreemptionHandler(save, grace_period_s=25) as preemption:
            for _ in range(EPOCHS):
                for batch in batches:
                    step(batch)
                preemption.check()
    found = tf.argmax(PIXELS[:TESTED] @ weights.numpy() + bias.numpy(), axis=1)
    accuracy = float(np.mean(found.numpy() == LABELS[:TESTED]))
    assert accuracy > 0.7, accuracy
    print(f"learned: {accuracy:.0%} of {TESTED} digits that it had not seen are right")


if __name__ == "__main__":
    main()
