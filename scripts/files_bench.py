"""Reads small elements of Parquet to the end, in order beside at most once.

    .venv/bin/python -m scripts.files_bench --json FILE

Two workers read 64 files of the page cache, and each trainer, a process, takes batches. The rate is
that of all, starts included; that of the second half shows what a long read has. Processor time is
of the trainers, of the workers, and of the workers' processes, which decode.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq

from forebay import service
from forebay.benchmarks.consume import serve
from forebay.benchmarks.servers import Responder, our_dispatcher, our_worker

FILES = 64
KINDS = {"rows of 4 KB": (4008, 100), "rows of 48 B": (48, 1000), "texts of 1 KB": (1032, 256)}
"""Bytes of an element, and elements of a batch."""

WAYS = ("at most once", "in order")


def write(directory: pathlib.Path, kind: str, megabytes: int) -> None:
    random, size = np.random.default_rng(1), KINDS[kind][0]
    rows = megabytes * 1_000_000 // size // FILES
    for number in range(FILES):
        ids = pa.array(np.arange(rows) + number * rows)
        columns = {"id": ids}
        if kind == "texts of 1 KB":
            lengths = random.integers(1000, 1040, rows)
            stops = np.cumsum(lengths)
            text = random.integers(97, 122, stops[-1], np.uint8).tobytes()
            spans = zip(stops - lengths, stops, strict=True)
            columns["text"] = pa.array([text[start:stop] for start, stop in spans])
        elif kind == "rows of 48 B":
            x = pa.FixedSizeListArray.from_arrays(random.random(rows * 8, np.float32), 8)
            columns |= {"x": x, "y": ids}
        else:
            columns["x"] = pa.FixedSizeListArray.from_arrays(random.random(rows * 500), 500)
        path = directory / f"{number:02}.parquet"
        group = max(1, rows // 4)
        pq.write_table(
            pa.table(columns), path, row_group_size=group, compression="none", use_dictionary=False
        )


def trainer(address: str, dataset_id: str) -> None:
    """A trainer's process."""

    def answer(way: str, job: str, batch: int, index: int, of: int) -> dict[str, float]:
        how: dict[str, Any] = {"processing_mode": service.ShardingPolicy.DYNAMIC}
        if way == "in order":
            how = {"ordered": True, "seed": 1, "consumer_index": index, "num_consumers": of}
        begun, cpu_s = time.perf_counter(), time.process_time()
        with service.read(address, dataset_id, job_name=job, batch_size=batch, **how) as batches:
            times = [time.perf_counter() for _ in batches]
        half = len(times) // 2
        return {
            "batches": len(times),
            "first_s": times[0] - begun,
            "all_s": times[-1] - begun,
            "second_half": (len(times) - half) / (times[-1] - times[half - 1]),
            "cpu_s": time.process_time() - cpu_s,
        }

    serve(answer)


def cpu_s(workers: list[psutil.Process], *, children: bool) -> float:
    """Of the workers themselves, or of their processes, also of those that have ended."""
    times = [worker.cpu_times() for worker in workers]
    if not children:
        return float(sum(each.user + each.system for each in times))
    theirs = [p.cpu_times() for w in workers for p in w.children(recursive=True)]
    ended = [each.children_user + each.children_system for each in (*times, *theirs)]
    return float(sum(ended) + sum(each.user + each.system for each in theirs))


def measure(kind: str, directory: pathlib.Path, trainers: int, rounds: int) -> dict[str, Any]:
    size, batch = KINDS[kind]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        at = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        dispatcher = stack.enter_context(our_dispatcher(at, collect=True))
        servers = [stack.enter_context(our_worker(dispatcher)) for _ in range(2)]
        for server in servers:
            server.wait_until_ready()
        workers = [psutil.Process(server.pid) for server in servers]
        dataset_id = service.register_files(dispatcher.address, str(directory / "*.parquet"))
        arguments = ("scripts.files_bench", "--trainer", dispatcher.address, dataset_id)
        processes = [stack.enter_context(Responder(*arguments)) for _ in range(trainers)]
        for process in processes:
            process.wait_until_ready()
        for number in range(rounds + 1):
            for way in WAYS:
                before = [cpu_s(workers, children=children) for children in (False, True)]
                for index, process in enumerate(processes):
                    process.ask(
                        way=way, job=f"{way} {number}", batch=batch, index=index, of=trainers
                    )
                answers = [process.answer_json() for process in processes]
                after = [cpu_s(workers, children=children) for children in (False, True)]
                megabytes = sum(a["batches"] for a in answers) * batch * size / 1e6
                if number:  # the first round warms up
                    rate = sum(a["second_half"] for a in answers) * batch * size / 1e6
                    found[way].append({
                        "mb_per_s": megabytes / max(a["all_s"] for a in answers),
                        "second_half_mb_per_s": rate,
                        "first_s": max(a["first_s"] for a in answers),
                        "trainers_ms_per_mb": sum(a["cpu_s"] for a in answers) * 1e3 / megabytes,
                        "workers_ms_per_mb": (after[0] - before[0]) * 1e3 / megabytes,
                        "processes_ms_per_mb": (after[1] - before[1]) * 1e3 / megabytes,
                    })  # fmt: skip
    return {
        way: {name: statistics.median(r[name] for r in readings) for name in readings[0]}
        for way, readings in found.items()
    }


def main() -> None:
    if sys.argv[1:2] == ["--trainer"]:
        trainer(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            write(pathlib.Path(name), kind, given.megabytes)
            for trainers in (1, 4):
                found = measure(kind, pathlib.Path(name), trainers, given.rounds)
                figures[f"{kind}, {trainers} trainers"] = found
    given.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(given.json.read_text())


if __name__ == "__main__":
    main()
