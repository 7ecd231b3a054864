"""Parquet files as other writers leave them, held against PyArrow."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.service.errors import InvalidArgument

from ..record_files import Register, all_records


def test_two_columns_of_one_name_are_refused(register: Register, tmp_path: pathlib.Path) -> None:
    arrays = [pa.array([1]), pa.array([2]), pa.array([3])]
    pq.write_table(pa.Table.from_arrays(arrays, ["x", "x", "X"]), tmp_path / "a.parquet")
    for how in ({}, {"columns": ["X", "x"]}):
        with pytest.raises(InvalidArgument, match=r"a\.parquet has several columns.*\['x'\]: read"):
            register(tmp_path, **how)
    assert all_records(register(tmp_path, columns=["X"])) == [{"X": 3}]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int32()), pa.large_list(pa.int32()), pa.list_(pa.int32(), 2)]
)
def test_nulls_in_lists_are_found_where_files_are_registered(
    register: Register, tmp_path: pathlib.Path, kind: Any
) -> None:
    """Statistics count an empty list like a null one."""
    path, size = tmp_path / "a.parquet", getattr(kind, "list_size", None)
    rows = [[1, 2], [None, 4], *([] if size else [None])]  # PyArrow reads no null of a fixed size
    pq.write_table(pa.table({"l": pa.array(rows, kind)}), path)
    with pytest.raises(InvalidArgument, match=r"1 nulls in column 'l': give fill=\{'l': …\}.*list"):
        register(path)
    found = [one["l"].tolist() for one in all_records(register(path, fill={"l": -1}))]
    assert found == [[1, 2], [-1, 4], *([] if size else [[]])]
    with pytest.raises(InvalidArgument, match=r"fill=\{'l': 'x'\}.* is no int32"):
        register(path, fill={"l": "x"})
    if not size:
        pq.write_table(pa.table({"l": pa.array([[1, 2], [], [3]], kind)}), path)
        found = [one["l"].tolist() for one in all_records(register(path))]
        assert found == [[1, 2], [], [3]]


def test_an_empty_file_says_nothing_of_types(register: Register, tmp_path: pathlib.Path) -> None:
    """A writer that saw no rows writes columns of type null, or none."""
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"x": pa.array([], pa.null())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({}), tmp_path / "c.parquet")
    assert all_records(register(tmp_path, columns=["x"])) == [{"x": 1}, {"x": 2}]


def test_extension_types_are_what_they_are_stored_as(
    register: Register, tmp_path: pathlib.Path
) -> None:
    """As PyArrow's arrays give them; Ray's tensors too, whose type is not known here."""
    numbers = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    turned = pa.fixed_shape_tensor(pa.int16(), [2, 3], permutation=[1, 0])
    flat = pa.array([[*range(6 * n, 6 * n + 6)] for n in range(4)], pa.list_(pa.int16(), 6))
    bools = pa.array([1, 0, -3, 0], pa.int8())
    table = pa.table(
        {
            "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(numbers),
            "turned": pa.ExtensionArray.from_storage(turned, flat),
            "uuid": pa.array([bytes([n]) * 16 for n in range(4)], pa.uuid()),
            "json": pa.array(["{}", "[1]", "2", '"x"'], pa.json_()),
            "bool": pa.ExtensionArray.from_storage(pa.bool8(), bools),
            "ray": pa.array(numbers.reshape(4, 6).tolist(), pa.large_list(pa.float32())),
        }
    )
    about = {
        "ARROW:extension:name": "ray.data.arrow_tensor_v2",
        "ARROW:extension:metadata": "[2, 3]",
    }
    at = table.schema.get_field_index("ray")
    schema = table.schema.set(at, table.schema.field(at).with_metadata(about))
    pq.write_table(table.cast(schema), tmp_path / "a.parquet", row_group_size=3)
    read = pq.read_table(tmp_path / "a.parquet").combine_chunks()
    expected = {
        "tensor": read["tensor"].chunk(0).to_numpy_ndarray(),
        "turned": read["turned"].chunk(0).to_numpy_ndarray(),
        "uuid": [one.bytes for one in read["uuid"].to_pylist()],
        "json": [one.encode() for one in read["json"].to_pylist()],
        "bool": read["bool"].to_pylist(),
        "ray": numbers,
    }
    for shuffled in (False, True):
        found = all_records(register(tmp_path, shuffle_records=shuffled))
        if shuffled:
            found.sort(key=lambda record: record["uuid"])
        for name, values in expected.items():
            for record, value in zip(found, values, strict=True):
                assert np.asarray(record[name]).dtype == np.asarray(value).dtype
                np.testing.assert_array_equal(record[name], value)
