"""TensorFlow's FIFO queues, under names that are used again.

A queue needs a name that no other has, which is an attribute of the operation that makes it, and
TensorFlow keeps each operation that it has run, with its attributes, for ever: 36 KB a queue.
`tf.queue.FIFOQueue` makes up another name each time.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.ops import gen_data_flow_ops as ops

Tensor = Any


class QueueSpec(NamedTuple):
    """How many elements a queue holds, and the dtypes and shapes of their components."""

    capacity: int
    dtypes: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]


class Queue:
    """A queue by its handle, eager or in a function. Thread-safe."""

    def __init__(self, spec: QueueSpec, handle: Tensor) -> None:
        self.handle = handle
        self._dtypes = spec.dtypes

    def enqueue(self, components: list[Any]) -> None:
        ops.queue_enqueue_v2(self.handle, self._converted(components))

    def enqueue_many(self, components: list[Any]) -> None:
        """Components stacked along a first dimension."""
        ops.queue_enqueue_many_v2(self.handle, self._converted(components))

    def dequeue(self) -> list[Tensor]:
        """One element. Raises OutOfRangeError, CancelledError once it is closed."""
        return list(ops.queue_dequeue_v2(self.handle, self._dtypes))

    def dequeue_up_to(self, count: int) -> list[Tensor]:
        """So many elements, stacked; once it is closed, those that are left. Raises as above."""
        return list(ops.queue_dequeue_up_to_v2(self.handle, count, self._dtypes))

    def size(self) -> int:
        return int(ops.queue_size_v2(self.handle))

    def is_closed(self) -> bool:
        return bool(ops.queue_is_closed_v2(self.handle))

    def close(self, *, cancel: bool = False) -> None:
        """Idempotent. With `cancel`, who waits to enqueue is told so."""
        try:
            ops.queue_close_v2(self.handle, cancel_pending_enqueues=cancel)
        except (tf.errors.CancelledError, tf.errors.NotFoundError):
            pass  # closed already, or gone

    def _converted(self, components: list[Any]) -> list[Tensor]:
        pairs = zip(components, self._dtypes, strict=True)
        return [tf.convert_to_tensor(component, dtype) for component, dtype in pairs]


class OwnedQueue(Queue):
    """A new queue, until `release`."""

    def __init__(self, spec: QueueSpec) -> None:
        self._spec = spec
        self._closing = threading.Lock()
        self._released = False
        while True:
            with _lock:
                free = _free[spec]
                self._name = free.pop() if free else f"forebay/{next(_numbers)}"
            handle = ops.fifo_queue_v2(
                spec.dtypes, spec.shapes, spec.capacity, shared_name=self._name
            )
            super().__init__(spec, handle)
            # Somebody may still hold the one that had this name; that one was closed.
            if not self.is_closed():
                return

    def close(self, *, cancel: bool = False) -> None:
        """Also when it is released, without an effect: its handle may be another's by then."""
        with self._closing:
            if not self._released:
                super().close(cancel=cancel)

    def release(self) -> None:
        """Free what it holds, and its name. Once, when nobody uses it but to close it."""
        self.close(cancel=True)
        with self._closing:
            self._released = True
        tf.raw_ops.DestroyResourceOp(resource=self.handle, ignore_lookup_error=True)
        with _lock:
            _free[self._spec].append(self._name)


_lock = threading.Lock()
_numbers = itertools.count()
_free: defaultdict[QueueSpec, list[str]] = defaultdict(list)
