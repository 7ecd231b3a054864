"""Refuses to save or restore iterators over the service, as `tf.train.Checkpoint` would do.

TensorFlow would save only its own state. A restored iterator would read the job's next epoch, and
drop as many elements of it as were read before. tf.data service refuses too. Checkpoints without an
iterator, such as of a model, are not affected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops

UNSAVED = (
    "the position of an iterator over a dataset of the service cannot be saved or restored yet: "
    "leave the iterator out of the tf.train.Checkpoint, and have who begins again give "
    "initial_epoch, which reads what is left of that epoch"
)


def refuse_saving() -> None:
    """From now on, saving or restoring an iterator that `reads_the_service` raises
    UnimplementedError. Called once.

    Python cannot see a dataset within the function of another. There TensorFlow itself refuses, in
    its own words: `not_saved` in transformations.py.
    """

    def refusing(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def refused(iterator: Any, *arguments: Any) -> Any:
            if reads_the_service(getattr(iterator, "_dataset", None)):
                raise tf.errors.UnimplementedError(None, None, UNSAVED)
            return method(iterator, *arguments)

        return refused

    kind = iterator_ops.OwnedIterator
    for name in ("_serialize_to_tensors", "_restore_from_tensors", "_save", "_restore"):
        setattr(kind, name, refusing(getattr(kind, name)))


def reads_the_service(dataset: Any) -> bool:
    """Whether the dataset is one of the service's, or made of one."""
    if getattr(dataset, "is_read_through_the_service", False):
        return True
    return isinstance(dataset, tf.data.Dataset) and any(map(reads_the_service, dataset._inputs()))
