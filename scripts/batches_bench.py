"""Reads batches of 32 images of 150 KB in order, beside trainers that stack them at most once.

    .venv/bin/python -m scripts.batches_bench --json FILE

Two workers make the images; each trainer is a process. The lengths of bundles are known: a first
job reads the dataset to its end. Each way then reads for some seconds, in turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from forebay import service
from forebay.benchmarks.consume import measured, serve
from forebay.benchmarks.results import Reading, together
from forebay.benchmarks.servers import Responder, our_dispatcher, our_worker

IMAGES, IMAGE_BYTES, BATCH, SPLITS = 120_000, 150_528, 32, 1_000
WARM_UP_S, SECONDS = 2.0, 2.5
WAYS = {"at most once, stacked": 0, "block_length=1": 1, "block_length=8": 8, "block_length=32": 32}


def stacked(images: Iterator[Any]) -> Iterator[Any]:
    while batch := [*itertools.islice(images, BATCH)]:
        yield np.stack(batch)


def trainer(address: str, dataset_id: str) -> None:
    """A trainer's process."""

    def answer(
        block_length: int, job: str, index: int, of: int, workers: list[int], to_the_end: bool
    ) -> Reading:
        def begin() -> Iterator[Any]:
            if not block_length:
                mode = service.ShardingPolicy.DYNAMIC
                how: dict[str, Any] = {"processing_mode": mode, "job_name": job}
                return stacked(service.read(address, dataset_id, **how))
            return service.read(
                address, dataset_id, ordered=True, job_name=job, batch_size=BATCH,
                consumer_index=index, num_consumers=of, block_length=block_length,
                bundle_splits=SPLITS,
            )  # fmt: skip

        seconds = 1e9 if to_the_end else SECONDS
        return measured(begin, workers, 0.0 if to_the_end else WARM_UP_S, seconds, BATCH)

    serve(answer)


def measure(directory: pathlib.Path, trainers: int, rounds: int) -> dict[str, Any]:
    import tensorflow as tf

    def image(number: Any) -> Any:
        return tf.fill([IMAGE_BYTES], tf.cast(number % 251, tf.uint8))

    with ExitStack() as stack:
        dispatcher = stack.enter_context(our_dispatcher(directory, collect=True))
        workers = [stack.enter_context(our_worker(dispatcher)) for _ in range(2)]
        for worker in workers:
            worker.wait_until_ready()
        dataset_id = service.register_dataset(
            dispatcher.address, tf.data.Dataset.range(IMAGES).map(image)
        )
        arguments = ("scripts.batches_bench", "--trainer", dispatcher.address, dataset_id)
        processes = [stack.enter_context(Responder(*arguments)) for _ in range(trainers)]

        def read(block_length: int, job: str, to_the_end: bool = False) -> Reading:
            for index, process in enumerate(processes):
                process.wait_until_ready()
                process.ask(
                    block_length=block_length, job=job, index=index, of=trainers,
                    workers=[worker.pid for worker in workers], to_the_end=to_the_end,
                )  # fmt: skip
            return together([Reading(**process.answer_json()) for process in processes])

        read(1, "lengths", to_the_end=True)
        found: dict[str, list[Reading]] = {way: [] for way in WAYS}
        for number in range(rounds + 1):
            for way, block_length in WAYS.items():
                reading = read(block_length, f"{way} {number}")
                if number:  # the first one warms up
                    found[way].append(reading)
    base = found["at most once, stacked"]
    return {
        way: {
            "images_per_s": [reading.elements_per_s for reading in readings],
            "cpu_us": [reading.cpu_us for reading in readings],
            "rate": statistics.median(
                a.elements_per_s / b.elements_per_s for a, b in zip(readings, base, strict=True)
            ),
            "cpu": statistics.median(
                a.cpu_us / b.cpu_us for a, b in zip(readings, base, strict=True)
            ),
        }
        for way, readings in found.items()
    }


def main() -> None:
    if sys.argv[1:2] == ["--trainer"]:
        trainer(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    figures = {}
    for trainers in (1, 4):
        with tempfile.TemporaryDirectory() as name:
            figures[f"{trainers} trainers"] = measure(pathlib.Path(name), trainers, given.rounds)
    given.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(given.json.read_text())


if __name__ == "__main__":
    main()
