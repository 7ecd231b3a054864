"""What passes before an iteration's first element: nothing is prepared that need not be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from forebay.service.client.options import ShardingPolicy
from forebay.service.client.reader import Reader
from forebay.service.client.tf_elements import NOTHING, dataset_of_blocks
from forebay.service.pipelines.tf_data.transformations import mapped, traced

ONE_DEVICE = "experimental_ints_on_device"

BEGIN = """
import sys
import numpy, tensorflow
from forebay.service import from_dataset_id
from forebay.service.blocks import Block, Component
from forebay.service.client.tf_elements import dataset_of_blocks, graph_of
from forebay.service.pipelines.tf_data.pipeline import TfDataPipeline

images = tensorflow.data.Dataset.from_tensors(numpy.zeros([64, 64, 3], numpy.uint8))
graph, spec = graph_of(images), images.element_spec
before = set(sys.modules)
opened = lambda: TfDataPipeline(graph, element_spec=spec).run(None).blocks()
elements = iter(dataset_of_blocks(opened, spec, cardinality=tensorflow.data.INFINITE_CARDINALITY))
print(next(elements).shape, sorted(set(sys.modules) - before))
"""


def functions_of(make: Callable[[], Any]) -> list[Any]:
    """Of the dataset's; each is prepared anew for each iterator."""
    with tf.Graph().as_default() as graph:
        make()
        library = graph.as_graph_def().library
    return [f for f in library.function if f.attr["_tf_data_function"].b]


@pytest.mark.parametrize(
    ("spec", "cardinality", "functions"),
    [
        (tf.TensorSpec([], tf.int64), tf.data.UNKNOWN_CARDINALITY, 6),
        (tf.TensorSpec([224, 224, 3], tf.uint8), tf.data.INFINITE_CARDINALITY, 8),
        (tf.TensorSpec([], tf.string), tf.data.UNKNOWN_CARDINALITY, 6),
        (tf.RaggedTensorSpec([2, None], tf.float32), tf.data.INFINITE_CARDINALITY, 8),
    ],
    ids=str,
)
def test_an_iterator_of_ours_has_few_functions_and_has_none_optimized(
    spec: Any, cardinality: int, functions: int
) -> None:
    found = functions_of(
        lambda: dataset_of_blocks(lambda: pytest.fail("opened"), spec, cardinality=cardinality)
    )
    assert len(found) <= functions
    assert [f.signature.name for f in found if not f.attr[ONE_DEVICE].b] == []


def test_what_a_first_element_needs_is_imported_before() -> None:
    """By a program that has imported the service: nobody waits for files to be read then."""
    begun = subprocess.run([sys.executable, "-c", BEGIN], capture_output=True, text=True)
    assert begun.stdout == "(64, 64, 3) []\n", begun.stderr


def test_an_iteration_can_be_dropped_before_a_dispatcher_answers() -> None:
    """TensorFlow can, while it waits for nothing of Python's."""
    iteration = Reader("127.0.0.1:1", "dataset", ShardingPolicy.OFF, None).iterate(NOTHING)
    assert [next(iteration), next(iteration)] == [NOTHING, NOTHING]
    iteration.close()


def test_a_function_that_returns_int32_passes_tf_datas_optimizer() -> None:
    """With the attribute it would be taken for a whole dataset; if that is mended one day, what
    sees to it can go."""
    numbers = tf.data.Dataset.range(3, output_type=tf.int32)
    made = traced(lambda n: (n, 2 * n), numbers.element_spec)
    assert ONE_DEVICE not in made.function.function_def.attr
    pairs = mapped(numbers, lambda n: (n, 2 * n))
    assert list(pairs.as_numpy_iterator()) == [(0, 0), (1, 2), (2, 4)]
