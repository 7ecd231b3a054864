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

UNSAVED_IN_ORDER = (
    "an iterator cannot be saved or restored, because what was fetched ahead of the training may "
    "lie anywhere behind it. Of an ordered read, put a service.OrderedPosition into the "
    "tf.train.Checkpoint in place of the iterator: give it as start_position, with "
    "add_position=True, and assign to it the position that comes with each element"
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
            dataset = getattr(iterator, "_dataset", None)
            if _is_or_has(dataset, "is_read_in_order"):
                raise tf.errors.UnimplementedError(None, None, UNSAVED_IN_ORDER)
            if reads_the_service(dataset):
                raise tf.errors.UnimplementedError(None, None, UNSAVED)
            return method(iterator, *arguments)

        return refused

    kind = iterator_ops.OwnedIterator
    for name in ("_serialize_to_tensors", "_restore_from_tensors", "_save", "_restore"):
        setattr(kind, name, refusing(getattr(kind, name)))


def reads_the_service(dataset: Any) -> bool:
    """Whether the dataset is one of the service's, or made of one."""
    return _is_or_has(dataset, "is_read_through_the_service")


def _is_or_has(dataset: Any, mark: str) -> bool:
    """Whether the dataset, or one that it is made of, has an attribute of this name that is set."""
    if getattr(dataset, mark, False):
        return True
    made_of = dataset._inputs() if isinstance(dataset, tf.data.Dataset) else ()
    return any(_is_or_has(each, mark) for each in made_of)
