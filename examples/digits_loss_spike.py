"""Train on two sources of digits, of which one has a damaged range.

The steps in which the gradient explodes are left out, the training goes on from before them, and
the journal has what was left out.

python examples/digits_loss_spike.py
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from sklearn.datasets import load_digits

from forebay import service

TESTED, BATCH, STEPS, SAVE_EVERY = 300, 32, 400, 10
SKIPPED, TOO_MUCH = 4, 100.0  # steps to leave out at a time, and the gradient's norm for that
ROWS = 50  # of a split
DAMAGED = range(200, 230)
IN_A_ROW = {"shuffle": False, "cycle_length": 1}  # as the digits stand in their files

PIXELS, LABELS = load_digits(return_X_y=True)
PIXELS = (PIXELS / 16).astype(np.float32)


def books(split):
    yield from zip(PIXELS[split : split + ROWS], LABELS[split : split + ROWS], strict=True)


def scans(split):
    for row, (pixels, label) in enumerate(books(split), split - 1000):
        yield (1e4 * pixels, label) if row in DAMAGED else (pixels, label)


def gradient_of(weights, pixels, labels):
    logits = pixels @ weights
    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    chances[np.arange(len(labels)), labels] -= 1
    return pixels.T @ chances / len(labels)


def train(target, dataset_id):
    """The weights, and what was left out: the first step, how many, and why."""
    saved, left_out = {"weights": np.zeros([64, 10]), "step": 0, "state": None}, []
    while True:
        weights, step = saved["weights"].copy(), saved["step"]
        with service.read(
            target, dataset_id, ordered=True, batch_size=BATCH, job_name="digits", **IN_A_ROW
        ) as batches:
            if saved["state"] is not None:
                batches.load_state_dict(saved["state"])
            for pixels, labels in batches:
                gradient = gradient_of(weights, pixels, labels)
                norm = float(np.linalg.norm(gradient))
                if norm > TOO_MUCH:
                    break
                weights -= gradient
                step += 1
                if step % SAVE_EVERY == 0:
                    saved = {"weights": weights.copy(), "step": step, "state": batches.state_dict()}
                if step == STEPS:
                    return weights, left_out
        print(f"step {step}: the gradient's norm is {norm:.0f}; on from step {saved['step']}")
        left_out.append((step, SKIPPED, f"spike {len(left_out) + 1}: a norm of {norm:.0f}"))
        first, count, why = left_out[-1]
        service.skip_steps(target, "digits", first, first + count, reason=why)


def main() -> None:
    storage = pathlib.Path(tempfile.mkdtemp(), "journal").as_uri()
    with (
        service.DispatchServer(service.DispatcherConfig(storage=storage)) as dispatcher,
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
    ):
        target = dispatcher.target
        sources = {
            "books": (service.register_dataset(target, books, splits=range(300, 1000, ROWS)), 0.75),
            "scans": (
                service.register_dataset(target, scans, splits=range(1000, 1750, ROWS)),
                0.25,
            ),
        }
        weights, left_out = train(target, service.register_mixture(target, sources))
    forebay = pathlib.Path(sys.executable).with_name("forebay")
    audit = json.loads(
        subprocess.run(
            [forebay, "audit", storage, "digits", "--json"], check=True, capture_output=True
        ).stdout
    )
    changes = [each for each in audit["changes"] if "skipped_steps" in each]
    for each in changes:
        print(f"on record: from step {each['from_step']} on, {each['reason']}")
    assert left_out == [(c["from_step"], c["skipped_steps"], c["reason"]) for c in changes]
    accuracy = float(np.mean((PIXELS[:TESTED] @ weights).argmax(axis=1) == LABELS[:TESTED]))
    assert accuracy > 0.7, accuracy
    print(f"learned: {accuracy:.0%} of {TESTED} digits that it had not seen are right")


if __name__ == "__main__":
    main()
