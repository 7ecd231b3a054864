"""`Epochs`: what Keras's `fit` takes in place of a dataset, on JAX and PyTorch.

Keras knows generators, which have one epoch, PyDatasets, whose batches have numbers, and PyTorch's
DataLoaders. It takes adapters of one's own, too, by a class that has no public name.
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
      dataset: an iterable whose `iter` is the next epoch, as `forebay.jax.ServiceDataset` and
        `forebay.torch.ServiceDataset` with a `batch_size` are. Its batches are pairs (inputs,
        targets), triples with sample weights, or inputs alone; inputs and targets may be dicts and
        tuples of arrays. If it has a len(), Keras knows how many there are.
      class_weight: the weight of each class, by its number; here, as Keras ignores that of `fit`
        beside an adapter. Batches are pairs then, and targets are classes, or one-hot.

    Without a len() and `steps_per_epoch`, Keras warns at each epoch's end that its input has run
    out of data. To build what is not built yet, `fit` begins an epoch, and leaves it.

    With `steps_per_epoch` it goes on in the next epoch where it was, and ends when the data do, for
    which the dataset repeats where it is registered.

    Raises InvalidArgument on the TensorFlow backend, where `from_dataset_id` is what `fit` takes.
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

    def __iter__(self) -> Iterator[Any]:
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
