"""Train with Keras's fit. The program is killed three times, and each step has the loss that it
would have had.

python examples/digits_keras_resume.py
"""

import json
import multiprocessing
import os
import pathlib
import signal
import tempfile

import keras
import numpy as np
from sklearn.datasets import load_digits

import forebay.keras
from forebay import service

EPOCHS, TESTED, BATCH, SPLITS = 5, 300, 32, 8

PIXELS, LABELS = load_digits(return_X_y=True)
PIXELS = (PIXELS / 16).astype(np.float32)


def digits(split: int):
    for number in range(TESTED + split, len(LABELS), SPLITS):
        yield PIXELS[number], LABELS[number]


class Losses(keras.callbacks.Callback):
    """Writes each step's loss, the mean in its epoch. Kills the program behind a step."""

    def __init__(self, position, file: pathlib.Path, killed_at: int | None):
        super().__init__()
        self.position, self.file, self.killed_at = position, file.open("a"), killed_at

    def on_train_batch_end(self, batch, logs=None):
        print(json.dumps([self.position.step, logs["loss"]]), file=self.file, flush=True)
        if self.position.step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(target: str, data: str, folder: pathlib.Path, killed_at: int | None) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input([64]), keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

    files = folder / "backup"
    position = forebay.keras.Position(model)
    read = service.from_dataset_id(
        "distributed_epoch", target, data, ordered=True, batch_size=BATCH, start_position=position
    )
    backup = keras.callbacks.BackupAndRestore(files, save_freq=10, double_checkpoint=True)
    model.fit(
        forebay.keras.Epochs(read, position=position),
        epochs=EPOCHS,
        callbacks=[backup, position, Losses(position, folder / "losses", killed_at)],
        verbose=2,
    )
    _, accuracy = model.evaluate(PIXELS[:TESTED], LABELS[:TESTED], verbose=0)
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
        for killed_at in (37, 111, 200, None):
            trainer = processes.Process(
                target=train, args=(*where, pathlib.Path(folder), killed_at)
            )
            trainer.start()
            trainer.join()
            assert trainer.exitcode == (0 if killed_at is None else -signal.SIGKILL)
        lines = pathlib.Path(folder, "losses").read_text().splitlines()
    connection.send("end")
    server.join()
    losses = {}
    for step, loss in map(json.loads, lines):
        assert losses.setdefault(step, loss) == loss, f"step {step} had another loss before"
    assert sorted(losses) == [*range(1, 47 * EPOCHS + 1)]


if __name__ == "__main__":
    main()
