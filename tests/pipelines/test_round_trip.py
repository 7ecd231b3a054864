"""Executor → blocks → dataset, and → NumPy: every element as it was."""

from __future__ import annotations

import threading
from collections.abc import Generator
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay.journal.proto import events_pb2 as ev
from forebay.service.blocks import Block, Component
from forebay.service.client.tf_elements import NOTHING, dataset_of_blocks
from forebay.service.errors import PipelineError
from forebay.service.pipelines.kinds.graphs import as_registered
from forebay.service.pipelines.tf_data.element_specs import (
    check_element_spec,
    decode_element_spec,
    decode_metadata,
    encode_element_spec,
    without_extension_types,
)
from forebay.service.pipelines.tf_data.imports import graph_of
from forebay.service.pipelines.tf_data.pipeline import TfDataPipeline
from forebay.service.structure import Ragged, Sparse, UnsupportedElement, assemble, encode

from .pipelines import ELEMENTS, plain


def generate(blocks: list[Block]) -> Generator[Block, None, None]:
    yield from blocks


def blocks_of(dataset: Any) -> list[Block]:
    spec = without_extension_types(dataset.element_spec)
    pipeline = TfDataPipeline(graph_of(as_registered(dataset)), element_spec=spec)
    return list(pipeline.run(None).blocks())


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_come_back_as_they_were(name: str) -> None:
    dataset = ELEMENTS[name]()
    blocks = blocks_of(dataset)
    for block in blocks:
        assert all(c.shapes is None or len(c.shapes) == block.count for c in block.components)
    pauses = [NOTHING, *(item for block in blocks for item in (block, NOTHING, NOTHING))]
    again = dataset_of_blocks(partial(generate, pauses), dataset.element_spec)
    assert again.element_spec == dataset.element_spec
    for _ in range(2):  # each iteration opens the blocks anew
        assert [plain(e) for e in again] == [plain(e) for e in dataset]


@pytest.mark.parametrize("name", ELEMENTS)
def test_numpy_readers_get_the_same(name: str) -> None:
    dataset = ELEMENTS[name]()
    build = assemble(encode(dataset.element_spec))
    elements: list[Any] = []
    for block in blocks_of(dataset):
        columns = [component.elements() for component in block.components]
        elements += build(columns, block.count)

    def comparable(value: Any) -> Any:
        match value:
            case Ragged():
                splits = []
                while isinstance(value, Ragged):
                    splits.append(plain(value.row_splits))
                    value = value.values
                return ("RaggedTensor", plain(value), *splits)
            case Sparse():
                return ("SparseTensor", *[plain(part) for part in value])
            case bytes():  # a scalar
                return plain(np.array(value, object))
            case dict():
                return {key: comparable(value[key]) for key in sorted(value)}
            case tuple():
                return (type(value).__name__, *[comparable(item) for item in value])
        return plain(value)

    unquantized = {"qint8": "int8", "quint8": "uint8"}
    expected = [repr(plain(element)) for element in dataset]
    for quantized, native in unquantized.items():
        expected = [text.replace(f"'{quantized}'", f"'{native}'") for text in expected]
    assert [repr(comparable(element)) for element in elements] == expected


def test_element_specs_survive_the_metadata() -> None:
    for make in ELEMENTS.values():
        spec = make().element_spec
        decoded = decode_element_spec(encode_element_spec(spec))
        assert decoded == spec
        check_element_spec(spec, decoded)


@pytest.mark.parametrize("name", ["tokens", "dict", "ragged", "sparse", "strings", "pair"])
def test_a_stock_clients_compressed_graph(name: str) -> None:
    from tensorflow.core.protobuf import data_service_pb2
    from tensorflow.python.data.experimental.ops import compression_ops

    dataset = ELEMENTS[name]()
    squeezed = dataset.map(lambda *e: compression_ops.compress(e[0] if len(e) == 1 else e))
    described = data_service_pb2.DataServiceMetadata(
        element_spec=encode_element_spec(dataset.element_spec), compression="COMPRESSION_SNAPPY"
    )
    definition = ev.DatasetDefinition(metadata=described.SerializeToString())
    metadata = decode_metadata(definition)
    assert metadata.compressed
    assert metadata.raw
    graph = graph_of(squeezed)

    undone = list(
        TfDataPipeline(graph, element_spec=metadata.element_spec, compressed=True)
        .run(None)
        .blocks()
    )
    relayed = list(TfDataPipeline(graph).run(None).blocks())
    for blocks, compressed in ((undone, False), (relayed, True)):
        opened = partial(generate, blocks)
        again = dataset_of_blocks(opened, dataset.element_spec, compressed=compressed)
        assert [plain(e) for e in again] == [plain(e) for e in dataset]


def test_small_elements_share_blocks_and_large_ones_are_alone() -> None:
    assert len(blocks_of(ELEMENTS["many scalars"]())) < 200
    assert [b.count for b in blocks_of(ELEMENTS["large"]())] == [1] * 4
    # 1, 600001, 1200001, … int64: the first one is small, the others travel alone
    assert [b.count for b in blocks_of(ELEMENTS["large, varying"]())][-5:] == [1] * 5


