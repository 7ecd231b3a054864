"""Train with Hugging Face's Trainer. The program is killed, and goes on at the step behind its
checkpoint.

python examples/digits_transformers.py
"""

import json
import multiprocessing
import os
import pathlib
import signal
import tempfile

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from forebay import service
from forebay.torch import ServiceDataset

EPOCHS, TESTED, BATCH, SPLITS = 5, 300, 32, 8
EPOCH_STEPS = 47

PIXELS, LABELS = load_digits(return_X_y=True)
PIXELS = (PIXELS / 16).astype(np.float32)


def digits(split: int):
    for number in range(TESTED + split, len(LABELS), SPLITS):
        yield {"pixels": PIXELS[number], "labels": LABELS[number], "number": number}


class Digits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, pixels, labels):
        return {"loss": cross_entropy(self.layer(pixels), labels)}


class OrderedTrainer(Trainer):
    seen: pathlib.Path
    killed_at: int | None

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=None)  # each rank has its own batches

    def training_step(self, model, inputs, *how):
        if self.state.global_step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        with self.seen.open("a") as seen:
            json.dump([self.state.global_step, sorted(inputs.pop("number").tolist())], seen)
            seen.write("\n")
        return super().training_step(model, inputs, *how)


def train(target: str, dataset_id: str, folder: pathlib.Path, killed_at: int | None) -> None:
    last = get_last_checkpoint(folder)
    step = 0
    if last is not None:
        step = TrainerState.load_from_json(f"{last}/trainer_state.json").global_step
    arguments = TrainingArguments(
        folder,
        max_steps=EPOCHS * EPOCH_STEPS,
        save_steps=10,
        save_total_limit=2,
        ignore_data_skip=True,  # the dataset begins at this step by itself
        learning_rate=0.02,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    dataset = ServiceDataset(target, dataset_id, ordered=True, batch_size=BATCH, start_step=step)
    trainer = OrderedTrainer(Digits(), arguments, train_dataset=dataset)
    trainer.seen, trainer.killed_at = folder / "seen", killed_at
    trainer.train(resume_from_checkpoint=last)
    pixels, labels = torch.from_numpy(PIXELS[:TESTED]), torch.from_numpy(LABELS[:TESTED])
    accuracy = float((trainer.model.layer(pixels).argmax(1) == labels).float().mean())
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
