"""What the row of files of records takes for granted, of PyArrow. Test_resumable has the others."""

from __future__ import annotations

import pathlib

import pytest

from forebay import service
from forebay.benchmarks import record_files
from forebay.benchmarks.record_files import PARQUET_FILES, TABLES, write_parquet
from forebay.benchmarks.resumable import FOREBAY, Files, Way

ROWS, BATCH = 600, 100


@pytest.mark.parametrize("kind", TABLES)
def test_both_read_all_rows(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "GROUP_ROWS", ROWS)
    write_parquet(tmp_path / kind, kind, groups=2)
    files = Files(tmp_path, 0, 1, None)
    how = {"directory": str(tmp_path / kind), "batch": BATCH}
    with (
        service.DispatchServer(service.DispatcherConfig(port=0)) as dispatcher,
        service.WorkerServer(
            service.WorkerConfig(dispatcher_address=dispatcher.target.partition("://")[2])
        ),
    ):
        files.address = dispatcher.target.partition("://")[2]
        how["dataset_id"] = service.register_files(dispatcher.target, tmp_path / kind)
        for library in ("pyarrow", FOREBAY):
            way = Way(library, batched=True)
            numbers = files.ask(way, "order", **how).numbers
            assert sorted(numbers) == [*range(2 * ROWS * PARQUET_FILES)]
            assert files.ask(way, "rate", seconds=0.01, **how).records % BATCH == 0