def test_elements_that_cannot_travel_are_named() -> None:
    nested = tf.data.Dataset.range(6).window(3).map(lambda window: {"w": window})
    with pytest.raises(UnsupportedElement, match=r"element\['w'\] is a DatasetSpec"):
        blocks_of(nested)


class Unnamed(tf.experimental.ExtensionType):  # type: ignore[misc]
    value: tf.Tensor


class Backwards(tf.experimental.ExtensionType):  # type: ignore[misc]
    __name__ = "tests.Backwards"
    first: tf.Tensor
    second: tf.Tensor

    def __init__(self, value: Any) -> None:
        self.second = value
        self.first = value + 1


class Raw(tf.experimental.ExtensionType):  # type: ignore[misc]
    __name__ = "tests.Raw"
    value: tf.Tensor
    constants: tuple[bytes, ...]


@pytest.mark.parametrize(("element", "message"), [
    (lambda i: {"e": Unnamed(i)}, r"element\['e'\] is a Unnamed, .* __name__ = "),
    (lambda i: (i, Backwards(i)), r"element\[1\] is a Backwards, .*\['second', 'first'\], and"),
    (lambda i: Raw(i, (b"x",)), r"element\.constants\[0\] is a b'x', which cannot be sent"),
    (lambda i: {"a": {1: i}}, r"element\['a'\] has the key 1, and only strings"),
])  # fmt: skip
def test_what_the_metadata_cannot_hold_is_named(element: Any, message: str) -> None:
    with pytest.raises(UnsupportedElement, match=message):
        encode(tf.data.Dataset.range(3).map(element).element_spec)


def test_a_failing_pipeline_gives_what_it_had_then_its_error() -> None:
    def fail_at_three(i: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_less(i, tf.constant(3, tf.int64))]):
            return tf.identity(i)

    dataset = tf.data.Dataset.range(10).map(fail_at_three)
    executor = TfDataPipeline(graph_of(dataset), element_spec=dataset.element_spec).run(None)
    values: list[int] = []
    with pytest.raises(PipelineError) as raised:
        for block in executor.blocks():
            values += [int(value) for value in block.components[0].elements()]
    assert values == [0, 1, 2]
    assert raised.value.code == "INVALID_ARGUMENT"
    assert "assertion failed" in raised.value.message


@pytest.mark.parametrize("shape", [[1 << 16], [None]])
def test_aligned_arrays_are_adopted_without_a_copy(shape: list[int | None]) -> None:
    memory = np.zeros((1 << 18) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + (1 << 18)].view(np.float32)[np.newaxis]
    block = Block(1, (Component(array),))
    dataset = dataset_of_blocks(partial(generate, [block]), tf.TensorSpec(shape, tf.float32))
    (element,) = dataset
    assert np.asarray(element).ctypes.data == array.ctypes.data


@pytest.mark.parametrize("shape", [[], [5000], [None]])
def test_what_is_said_to_be_infinite_may_end(shape: list[int | None]) -> None:
    """TensorFlow says it of a sample_from_datasets that ends with its first empty input, too."""
    infinite = tf.data.INFINITE_CARDINALITY
    block = Block(3, (Component(np.ones([3, *(d or 2 for d in shape)], np.float32)),))
    spec = tf.TensorSpec(shape, tf.float32)
    dataset = dataset_of_blocks(partial(generate, [block]), spec, cardinality=infinite)
    assert int(dataset.cardinality()) == infinite
    assert len(list(dataset)) == 3
    assert len(list(dataset.repeat().take(7))) == 7


def test_an_abandoned_iteration_closes_its_blocks() -> None:
    blocks = [Block(1, (Component(np.array([number])),)) for number in range(9)]
    closed = []

    class Blocks:
        def __iter__(self) -> Any:
            return iter(blocks)

        def close(self) -> None:
            closed.append(True)

    dataset = dataset_of_blocks(Blocks, tf.TensorSpec([], tf.int64))
    iterator = iter(dataset)
    next(iterator)
    assert not closed
    del iterator
    assert closed == [True]


@pytest.mark.parametrize("spec", [
    tf.TensorSpec([], tf.int64),
    tf.TensorSpec([5000], tf.uint8),
    tf.TensorSpec([None], tf.float32),
])  # fmt: skip
@pytest.mark.parametrize(
    "behind", [lambda d: d, lambda d: d.map(lambda x: x), lambda d: d.batch(1)]
)
def test_an_iteration_can_be_dropped_while_no_block_comes(spec: Any, behind: Any) -> None:
    dropped = threading.Event()
    element = np.zeros([1, *(d or 3 for d in spec.shape)], spec.dtype.as_numpy_dtype)

    def one_and_no_more() -> Generator[Block, None, None]:
        yield Block(1, (Component(element),))
        while not dropped.wait(0.01):
            yield NOTHING
        pytest.fail("the iteration goes on")

    iterator = iter(behind(dataset_of_blocks(one_and_no_more, spec)))
    next(iterator)
    del iterator  # waits for TensorFlow's threads, and they for the next block
    dropped.set()
