"""`forebay audit --record` and `forebay diff`, against what trainers were given."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from forebay import service
from forebay.service.cli import app
from forebay.service.errors import ForebayError

from ..ordered_reads import Cluster, read

ORDER: dict[str, Any] = {"seed": 3, "batch_size": 8, "cycle_length": 3, "block_length": 2}
ROWS, FILES = 40, 5
BROKEN = {13, 77, 78}


def said(*arguments: object) -> Any:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    return json.loads(done.output)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Row r of file f is the number 40 f + r."""
    folder = tmp_path_factory.mktemp("files")
    numbers = iter(np.arange(ROWS * FILES))
    paths = [folder / f"part-{n}.parquet" for n in range(FILES)]
    for path in paths:
        pq.write_table(pa.table({"n": [*itertools.islice(numbers, ROWS)]}), path)
    return paths


def numbers(cluster: Cluster, dataset_id: str, **how: Any) -> list[list[int]]:
    """The global batches of two epochs, which two trainers read."""
    found: list[list[int]] = []
    for _ in range(2):
        line = read(
            cluster.target, dataset_id, 2, start_position=sum(map(len, found)), **how
        ).numbers
        found += [line[n : n + 16] for n in range(0, len(line), 16)]
    return found


@pytest.mark.parametrize("shuffled", [False, True])
def test_where_a_record_was(cluster: Cluster, files: list[Path], shuffled: bool) -> None:
    dataset = service.register_files(
        cluster.target, files, shuffle_records=shuffled, split_records=7,
        map=lambda record: record["n"], one_to_one=True,
    )  # fmt: skip
    name = f"records {shuffled}"
    steps = numbers(cluster, dataset, job_name=name, **ORDER)
    for number in (0, 41, 78, 199):
        record = f"part-{number // ROWS}.parquet:{number % ROWS}"
        found = said("audit", cluster.journal, name, "--record", record)["found"]
        at = [(each["step"], each["consumer"]) for each in found]
        wanted = [
            (step, batch.index(number) // 8) for step, batch in enumerate(steps) if number in batch
        ]
        assert at == wanted and len(at) == 2 and {e["status"] for e in found} == {"given"}
        one = said("audit", cluster.journal, name, "--record", record, "--epoch", 1)["found"]
        assert [(each["step"], each["consumer"]) for each in one] == wanted[1:]


def fails_on_some(record: dict[str, Any]) -> Any:
    if int(record["n"]) in BROKEN:
        raise ValueError("broken")
    return record["n"]


def test_records_behind_one_that_was_skipped(cluster: Cluster, files: list[Path]) -> None:
    dataset = service.register_files(
        cluster.target, files, split_records=40, map=fails_on_some, one_to_one=True, on_error="skip"
    )
    steps = numbers(cluster, dataset, job_name="skips some", **ORDER)
    for number in (12, 14, 79, 80):
        record = f"{files[number // ROWS]}:{number % ROWS}"
        found = said("audit", cluster.journal, "skips some", "--record", record)["found"]
        wanted = [step for step, batch in enumerate(steps) if number in batch]
        assert [each["step"] for each in found] == wanted
    with pytest.raises(ForebayError, match=r"record 13 of .*part-0.* was skipped: .*broken"):
        said("audit", cluster.journal, "skips some", "--record", f"{files[0]}:13")


def test_what_is_no_record(cluster: Cluster, files: list[Path]) -> None:
    dataset = service.register_files(cluster.target, files)
    read(cluster.target, dataset, steps=1, job_name="no records", **ORDER)
    for record, match in (
        ("part-0.parquet", "not of the form FILE:ROW"),
        ("other.parquet:1", "no file other.parquet"),
        ("part-0.parquet:40", "has 40 records, from 0 on, and not 40"),
    ):
        with pytest.raises(ForebayError, match=match):
            said("audit", cluster.journal, "no records", "--record", record)
    graph = service.register_dataset(cluster.target, lambda n: iter([n]), splits=range(9))
    read(cluster.target, graph, steps=1, job_name="of a function", **ORDER)
    with pytest.raises(ForebayError, match="its splits are given to a function"):
        said("audit", cluster.journal, "of a function", "--record", "x:1")


class TestDiff:
    def test_jobs_that_read_the_same(self, cluster: Cluster, files: list[Path]) -> None:
        dataset = service.register_files(cluster.target, files)
        for name in ("one", "two"):
            read(cluster.target, dataset, job_name=name, **ORDER)
        found = said("diff", cluster.journal, "one", "two")
        assert found["differences"] == [] and found["verdict"].startswith("they read the same data")

    def test_what_was_decided(self, cluster: Cluster, files: list[Path]) -> None:
        dataset = service.register_files(cluster.target, files)
        for name in ("plain", "skipped"):
            read(cluster.target, dataset, steps=2, job_name=name, **ORDER)
        service.skip_steps(cluster.target, "skipped", 7, 9)
        (part,) = said("diff", cluster.journal, "plain", "skipped")["differences"]
        assert (part["position"], part["first_step"], part["second_step"]) == (56, 7, 7)

    def test_weights_part_where_another_source_is_picked(
        self, cluster: Cluster, files: list[Path]
    ) -> None:
        sources = {
            name: (service.register_files(cluster.target, [file]), 1.0)
            for name, file in zip("abc", files, strict=False)
        }
        mixture = service.register_mixture(cluster.target, sources)
        for name in ("even", "uneven"):
            read(cluster.target, mixture, steps=2, job_name=name, **ORDER)
        service.change_weights(cluster.target, "uneven", {"a": 2.0}, from_step=5)
        lines = [
            [
                row
                for step in range(12)
                for row in service.batch_of(cluster.target, name, step)["n"].tolist()
            ]
            for name in ("even", "uneven")
        ]
        wanted = next(at for at, (one, other) in enumerate(zip(*lines)) if one != other)  # noqa: B905
        (part,) = said("diff", cluster.journal, "even", "uneven")["differences"]
        assert part["position"] == wanted >= 40 and part["second_step"] == wanted // 8

    def test_other_datasets_and_orders(self, cluster: Cluster, files: list[Path]) -> None:
        for name, those, seed in (("all", files, 3), ("some", files[1:], 3), ("other", files, 4)):
            dataset = service.register_files(cluster.target, those)
            read(cluster.target, dataset, steps=1, job_name=name, **{**ORDER, "seed": seed})
        for other, what in (("some", "dataset"), ("other", "seed")):
            found = said("diff", cluster.journal, "all", other)
            assert what in [each["what"] for each in found["differences"]]
