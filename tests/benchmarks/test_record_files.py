"""What the row of files of records takes for granted, of each library that is installed."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from forebay import service
from forebay.benchmarks import record_files
from forebay.benchmarks.record_files import FORMS, PARQUET_FILES, PEERS, TABLES, ask
from forebay.benchmarks.record_reader import Way
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
    record_files.write_parquet(tmp_path / kind, kind, groups=2)
    dataset_id = service.register_files(address, tmp_path / kind)
    way = Way(
        library="forebay", directory=str(tmp_path / kind), batched=True, batch=BATCH,
        address=address, dataset_id=dataset_id,
    )  # fmt: skip
    for each in (way, replace(way, library="pyarrow")):
        assert sorted(ask("order", **asdict(each))) == [*range(2 * ROWS * PARQUET_FILES)]
        assert ask("rate", seconds=0.01, **asdict(each)) > 0


@pytest.mark.timeout(400)  # a peer's imports may take a minute on a busy machine
@pytest.mark.parametrize("batched", FORMS)
@pytest.mark.parametrize("peer", PEERS)
def test_each_library_reads_all_records(
    peer: str, batched: bool, address: str, tmp_path: pathlib.Path
) -> None:
    """Where their environment is not made, the row says what to do."""
    files: dict[str, Any] = {"directory": str(tmp_path)}
    if not record_files.ENVIRONMENT.exists():
        with pytest.raises(ForebayError, match="run scripts/peers in a clone"):
            ask("write", library=peer, count=RECORDS, **files)
        return
    ask("write", library=peer, count=RECORDS, **files)
    dataset_id = record_files.register_records(address, tmp_path / PEERS[peer][1], batched)
    for library, processes in (("forebay", 0), (peer, 0), (peer, 1)):
        numbers = ask(
            "order", library=library, batched=batched, processes=processes, address=address,
            dataset_id=dataset_id, **files,
        )  # fmt: skip
        assert sorted(numbers) == [*range(RECORDS)] != numbers
