"""The ids that `register_dataset` returns where there is TensorFlow."""

from __future__ import annotations

import tensorflow as tf


class DatasetId(str):
    """The id of a registered dataset: a string that also has what callers of tf.data service ask
    its string tensor for. It is pickled as a plain string."""

    __slots__ = ()

    def numpy(self) -> bytes:
        return self.encode()

    @property
    def dtype(self) -> tf.DType:
        return tf.string

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape([])

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)
