"""Registers and reads 100,000 small objects of an S3 server, and 3,000 of them.

    .venv/bin/python -m scripts.many_objects_bench --json FILE --format jsonl

The server is nginx (Debian's), with lists as files: it has the same cores, and its processor time
is counted apart. Bare requests, of as many threads and nothing else, are the floor.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from forebay import service
from forebay.benchmarks.machine import memory_mb
from forebay.benchmarks.servers import our_dispatcher, our_worker

from .object_store_bench import cpu_s, nginx

PAGE, ROWS, FEW, THREADS = 1000, 40, 3000, 64


def write(directory: pathlib.Path, bucket: str, objects: int, of: str, nulls: str) -> None:
    """Objects of 2 to 4 KB, and the pages of their list."""
    (folder := directory / bucket / "train").mkdir(parents=True)
    (lists := directory / "lists" / bucket).mkdir(parents=True)
    draws, about = np.random.default_rng(0), list[str]()
    for number in range(objects):
        path = folder / f"{number:06}.{of}"
        ids = range(number * ROWS, (number + 1) * ROWS)
        if of == "jsonl":
            values = draws.random(ROWS).tolist()
            lines = zip(ids, values, strict=True)
            path.write_text("".join(f'{{"id": {a}, "x": {b}, "text": "a"}}\n' for a, b in lines))
        else:
            values = [None if nulls == "drop" and n == 7 else n for n in range(ROWS)]
            pq.write_table(pa.table({"id": [*ids], "x": values}), path)
        stat = path.stat()
        about.append(
            f"<Contents><Key>train/{path.name}</Key><Size>{stat.st_size}</Size>"
            f'<ETag>"{int(stat.st_mtime):x}-{stat.st_size:x}"</ETag>'
            "<LastModified>2026-11-30T00:00:00.000Z</LastModified></Contents>"
        )
    for page, begin in enumerate(range(0, objects, PAGE)):
        more = begin + PAGE < objects
        token = f"<NextContinuationToken>{page + 1}</NextContinuationToken>" if more else ""
        (lists / str(page)).write_text(
            f"<ListBucketResult><Name>{bucket}</Name><IsTruncated>{str(more).lower()}"
            f"</IsTruncated>{token}{''.join(about[begin : begin + PAGE])}</ListBucketResult>"
        )


def bare(urls: list[str]) -> None:
    """In a process of its own."""
    import obstore

    store = obstore.store.from_url("s3://many")
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(lambda url: bytes(obstore.get(store, url).bytes()), urls):
            pass


def tree_mb(pid: int) -> float:
    """Memory of a process and all below it, pages that they share counted once."""
    left, found = [pid], 0.0
    while left:
        one = left.pop()
        with contextlib.suppress(OSError):
            lines = pathlib.Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            found += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            for task in pathlib.Path(f"/proc/{one}/task").iterdir():
                left += map(int, (task / "children").read_text().split())
    return found * 1024 / 1e6


def measure(directory: pathlib.Path, bucket: str, objects: int, of: str, nulls: str) -> Any:
    figures: dict[str, Any] = {}
    with our_dispatcher(directory / bucket) as dispatcher, our_worker(dispatcher) as worker:
        worker.wait_until_ready()
        target, begun, used = dispatcher.address, time.perf_counter(), cpu_s(os.getpid())
        more: dict[str, Any] = {"nulls": nulls} if of == "parquet" else {}
        dataset_id = service.register_files(target, f"s3://{bucket}/train/*.{of}", **more)
        figures["register_s"] = time.perf_counter() - begun
        figures["register_cpu_s"] = cpu_s(os.getpid()) - used
        begun = time.perf_counter()
        with service.read(target, dataset_id, ordered=True, seed=1, batch_size=100) as batches:
            next(iter(batches))
            figures["first_ordered_s"] = time.perf_counter() - begun
        begun, found = time.perf_counter(), 0
        how: dict[str, Any] = {"processing_mode": "distributed_epoch", "batch_size": 1000}
        with service.read(target, dataset_id, **how) as batches:
            for batch in batches:
                found += len(batch["id"])
        figures["epoch_s"] = time.perf_counter() - begun
        assert found == objects * (ROWS - (nulls == "drop"))
        figures["dispatcher_mb"] = memory_mb(dispatcher.pid, "VmRSS")
        figures["worker_mb"] = tree_mb(worker.pid)
        took = []
        for _ in range(5):
            begun = time.perf_counter()
            command = [sys.executable, "-m", "forebay.service.cli", "status", target]
            subprocess.run(command, check=True, capture_output=True)
            took.append(time.perf_counter() - begun)
        figures["status_s"] = statistics.median(took)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--objects", type=int, default=100_000)
    parser.add_argument("--nulls", choices=("raise", "drop"), default="raise")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        for bucket, objects in (("few", FEW), ("many", given.objects)):
            write(directory, bucket, objects, given.format, given.nulls)
        port, server = nginx(
            directory,
            "map $args $page { default 0; ~continuation-token=(?<n>\\d+) $n; } "
            f"server {{ listen 127.0.0.1:PORT; root {directory}; keepalive_requests 1000000; "
            "location = /few { try_files /lists/few/$page =404; } "
            "location = /many { try_files /lists/many/$page =404; } }",
        )
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip
        urls = [f"train/{number:06}.{given.format}" for number in range(given.objects // 5)]
        count = len(os.sched_getaffinity(0))
        begun, used = time.perf_counter(), cpu_s(server)
        with multiprocessing.get_context("spawn").Pool(count) as pool:
            pool.map(bare, [urls[at::count] for at in range(count)], 1)
        figures: dict[str, Any] = {
            "objects": given.objects,
            "bare_requests_per_s": len(urls) / (time.perf_counter() - begun),
            "server_cpu_us_per_request": (cpu_s(server) - used) / len(urls) * 1e6,
        }
        for bucket, objects in (("few", FEW), ("many", given.objects)):
            used = cpu_s(server)
            figures[bucket] = measure(directory, bucket, objects, given.format, given.nulls)
            figures[bucket]["server_cpu_s"] = cpu_s(server) - used
    given.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(given.json.read_text())


if __name__ == "__main__":
    main()
