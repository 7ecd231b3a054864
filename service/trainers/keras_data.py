"""`Epochs`: an adapter that Keras's `fit` takes as a dataset, on JAX and PyTorch.

Keras itself supports generators, which have one epoch, PyDatasets, whose batches have numbers, and
PyTorch's DataLoaders. It also takes custom adapters, of a class that has no public name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from ..errors import InvalidArgument


class Epochs(DataAdapter):  # type: ignore[misc]
    """A dataset for `fit`, `evaluate` and `predict`, which each iterate over it once an epoch.

    Args:
      dataset: an iterable whose `iter` is the next epoch, such as `forebay.jax.ServiceDataset` or
        `forebay.torch.ServiceDataset` with a `batch_size`. Its batches are pairs (inputs, targets),
        triples with sample weights, or inputs alone. Inputs and targets may be dicts and tuples of
        arrays. If it has a len(), Keras knows the number of batches.
      class_weight: the weight of each class, by its number. Give it here, because Keras ignores
        that of `fit` with an adapter. Batches must be pairs, and targets classes or one-hot.

    Without a len() and `steps_per_epoch`, Keras warns at each epoch's end that its input has run
    out of data. To build an unbuilt model, `fit` begins an epoch, and leaves it.

    To build an unbuilt model, `fit` begins an epoch. If the first iteration is of an ordered read
    and is left after one batch, the next one gives that batch again. To resume, give the dataset
    `start_step`, or `load_state_dict` before `fit`.

    With `steps_per_epoch`, the next epoch continues in the same iteration, and training ends when
    the data do. So repeat the dataset before registering it.

    Raises InvalidArgument on the TensorFlow backend, where `fit` takes `from_dataset_id`'s dataset.
    """

    def __init__(
        self, dataset: Iterable[Any], class_weight: Mapping[int, float] | None = None
    ) -> None:
        if keras.backend.backend() == "tensorflow":
            raise InvalidArgument(
                "Keras is on its TensorFlow backend: give it service.from_dataset_id(…), or set "
                "KERAS_BACKEND to jax or torch before it is imported"
            )
        self._dataset = dataset
        self._class_weight = None if class_weight is None else dict(class_weight)
        self._is_first = True

    def __iter__(self) -> Iterator[Any]:
        is_first, self._is_first = self._is_first, False
        if not (is_first and getattr(self._dataset, "ordered", False)):
            yield from self._weighted()
            return
        dataset: Any = self._dataset
        start, given = dataset.state_dict(), 0
        try:
            for batch in self._weighted():
                given += 1
                yield batch
        except GeneratorExit:
            if given == 1:
                dataset.load_state_dict(start)
            raise

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

    def get_jax_iterator(self) -> Iterator[Any]:
        return iter(data_adapter_utils.get_jax_iterator(self))

    def get_torch_dataloader(self) -> Any:
        return data_adapter_utils.get_torch_dataloader(self)

    @property
    def num_batches(self) -> int | None:
        try:
            return len(self._dataset)  # type: ignore[arg-type]
        except TypeError:
            return None

    @property
    def batch_size(self) -> None:
        return None
