"""Measures pipelines over real files without a service, in a process of its own.

python -m forebay.benchmarks.in_process DIRECTORY

`bare` is the pipeline driven in C++, by `reduce`, which calls a function for each element;
`skipped` is the pipeline alone. `eager` is a loop over it in Python.
"""

from __future__ import annotations

import functools
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from .cases import pipeline
from .consume import measured, serve
from .contents import FILE_CASES, FileCase
from .machine import memory_mb
from .results import Reading

LEAST_S = 0.1  # of a trial pass, which determines the measured one's size


def by_reduce(dataset: Any, count: Any) -> Any:
    """Take `count` elements, and call a function for each, as a loop in C++ does."""
    return dataset.take(count).reduce(np.int64(0), lambda total, _: total + 1)


def by_skip(dataset: Any, count: Any) -> Any:
    """Take `count` elements, and do nothing else.

    Between the two stands what cannot be skipped, so that none is left out or made in part.
    """
    taken = dataset.take(count).apply(tf.data.experimental.assert_cardinality(count))
    return taken.skip(count).reduce(count, lambda total, _: total + 1)


DRIVERS = {"bare": by_reduce, "skipped": by_skip}


def measure_bare(
    drive: Callable[[Any, Any], Any], case: FileCase, directory: pathlib.Path, seconds: float
) -> Reading:
    """Drive the pipeline in C++, for about `seconds`."""
    dataset = pipeline(case, directory, 0)
    # Trace once: tracing costs as much as many elements.
    driven = tf.function(functools.partial(drive, dataset))
    driven(tf.constant(1, tf.int64))
    count, elapsed_s, cpu_s = 1, 0.0, 0.0
    while elapsed_s < seconds / 2:
        count = 2 * count if elapsed_s < LEAST_S else math.ceil(count * seconds / elapsed_s)
        elapsed_s, cpu_s = time.perf_counter(), time.process_time()
        passed = int(driven(tf.constant(count, tf.int64)))
        elapsed_s, cpu_s = time.perf_counter() - elapsed_s, time.process_time() - cpu_s
        assert passed == count
    peak_mb = memory_mb(os.getpid(), "VmHWM")
    return Reading(
        elements=count, seconds=elapsed_s, client_cpu_s=cpu_s, worker_cpu_s=0,
        client_peak_mb=peak_mb, worker_peak_mb=0, first_s=0,
    )  # fmt: skip


def answer(
    way: str, row: str, warm_up_s: float, seconds: float, directory: pathlib.Path
) -> Reading:
    """Read in a way, for so long."""
    case = FILE_CASES[row]
    if way in DRIVERS:
        return measure_bare(DRIVERS[way], case, directory, seconds)
    return measured(lambda: iter(pipeline(case, directory, 0)), [], warm_up_s, seconds)


if __name__ == "__main__":
    serve(functools.partial(answer, directory=pathlib.Path(sys.argv[1])))
