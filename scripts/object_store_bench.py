"""Reads 1 GB of Parquet in 64 objects, beside the same files on the local disk.

    .venv/bin/python -m scripts.object_store_bench --json FILE

In a clone only, as the server is that of the tests: moto's S3 behind a proxy with 30 ms a request,
which takes most of the two cores. So the same is read of nginx (Debian's), too, which takes little.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from forebay import service
from tests.object_store import BUCKET, Faults, ObjectStore, object_store

ROWS, GROUP, WIDTH = 4000, 1000, 500
LATENCY_S = 0.03


def write(directory: pathlib.Path, files: int) -> int:
    """Returns their bytes."""
    random = np.random.default_rng(0)
    for number in range(files):
        ids = np.arange(number * ROWS, (number + 1) * ROWS)
        values = pa.FixedSizeListArray.from_arrays(random.random(ROWS * WIDTH), WIDTH)
        table = pa.table({"id": ids, "x": values})
        path = directory / f"{number:03}.parquet"
        pq.write_table(table, path, row_group_size=GROUP, compression=None, use_dictionary=False)
    return sum(path.stat().st_size for path in directory.iterdir())


def read(target: str, dataset_id: str, how: dict[str, Any]) -> tuple[set[int], float]:
    """The ids, and how long it took."""
    begun, found = time.perf_counter(), set[int]()
    with service.read(target, dataset_id, batch_size=100, **how) as batches:
        for batch in batches:
            found.update(batch["id"].tolist())
    return found, time.perf_counter() - begun


def measure(store: ObjectStore, directory: pathlib.Path, files: int, rounds: int) -> dict[str, Any]:
    size, everything = write(directory, files), {*range(files * ROWS)}
    for path in sorted(directory.iterdir()):
        store.client.upload_file(str(path), BUCKET, f"train/{path.name}")
    store.proxy.faults = Faults(latency_s=LATENCY_S)
    os.environ.update(store.environment)
    figures: dict[str, Any] = {"bytes": size}
    ways: dict[str, dict[str, Any]] = {
        "once": {"processing_mode": "distributed_epoch"},
        "ordered": {"ordered": True, "seed": 1},
    }
    with service.DispatchServer() as dispatcher, tempfile.TemporaryDirectory() as cache:
        target = dispatcher.target

        def workers(**options: Any) -> list[service.WorkerServer]:
            config = service.WorkerConfig(dispatcher_address=target.partition("://")[2], **options)
            return [service.WorkerServer(config) for _ in range(2)]

        running = workers()
        begun = time.perf_counter()
        sources = {"s3": service.register_files(target, f"s3://{BUCKET}/train/*.parquet")}
        figures |= {"register_s": time.perf_counter() - begun, "lists": store.proxy.lists}
        sources["local"] = service.register_files(target, f"{directory}/*.parquet")
        port = _nginx(directory)
        names = f"{{000..{files - 1:03}}}.parquet"
        sources["http"] = service.register_files(target, f"http://127.0.0.1:{port}/{names}")
        for way, how in ways.items():
            rates: dict[str, list[float]] = {name: [] for name in sources}
            for _ in range(rounds):
                for name, dataset_id in sources.items():
                    store.proxy.forget()
                    found, took_s = read(target, dataset_id, how)
                    assert found == everything
                    rates[name].append(size / took_s / 1e6)
                    if name == "s3":
                        figures[f"{way}_fetched"] = store.proxy.sent_bytes / size
            figures[f"{way}_mb_per_s"] = rates
            for name in ("s3", "http"):
                pairs = zip(rates[name], rates["local"], strict=True)
                figures[f"{way}_{name}_to_local"] = statistics.median(a / b for a, b in pairs)
        store.proxy.faults = Faults(LATENCY_S, unavailable=0.05, cut=0.01, reset=0.001)
        store.proxy.forget()
        found, _ = read(target, sources["s3"], ways["once"])
        figures |= {"faults": store.proxy.failed, "all_despite_faults": found == everything}
        store.proxy.faults = Faults(latency_s=LATENCY_S)
        store.proxy.forget()
        half = ways["ordered"] | {"start_step": files * ROWS // 200, "cycle_length": 1}
        with service.read(target, sources["s3"], batch_size=100, **half) as some:
            next(iter(some))
            figures["bytes_before_first_at_half"] = store.proxy.sent_bytes
        for worker in running:
            worker.stop()
        running = workers(cache_directory=cache)
        for epoch in ("first", "second"):
            store.proxy.forget()
            assert read(target, sources["s3"], ways["ordered"])[0] == everything
            figures[f"cache_{epoch}_epoch_fetched"] = store.proxy.sent_bytes / size
        for worker in running:
            worker.stop()
    return figures


def _nginx(directory: pathlib.Path) -> int:
    """Serves the directory until this process ends. Returns its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    config = directory.parent / "nginx.conf"
    config.write_text(
        f"user {getpass.getuser()}; worker_processes 1; daemon off; error_log stderr;\n"
        f"pid {directory.parent}/nginx.pid;\n"
        "events { worker_connections 256; }\n"
        f"http {{ access_log off; sendfile on; server {{ listen 127.0.0.1:{port}; "
        f"root {directory}; }} }}\n"
    )
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program, "nginx is needed: scripts/tool nginx-light nginx -v"
    subprocess.Popen(["setpriv", "--pdeathsig", "TERM", program, "-c", str(config)])
    give_up_s = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return port
        except ConnectionRefusedError:
            assert time.monotonic() < give_up_s, "nginx does not listen"
            time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--files", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with object_store() as store, tempfile.TemporaryDirectory() as name:
        (directory := pathlib.Path(name, "files")).mkdir()
        figures = measure(store, directory, given.files, given.rounds)
    given.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(given.json.read_text())


if __name__ == "__main__":
    main()
