"""Train on handwritten digits with JAX: batches are global arrays over the devices of a mesh.

python examples/digits_jax.py

Started on several machines behind jax.distributed.initialize(), with a service that all reach, the
same program trains on all of their devices; one of them registers the dataset.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import forebay.jax
from forebay import service

EPOCHS, TESTED, BATCH, SPLITS, RATE = 5, 300, 32, 8, 0.5

PIXELS, LABELS = load_digits(return_X_y=True)
PIXELS = (PIXELS / 16).astype(np.float32)


def digits(split: int) -> Iterator[dict[str, Any]]:
    for place in range(TESTED + split, len(LABELS), SPLITS):
        yield {"pixels": PIXELS[place], "label": LABELS[place]}


def loss(parameters: Any, batch: Any, mask: Any) -> Any:
    """Where the mask is False, at the end of an epoch, there is no digit."""
    scores = jax.nn.log_softmax(batch["pixels"] @ parameters["weights"] + parameters["bias"])
    right = jnp.take_along_axis(scores, batch["label"][:, None], axis=1)[:, 0]
    return -jnp.where(mask, right, 0).sum() / mask.sum()


@jax.jit
def step(parameters: Any, batch: Any, mask: Any) -> Any:
    gradients = jax.grad(loss)(parameters, batch, mask)
    return jax.tree.map(lambda value, gradient: value - RATE * gradient, parameters, gradients)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")
    parameters = {"weights": jnp.zeros([64, 10]), "bias": jnp.zeros([10])}
    with (
        service.DispatchServer() as dispatcher,
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
    ):
        dataset_id = service.register_dataset(dispatcher.target, digits, splits=range(SPLITS))
        batches = forebay.jax.ServiceDataset(
            dispatcher.target,
            dataset_id,
            batch_size=BATCH,
            sharding=mesh,
            remainder="pad",
            job_name="digits",
        )
        for _ in range(EPOCHS):
            seen = 0
            for batch, mask in batches:
                parameters = step(parameters, batch, mask)
                seen += int(mask.sum())
            assert seen == len(LABELS) - TESTED, f"{seen} digits in an epoch"
    found = jnp.argmax(PIXELS[:TESTED] @ parameters["weights"] + parameters["bias"], axis=1)
    accuracy = float(np.mean(found == LABELS[:TESTED]))
    assert accuracy > 0.7, accuracy
    print(f"learned: {accuracy:.0%} of {TESTED} digits that it had not seen are right")


if __name__ == "__main__":
    main()
