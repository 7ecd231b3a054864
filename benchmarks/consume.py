"""What a trainer's process does in a measurement: it answers questions, and takes elements.

Does not use TensorFlow, nor Forebay.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .machine import memory_mb, process_cpu_s
from .results import Reading

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


def measured(
    begin: Callable[[], Iterator[Any]],
    workers: Sequence[int],
    warm_up_s: float,
    seconds: float,
    batch: int = 1,
) -> Reading:
    """Read what `begin` returns for `seconds`. `workers` are processes; `batch` elements come at
    once.
    """
    begun = time.perf_counter()
    elements = begin()
    next(elements)
    first_s = time.perf_counter() - begun
    consume(elements, warm_up_s)
    client_s, worker_s = time.process_time(), sum(map(process_cpu_s, workers))
    count, elapsed_s = consume(elements, seconds)
    reading = Reading(
        elements=count * batch,
        seconds=elapsed_s,
        client_cpu_s=time.process_time() - client_s,
        worker_cpu_s=sum(map(process_cpu_s, workers)) - worker_s,
        client_peak_mb=memory_mb(os.getpid(), "VmHWM"),
        worker_peak_mb=sum(memory_mb(each, "VmHWM") for each in workers),
        first_s=first_s,
    )
    del elements
    gc.collect()  # ends the iteration, before the other side's turn
    return reading
