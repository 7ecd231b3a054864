"""Files of Parquet and of Arrow's record batches as other writers leave them, held against PyArrow.

tests/pipelines/hugging_face was written by datasets 5.2.0 with pyarrow 26.0.1:
datasets.config.DEFAULT_MAX_BATCH_SIZE = 7; Dataset.from_dict(rows, features=Features({"id":
Value("int64"), "text": Value("string"), "tokens": List(Value("int32")), "label":
ClassLabel(names=["no", "yes"]), "meta": {"score": Value("float32"), "tags":
List(List(Value("string")))}, "pairs": List({"q": Value("string"), "a": Value("int16")})}))
.save_to_disk(…, num_shards=2), with 25 rows.
"""

from __future__ import annotations

import glob
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from forebay.service.errors import ForebayError, InvalidArgument
from forebay.service.order import permuted_many
from forebay.storage.errors import Corrupt

from ..record_files import Register, all_records, records
from .test_nested import NULLS, expected, lists, plain_times, table_of


def test_two_columns_of_one_name_are_refused(register: Register, tmp_path: Path) -> None:
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
    register: Register, tmp_path: Path, kind: Any
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


def test_an_empty_file_says_nothing_of_types(register: Register, tmp_path: Path) -> None:
    """A writer that saw no rows writes columns of type null, or none."""
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"x": pa.array([], pa.null())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({}), tmp_path / "c.parquet")
    assert all_records(register(tmp_path, columns=["x"])) == [{"x": 1}, {"x": 2}]


def test_extension_types_are_what_they_are_stored_as(register: Register, tmp_path: Path) -> None:
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


def _write(root: Path, *places: str) -> None:
    for number, place in enumerate(places):
        path = root / place / f"{number}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"n": [10 * number, 10 * number + 1]}), path, row_group_size=1)


def _as_read(table: pa.Table, **fill: Any) -> list[dict[str, Any]]:
    """PyArrow's rows, with what Forebay gives for texts, and for nulls."""
    rows = table.to_pylist()
    rows = [{n: fill.get(n) if v is None else v for n, v in row.items()} for row in rows]
    rows = [{n: v.encode() if isinstance(v, str) else v for n, v in row.items()} for row in rows]
    return sorted(rows, key=lambda row: int(row["n"]))


PLACES = ("year=2020/kind=a%20b", "year=2021/kind=x", "year=__HIVE_DEFAULT_PARTITION__/kind=7", ".")


def test_partitions_are_columns_as_pyarrow_has_them(
    register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / "run=3" / "hive", *PLACES)
    monkeypatch.chdir(tmp_path / "run=3")
    fill = {"year": -1, "kind": "none"}
    files = sorted(glob.glob("hive/*/*/*.parquet"))
    for given, read, filled in (
        ("hive", "hive", fill),
        (Path("hive/year=2020"), "hive/year=2020", {}),
        (files, files, {"year": -1}),
        ("hive/year=202*/*/*.parquet", files[:2], {}),
        ("hive/year={2021,2020}/*/*.parquet", files[:2], {}),
        ("hive/year=2020/kind=a%20b/0.parquet", "hive/year=2020/kind=a%20b/0.parquet", {}),
    ):
        table = pq.read_table(read)
        expected = _as_read(table, **fill)
        for how in ({}, {"shuffle_records": True}, {"columns": [*table.column_names]}):
            request = register(given, fill=filled, **how)
            found = sorted(all_records(request), key=lambda row: int(row["n"]))
            assert found == expected
        for name in {"year"} & {*table.column_names}:
            (only,) = {type(row[name]) for row in all_records(register(given, fill=filled))}
            assert only is np.int32
            found = all_records(register(given, fill=filled, columns=["year"]))
            assert sorted(one["year"] for one in found) == sorted(one["year"] for one in expected)
    for name in ("year", "kind"):
        with pytest.raises(InvalidArgument, match=rf"has no '{name}', which .*fill=.'{name}': …"):
            register("hive", fill={one: value for one, value in fill.items() if one != name})
    for value in (2.5, "x", 2**40):
        with pytest.raises(InvalidArgument, match="fill="):
            register("hive", fill=fill | {"year": value})


