"""What the row of files of records takes for granted, of each library that is installed."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from forebay import service
from forebay.benchmarks import record_files
from forebay.benchmarks.record_files import (
    FORMATS,
    FORMS,
    PARQUET_FILES,
    TABLES,
    Files,
    Way,
    peers_python,
    write_parquet,
)
from forebay.service.errors import ForebayError

ROWS, BATCH = 600, 100


RECORDS = 5_000


@pytest.fixture
def address() -> Iterator[str]:
    with service.DispatchServer(service.DispatcherConfig(port=0)) as dispatcher:
        found = dispatcher.target.partition("://")[2]
        with service.WorkerServer(service.WorkerConfig(dispatcher_address=found)):
            yield found


@pytest.mark.parametrize("kind", TABLES)
def test_both_read_all_rows(
    kind: str, address: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "GROUP_ROWS", ROWS)
    write_parquet(tmp_path / kind, kind, groups=2)
    files = Files(tmp_path, 0, None)
    files.address = address
    how = {"directory": str(tmp_path / kind), "batch": BATCH}
    how["dataset_id"] = service.register_files(address, tmp_path / kind)
    for library in ("pyarrow", "forebay"):
        way = Way(library, batched=True)
        numbers = files.ask(way, "order", **how).numbers
        assert sorted(numbers) == [*range(2 * ROWS * PARQUET_FILES)]
        assert files.ask(way, "rate", seconds=0.01, **how).records % BATCH == 0


@pytest.mark.timeout(400)  # a peer's imports may take a minute on a busy machine
@pytest.mark.parametrize("batched", FORMS)
@pytest.mark.parametrize("peer", FORMATS)
def test_each_library_reads_all_records(
    peer: str, batched: bool, address: str, tmp_path: pathlib.Path
) -> None:
    """Where their environment is not made, the row says what to do."""
    if not record_files.ENVIRONMENT.exists():
        with pytest.raises(ForebayError, match="run scripts/peers in a clone"):
            peers_python()
        return
    files = Files(tmp_path, RECORDS, peers_python())
    files.address = address
    files.ask(Way(peer, batched=False), "write")
    pattern, library = FORMATS[peer]
    dataset_id = service.register_files(
        address, tmp_path / pattern, shuffle_records=True,
        map=record_files._as_array if batched else None,
    )  # fmt: skip
    for way in (Way(library, batched), Way(peer, batched), Way(peer, batched, 1)):
        numbers = files.ask(way, "order", dataset_id=dataset_id).numbers
        assert sorted(numbers) == [*range(RECORDS)] != numbers
