"""What a trainer's process does in a measurement: it answers questions, and takes elements.

Does not use TensorFlow, nor Forebay.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

TURN_S = 0.01  # between two looks at the clock


def serve(answer: Callable[..., Any]) -> None:
    """Print "ready"; then answer each line of input, arguments in JSON, by a line of JSON."""
    print("ready", flush=True)
    for line in sys.stdin:
        found = answer(**json.loads(line))
        if dataclasses.is_dataclass(found) and not isinstance(found, type):
            found = dataclasses.asdict(found)
        print(json.dumps(found), flush=True)


def consume(elements: Iterator[Any], seconds: float) -> tuple[int, float]:
    """Take elements for `seconds`, or all there are; return their number, and the time."""
    begun = now = time.perf_counter()
    count = 0
    turn = 1
    while now - begun < seconds:
        turn_begun = now
        taken = _take(elements, turn)
        now = time.perf_counter()
        count += taken
        if taken < turn:
            break
        if now - turn_begun < TURN_S:
            turn *= 2
    return count, now - begun


def _take(elements: Iterator[Any], most: int) -> int:
    """Take up to `most` elements, with as little overhead as Python allows."""
    counter = itertools.count()
    deque(zip(itertools.islice(elements, most), counter, strict=False), maxlen=0)
    return next(counter)
