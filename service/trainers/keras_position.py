"""`forebay.keras.Position`: the position of an ordered read, in the files that Keras saves.

A kill may fall between any two writes, so the position lies in the model's file itself, beside the
weights. Keras saves the state of the objects that are attributes of a model, if their class is one
of Keras's: a Loss is such a class, and adds no variables to the model.

The position is the number of steps that the weights have taken, which each saving callback must
find correct, wherever it stands in the list of callbacks. So a step counts when it begins. On JAX
and TensorFlow, Keras notices the end of an epoch in a step that has begun. It tells the data
adapter (`Epochs`) first, which takes that step back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import keras
import numpy as np

from ..client.open_iterations import stopping
from ..client.positions import OrderedRead
from ..client.saved_states import description_of, load, state_at
from ..errors import FailedPrecondition, InvalidArgument


class KerasPosition(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback of `fit` that puts the position of an ordered read into the model's checkpoints::

        position = forebay.keras.Position(model)
        read = service.from_dataset_id(..., ordered=True, batch_size=32, start_position=position)
        backup = keras.callbacks.BackupAndRestore(folder, save_freq=100, double_checkpoint=True)
        model.fit(
            forebay.keras.Epochs(read, position=position), epochs=10, callbacks=[backup, position]
        )

    The files of `BackupAndRestore` and `ModelCheckpoint` (`.keras` and `.weights.h5`) then have the
    epoch, the step, and the metrics of the epoch. After `BackupAndRestore` or `load_weights` has
    read them, `fit` goes on behind the step that was saved, in the epoch in which it was.
    `initial_epoch` is the checkpoint's then. `keras.models.load_model` makes another model, without
    a position: call `load_weights` of the same file behind it.

    Args:
      model: built and compiled. Its optimizer is built here, so that `load_weights` restores it.

    Attributes:
      epoch, step: the epoch of `fit`, and the number of steps over all epochs.

    It stands behind `BackupAndRestore` in the list of callbacks. `steps_per_epoch` must be left
    out, and `steps_per_execution` must be 1. The dataset, its order and its global batch must be
    the checkpoint's. Raises InvalidArgument and FailedPrecondition if one of these does not hold.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        if not model.built or getattr(model, "optimizer", None) is None:
            raise InvalidArgument(
                f"Position(model) of the model {model.name!r}, which is not built or not compiled: "
                "call model.compile(…), and begin the model with keras.Input or call model.build(…)"
            )
        if getattr(model, "forebay_position", None) is not None:
            raise InvalidArgument(
                f"a second Position of the model {model.name!r}, whose files have one: use the "
                "first"
            )
        model.optimizer.build(model.trainable_variables)
        model.forebay_position = _InModel(self)
        self.set_model(model)
        self.epoch = self.step = 0
        self._base = self._ended = 0  # steps before the epoch, and in it
        self._in_epoch = self._counts = False
        self._begins = False  # fit does, and Keras's callbacks restore what they have
        self._in_fit = False  # also if fit has raised
        self._was_loaded = False  # in fit
        self._restored: _Restored | None = None
        self._description = ""  # of the read, as a checkpoint has it
        self._read: OrderedRead | None = None  # the iteration that is open, or was last
        self._peek: Callable[[], Any] | None = None
        self._num_batches: Callable[[], int | None] = lambda: None
        self._counters: list[tuple[Any, Any]] = []

    # -- of `Epochs`, and of `from_dataset_id` --------------------------------------------------

    def attach(self, peek: Callable[[], Any], num_batches: Callable[[], int | None]) -> None:
        """`peek` reads the batch at this position, and leaves the iteration."""
        self._peek, self._num_batches = peek, num_batches

    def begin(self, ordered: OrderedRead) -> None:
        """Have the read begin here. Raises FailedPrecondition for a position in another one."""
        if (state := self.state()) is not None:
            load(ordered, state)

    def state(self) -> dict[str, Any] | None:
        """As a dataset's `state_dict()`; None before the first batch."""
        if not (described := self._described()):
            return None
        start_step = self._base + self._ended  # JAX begins to read in the first step
        return state_at(described, start_step=start_step)

    def describe(self, ordered: OrderedRead) -> None:
        """It is a position in this read, which has begun. Raises FailedPrecondition if steps are
        left out."""
        self._read = ordered
        self._require_all_steps()

    def _require_all_steps(self) -> None:
        if self._read is not None and any(each.skipped for each in self._read.changes or ()):
            raise FailedPrecondition(
                "steps of the job were left out (`skip_steps`), and a Position counts epochs of "
                "equally many: give the read another job_name, or save its state_dict() instead"
            )

    def end_epoch(self) -> None:
        """The epoch's data have come to their end, or a PreemptionHandler has ended them."""
        if not self._in_epoch:
            return
        if stopping.is_set():
            self.model.stop_training = True  # `_find_epoch` finds out which it was
        else:
            self._in_epoch = False
            self.epoch += 1
        if self.step > self._base + self._ended:
            self.step = self._base + self._ended
            for variable, value in self._counters:
                variable.assign(value)

    def _described(self) -> str:
        return self._description if self._read is None else description_of(self._read)

    # -- of `fit` -------------------------------------------------------------------------------

    def set_params(self, params: MutableMapping[str, Any]) -> None:
        params["steps"] = params.get("steps") or None  # Keras's progress bar takes no 0
        super().set_params(params)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._peek is None:
            raise InvalidArgument(
                "a Position whose data fit does not read: give fit forebay.keras.Epochs(dataset, "
                "position=position)"
            )
        if self.params["steps"] not in (None, self._num_batches()):
            raise InvalidArgument(
                f"steps_per_epoch={self.params['steps']} with a Position: leave it out, as an "
                "epoch of fit is one of the data"
            )
        if self.model.steps_per_execution != 1:
            raise InvalidArgument(
                f"steps_per_execution={self.model.steps_per_execution} with a Position, which "
                "counts each step: leave it at 1 in compile()"
            )
        self._in_fit = self._counts = self._begins = True
        self._was_loaded = False
        if self._restored is not None:
            self._find_epoch(self._restored)
            self.model._initial_epoch = _InitialEpoch(self.epoch)

    def _find_epoch(self, restored: _Restored) -> None:
        """Behind an epoch's last step comes the next epoch. When it was saved, it may not have been
        known that the step was the last one."""
        if not self._ended:
            self._restored = None
            return
        unbuilt = len(self.model.metrics_variables) < len(restored.metrics)
        if restored.steps is None or unbuilt:
            assert self._peek is not None
            batch = self._peek()
            if unbuilt:
                self.model._symbolic_build(data_batch=batch)
        steps = restored.steps if self._read is None else self._read.steps()
        if steps and self.step % steps == 0:
            self.epoch += 1
            self._restored = None

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self.epoch, self._base, self._ended = epoch, self.step, 0
        self._in_epoch, self._begins = True, False
        self.model._initial_epoch = None  # fit has read it
        if self._restored is not None:
            variables = self.model.metrics_variables
            if len(variables) != len(self._restored.metrics):
                raise FailedPrecondition(
                    f"the checkpoint has {len(self._restored.metrics)} variables of metrics, and "
                    f"the model {len(variables)}: compile it with the same metrics"
                )
            for variable, value in zip(variables, self._restored.metrics, strict=True):
                variable.assign(value)
            self._restored = None

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._was_loaded:
            raise FailedPrecondition(
                "weights with a Position were loaded while fit was running, which goes on with "
                "other data: load them before fit, or use model.set_weights"
            )
        self.step = self._base + batch + 1

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._ended = batch + 1
        if self._read is None:
            raise InvalidArgument(
                "the dataset does not begin at the Position: give from_dataset_id "
                "start_position=position"
            )
        if keras.backend.backend() == "tensorflow":
            # A step without data may still count iterations, and states of random numbers.
            counting = [*self.model.optimizer.variables, *self.model.non_trainable_variables]
            self._counters = [(each, each.numpy()) for each in counting if "int" in each.dtype]

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._in_fit = self._begins = False
        self.model._initial_epoch = None

    # -- of checkpoints -------------------------------------------------------------------------

    def save(self, store: MutableMapping[str, Any]) -> None:
        """Into a part of the file that Keras saves."""
        if (read := self._read) is not None and not self._counts:
            raise InvalidArgument(
                "a Position that counts no steps: give fit callbacks=[…, position], behind "
                "BackupAndRestore"
            )
        self._require_all_steps()
        state = {
            "epoch": self.epoch,
            "step": self.step,
            "ended": self.step - self._base if self._in_epoch else 0,
            "steps": None if read is None else read.steps(),
            "metrics": len(self.model.metrics_variables),
            "read": self._described(),
        }
        store["state"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        for name, variables in (
            ("metric", self.model.metrics_variables),
            ("random", self._random_states()),
        ):
            for number, variable in enumerate(variables):
                store[f"{name}{number}"] = keras.ops.convert_to_numpy(variable.value)

    def load(self, store: Mapping[str, Any]) -> None:
        """From what `save` has made; without it, as in weights that were trained before, the
        training begins."""
        if "state" not in store:
            return
        if self._begins:
            raise FailedPrecondition(
                "BackupAndRestore has read its files behind the Position: give "
                "callbacks=[backup, position]"
            )
        self._was_loaded, self._in_epoch = self._in_fit, False
        state = json.loads(np.asarray(store["state"]).tobytes())
        self.epoch, self.step, self._ended = state["epoch"], state["step"], state["ended"]
        self._base = self.step - self._ended
        self._description, self._read = state["read"], None
        metrics = [np.asarray(store[f"metric{i}"]) for i in range(state["metrics"])]
        self._restored = _Restored(state["steps"], metrics)
        for number, variable in enumerate(self._random_states()):
            variable.assign(np.asarray(store[f"random{number}"]))

    def _random_states(self) -> list[Any]:
        """The states of random numbers, as of Dropout, which Keras itself does not save."""
        others = {id(each) for each in self.model.non_trainable_weights}
        others |= {id(each) for each in self.model.metrics_variables}
        return [each for each in self.model.non_trainable_variables if id(each) not in others]


class _InitialEpoch(int):
    """Keras takes the argument of `fit` in the place of one that is false."""

    def __bool__(self) -> bool:
        return True


class _Restored(NamedTuple):
    steps: int | None  # of an epoch, if that was known
    metrics: list[Any]


class _InModel(keras.losses.Loss):  # type: ignore[misc]
    """The part of a model that Keras saves and restores."""

    def __init__(self, position: KerasPosition) -> None:
        super().__init__()
        self._position = position

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        self._position.save(store)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        self._position.load(store)