def test_a_partition_beside_nested_columns(register: Register, tmp_path: Path) -> None:
    (tmp_path / "b=7").mkdir()
    table = pa.table({"a": [{"x": 1, "y": "z"}], "c": [[[1], [2, 3]]]})
    pq.write_table(table, tmp_path / "b=7" / "0.parquet")
    (found,) = all_records(register(tmp_path))
    assert (found["a"], found["b"]) == ({"x": 1, "y": b"z"}, 7)
    assert found["c"].row_splits.tolist() == [0, 1, 3]


def test_other_partitionings_are_pyarrows(register: Register, tmp_path: Path) -> None:
    _write(tmp_path / "d", "2020/1", "2021/2")
    _write(tmp_path / "h", "day=2020-01-02/b=1")
    schema = pa.schema([("day", pa.date32()), ("b", pa.bool_())])
    cases: list[tuple[str, Any]] = [
        ("d", ["year", "month"]),
        ("d", ds.partitioning(field_names=["year"])),
        ("d", None),
        ("h", ds.partitioning(schema, flavor="hive")),
    ]
    for directory, how in cases:
        read = pq.read_table(tmp_path / directory, partitioning=how)
        if "day" in read.column_names:
            at = read.schema.get_field_index("day")
            read = read.set_column(at, "day", read["day"].cast(pa.int32()).cast(pa.int64()))
        found = all_records(register(tmp_path / directory, partitioning=how))
        assert sorted(found, key=lambda row: int(row["n"])) == _as_read(read)
    with pytest.raises(InvalidArgument, match=r"partitioning=.* does not fit the names"):
        register(
            tmp_path / "h",
            partitioning=ds.partitioning(schema.set(0, pa.field("day", pa.int32())), flavor="hive"),
        )
    for wrong in (5, "directory", [1]):
        with pytest.raises(InvalidArgument, match="partitioning="):
            register(tmp_path / "d", partitioning=wrong)


def test_a_column_in_a_file_and_in_its_directorys_name(register: Register, tmp_path: Path) -> None:
    """Refused by name, unless it is said which one."""
    _write(tmp_path, "n=7")
    for how in ({}, {"columns": ["n"]}):
        with pytest.raises(InvalidArgument, match=r"has columns \['n'\], and so has its dir.*None"):
            register(tmp_path, **how)
    assert all_records(register(tmp_path, partitioning=None)) == [{"n": 0}, {"n": 1}]


def test_a_directory_of_a_table_is_refused(register: Register, tmp_path: Path) -> None:
    """It has files that are no longer the table's."""
    _write(tmp_path, "t/year=1")
    for name, kind in (("_delta_log", "Delta Lake"), (".hoodie", "Apache Hudi")):
        (tmp_path / "t" / name).mkdir()
        with pytest.raises(InvalidArgument, match=f"t is a table of {kind}, whose log .*parquet"):
            register(tmp_path)
        assert len(all_records(register(f"{tmp_path}/t/**/*.parquet"))) == 2
        (tmp_path / "t" / name).rmdir()


def test_files_whose_schemas_differ(register: Register, tmp_path: Path) -> None:
    """Sizes of lists may; the columns that differ are named, and only they."""

    def write(number: int, **columns: Any) -> None:
        pq.write_table(pa.table({"n": [number]} | columns), tmp_path / f"{number}.parquet")

    for number, kind in enumerate(
        (pa.list_(pa.int8(), 2), pa.list_(pa.int8(), 3), pa.list_(pa.int8()))
    ):
        write(number, a=pa.array([[1, 2, 3][: getattr(kind, "list_size", 1)]], kind))
        request = register(tmp_path)
        assert f'["a",{{"tensor":"int8","shape":[{"null" if number else 2}]}}]' in request.structure
        assert [one["n"] for one in all_records(request)] == [*range(number + 1)]
    write(2)
    for columns, said in (
        ({}, r"2\.parquet has records without \['a'\], and .*0\.parquet of \{a: int8\[\?\]\}: "),
        ({"a": [1]}, r"records of \{a: int64\[\]\}, and .*0\.parquet of \{a: int8\[\?\]\}: "),
        ({"b": [1]}, r"records of \{b: int64\[\]\} without \['a'\], and .*int8.* without \['b'\]"),
        ({"a": pa.nulls(1)}, r"2\.parquet has column 'a' of type null, whose values are all nulls"),
    ):
        write(2, **columns)
        with pytest.raises(InvalidArgument, match=said):
            register(tmp_path)


