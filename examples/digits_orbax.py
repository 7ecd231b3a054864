"""Train with JAX and Orbax. The program is killed, and goes on at its checkpoint over another mesh.

python examples/digits_orbax.py
"""

import json
import multiprocessing
import os
import pathlib
import signal
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

import forebay.jax
from forebay import service

EPOCHS, TESTED, BATCH, SPLITS = 5, 300, 32, 8
EPOCH_STEPS = 47

PIXELS, LABELS = load_digits(return_X_y=True)
PIXELS = (PIXELS / 16).astype(np.float32)


def digits(split: int):
    for number in range(TESTED + split, len(LABELS), SPLITS):
        yield {"pixels": PIXELS[number], "label": LABELS[number], "number": np.int32(number)}


def loss(parameters, batch, mask):
    """Where the mask is False, at the end of an epoch, there is no digit."""
    scores = jax.nn.log_softmax(batch["pixels"] @ parameters["weights"] + parameters["bias"])
    right = jnp.take_along_axis(scores, batch["label"][:, None], axis=1)[:, 0]
    return -jnp.where(mask, right, 0).sum() / mask.sum()


@jax.jit
def take(parameters, batch, mask):
    gradients = jax.grad(loss)(parameters, batch, mask)
    return jax.tree.map(lambda value, gradient: value - 0.5 * gradient, parameters, gradients)


def save(manager, step, parameters, dataset):
    model, data = ocp.args.StandardSave(parameters), ocp.args.JsonSave(dataset.state_dict())
    manager.save(step, args=ocp.args.Composite(model=model, data=data))


def restore(manager, step, parameters, dataset):
    """The parameters, placed as these are, over whatever mesh."""
    model, data = ocp.args.StandardRestore(parameters), ocp.args.JsonRestore()
    restored = manager.restore(step, args=ocp.args.Composite(model=model, data=data))
    dataset.load_state_dict(restored.data)
    return restored.model


def train(
    target: str, dataset_id: str, folder: pathlib.Path, killed_at: int | None, devices: int
) -> None:
    jax.config.update("jax_num_cpu_devices", devices)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")
    dataset = forebay.jax.ServiceDataset(
        target, dataset_id, ordered=True, batch_size=BATCH, sharding=mesh, remainder="pad"
    )
    parameters = {"weights": jnp.zeros([64, 10]), "bias": jnp.zeros([10])}
    parameters = jax.device_put(parameters, jax.sharding.NamedSharding(mesh, jax.P()))
    step = 0
    with ocp.CheckpointManager(folder / "saved", item_names=("model", "data")) as manager:
        if (latest := manager.latest_step()) is not None:
            step, parameters = latest, restore(manager, latest, parameters, dataset)
        while step < EPOCHS * EPOCH_STEPS:
            for batch, mask in dataset:
                if step == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                with (folder / "seen").open("a") as seen:
                    json.dump([step, sorted(np.asarray(batch["number"])[mask].tolist())], seen)
                    seen.write("\n")
                parameters = take(parameters, batch, mask)
                step += 1
                if step % 10 == 0:
                    save(manager, step, parameters, dataset)
    found = jnp.argmax(PIXELS[:TESTED] @ parameters["weights"] + parameters["bias"], axis=1)
    accuracy = float(np.mean(found == LABELS[:TESTED]))
    assert accuracy > 0.7, accuracy
    print(f"learned: {accuracy:.0%} of {TESTED} digits that it had not seen are right")


def serve(connection) -> None:
    with (
        service.DispatchServer() as dispatcher,
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
    ):
        dataset_id = service.register_dataset(dispatcher.target, digits, splits=range(SPLITS))
        connection.send((dispatcher.target, dataset_id))
        connection.recv()  # until the end


def main() -> None:
    processes = multiprocessing.get_context("fork")
    connection, other_end = processes.Pipe()
    server = processes.Process(target=serve, args=(other_end,), daemon=True)
    server.start()
    where = connection.recv()
    with tempfile.TemporaryDirectory() as folder:
        for killed_at, devices in ((37, 2), (111, 4), (None, 1)):
            trainer = processes.Process(
                target=train, args=(*where, pathlib.Path(folder), killed_at, devices)
            )
            trainer.start()
            trainer.join()
            assert trainer.exitcode == (0 if killed_at is None else -signal.SIGKILL)
        steps = {}
        for line in pathlib.Path(folder, "seen").read_text().splitlines():
            step, numbers = json.loads(line)
            assert steps.setdefault(step, numbers) == numbers, f"step {step} saw other digits"
    connection.send("end")
    server.join()
    for epoch in range(EPOCHS):
        seen = [
            number
            for step in range(EPOCH_STEPS * epoch, EPOCH_STEPS * (epoch + 1))
            for number in steps[step]
        ]
        assert sorted(seen) == [*range(TESTED, len(LABELS))], f"epoch {epoch}"


if __name__ == "__main__":
    main()
