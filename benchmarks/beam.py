"""Row `beam`: a chain of Beam's transforms in one worker process, beside Beam's own runner.

The trainer is a separate process, which answers questions for records/s, a line of JSON each:

python -m forebay.benchmarks.beam ADDRESS DIRECTORY
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from ..storage.tfrecord import frame
from .consume import consume
from .results import Better, Finding, Result
from .servers import Responder, our_dispatcher, our_worker
from .setting import Setting

RECORDS = 100_000
FILES = 200  # names of one; none ends before the measurement


def beam(setting: Setting) -> list[Finding]:
    """The chain yields as many elements as it reads records."""
    files = setting.directory("beam-files")
    write(files)
    with contextlib.ExitStack() as stack:
        dispatcher = stack.enter_context(our_dispatcher(setting.directory("beam")))
        worker = stack.enter_context(our_worker(dispatcher, "--processes", 1))
        worker.wait_until_serving()
        responder = Responder("forebay.benchmarks.beam", dispatcher.address, str(files))
        trainer = stack.enter_context(responder)
        trainer.answer()

        def measured(runner: bool) -> float:
            trainer.ask({"runner": runner, "seconds": setting.seconds})
            return float(trainer.answer())

        figures = setting.alternate(
            ours=functools.partial(measured, False), runner=functools.partial(measured, True)
        )
    what = "Beam chain (TFRecord, DoFn, Filter, FlatMap) into NumPy, one process; peer: FnApiRunner"
    return [
        Result(
            row="beam",
            what=what,
            unit="records/s",
            better=Better.MORE,
            ours=figures["ours"],
            peer=figures["runner"],
            required=200_000,
            required_ratio=10,
        )
    ]


def write(directory: pathlib.Path) -> None:
    """Write equal TFRecord files of numbers."""
    first = directory / "0.tfrecord"
    first.write_bytes(b"".join(frame(b"%d" % number) for number in range(RECORDS)))
    for number in range(1, FILES):
        os.link(first, directory / f"{number}.tfrecord")


def chain(pipeline: Any, pattern: str) -> Any:
    """A PCollection of the odd numbers, each twice."""
    import apache_beam

    class Parse(apache_beam.DoFn):  # type: ignore[misc]
        def process(self, record: bytes) -> Iterator[int]:
            yield int(record)

    return (
        pipeline
        | apache_beam.io.ReadFromTFRecord(pattern)
        | apache_beam.ParDo(Parse())
        | apache_beam.Filter(lambda number: number % 2)
        | apache_beam.FlatMap(lambda number: (number, number))
    )


def runner_rate(directory: str) -> float:
    """Records/s of one file, from the runner's start to its end."""
    import apache_beam
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner

    begun = time.perf_counter()
    with apache_beam.Pipeline(runner=FnApiRunner()) as pipeline:
        chain(pipeline, f"{directory}/0.tfrecord")
    return RECORDS / (time.perf_counter() - begun)


def worker_rate(address: str, directory: str, seconds: float) -> float:
    import apache_beam

    from ..service import read, register_dataset

    dataset_id = register_dataset(address, chain(apache_beam.Pipeline(), f"{directory}/*.tfrecord"))
    with read(address, dataset_id, processing_mode="distributed_epoch") as elements:
        next(elements)
        count, took_s, _ = consume(elements, seconds)
    return count / took_s


def main(address: str, directory: str) -> None:
    """Answer questions until the input ends."""
    print("ready", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        if question["runner"]:
            rate = runner_rate(directory)
        else:
            rate = worker_rate(address, directory, question["seconds"])
        print(rate, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
