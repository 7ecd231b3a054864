"""`map_batch` of register_files: a function that is called with many records at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.service.errors import InvalidArgument, PipelineError
from forebay.service.order import permuted_many
from forebay.service.pipelines import SplitRange
from forebay.service.pipelines.files.reading import BATCH
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.structure import assemble

from ..record_files import Register, running

ROWS = 1000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    table = pa.table(
        {
            "n": np.arange(ROWS),
            "pair": pa.FixedSizeListArray.from_arrays(np.arange(2.0 * ROWS), 2),
            "text": [f"{n}" for n in range(ROWS)],
            "list": [[*range(n % 5)] for n in range(ROWS)],
        }
    )
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=300)
    return tmp_path / "0.parquet"


def elements(request: pb.RegisterDatasetRequest, split: int = 0, start: int = 0) -> list[Any]:
    build = assemble(request.structure)
    found: list[Any] = []
    with running(request) as pipeline:
        run = pipeline.bundle(SplitRange(split, 1, 0), number=1, seed=5, start=start)
        for block in run.blocks():
            found += build([one.elements() for one in block.components], block.count)
    return found


def mapped(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        "sum": batch["n"] + batch["pair"].sum(axis=1),
        "image": np.repeat(batch["n"][:, None], 7, axis=1).astype(np.float32),
        "text": [text * 2 for text in batch["text"]],
        "list": [np.append(values, 9) for values in batch["list"]],
        "drawn": np.random.random(len(batch["n"])),
        "also": np.full(len(batch["n"]), random.random()),
    }


def plain(element: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in element.items()}


@pytest.mark.parametrize("start", [0, 1, BATCH - 1, BATCH, 700, ROWS])
def test_elements_and_random_numbers_are_the_same_from_each_start(
    register: Register, path: Path, start: int
) -> None:
    request = register(path, map_batch=mapped, split_records=ROWS)
    assert [*request.lengths] == [ROWS]
    everything = [*map(plain, elements(request))]
    assert [one["sum"] for one in everything] == [5.0 * n + 1 for n in range(ROWS)]
    assert [one["image"] for one in everything] == [[float(n)] * 7 for n in range(ROWS)]
    assert [one["text"] for one in everything] == [f"{n}".encode() * 2 for n in range(ROWS)]
    assert [one["list"] for one in everything] == [[*range(n % 5), 9] for n in range(ROWS)]
    assert len({one["drawn"] for one in everything}) == ROWS
    assert len({one["also"] for one in everything}) == -(-ROWS // BATCH)
    assert [*map(plain, elements(request, start=start))] == everything[start:]


def test_shuffled_records_are_mapped_in_the_reads_order(register: Register, path: Path) -> None:
    request = register(
        path, columns=["n"], map_batch=lambda batch: batch["n"], split_records=400,
        shuffle_records=True,
    )  # fmt: skip
    order = permuted_many(np.arange(ROWS), ROWS, 5, 0).tolist()
    assert elements(request, split=1, start=3) == order[403:800]


def test_blocks_of_large_elements_are_bounded(register: Register, path: Path) -> None:
    request = register(
        path, columns=["n"], split_records=ROWS,
        map_batch=lambda batch: np.zeros((len(batch["n"]), 100_000), np.uint8),
    )  # fmt: skip
    with running(request) as pipeline:
        sizes = [block.payload_bytes for block in pipeline.run(None).blocks()]
    assert sum(sizes) == 100_000 * ROWS and max(sizes) <= 8 << 20


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda batch: batch["n"][:-1], r"for 256 records"),
        (lambda batch: {"a": batch["n"], "b": 3}, r"for 256 records"),
        (lambda batch: 1 / 0, "division by zero"),
    ],
)
def test_what_no_batch_is_is_refused_at_registration(
    register: Register, path: Path, wrong: Callable[[Any], Any], said: str
) -> None:
    with pytest.raises((InvalidArgument, ZeroDivisionError), match=said):
        register(path, map_batch=wrong)


@pytest.mark.parametrize(
    ("late", "said"),
    [
        (lambda n: n[:-1], r"element 512.*int64\[255\], for 256 records"),
        (lambda n: n.astype(np.int32), r"element 512.*registered as int64"),
        (lambda n: n / 0, r"element 512"),
        (lambda n: [*n[:-1], "text"], r"element 767.*element is 'text'"),
    ],
)
def test_a_batch_that_goes_wrong_ends_the_read(
    register: Register, path: Path, late: Callable[[Any], Any], said: str
) -> None:
    def at_the_third(batch: dict[str, Any]) -> Any:
        with np.errstate(all="raise"):
            return late(batch["n"]) if batch["n"][0] == 2 * BATCH else batch["n"]

    request = register(path, columns=["n"], map_batch=at_the_third, split_records=ROWS)
    with pytest.raises(PipelineError, match=said):
        elements(request)


def test_options_that_have_no_place_beside_it(register: Register, path: Path) -> None:
    for wrong in (
        {"map": int}, {"on_error": "skip"}, {"one_to_one": False}, {"map_batch": "int"},
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match="give a function of many records"):
            register(path, **({"map_batch": mapped} | wrong))
