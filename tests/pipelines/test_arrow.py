"""Files of Arrow's record batches, held against PyArrow's reader.

tests/pipelines/hugging_face was written by datasets 5.2.0 with pyarrow 26.0.1:
datasets.config.DEFAULT_MAX_BATCH_SIZE = 7; Dataset.from_dict(rows, features=Features({"id":
Value("int64"), "text": Value("string"), "tokens": List(Value("int32")), "label":
ClassLabel(names=["no", "yes"]), "meta": {"score": Value("float32"), "tags":
List(List(Value("string")))}, "pairs": List({"q": Value("string"), "a": Value("int16")})}))
.save_to_disk(…, num_shards=2), with 25 rows.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from forebay.service.errors import ForebayError, InvalidArgument
from forebay.service.order import permuted_many
from forebay.storage.errors import Corrupt

from ..record_files import Register, all_records, records
from .test_nested import NULLS, expected, lists, plain_times, table_of

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