SAVED = Path(__file__).parent / "hugging_face"


def written(path: Path, *batches: pa.Table, file: bool = False, **how: Any) -> None:
    new = pa.ipc.new_file if file else pa.ipc.new_stream
    options = pa.ipc.IpcWriteOptions(**how)
    with pa.OSFile(str(path), "wb") as sink, new(sink, batches[0].schema, options=options) as out:
        for batch in batches:
            out.write_table(batch)


def test_datasets_that_hugging_face_saves(register: Register, tmp_path: Path) -> None:
    """A directory, without the caches that may lie in it."""
    shutil.copytree(SAVED, tmp_path / "d" / "train")
    wanted = []
    for number in range(2):
        path = str(tmp_path / "d" / "train" / f"data-0000{number}-of-00002.arrow")
        table = pa.ipc.open_stream(path).read_all()
        wanted += expected(table.to_pylist(), table.schema)
    assert len(wanted) == 25
    shutil.copy(path, tmp_path / "d" / "train" / "cache-0123456789abcdef.arrow")
    request = register(tmp_path / "d" / "train", split_records=1)
    assert [*request.lengths] == [7, 6, 7, 5]
    assert [*map(lists, all_records(request))] == wanted
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(InvalidArgument, match=r"d has several datasets .*train and test: give"):
        register(tmp_path / "d")


@pytest.mark.parametrize("file", [False, True])
def test_nested_columns(register: Register, tmp_path: Path, file: bool) -> None:
    table = table_of()
    parts = [table.slice(0, 7), table.slice(7, 0), table.slice(7, 20), table.slice(27)]
    written(tmp_path / "a.arrow", *parts, file=file, compression="zstd" if file else None)
    table = plain_times(table)
    wanted = expected(table.to_pylist(), table.schema)
    request = register(tmp_path, split_records=1)
    assert [*request.lengths] == [7, 20, 13]
    assert [*map(lists, all_records(request))] == wanted
    assert [*map(lists, records(request, 1, 3))] == wanted[10:27]
    shuffled = register(tmp_path, split_records=9, shuffle_records=True, seed=4)
    order = permuted_many(np.arange(len(wanted)), len(wanted), 4, 0)
    assert [*map(lists, all_records(shuffled))] == [wanted[at] for at in order]
    some = register(tmp_path, columns=["map.keys", "n"])
    assert [*map(lists, all_records(some))] == [
        {"map": {"keys": row["map"]["keys"]}, "n": row["n"]} for row in wanted
    ]
    with pytest.raises(InvalidArgument, match=r"has no columns \['map.x'\]: give some of"):
        register(tmp_path, columns=["map.x"])


@pytest.mark.parametrize("deltas", [False, True])
def test_dictionaries_that_grow_or_are_replaced(
    register: Register, tmp_path: Path, deltas: bool
) -> None:
    kinds = [["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"], ["x"]][: 3 if deltas else 4]
    batches = [
        pa.table({"k": pa.DictionaryArray.from_arrays(pa.array([*range(len(of))], pa.int8()), of)})
        for of in kinds
    ]
    written(tmp_path / "a.arrow", *batches, emit_dictionary_deltas=deltas)
    wanted = [{"k": kind.encode()} for of in kinds for kind in of]
    assert all_records(register(tmp_path)) == wanted
    request = register(tmp_path, split_records=4, shuffle_records=True)
    order = permuted_many(np.arange(len(wanted)), len(wanted), 0, 0)
    assert all_records(request) == [wanted[at] for at in order]


