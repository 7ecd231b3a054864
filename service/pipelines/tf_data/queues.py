"""TensorFlow's FIFO queues, with names that are reused.

A queue needs a unique name. The name is an attribute of the operation that makes the queue, and
TensorFlow keeps each distinct operation forever: 36 KB a queue. `tf.queue.FIFOQueue` invents a new
name each time.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.ops import gen_data_flow_ops as ops

Tensor = Any

ENDED = tf.errors.OutOfRangeError, tf.errors.CancelledError


class QueueSpec(NamedTuple):
    """The capacity of a queue, and the dtypes and shapes of its elements' components."""

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
        """Put elements, whose components are stacked along a first dimension."""
        ops.queue_enqueue_many_v2(self.handle, self._converted(components))

    def dequeue(self) -> list[Tensor]:
        """Take one element. Raises one of ENDED once the queue is closed."""
        return list(ops.queue_dequeue_v2(self.handle, self._dtypes))

    def dequeue_up_to(self, count: int) -> list[Tensor]:
        """Take `count` elements, stacked, or those left in a closed queue. Raises as `dequeue`."""
        return list(ops.queue_dequeue_up_to_v2(self.handle, count, self._dtypes))

    def size(self) -> int:
        return int(ops.queue_size_v2(self.handle))

    def is_closed(self) -> bool:
        return bool(ops.queue_is_closed_v2(self.handle))

    def close(self, *, cancel: bool = False) -> None:
        """No effect if it is closed already, or destroyed. `cancel` fails pending enqueues."""
        with contextlib.suppress(tf.errors.CancelledError, tf.errors.NotFoundError):
            ops.queue_close_v2(self.handle, cancel_pending_enqueues=cancel)

    def _converted(self, components: list[Any]) -> list[Tensor]:
        pairs = zip(components, self._dtypes, strict=True)
        return [tf.convert_to_tensor(component, dtype) for component, dtype in pairs]


class OwnedQueue(Queue):
    """A new queue; release it."""

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
            # Somebody may still hold the last queue of this name; that one was closed.
            if not self.is_closed():
                return

    def close(self, *, cancel: bool = False) -> None:
        """No effect after `release`, when the handle may belong to another queue."""
        with self._closing:
            if not self._released:
                super().close(cancel=cancel)

    def release(self) -> None:
        """Free the queue and its name. Call it once, when others only close the queue any more."""
        self.close(cancel=True)
        with self._closing:
            self._released = True
        tf.raw_ops.DestroyResourceOp(resource=self.handle, ignore_lookup_error=True)
        with _lock:
            _free[self._spec].append(self._name)


_lock = threading.Lock()
_numbers = itertools.count()
_free: defaultdict[QueueSpec, list[str]] = defaultdict(list)
