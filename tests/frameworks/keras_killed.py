"""What test_checkpoints.py has Keras do, on the backend that KERAS_BACKEND names.

python keras_killed.py TARGET DATASET_ID FOLDER

A training of EPOCHS is killed again and again, and has the same losses as one that is not. Each
life is a fork of this process, which only imports.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import keras

import forebay.keras
from forebay import service
from forebay.journal.proto.events_pb2 import ScheduleChange
from forebay.service.client.positions import OrderedRead

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf  # noqa: F401 - once, for all lives
else:
    ServiceDataset = import_module(f"forebay.{BACKEND}").ServiceDataset

EPOCHS, BATCH, EPOCH_STEPS = 3, 32, 15  # which are whole: nothing but the end tells the last one
STEPS = EPOCHS * EPOCH_STEPS
TARGET, DATASET_ID, FOLDER = sys.argv[1:4]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def started(live: Callable[..., None], *arguments: Any) -> int:
    """The id of a process that calls this."""
    process = os.fork()
    if not process:
        try:
            live(*arguments)
            os._exit(0)
        except SystemExit as preempted:
            assert isinstance(preempted.code, int)
            os._exit(preempted.code)
        finally:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    return process


def lives(live: Callable[..., None], *arguments: Any) -> bool:
    """Whether a process that calls this comes to its end. If not, it was killed, or preempted."""
    code = os.waitstatus_to_exitcode(os.waitpid(started(live, *arguments), 0)[1])
    assert code in (0, -signal.SIGKILL, 143), code
    return code == 0


class Weights(keras.layers.Dense):  # type: ignore[misc]
    """Whose process may be killed when half of the model has been written."""

    fatal = False

    def save_own_variables(self, store: Any) -> None:
        if self.fatal:
            die()
        super().save_own_variables(store)


def model_of() -> tuple[Any, forebay.keras.Position]:
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input([64]),
        keras.layers.Dense(32, "relu"),
        keras.layers.Dropout(0.2, seed=1),
        Weights(10, "softmax"),
    ]
    model = keras.Sequential(layers)
    adam = keras.optimizers.Adam(0.01)
    model.compile(adam, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, forebay.keras.Position(model)


def epochs(position: Any, **how: Any) -> forebay.keras.Epochs:
    order: dict[str, Any] = {"ordered": True, "seed": 1, "batch_size": BATCH, **how}
    if BACKEND == "tensorflow":
        read = service.from_dataset_id(
            "distributed_epoch", TARGET, DATASET_ID, start_position=position, **order
        )
    else:
        read = ServiceDataset(TARGET, DATASET_ID, **order)
    return forebay.keras.Epochs(read, position=position)


class Says(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes what each step and epoch says, and kills the process behind a step, or in a save."""

    def __init__(self, said: Path, position: Any, kind: str | None = None, at: int = 0) -> None:
        super().__init__()
        self.said, self.position = said.open("a", buffering=1), position
        self.kind, self.at, self.step = kind, at, 0
        if kind == "metadata":
            sys.addaudithook(self.die_before_metadata)

    def die_before_metadata(self, event: str, arguments: Any) -> None:
        if event != "open" or not str(arguments[0]).endswith("training_metadata.json"):
            return
        if self.position.step >= self.at and "w" in (arguments[1] or ""):
            die()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.said.write(json.dumps([self.epoch, self.position.step, logs]) + "\n")
        if self.kind == "step" and self.position.step == self.at:
            die()
        if self.kind == "preempted" and self.position.step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        Weights.fatal = self.kind == "weights" and self.position.step >= self.at

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.said.write(json.dumps([epoch, "over", logs]) + "\n")


def what(said: Path) -> dict[str, str]:
    """What the steps and epochs said, each of which must say the same whenever it is there."""
    found: dict[str, str] = {}
    for line in said.read_text().splitlines():
        epoch, step, logs = json.loads(line)
        known = found.setdefault(f"{epoch} {step}", json.dumps(logs))
        assert known == json.dumps(logs), (epoch, step, logs, known)
    return found


def undisturbed(said: Path) -> None:
    model, position = model_of()
    model.fit(
        epochs(position), epochs=EPOCHS, verbose=0, callbacks=[position, Says(said, position)]
    )
    assert (position.epoch, position.step) == (EPOCHS, STEPS), position.epoch


def backed_up(said: Path, folder: Path, kind: str | None, at: int) -> None:
    """Saves behind each fifth step: of an epoch the last one is among these."""
    model, position = model_of()
    backup = keras.callbacks.BackupAndRestore(folder, save_freq=5, double_checkpoint=True)
    callbacks = [Says(said, position, kind, at), backup, position]
    model.fit(epochs(position), epochs=EPOCHS, verbose=0, callbacks=callbacks)


def checkpointed(said: Path, folder: Path, ext: str, at: int) -> None:
    """`fit` with the initial_epoch that is in the last checkpoint but one."""
    model, position = model_of()
    saved = sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime_ns)
    if saved:
        model.load_weights(saved[-2])
        assert position.step == 4 * (len(saved) - 1)
    path = str(folder / f"{{epoch}} {{batch}}{ext}")
    checkpoint = keras.callbacks.ModelCheckpoint(
        path, save_freq=4, save_weights_only=ext == ".weights.h5"
    )
    callbacks = [Says(said, position, "step", at), position, checkpoint]
    model.fit(
        epochs(position),
        epochs=EPOCHS,
        initial_epoch=position.epoch,
        verbose=0,
        callbacks=callbacks,
    )


