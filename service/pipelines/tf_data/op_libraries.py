"""Libraries of custom ops, which a dataset's graph may use: of TensorFlow's, for this process."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...errors import InvalidArgument

_MISSING = re.compile(r"Op type not registered '([^']*)'")


def load_op_libraries(paths: Iterable[str]) -> None:
    """Make the ops of these shared objects known. Raises InvalidArgument, naming the path."""
    import tensorflow as tf

    for path in paths:
        try:
            tf.load_op_library(path)
        except (tf.errors.OpError, RuntimeError) as error:
            raise InvalidArgument(
                f"the library of custom ops {path!r} cannot be loaded: {error}; "
                "give --load-op-library the path of a shared object that was built for "
                f"TensorFlow {tf.__version__}"
            ) from error


def explained(message: str) -> str:
    """What TensorFlow says of a graph, and what to do if it has an op that nobody loaded."""
    missing = _MISSING.search(message)
    if missing is None:
        return message
    return (
        f"the custom op {missing[1]!r} is not known here: start workers, and the dispatcher, with "
        f"--load-op-library and the library that has it ({message})"
    )
