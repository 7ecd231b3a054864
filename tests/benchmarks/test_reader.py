"""How elements are taken and weighed; no service is involved."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import tensorflow as tf

from forebay.benchmarks.consume import consume
from forebay.benchmarks.machine import memory_mb, process_cpu_s
from forebay.benchmarks.reader import mean_bytes

LONG_S = 3600.0


def test_a_dataset_is_read_to_its_end() -> None:
    count, _, ended = consume(iter(range(1000)), LONG_S)
    assert (count, ended) == (1000, True)


def test_an_endless_one_is_left_in_time() -> None:
    elements = itertools.count()
    count, _, ended = consume(elements, 0.01)
    assert not ended
    assert next(elements) == count


def test_no_time_takes_nothing() -> None:
    elements = itertools.count()
    assert consume(elements, 0.0)[0] == 0
    assert next(elements) == 0


def test_all_parts_of_an_element_weigh() -> None:
    elements = {"image": np.zeros((4, 10, 3), np.uint8), "name": ["ab", "ab", "abcd", "abcd"]}
    assert mean_bytes(tf.data.Dataset.from_tensor_slices(elements).repeat()) == 30 + 3


def test_batches_of_strings_weigh_what_they_hold() -> None:
    lines = tf.data.Dataset.from_tensor_slices([b"one", b"three"]).batch(2)
    assert mean_bytes(lines) == 8


def test_of_large_elements_a_few_are_enough() -> None:
    drawn: list[int] = []

    def draw(number: Any) -> Any:
        drawn.append(int(number))
        return np.zeros(10**7, np.uint8)

    big = tf.data.Dataset.range(1000).map(lambda n: tf.py_function(draw, [n], tf.uint8))
    assert mean_bytes(big) == 10**7
    assert len(drawn) < 100


def test_a_process_costs_something() -> None:
    assert process_cpu_s(os.getpid()) > 0
    before = memory_mb(os.getpid(), "VmRSS")
    np.ones(200_000_000, np.uint8)  # and gone again
    assert memory_mb(os.getpid(), "VmHWM") > before + 150 > 150
