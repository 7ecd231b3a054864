"""Train with Lightning. The program is killed, and goes on at the step behind its checkpoint.

python examples/digits_lightning.py
"""

import json
import multiprocessing
import os
import pathlib
import signal
import tempfile

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from forebay import service
from forebay.torch import ServiceDataset

EPOCHS, TESTED, BATCH, SPLITS = 5, 300, 32, 8
EPOCH_STEPS = 47

PIXELS, LABELS = load_digits(return_X_y=True)
PIXELS = (PIXELS / 16).astype(np.float32)


def digits(split: int):
    for number in range(TESTED + split, len(LABELS), SPLITS):
        yield {"pixels": PIXELS[number], "label": LABELS[number], "number": number}


class Digits(lightning.LightningModule):
    def __init__(self, target: str, dataset_id: str, seen: pathlib.Path, killed_at: int | None):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.where, self.seen, self.killed_at = (target, dataset_id), seen, killed_at

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.02)

    def train_dataloader(self):
        # The checkpoint has been restored, and its global_step is all that the data need.
        dataset = ServiceDataset(
            *self.where, ordered=True, batch_size=BATCH, start_step=self.trainer.global_step
        )
        return DataLoader(dataset, batch_size=None)

    def training_step(self, batch, _):
        if self.trainer.global_step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        with self.seen.open("a") as seen:
            json.dump([self.trainer.global_step, sorted(batch["number"].tolist())], seen)
            seen.write("\n")
        return cross_entropy(self.layer(batch["pixels"]), batch["label"])


def train(target: str, dataset_id: str, folder: pathlib.Path, killed_at: int | None) -> None:
    model = Digits(target, dataset_id, folder / "seen", killed_at)
    trainer = lightning.Trainer(
        max_epochs=-1,
        max_steps=EPOCHS * EPOCH_STEPS,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=10, save_last=True)],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = folder / "last.ckpt"
    trainer.fit(model, ckpt_path=last if last.exists() else None)
    pixels, labels = torch.from_numpy(PIXELS[:TESTED]), torch.from_numpy(LABELS[:TESTED])
    accuracy = float((model.layer(pixels).argmax(1) == labels).float().mean())
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
        for killed_at in (37, 111, None):
            trainer = processes.Process(
                target=train, args=(*where, pathlib.Path(folder), killed_at)
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