def preempted(said: Path, folder: Path, at: int) -> None:
    """SIGTERM comes behind a step. Keras saves at the ends of epochs, and that is one."""
    model, position = model_of()
    backup = keras.callbacks.BackupAndRestore(folder)
    with service.PreemptionHandler(grace_period_s=60) as handler:
        leave = keras.callbacks.LambdaCallback(on_epoch_end=handler.check)
        callbacks = [backup, position, leave, Says(said, position, "preempted", at)]
        model.fit(epochs(position), epochs=EPOCHS, verbose=0, callbacks=callbacks)


def wrong(folder: Path) -> None:
    """What a checkpoint does not fit, and what is forgotten, is refused."""

    def refused(words: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - TensorFlow has its own
            assert words in str(error), error
        else:
            raise AssertionError(words)

    def fit(how: dict[str, Any], order: dict[str, Any], *callbacks: Any) -> None:
        model, position = model_of()
        backup = keras.callbacks.BackupAndRestore(folder, save_freq=5)
        given = [{"backup": backup, "position": position}.get(each, each) for each in callbacks]
        model.fit(epochs(position, **order), callbacks=given, verbose=0, **{"epochs": 9} | how)

    both = "backup", "position"
    refused("another order", lambda: fit({}, {"seed": 2}, *both))
    refused("another global batch", lambda: fit({}, {"batch_size": 16}, *both))
    refused("steps_per_epoch=3", lambda: fit({"steps_per_epoch": 3}, {}, *both))
    refused("callbacks=[backup, position]", lambda: fit({}, {}, "position", "backup"))
    saving = keras.callbacks.ModelCheckpoint(str(folder / "a.keras"), save_freq=3)
    refused("counts no steps", lambda: fit({}, {}, saving))
    refused("keras.Input", lambda: forebay.keras.Position(keras.Sequential([Weights(1)])))
    model, position = model_of()
    refused("a second Position", lambda: forebay.keras.Position(model))
    skips = OrderedRead(changes=[ScheduleChange(skipped=8)])
    refused("steps of the job were left out", lambda: position.describe(skips))
    model, position = model_of()
    zeros = keras.ops.zeros([1, 64])
    refused(
        "Epochs(dataset, position=position)",
        lambda: model.fit(zeros, zeros[:, 0], callbacks=[position]),
    )
    path = str(folder / "b.weights.h5")
    at_fourth = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch < 3 or model.load_weights(path)
    )
    interrupting = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: model.save_weights(path) if batch < 3 else 1 / 0
    )
    model, position = model_of()
    read = epochs(position)
    refused("division", lambda: model.fit(read, callbacks=[position, interrupting], verbose=0))
    model.load_weights(path)
    assert position.step == 3
    model.fit(read, callbacks=[position], verbose=0, initial_epoch=1, epochs=2)
    assert (position.epoch, position.step) == (2, 2 * EPOCH_STEPS)
    model.load_weights(path)
    refused("while fit", lambda: model.fit(read, callbacks=[position, at_fourth], verbose=0))
    if BACKEND != "tensorflow":
        refused("start_step=3", lambda: epochs(position, start_step=3))


def main() -> None:
    warnings.filterwarnings("ignore", "Your input ran out of data")
    seed = random.randrange(1 << 32)
    print("seed", seed, flush=True)
    draw = random.Random(seed).randint
    folder = Path(FOLDER)
    assert lives(undisturbed, folder / "undisturbed")
    expected = what(folder / "undisturbed")
    assert len(expected) == STEPS + EPOCHS, expected

    said, saved = folder / "backed up", folder / "backup"
    for kind, at in (
        ("step", draw(6, EPOCH_STEPS - 1)),
        ("weights", EPOCH_STEPS),
        ("metadata", EPOCH_STEPS),
        ("step", draw(EPOCH_STEPS + 6, STEPS - 5)),
    ):
        assert not lives(backed_up, said, saved, kind, at)
    if BACKEND != "jax":  # which would compile all that for half a minute
        assert lives(wrong, saved)
    assert lives(backed_up, said, saved, None, 0)
    found = what(said)
    assert "0 over" not in found, "killed between the last step and the end of its epoch"
    assert found | {"0 over": expected["0 over"]} == expected

    said, saved = folder / "preempted", folder / "left"
    # The first one is early: a step more may be taken, and the next ones must not have been.
    for at in draw(1, EPOCH_STEPS - 5), EPOCH_STEPS, draw(EPOCH_STEPS + 1, STEPS - 1):
        assert not lives(preempted, said, saved, at)
    assert lives(preempted, said, saved, 0)
    found = what(said)
    # Who is preempted at the end of an epoch leaves before it says that it is over.
    over = {key: logs for key, logs in expected.items() if key.endswith("over")}
    assert over | found == expected

    ext = ".keras" if BACKEND == "torch" else ".weights.h5"  # Keras's, whatever the backend
    said, saved = folder / "checkpointed", folder / "models"
    assert not lives(checkpointed, said, saved, ext, draw(9, STEPS - 1))
    print("another worker", flush=True)
    sys.stdin.read()  # until it is there
    assert lives(checkpointed, said, saved, ext, 0)
    assert what(said) == expected
    print("done on", BACKEND)


if __name__ == "__main__":
    main()
