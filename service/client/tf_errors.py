"""Forebay's errors as TensorFlow's users expect them: each is the error of tf.errors, too.

`except tf.errors.NotFoundError` around tf.data service's calls goes on working, and so does
`except ForebayError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ..errors import (
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

    def reduce(self: Any) -> tuple[Any, ...]:  # the class has no name by which pickle finds it
        return _again, (ours, self.message)

    body = {
        "__init__": init,
        "__str__": lambda self: self.message,
        "__reduce__": reduce,
        "__doc__": ours.__doc__,
    }
    return type(ours.__name__, (ours, tensorflows), body)


_AS_TENSORFLOWS = {
    InvalidArgument: _both(InvalidArgument, tf.errors.InvalidArgumentError),
    NotFound: _both(NotFound, tf.errors.NotFoundError),
    FailedPrecondition: _both(FailedPrecondition, tf.errors.FailedPreconditionError),
    Unimplemented: _both(Unimplemented, tf.errors.UnimplementedError),
    Unavailable: _both(Unavailable, tf.errors.UnavailableError),
}


def _again(ours: type[ForebayError], message: str) -> ForebayError:
    return _AS_TENSORFLOWS[ours](message)


@contextmanager
def raising_tensorflows() -> Iterator[None]:
    """Within, an error of ours is raised as one that is TensorFlow's as well."""
    try:
        yield
    except ForebayError as error:
        kinds = (_AS_TENSORFLOWS[kind] for kind in type(error).__mro__ if kind in _AS_TENSORFLOWS)
        kind = next(kinds, None)
        if kind is None or isinstance(error, tf.errors.OpError):
            raise
        raise kind(str(error)) from error
