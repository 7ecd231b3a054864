"""Records that are left out alone, where a file or a function is registered so."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.service.blocks import Block
from forebay.service.errors import FailedPrecondition, InvalidArgument, PipelineError
from forebay.service.pipelines import PythonRules, SkipReport, SplitRange, open_pipeline
from forebay.service.pipelines.definitions import doubts_of
from forebay.service.pipelines.files.reading import FileRecords
from forebay.service.pipelines.files.tokens import TokenFile
from forebay.service.pipelines.kinds.files import definition
from forebay.service.pipelines.kinds.functions import python_dataset, request_of
from forebay.service.pipelines.tf_data.source_walk import NotSplittable
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto.python_pb2 import PythonDataset
from forebay.storage.tfrecord import frame

from ..record_files import definition_of, running, write_megatron
from .functions import INT, numbers
from .pipelines import OneSource


class Reading:
    """A worker's pipeline, and what was left out of it: by place, how many records and why."""

    def __init__(self, request: pb.RegisterDatasetRequest, limit: int = 100) -> None:
        self.left: dict[tuple[int, int], tuple[int, str]] = {}
        self.splits = request.sources[0].count

        def may_skip(report: SkipReport) -> bool:
            place = report.split, report.element
            if place not in self.left and len(self.left) >= limit:
                return False
            self.left[place] = report.records, report.reason
            return True

        rules = PythonRules(processes=1, may_skip=may_skip)
        definition = definition_of(request)
        self.pipeline: Any = open_pipeline(definition, request.python, python=rules)

    def run(self) -> list[int]:
        return numbers(self.pipeline.run(None).blocks())

    def bundle(self, first: int, count: int, start: int = 0, epoch: int = 0) -> list[int]:
        splits = SplitRange(first, count, epoch)
        return numbers(self.pipeline.bundle(splits, number=0, seed=3, start=start).blocks())


@pytest.fixture
def opened() -> Iterator[Callable[..., Reading]]:
    """Registers files, and opens what a worker has of them."""
    with contextlib.ExitStack() as closing:

        def made(files: Any, damage: tuple[Path, bytes] | None = None, **how: Any) -> Reading:
            request = definition(files, **how)
            assert bool(request.lengths) == (
                how.get("on_error") != "skip" and how.get("one_to_one", "map" not in how)
            )
            if damage is not None:
                path, what = damage
                data = bytearray(path.read_bytes())
                data[data.index(what)] ^= 1
                path.write_bytes(data)
            reading = Reading(request, how.get("limit", 100))
            closing.callback(reading.pipeline.close)
            return reading

        yield made


Opened = Callable[..., Reading]


def integers(path: Path, count: int = 60) -> Path:
    rows = [b"%d" % number + b" " * 2000 for number in range(count)]
    path.write_bytes(b"".join(map(frame, rows)))
    return path


