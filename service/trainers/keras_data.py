"""`Epochs`: an adapter that Keras's `fit` takes as a dataset.

Keras itself supports generators, which have one epoch, PyDatasets, whose batches have numbers, and
PyTorch's DataLoaders. It also takes custom adapters, of a class that has no public name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import keras
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from ..errors import InvalidArgument
from .keras_position import KerasPosition


class Epochs(DataAdapter):  # type: ignore[misc]
    """A dataset for `fit`, `evaluate` and `predict`, which each iterate over it once an epoch.

    Args:
      dataset: an iterable whose `iter` is the next epoch, such as `forebay.jax.ServiceDataset` or
        `forebay.torch.ServiceDataset` with a `batch_size`. Its batches are pairs (inputs, targets),
        triples with sample weights, or inputs alone. Inputs and targets may be dicts and tuples of
        arrays. If it has a len(), Keras knows the number of batches.
      class_weight: the weight of each class, by its number. Give it here, because Keras ignores
        that of `fit` with an adapter. Batches must be pairs, and targets classes or one-hot.
      position: of an ordered read, where each epoch begins. Takes the place of `start_step` and
        `load_state_dict`.

    Without a len() and `steps_per_epoch`, Keras warns at each epoch's end that its input has run
    out of data.

    To build an unbuilt model, `fit` begins an epoch, and leaves it: an ordered read gives its first
    batch again. To resume, give the dataset `start_step`, or `load_state_dict` before `fit`.

    With `steps_per_epoch`, the next epoch continues in the same iteration, and training ends when
    the data do. So repeat the dataset before registering it.

    On the TensorFlow backend `fit` takes `from_dataset_id`'s dataset. With a position it takes
    `Epochs` of this dataset, whose `start_position` is the position. Without one, raises
    InvalidArgument there.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        class_weight: Mapping[int, float] | None = None,
        position: KerasPosition | None = None,
    ) -> None:
        self._in_tensorflow = keras.backend.backend() == "tensorflow"
        if self._in_tensorflow and position is None:
            raise InvalidArgument(
                "Keras is on its TensorFlow backend: give it service.from_dataset_id(…), or set "
                "KERAS_BACKEND to jax or torch before it is imported"
            )
        self._dataset = dataset
        self._class_weight = None if class_weight is None else dict(class_weight)
        self._position = position
        if position is not None:
            position.attach(self._peek, lambda: self.num_batches)
            if not self._in_tensorflow:
                ordered = dataset.ordered_read()  # type: ignore[attr-defined]
                if ordered.start_position or ordered.start_step is not None:
                    raise InvalidArgument(
                        f"start_position={ordered.start_position} start_step={ordered.start_step} "
                        "beside a Position, which says where to begin: leave it out"
                    )

    def __iter__(self) -> Iterator[Any]:
        if self._position is not None:
            yield from self._from(self._position)
        else:
            yield from self._weighted()

    def _from(self, position: KerasPosition) -> Generator[Any, None, None]:
        dataset: Any = self._dataset
        if (state := position.state()) is not None:
            dataset.load_state_dict(state)
        for batch in self._weighted():
            position.describe(dataset.ordered_read())
            yield batch

    def _peek(self) -> Any:
        if self._in_tensorflow:
            return next(iter(self._dataset), None)
        assert self._position is not None
        with contextlib.closing(self._from(self._position)) as batches:
            return next(batches, None)

    def _weighted(self) -> Iterator[Any]:
        for batch in self._dataset:
            if self._class_weight is None:
                yield batch
                continue
            if not isinstance(batch, tuple) or len(batch) != 2:
                raise InvalidArgument(
                    "class_weight makes sample weights of a batch's targets, and this one is no "
                    f"pair (inputs, targets): {batch!r:.200}"
                )
            weights = data_adapter_utils.class_weight_to_sample_weights(
                batch[1], self._class_weight
            )
            yield (*batch, weights)

    def get_numpy_iterator(self) -> Iterator[Any]:
        return iter(data_adapter_utils.get_numpy_iterator(self))

    def get_tf_dataset(self) -> Any:
        return TFDatasetAdapter(self._dataset, class_weight=self._class_weight).get_tf_dataset()

    def get_jax_iterator(self) -> Iterator[Any]:
        return iter(data_adapter_utils.get_jax_iterator(self))

    def get_torch_dataloader(self) -> Any:
        return data_adapter_utils.get_torch_dataloader(self)

    def on_epoch_end(self) -> None:
        if self._position is not None:
            self._position.end_epoch()

    @property
    def num_batches(self) -> int | None:
        """0 if it is unknown, and the first epoch may begin in its midst: of None, Keras would make
        the number of that epoch's batches, for all."""
        try:
            return len(self._dataset)  # type: ignore[arg-type]
        except TypeError:
            return None if self._position is None else 0

    @property
    def batch_size(self) -> None:
        return None
