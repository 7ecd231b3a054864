"""A process with a worker in a variable, and an iterator that is still referenced, ends."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from ..forks import TENSORFLOW, run
from ..stock import DispatcherProcess

PROGRAM = """
import os, signal, sys, time
target, made, how, ends = sys.argv[1:]
if made == "function":
    sys.modules["tensorflow"] = None

import numpy as np
from forebay import service

def megabytes(split):
    yield np.zeros(1 << 20, np.uint8)

worker = service.WorkerServer(service.WorkerConfig(target.removeprefix("grpc://")))
if made == "function":
    dataset_id = service.register_dataset(target, megabytes, splits=range(400))
else:
    import tensorflow as tf
    made = tf.data.Dataset.range(400).map(lambda n: tf.zeros([1 << 20], tf.uint8))
    if "num_consumers" in how:
        made = made.repeat()
    dataset_id = service.register_dataset(target, made)
elements = iter(service.read(target, dataset_id, job_name="training", **eval(how)))
for _ in range(3):
    next(elements)
print("read", flush=True)
if ends == "raise":
    for element in elements:
        raise ValueError("of the training")
if ends == "interrupt":
    for element in elements:
        os.kill(os.getpid(), signal.SIGINT)
"""
CODES = {"raise": 1, "interrupt": -signal.SIGINT, "end": 0}
DYNAMIC = {"processing_mode": "distributed_epoch"}
ORDERED, AT_LEAST_ONCE = {"ordered": True}, {"delivery": "at_least_once"}
COORDINATED = {"consumer_index": 0, "num_consumers": 1}


@pytest.mark.parametrize(
    ("made", "how", "ends"),
    [
        ("graph", DYNAMIC, "raise"),
        ("graph", COORDINATED, "interrupt"),
        ("function", ORDERED, "end"),
        ("function", AT_LEAST_ONCE, "raise"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("graph", ORDERED, "raise"),
                ("graph", ORDERED, "interrupt"),
                ("graph", AT_LEAST_ONCE, "end"),
                ("function", DYNAMIC, "end"),
                ("function", ORDERED, "interrupt"),
                ("function", AT_LEAST_ONCE, "end"),
            )
        ),
    ],
)
def test_nothing_holds_up_its_end(made: str, how: dict[str, Any], ends: str) -> None:
    imports = TENSORFLOW if made == "graph" else ("forebay.service", "forebay.service.client.api")
    with DispatcherProcess("memory:") as dispatcher:
        ended = run(["-c", PROGRAM, dispatcher.target, made, str(how), ends], 40, imports)
    assert "read" in ended.stdout, ended.stderr
    assert ended.returncode == CODES[ends], ended.stderr
    assert " ERROR " not in ended.stderr and "failed" not in ended.stderr
