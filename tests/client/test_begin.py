"""The start of an iteration: what is traced, and what is left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay.service.blocks import Block, Component
from forebay.service.client.deferred_closer import deferred_closer
from forebay.service.client.options import ShardingPolicy
from forebay.service.client.reader import Reader
from forebay.service.client.tf_elements import NOTHING, dataset_of_blocks, under_way
from forebay.service.pipelines.tf_data.transformations import mapped, traced

ONE_DEVICE = "experimental_ints_on_device"


class Blocks:
    """Blocks of two elements each. `close` adds this to the list `closed`."""

    def __init__(self, closed: list[Blocks], *values: list[Any]) -> None:
        self._closed = closed
        self._blocks = iter([Block(2, (Component(np.array(own)),)) for own in values])

    def __iter__(self) -> Iterator[Block]:
        return self._blocks

    def close(self) -> None:
        self._closed.append(self)


def test_datasets_of_different_specs_share_traces_and_leave_nothing_behind() -> None:
    """The functions that begin and end iterations are traced once for all datasets."""
    closed: list[Blocks] = []

    def blocks(*values: list[Any]) -> Callable[[], Blocks]:
        return lambda: Blocks(closed, *values)

    numbers = dataset_of_blocks(blocks([1, 2], [3, 4]), tf.TensorSpec([], tf.int64))
    floats = dataset_of_blocks(blocks([0.5, 1.5]), tf.TensorSpec([], tf.float64))
    wrong = dataset_of_blocks(blocks([0.5, 1.5], [1, 2]), tf.TensorSpec([], tf.int64))
    before = set(under_way)
    pairs = zip(numbers, floats, strict=False)
    assert [(int(n), float(f)) for n, f in pairs] == [(1, 0.5), (2, 1.5)]
    failing = iter(wrong)
    for _ in range(2):  # it goes on failing, or its end would be taken for an epoch's
        with pytest.raises(tf.errors.InvalidArgumentError, match="float64"):
            next(failing)
    del failing
    assert list(numbers.as_numpy_iterator()) == [1, 2, 3, 4]
    del pairs
    gc.collect()
    deferred_closer.wait()
    assert len(closed) == 4
    assert set(under_way) == before


def test_a_graph_keeps_what_its_dataset_calls() -> None:
    """One of TensorFlow 1's, in which nothing is traced for others."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        dataset = dataset_of_blocks(lambda: Blocks([], [7, 8]), tf.TensorSpec([], tf.int64))
        iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
        number = iterator.get_next()
        gc.collect()
        session.run(iterator.initializer)
        assert [session.run(number), session.run(number)] == [7, 8]


def test_an_iteration_can_be_dropped_before_a_dispatcher_answers() -> None:
    """TensorFlow can, while it waits for nothing of Python's."""
    iteration = Reader("127.0.0.1:1", "dataset", ShardingPolicy.OFF, None).iterate(NOTHING)
    assert [next(iteration), next(iteration)] == [NOTHING, NOTHING]
    iteration.close()


def test_a_function_that_returns_int32_passes_tf_datas_optimizer() -> None:
    """With the attribute, tf.data would take the function for a whole dataset. Our workaround
    can go once TensorFlow mends that."""
    numbers = tf.data.Dataset.range(3, output_type=tf.int32)
    made = traced(lambda n: (n, 2 * n), numbers.element_spec)
    assert ONE_DEVICE not in made.function.function_def.attr
    pairs = mapped(numbers, lambda n: (n, 2 * n))
    assert list(pairs.as_numpy_iterator()) == [(0, 0), (1, 2), (2, 4)]
