"""Makes each of Forebay's errors an error of tf.errors too.

Both `except tf.errors.NotFoundError`, as around tf.data service's calls, and `except ForebayError`
work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ..errors import (
    AlreadyExists,
    FailedPrecondition,
    ForebayError,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unimplemented,
)


def _both(ours: type[ForebayError], tensorflows: Any) -> type[ForebayError]:
    def init(self: Any, message: str) -> None:
        tensorflows.__init__(self, None, None, message)
        self.args = (message,)

    body = {
        "__init__": init,
        "__str__": lambda self: self.message,
        "__reduce__": lambda self: (_made, (ours, self.message)),  # between processes
        "__doc__": ours.__doc__,
    }
    return type(ours.__name__, (ours, tensorflows), body)


_TENSORFLOWS: dict[type, Any] = {
    InvalidArgument: tf.errors.InvalidArgumentError,
    NotFound: tf.errors.NotFoundError,
    AlreadyExists: tf.errors.AlreadyExistsError,
    FailedPrecondition: tf.errors.FailedPreconditionError,
    Unimplemented: tf.errors.UnimplementedError,
    Unavailable: tf.errors.UnavailableError,
}


_KINDS: dict[type[ForebayError], type[ForebayError] | None] = {}


def _kind(ours: type[ForebayError]) -> type[ForebayError] | None:
    """A subclass of this one and of TensorFlow's error of the same code; None if it has none."""
    if ours not in _KINDS:
        same = next((_TENSORFLOWS[kind] for kind in ours.__mro__ if kind in _TENSORFLOWS), None)
        _KINDS[ours] = None if same is None else _both(ours, same)
    return _KINDS[ours]


def _made(ours: type[ForebayError], message: str) -> ForebayError:
    return (_kind(ours) or ours)(message)


@contextmanager
def raising_tensorflows() -> Iterator[None]:
    """Inside, Forebay's errors are raised as errors of tf.errors too."""
    try:
        yield
    except ForebayError as error:
        if isinstance(error, tf.errors.OpError) or _kind(type(error)) is None:
            raise
        raise _made(type(error), str(error)) from error