def broken(record: bytes) -> int:
    if int(record) % 10 == 7 and int(record) != 47:
        raise SystemExit("broken") if int(record) == 17 else StopIteration("broken")
    return int(record) if int(record) != 47 else "of another type"  # type: ignore[return-value]


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_record_that_a_function_fails_on_is_left_out(
    opened: Opened, tmp_path: Path, shuffled: bool
) -> None:
    """Wherever a read begins, in each epoch; and so is one that does not fit."""
    path = integers(tmp_path / "a.tfrecord")
    how = {"on_error": "skip", "split_records": 25, "shuffle_records": shuffled, "seed": 5}
    made = opened(path, map=broken, **how)
    good = [number for number in range(60) if number % 10 != 7]
    assert sorted(made.run()) == good
    assert {(25 * split + at, n) for (split, at), (n, _) in made.left.items()} == {
        (number, 1) for number in {*range(60)} - {*good}
    }
    assert made.left[0, 7] == (1, f"record 7 of {path}: StopIteration('broken')")
    assert "record 47 of" in (said := made.left[1, 22][1]) and "'of another type'" in said
    whole = made.bundle(0, 2, epoch=1)
    for start in (1, 8, 24, len(whole)):
        assert made.bundle(0, 2, start, epoch=1) == whole[start:]
    assert sorted(whole + made.bundle(2, 1, epoch=1)) == good
    assert len(made.left) == 6


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_record_that_cannot_be_read_is_left_out(
    opened: Opened, tmp_path: Path, shuffled: bool, mapped: bool
) -> None:
    path = integers(tmp_path / "a.tfrecord")
    damage = path, b"31" + b" " * 2000
    how = {"map": int} if mapped else {}
    made = opened(path, damage, on_error="skip", split_records=60, shuffle_records=shuffled, **how)
    assert sorted(made.run()) == [n for n in range(60) if n != 31]
    assert (
        made.left
        == {(0, 31): (1, f"record 31 of {path}: its checksum does not fit its data; it is damaged")}
        or "record 31 of" in made.left[0, 31][1]
    )
    assert len(whole := made.bundle(0, 1)) == 59
    assert made.bundle(0, 1, 40) == whole[40:]


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("cut", "lacks"), [("a.bin", 100), ("a.idx", 800_100)])
def test_of_a_file_that_is_cut_while_it_is_read_nothing_is_left_out(
    tmp_path: Path, shuffled: bool, cut: str, lacks: int
) -> None:
    write_megatron(tmp_path / "a", [[n] * 10 for n in range(100_000)], "int32")
    path = tmp_path / "a.bin"
    how: dict[str, Any] = {
        "format": "tokens",
        "split_records": 100_000,
        "shuffle_records": shuffled,
    }
    dataset = PythonDataset.FromString(definition(path, on_error="skip", **how).python)
    records = FileRecords(dataset, lambda *_: True).blocks(0)
    next(records)
    os.truncate(tmp_path / cut, (tmp_path / cut).stat().st_size - lacks)
    with pytest.raises(FailedPrecondition, match=f"{cut} has .* and had "):
        list(records)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("off", [1, -1])
def test_a_format_that_gives_another_number_of_records_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffled: bool, off: int
) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100))
    dataset = PythonDataset.FromString(definition(path, shuffle_records=shuffled).python)
    take = TokenFile.take

    def wrong(file: TokenFile, records: Any) -> Block:
        found = take(file, records)
        return dataclasses.replace(found, count=found.count + off)

    monkeypatch.setattr(TokenFile, "take", wrong)
    with pytest.raises(PipelineError, match=f"'tokens' of .* gave .* from record .* of {path}"):
        list(FileRecords(dataset).blocks(0))


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_row_group_is_left_out_with_all_of_its_records(
    opened: Opened, tmp_path: Path, shuffled: bool
) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"x": np.arange(40_000)})
    how = {"use_dictionary": False, "compression": "NONE", "write_page_checksum": True}
    pq.write_table(table, path, row_group_size=10_000, **how)
    damage = path, np.arange(25_000, 25_009).tobytes()
    made = opened(
        path, damage, on_error="skip", shuffle_records=shuffled, split_records=20_000, limit=10_000
    )
    assert sorted(made.run()) == [*range(20_000), *range(30_000, 40_000)]
    assert [n for n, _ in made.left.values()] == [10_000]
    (reason,) = (why for _, why in made.left.values())
    assert f"records 20000 to 29999 of {path}: " in reason


def test_what_a_record_makes_is_none_or_several(opened: Opened, tmp_path: Path) -> None:
    path = integers(tmp_path / "a.tfrecord")

    def several(record: bytes) -> Any:
        number = int(record)
        if number == 40:
            raise ValueError("the last one")
        if number % 3 == 1:
            return None
        return iter([number] * 2) if number % 3 else [number] * 3

    made = opened(path, map=several, on_error="skip", split_records=60)
    expected = [
        number for number in range(60) for _ in range(0 if number == 40 else (3, 0, 2)[number % 3])
    ]
    assert made.run() == made.bundle(0, 1) == expected
    assert made.bundle(0, 1, 41) == expected[41:]
    strict = opened(path, map=several, split_records=60)
    with pytest.raises(PipelineError, match=rf"\(record 40 of {path}\), element 68: .*last one"):
        strict.run()
    with pytest.raises(InvalidArgument, match=r"`map` returned .*, and is .*one_to_one=False"):
        opened(path, map=several, shuffle_records=True)
    opened(path, map=lambda record: [] if int(record) else [0])


