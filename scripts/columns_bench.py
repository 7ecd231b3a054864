"""Reads 200 MB of columns of Parquet by one worker, beside PyArrow's scanner on the same files.

    .venv/bin/python -m scripts.columns_bench --json FILE

Both give batches of NumPy arrays to one process, which adds up the ids. Dispatcher and worker have
processes of their own, on the same host. The files stay in the page cache.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

from forebay import service
from forebay.benchmarks.servers import our_dispatcher, our_worker

FILES, ROWS, GROUP, WIDTH = 8, 240_000, 80_000, 16
BATCH = 4096
ROW_BYTES = 4 * 4 + 3 * 8 + 4 * WIDTH
ALL = sum(range(FILES * ROWS))


def write(directory: pathlib.Path) -> None:
    """With PyArrow's settings, but for the size of row groups."""
    random = np.random.default_rng(0)
    for number in range(FILES):
        columns: dict[str, Any] = {"id": np.arange(number * ROWS, (number + 1) * ROWS)}
        columns |= {f"f{at}": random.random(ROWS, np.float32) for at in range(4)}
        columns |= {f"n{at}": random.integers(0, 1 << 40, ROWS) for at in range(2)}
        values = random.random(ROWS * WIDTH, np.float32)
        columns["x"] = pa.FixedSizeListArray.from_arrays(values, WIDTH)
        pq.write_table(pa.table(columns), directory / f"{number}.parquet", row_group_size=GROUP)


def scanned(directory: pathlib.Path) -> Iterator[dict[str, Any]]:
    """By PyArrow, with its threads."""
    for batch in pyarrow.dataset.dataset(directory).scanner(batch_size=BATCH).to_batches():
        found = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            is_list = pa.types.is_fixed_size_list(column.type)
            values = (column.flatten() if is_list else column).to_numpy(zero_copy_only=False)
            found[name] = values.reshape(len(column), -1) if is_list else values
        yield found


def rate(batches: Iterator[dict[str, Any]], begun_s: float) -> float:
    """MB/s, without compression."""
    total = sum(int(batch["id"].sum()) for batch in batches)
    took_s = time.perf_counter() - begun_s
    assert total == ALL, "records are missing, or came twice"
    return FILES * ROWS * ROW_BYTES / took_s / 1e6


def measure(directory: pathlib.Path, rounds: int) -> dict[str, Any]:
    (files := directory / "files").mkdir()
    write(files)
    ways: dict[str, dict[str, Any]] = {
        "at most once": {"processing_mode": "distributed_epoch"},
        "in order": {"ordered": True, "cycle_length": 1},
    }
    rates: dict[str, list[float]] = {name: [] for name in ("pyarrow", *ways)}
    with our_dispatcher(directory) as dispatcher, our_worker(dispatcher) as worker:
        worker.wait_until_ready()
        dataset_id = service.register_files(dispatcher.address, files)
        for number in range(rounds + 1):
            found = {"pyarrow": rate(scanned(files), time.perf_counter())}
            for way, how in ways.items():
                begun_s = time.perf_counter()
                with service.read(
                    dispatcher.address, dataset_id, batch_size=BATCH, **how
                ) as batches:
                    found[way] = rate(batches, begun_s)
            if number:  # the first one warms up
                for name, one in found.items():
                    rates[name].append(one)
    figures: dict[str, Any] = {"mb_per_s": rates}
    for way in ways:
        pairs = [a / b for a, b in zip(rates[way], rates["pyarrow"], strict=True)]
        figures[way] = {"median": statistics.median(pairs), "range": [min(pairs), max(pairs)]}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        figures = measure(pathlib.Path(name), given.rounds)
    given.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(given.json.read_text())


if __name__ == "__main__":
    main()
