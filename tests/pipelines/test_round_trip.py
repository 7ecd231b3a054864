"""Executor → blocks → dataset, and → NumPy: every element as it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay.journal.proto import events_pb2 as ev
from forebay.service.blocks import Block, Component
from forebay.service.client.tf_elements import NOTHING, dataset_of_blocks
from forebay.service.errors import PipelineError
from forebay.service.pipelines import SplitRange
from forebay.service.pipelines.kinds.graphs import as_registered
from forebay.service.pipelines.tf_data.columns import column
from forebay.service.pipelines.tf_data.element_packs import (
    MAX_PACK_ELEMENTS,
    calls_functions,
    elements_per_pack,
)
from forebay.service.pipelines.tf_data.element_specs import (
    check_element_spec,
    component_specs,
    decode_element_spec,
    decode_metadata,
    encode_element_spec,
    without_extension_types,
)
from forebay.service.pipelines.tf_data.graphs import Graph
from forebay.service.pipelines.tf_data.imports import graph_of
from forebay.service.pipelines.tf_data.pipeline import TfDataPipeline
from forebay.service.pipelines.tf_data.run import TfDataRun
from forebay.service.structure import Ragged, Sparse, UnsupportedElement, assemble, encode

from .pipelines import ELEMENTS, OneSource, plain


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


NUMBERS = [tf.bool, tf.bfloat16, tf.half, tf.float64, tf.complex64, tf.complex128]
NUMBERS += [tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32, tf.int64]
NUMBERS += [tf.uint64, tf.qint8, tf.quint8, tf.qint16, tf.quint16, tf.qint32]


def through(spec: Any, tensors: list[Any]) -> Any:
    """The component of a block of these."""
    own = column(spec)
    encoded = [own.encode(tensor)[0] for tensor in tensors]
    return own.decode([tf.raw_ops.Pack(values=part) for part in zip(*encoded, strict=True)])


@pytest.mark.parametrize("dtype", NUMBERS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("sizes", [(2, 0, 3), (2, 0, 20_000), (20_000,)])
def test_values_come_back_whatever_they_are_joined_by(dtype: Any, sizes: tuple[int, ...]) -> None:
    bits = {1: tf.int8, 2: tf.int16, 4: tf.int32}[dtype.size] if dtype.is_quantized else dtype
    drawn = [np.random.default_rng(0).integers(0, 2, size) for size in sizes]
    plain = [tf.cast(numbers, bits) for numbers in drawn]
    tensors = [tf.bitcast(own, dtype) if dtype.is_quantized else own for own in plain]
    component = through(tf.TensorSpec([None], dtype), tensors)
    found = [own.astype(np.complex128).real.tolist() for own in component.elements()]
    assert found == [numbers.tolist() for numbers in drawn]


def test_elements_without_a_rank_are_one_by_one() -> None:
    """TensorFlow copies joined ones wherever there is too little room for them."""
    spec, tensors = tf.TensorSpec(None, tf.int64), [tf.zeros([2, 3], tf.int64)] * 2
    (found,) = through(spec, tensors[:1]).elements()
    assert found.shape == (2, 3)
    with pytest.raises(AssertionError, match="travels alone"):
        through(spec, tensors)


Dataset = tf.data.Dataset


def pack_of(dataset: Any) -> int:
    if calls_functions(Graph(graph_of(dataset))):
        return 1
    return elements_per_pack(component_specs(dataset.element_spec))


@pytest.mark.parametrize(
    ("dataset", "elements"),
    [
        (lambda: Dataset.range(10), MAX_PACK_ELEMENTS),
        (lambda: Dataset.range(10).shuffle(3).repeat().take(5), MAX_PACK_ELEMENTS),
        (lambda: Dataset.from_tensor_slices(tf.zeros([9, 1024], tf.uint8)), 64),
        (
            lambda: Dataset.from_tensor_slices(["a"]).interleave(
                tf.data.TFRecordDataset, num_parallel_calls=2
            ),
            1,
        ),
        (lambda: Dataset.zip(Dataset.range(9), tf.data.TextLineDataset("a")), 1),
        (lambda: Dataset.from_tensor_slices(["a", "b"]), 1),
        (lambda: Dataset.zip(Dataset.range(9), Dataset.range(9)), MAX_PACK_ELEMENTS),
        # Functions are called, and may take their time; shapes differ; elements are large.
        (lambda: Dataset.range(10).map(lambda x: x + 1), 1),
        (lambda: Dataset.range(10).filter(lambda x: x > 1), 1),
        (lambda: Dataset.range(9).flat_map(lambda x: Dataset.from_tensors(x * 2)), 1),
        (lambda: Dataset.range(9).interleave(lambda x: Dataset.range(x).map(tf.square)), 1),
        (lambda: Dataset.range(10).batch(3), 1),
        (lambda: Dataset.from_tensors(tf.zeros([1 << 20])).repeat(3), 1),
        (lambda: Dataset.from_tensors(tf.zeros([0])).repeat(3), 1),
        (lambda: Dataset.from_tensor_slices(tf.ragged.constant([[[1], [2, 3]], [[4]]])), 1),
    ],
)  # fmt: skip
def test_only_pipelines_that_call_no_function_are_packed(
    dataset: Callable[[], Any], elements: int
) -> None:
    assert pack_of(dataset()) == elements


@pytest.mark.parametrize("made", [Dataset.from_tensors, Dataset.from_tensor_slices])
@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "qint16", "quint16", "qint8", "float8_e4m3fn", "float8_e5m2"]
)
def test_dtypes_that_tensorflow_cannot_batch_are_read(
    dtype: str, made: Callable[[Any], Any]
) -> None:
    narrow = {"int4": np.int8, "uint4": np.int8}.get(dtype, np.float32)
    kind = tf.as_dtype(dtype)
    if kind.is_quantized:
        kept = {"qint8": tf.int8, "qint16": tf.int16, "quint16": tf.uint16}[dtype]
        values = tf.bitcast(tf.constant([1, 2, 3], kept), kind)
    else:
        values = tf.cast(tf.constant([1, 2, 3], narrow), kind)
    dataset = made(values)
    pipeline = TfDataPipeline(graph_of(dataset), element_spec=dataset.element_spec)
    blocks = pipeline.run(None).blocks()
    found = [np.asarray(block.components[0].values).astype(int).ravel() for block in blocks]
    assert np.concatenate(found).tolist() == [1, 2, 3]


def test_what_is_there_when_splits_run_dry_waits_for_no_more_than_a_pack() -> None:
    dry, more = threading.Event(), threading.Event()

    class Feed(OneSource):
        def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
            if not dry.is_set():
                dry.set()
                return SplitRange(0, 10 * MAX_PACK_ELEMENTS + 7, 0)
            more.wait()
            return None

    dataset = Dataset.range(10**6)
    executor = TfDataPipeline(graph_of(dataset), element_spec=dataset.element_spec).run(Feed())
    blocks = executor.blocks()
    seen = 0
    while seen < 10 * MAX_PACK_ELEMENTS:
        seen += next(blocks).count
    assert dry.is_set()
    more.set()
    assert seen + sum(block.count for block in blocks) == 10 * MAX_PACK_ELEMENTS + 7


def test_variants_are_never_packed() -> None:
    """As a stock client registers ragged tensors without their spec: TensorFlow's own variants."""
    rows = tf.ragged.constant([[1], [2, 3], [], [4]])
    dataset = Dataset.from_tensor_slices(rows)
    blocks = list(TfDataPipeline(graph_of(dataset)).run(None).blocks())
    assert sum(block.count for block in blocks) == 4
    assert elements_per_pack([tf.TensorSpec([], tf.variant)]) == 1


def test_the_first_element_travels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for it does not wait for others to be copied, however many there are by then."""
    ready = TfDataRun._ready

    def ready_with_several(run: TfDataRun) -> int:
        while (found := ready(run)) < 2:
            time.sleep(0.001)
        return found

    monkeypatch.setattr(TfDataRun, "_ready", ready_with_several)
    images = Dataset.from_tensors(np.zeros((224, 224, 3), np.uint8)).repeat()
    run = TfDataPipeline(graph_of(images), element_spec=images.element_spec).run(None)
    with closing(run.blocks()) as blocks:
        assert next(blocks).count == 1
        assert next(blocks).count > 1