def test_nulls(register: Register, tmp_path: Path) -> None:
    """Also of lists of a fixed size, which Parquet has not."""
    fixed = pa.array([[1, 2], None, [5, None], None, [6, 7]], pa.list_(pa.int8(), 2))
    table = NULLS.append_column("z", fixed)
    written(tmp_path / "a.arrow", table.slice(0, 1), table.slice(1, 2), table.slice(3))
    with pytest.raises(InvalidArgument, match=r"a\.arrow has 1 nulls in column 'n': give"):
        register(tmp_path)
    with pytest.raises(InvalidArgument, match=r"1 nulls in column 'z': give"):
        register(tmp_path, columns=["z"])
    filled = [
        one["z"].tolist() for one in all_records(register(tmp_path, columns=["z"], fill={"z": -1}))
    ]
    assert filled == [[1, 2], [-1, -1], [5, -1], [-1, -1], [6, 7]]
    masked = all_records(register(tmp_path, nulls="mask"))
    assert [one["z.valid"].tolist() for one in masked] == [
        [True, True], [False, False], [True, False], [False, False], [True, True],
    ]  # fmt: skip
    assert [one["h.valid"] for one in masked] == [True, True, False, False, True]
    for shuffled in (False, True):
        kept = register(tmp_path, nulls="drop", shuffle_records=shuffled)
        assert [*kept.lengths] == [1]
        assert [one["n"] for one in all_records(kept)] == [1]
    kept = register(tmp_path, nulls="drop", columns=["n", "s", "z"])
    assert sorted(one["n"] for one in all_records(kept)) == [1, 5]
    kept = register(tmp_path, nulls="drop", columns=["n", "i"], fill={"i.y": 0})
    assert [one["n"] for one in all_records(kept)] == [1, 3, 4, 5]


def test_nulls_that_are_in_a_dictionary(register: Register, tmp_path: Path) -> None:
    kind = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["a", None]))
    written(tmp_path / "a.arrow", pa.table({"n": [1, 2, 3], "k": kind}))
    kept = register(tmp_path, nulls="drop")
    assert [one["n"] for one in all_records(kept)] == [1, 3]


@pytest.mark.parametrize("file", [False, True])
def test_files_that_are_cut_anywhere(register: Register, tmp_path: Path, file: bool) -> None:
    """A stream that is cut between batches is one of fewer batches, as PyArrow has it."""
    path = tmp_path / "a.arrow"
    table = pa.table({"n": [*range(9)], "s": ["text"] * 9})
    written(path, *[table.slice(at, 3) for at in (0, 3, 6)], file=file)
    whole = path.read_bytes()
    for size in range(8, len(whole), 40 if file else 24):
        path.write_bytes(whole[:size])
        try:
            found = [one["n"] for one in all_records(register(path, format="arrow"))]
        except ForebayError as error:
            assert str(path) in str(error)
        else:
            assert not file
            assert found == [*range(len(found))]
            assert len(found) == pa.ipc.open_stream(path).read_all().num_rows
    path.write_bytes(whole[:-1])
    if file:
        with pytest.raises(Corrupt, match="lacks the end of an Arrow file: it is cut"):
            register(path)


def test_damage_is_named_or_changes_values_alone(register: Register, tmp_path: Path) -> None:
    """There are no checksums, and no byte may end the process that reads."""
    path = tmp_path / "a.arrow"
    table = pa.table({"s": ["text", "", "more"], "l": [[1], [2, 3], []], "n": [1, 2, 3]})
    written(path, table)
    whole = path.read_bytes()
    for at in range(0, len(whole), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xC1]) + whole[at + 1 :])
        try:
            request = register(path, format="arrow")
            found = all_records(request)
        except ForebayError as error:
            assert str(path) in str(error)
        else:
            assert len(found) == sum(request.lengths)


def test_a_file_of_another_arrow_is_named(register: Register, tmp_path: Path) -> None:
    import pyarrow.feather

    table = pa.table({"n": [1, 2, 3]})
    pyarrow.feather.write_feather(table, tmp_path / "b.feather")
    assert [one["n"] for one in all_records(register(tmp_path / "b.feather"))] == [1, 2, 3]
    (tmp_path / "a.feather").write_bytes(b"FEA1" + bytes(40))  # of version 1
    with pytest.raises(Corrupt, match=r"a\.feather cannot .* no message begins at byte 0"):
        register(tmp_path / "a.feather")
    written(tmp_path / "c.arrow", table, use_legacy_format=True)
    with pytest.raises(Corrupt, match=r"no message begins at byte 0: .*, or of Arrow < 0\.15"):
        register(tmp_path / "c.arrow")
