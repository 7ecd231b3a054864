"""What is written comes back, whatever its dtype and shape, and is the same bytes."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from forebay.service import structure
from forebay.service.block_limits import TYPES
from forebay.service.blocks import Block, Component, Strings, joined
from forebay.service.materialized import formats
from forebay.service.materialized.formats import WRITERS, ShardReader
from forebay.service.materialized.layout import ComponentSpec
from forebay.service.materialized.records import Records, names_of
from forebay.service.pipelines.tf_data.element_specs import component_specs
from forebay.storage.errors import Corrupt

DTYPES = ("bool", "int8", "uint64", "float16", "bfloat16", "float8_e4m3fn", "float64", "complex64")

SPEC = {
    **{name: tf.TensorSpec([], name) for name in DTYPES},
    "image": tf.TensorSpec([2, 3], tf.bfloat16),
    "varying": tf.TensorSpec([None, 2], tf.int16),
    "row": tf.TensorSpec([None], tf.bool),
    "nested": (tf.TensorSpec([], tf.string), None, tf.TensorSpec([None], tf.string)),
}


def element(number: int) -> list[Any]:
    """Its components, in the order of SPEC's keys."""

    def array(dtype: str, *shape: int) -> Any:
        return (
            (np.arange(np.prod(shape, dtype=int)) + number).astype(dtype_of(dtype)).reshape(shape)
        )

    parts = {name: array(name) for name in DTYPES} | {
        "image": array("bfloat16", 2, 3),
        "varying": array("int16", number % 3, 2),
        "row": array("bool", number % 2),
    }
    texts = [b"", b"\xff\x00", "ä".encode()][: number % 4]
    nested = [f"{number}".encode(), np.array(texts, object)]
    return [
        part for name in sorted(SPEC) for part in (nested if name == "nested" else [parts[name]])
    ]


def dtype_of(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name, name))


def block_of(elements: Sequence[Sequence[Any]]) -> Block:
    def component(tensor: Any) -> Component:
        if isinstance(tensor, bytes):
            tensor = np.array(tensor, object)
        if tensor.dtype == object:
            lengths = np.array([len(text) for text in tensor.ravel()], np.int64)
            data = np.frombuffer(b"".join(tensor.ravel().tolist()), np.uint8)
            return Component(Strings(lengths.reshape(1, *tensor.shape), data))
        return Component(tensor[None])

    return joined([Block(1, tuple(map(component, parts))) for parts in elements])


def components_of(spec: Any) -> list[ComponentSpec]:
    names = names_of(structure.encode(spec))
    return [
        ComponentSpec(name, s.dtype.name, s.shape.as_list())
        for name, s in zip(names, component_specs(spec), strict=True)
    ]


def written(format_name: str, blocks: Sequence[Block]) -> bytes:
    out: list[bytes] = []
    writer = WRITERS[format_name](out.append, components_of(SPEC))
    for block in blocks:
        writer.write(block)
    writer.close()
    return b"".join(out)


@pytest.mark.parametrize("format_name", [*WRITERS])
def test_bytes_follow_from_the_elements_alone(
    format_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "ROW_GROUP_BYTES", 400)
    elements = [element(number) for number in range(11)]
    alone = written(format_name, [block_of([e]) for e in elements])
    assert alone == written(format_name, [block_of(elements[:4]), block_of(elements[4:])])


@pytest.mark.parametrize("format_name", ["arrayrecord", "parquet"])
@pytest.mark.parametrize("count", [0, 11])
def test_a_shard_reader_yields_what_was_written(
    format_name: str, count: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "ROW_GROUP_BYTES", 400)
    monkeypatch.setattr(formats, "READ_RECORDS", 3)
    path = tmp_path / "shard"
    path.write_bytes(written(format_name, [block_of([element(n)]) for n in range(count)]))
    reader = ShardReader(format_name, structure.encode(SPEC), components_of(SPEC))
    found = list(reader(str(path)))
    assert len(found) == count
    for number, read in enumerate(found):
        parts = [
            part
            for name in sorted(SPEC)
            for part in ([read[name][0], read[name][2]] if name == "nested" else [read[name]])
        ]
        for got, wanted in zip(parts, element(number), strict=True):
            assert np.shape(got) == np.shape(wanted)
            assert np.asarray(got).dtype == np.asarray(wanted).dtype
            assert np.asarray(got).tolist() == np.asarray(wanted).tolist()


def test_a_flipped_bit_in_a_parquet_file_is_found(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "shard"
    data = written("parquet", [block_of([element(number)]) for number in range(100)])
    reader = ShardReader("parquet", structure.encode(SPEC), components_of(SPEC))
    for place in range(64, len(data) // 2, len(data) // 20):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(Corrupt, match=f"shard {path} cannot be read .*--verify"):
            list(reader(str(path)))


def test_a_record_is_what_tensorflow_makes_and_parses() -> None:
    components = components_of(SPEC)
    record = Records(components).encode(tuple(element(7)))
    wanted = {c.name: tf.io.FixedLenFeature([], tf.string) for c in components}
    features = tf.io.parse_single_example(record, wanted)
    for component, tensor in zip(components, element(7), strict=True):
        dtype = tf.dtypes.as_dtype(component.dtype)
        parsed = tf.io.parse_tensor(features[component.name], dtype).numpy()
        assert np.shape(parsed) == np.shape(tensor)
        assert np.asarray(parsed).tolist() == np.asarray(tensor).tolist()


def test_types_are_tensorflows() -> None:
    assert {name: tf.dtypes.as_dtype(name).as_datatype_enum for name in TYPES} == TYPES


def test_components_have_names_that_differ() -> None:
    ragged = tf.RaggedTensorSpec([None, None, None], tf.int8)
    sparse = tf.SparseTensorSpec([3], tf.int8)
    scalar = tf.TensorSpec([], tf.int8)
    names = names_of(structure.encode({"r": ragged, "s": (sparse, scalar)}))
    assert names == [
        *("r.values", "r.row_splits.0", "r.row_splits.1"),
        *("s.0.indices", "s.0.values", "s.0.dense_shape", "s.1"),
    ]
    assert names_of(structure.encode(scalar)) == ["element"]
    # What a Parquet file calls the shapes of another one.
    assert names_of(structure.encode({"a": scalar, "a:shape": scalar})) == ["0", "1"]
    assert names_of(structure.encode({"a.b": scalar, "a": {"b": scalar}})) == ["0", "1"]