def test_no_more_than_the_limit_is_left_out(opened: Opened, tmp_path: Path) -> None:
    path = integers(tmp_path / "a.tfrecord")
    for limit in (0, 3):
        made = opened(path, map=_late, on_error="skip", split_records=60, limit=limit)
        for read in (made.run, lambda made=made: made.bundle(0, 1)):
            with pytest.raises(PipelineError, match=f"record {20 + limit} of") as failed:
                read()
            said = f"no more than {limit} splits are skipped"
            assert (said in str(failed.value)) == bool(limit)
        assert len(made.left) == limit
    with pytest.raises(ValueError, match="late"):
        opened(path, map=lambda record: _late(b"20"), on_error="skip", limit=5)
    for wrong in ({"limit": -1}, {"on_error": "ignore"}, {"one_to_one": False}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            opened(path, **wrong)


def _late(record: bytes) -> int:
    if int(record) >= 20:
        raise ValueError("late")
    return int(record)


def test_shuffled_records_that_are_left_out_have_no_order(tmp_path: Path) -> None:
    path = integers(tmp_path / "a.tfrecord")
    ways: list[dict[str, Any]] = [{"on_error": "skip"}, {"map": int, "one_to_one": False}]
    for how in ways:
        request = definition(path, shuffle_records=True, **how)
        with pytest.raises(NotSplittable, match="each epoch shuffles all records"):
            doubts_of(definition_of(request), request.python, ordered=True)
        assert doubts_of(definition_of(request), request.python, ordered=False) == []
    request = definition(path, shuffle_records=True, map=int)
    assert doubts_of(definition_of(request), request.python, ordered=True) == []


class _GoesOn:
    """An iterator that does not end where it raises."""

    def __init__(self, split: int) -> None:
        self._next = iter(range(10 * split, 10 * split + 10))

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        number = next(self._next)
        if number in (3, 4, 19):
            raise ValueError(f"no {number}")
        return number


def _generator(split: int) -> Iterator[Any]:
    for number in range(10 * split, 10 * split + 10):
        if number == 17:
            raise ValueError("no 17")
        yield number if number not in (3, 4) else "no number"


@pytest.mark.parametrize(
    ("function", "lost", "left"),
    [
        (_GoesOn, {3, 4, 19}, {(0, 3): 1, (0, 4): 1, (1, 9): 0}),
        (lambda split: map(int, map(str, _GoesOn(split))), {3, 4, 19}, None),
        (_generator, {3, 4, 17, 18, 19}, {(0, 3): 1, (0, 4): 1, (1, 7): 0}),
    ],
)
def test_a_function_goes_on_behind_what_it_fails_on_if_it_can(
    function: Any, lost: set[int], left: dict[tuple[int, int], int] | None
) -> None:
    """In a bundle as well. A generator has ended where it raised."""
    dataset = python_dataset(range(3), on_error="skip")(function)
    made = Reading(request_of(dataset, range(3), INT))
    try:
        expected = [number for number in range(30) if number not in lost]
        assert made.run() == made.bundle(0, 3) == expected
        assert made.bundle(0, 3, 9) == expected[9:]
        if left is not None:
            assert {place: n for place, (n, _) in made.left.items()} == left
            assert made.left[0, 3][1].startswith("split 0 (0), element 3: ")
    finally:
        made.pipeline.close()


def test_a_record_is_left_out_while_another_process_waits_for_splits() -> None:
    asked, left = itertools.count(), threading.Event()

    class Feed(OneSource):
        def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
            if not next(asked):
                return SplitRange(0, 1, 0)
            assert left.wait(20), "the feed waits for trainers, and they for these elements"
            return None

    def may_skip(report: SkipReport) -> bool:
        left.set()
        return True

    request = request_of(python_dataset(range(1), on_error="skip")(_GoesOn), range(1), INT)
    with running(request, processes=2, may_skip=may_skip) as pipeline:
        assert numbers(pipeline.run(Feed()).blocks()) == [0, 1, 2, 5, 6, 7, 8, 9]


def test_a_bundle_without_a_dispatcher_leaves_nothing_out() -> None:
    """As where it is materialized: nobody would count."""
    request = request_of(python_dataset(range(3), on_error="skip")(_generator), range(3), INT)
    with running(request) as pipeline, pytest.raises(PipelineError, match="'no number'"):
        numbers(pipeline.bundle(SplitRange(0, 3, 0), number=0, seed=3).blocks())
