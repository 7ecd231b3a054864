"""Consumes elements in a measurement, and compares them in a test. Does not use TensorFlow."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

TURN_S = 0.01  # between two looks at the clock


def consume(elements: Iterator[Any], seconds: float) -> tuple[int, float, bool]:
    """Take elements for `seconds`; return their number, the time, and whether they ended."""
    begun = now = time.perf_counter()
    count = 0
    turn = 1
    while now - begun < seconds:
        turn_begun = now
        taken = _take(elements, turn)
        now = time.perf_counter()
        count += taken
        if taken < turn:
            return count, now - begun, True
        if now - turn_begun < TURN_S:
            turn *= 2
    return count, now - begun, False


def _take(elements: Iterator[Any], most: int) -> int:
    """Take up to `most` elements, with as little overhead as Python allows."""
    counter = itertools.count()
    deque(zip(itertools.islice(elements, most), counter, strict=False), maxlen=0)
    return next(counter)


def plain(element: Any) -> Any:
    """An element that is one tensor, of whatever library, as an array, or a string as bytes."""
    element = element.numpy() if hasattr(element, "numpy") else element
    return element if isinstance(element, bytes) else np.asarray(element)


def size_of(element: Any) -> int:
    """The bytes of an element that is one tensor, without metadata."""
    array = plain(element)
    if isinstance(array, bytes):
        return len(array)
    return int(array.nbytes) if array.dtype.kind not in "OS" else sum(map(len, array.flat))


def digest(elements: Iterable[Any]) -> tuple[int, int]:
    """The number of elements, and a digest that does not depend on their order."""
    count = total = 0
    for element in elements:
        array = plain(element)
        if isinstance(array, bytes):
            content = b"bytes" + array
        elif array.dtype.kind in "OS":  # only as an object does a string keep trailing zeros
            content = repr((array.shape, array.astype(object).tolist())).encode()
        else:
            content = repr((array.shape, array.dtype.name)).encode() + array.tobytes()
        total += int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
        count += 1
    return count, total % 2**64
