"""What a graph may need from a process besides TensorFlow: custom ops and Python functions."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

import tensorflow as tf
from tensorflow.python.ops import script_ops

from ...errors import InvalidArgument
from .versions import newer_maker

_MISSING_OP = re.compile(r"Op type not registered '([^']*)'")
_MISSING_FUNCTION = re.compile(r"Could not find callback with key=pyfunc_\d+")


def load_op_libraries(paths: Iterable[str]) -> None:
    """Load the ops of these shared objects. Raises InvalidArgument, naming the path."""
    for path in paths:
        try:
            tf.load_op_library(path)
        except (tf.errors.OpError, RuntimeError) as error:
            raise InvalidArgument(
                f"the library of custom ops {path!r} cannot be loaded: {error}; "
                "give --load-op-library the path of a shared object that was built for "
                f"TensorFlow {tf.__version__}"
            ) from error


def number_functions_apart() -> None:
    """Give Python functions of this process numbers that are unique among processes.

    TensorFlow numbers them from 0 in each process, and a graph refers to them only by number. So a
    worker would call its own function in place of that of the client that registered the dataset.
    """
    with script_ops._py_funcs._lock:
        script_ops._py_funcs._unique_id += secrets.randbits(48)


def explained(message: str, graph: bytes) -> str:
    """TensorFlow's message, with advice if this process lacks what the graph needs."""
    if missing := _MISSING_OP.search(message):
        if maker := newer_maker(graph):
            return (
                f"the dataset was registered by {maker}, and this process has TensorFlow "
                f"{tf.__version__}, which lacks the operation {missing[1]!r}: run workers, and the "
                "dispatcher, with the newer one, or, if it is a custom op, with --load-op-library "
                f"and the library that has it ({message})"
            )
        return (
            f"the custom op {missing[1]!r} is not known here: start workers, and the dispatcher, "
            f"with --load-op-library and the library that has it ({message})"
        )
    if _MISSING_FUNCTION.search(message):
        return (
            "the dataset calls a Python function (from_generator, py_function, numpy_function), "
            "which is there only in the process that registered it: use TensorFlow's operations, "
            f"apply it behind the service, or start a WorkerServer in that process ({message})"
        )
    return message
