"""Files in an object store, read by workers that are killed and share a cache on their disk."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay import service
from forebay.service.pipelines.kinds import file_inspector
from forebay.service.processes import free_port

from ..cluster import WorkerProcess
from ..object_store import ACCESS_KEY, BUCKET, SECRET_KEY, Faults, ObjectStore, object_store
from ..scrapes import scraped, value
from ..standbys import status, wait_until
from ..stock import DispatcherProcess

FILES, ROWS = 6, 500
ORDER: dict[str, Any] = {"ordered": True, "seed": 3, "batch_size": 50}


def numbers(target: str, dataset_id: str) -> list[list[int]]:
    with service.read(target, dataset_id, **ORDER) as batches:
        return [batch["n"].tolist() for batch in batches]


@pytest.mark.timeout(240)
def test_an_epoch_of_a_faulty_store_is_the_same_whoever_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with object_store() as store, DispatcherProcess(tmp_path / "journal") as dispatcher:
        for name, text in store.environment.items():
            monkeypatch.setenv(name, text)
        file_inspector._fork_server.close()  # its children have the environment of its start
        _put(store, tmp_path)
        target = dispatcher.target
        dataset_id = service.register_files(target, f"s3://{BUCKET}/train/", split_records=100)
        assert store.proxy.lists == 1
        store.proxy.faults = Faults(unavailable=0.05, cut=0.03, reset=0.01)

        cache = tmp_path / "cache"

        def worker(**how: Any) -> WorkerProcess:
            started = WorkerProcess(dispatcher.address, os.environ, cache_directory=cache, **how)
            return started.wait_until_registered()

        workers = [worker(), worker()]
        whole = numbers(target, dataset_id)
        assert sorted(itertools.chain(*whole)) == [*range(FILES * ROWS)]
        workers.pop().kill()
        with service.read(target, dataset_id, **ORDER, start_step=20) as batches:
            rest = [next(batches)["n"].tolist() for _ in range(10)]
            workers.append(worker())
            workers.pop(0).kill()
            rest += [batch["n"].tolist() for batch in batches]
        assert rest == whole[20:]
        store.proxy.faults = Faults()
        store.proxy.forget()
        assert numbers(target, dataset_id) == whole
        assert store.proxy.gets == 0, "what one worker has fetched, another one finds"
        held, port = sum(path.stat().st_size for path in cache.rglob("*-*")), free_port()
        workers.append(worker(http_port=port))
        wait_until(lambda: value(scraped(port), "forebay_worker_cache_bytes") == held > 0)
        assert numbers(target, dataset_id) == whole

        def told() -> dict[str, int]:
            found = status(dispatcher)
            of = {one["address"]: one["cache"] for one in found["memory"]}
            return dict(of[workers[-1].address])

        wait_until(lambda: told()["hit_bytes"] > 0)
        others = {"held_bytes": held, "limit_bytes": 64 << 30, "missed_bytes": 0}
        assert told() | others == told()
        for one in workers:
            one.kill()
    said = "".join(capfd.readouterr())
    for path in (tmp_path / "journal").rglob("*"):
        said += path.read_bytes().decode("latin-1") if path.is_file() else ""
    assert SECRET_KEY not in said and ACCESS_KEY not in said


def _put(store: ObjectStore, tmp_path: Path) -> None:
    for number in range(FILES):
        rows = range(number * ROWS, (number + 1) * ROWS)
        path = tmp_path / "one.parquet"
        pq.write_table(pa.table({"n": rows, "text": ["text"] * ROWS}), path, row_group_size=100)
        store.client.upload_file(str(path), BUCKET, f"train/{number}.parquet")
