"""A crowd of chaos: many readers in one process, all at once, of a small dataset.

Half of the readers share a dynamically sharded job; the others read everything, each in its own
job. Some more share a job of a Python dataset, whose processes are killed (function.py): retries
make up for that, so no element is lost. Each reader records its elements, as a trainer does. The
crowd also saves a dataset (saves.py). The process ends with its last reader. No fault hits it; it
makes workers busy with many tasks at once, and suffers from faults of workers and dispatchers.
"""

from __future__ import annotations

import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from ..service.client.options import ReadOptions
from ..service.connections.dispatcher_client import DispatcherClient
from ..service.proto import forebay_pb2 as pb
from . import saves
from .modes import MODES, Readers
from .records import Recorder, Started
from .trainer import read_epoch

READERS = 50
PYTHON_READERS = 2
"""Their numbers follow the others'."""

ELEMENTS = 50


class CrowdTask(msgspec.Struct, frozen=True):
    """The arguments of a crowd's process."""

    name: str  # of the process
    service: str
    dataset_id: str
    endless_id: str  # of an infinite dataset
    python_id: str  # of a Python dataset
    records: str  # the path of a directory, for each reader's file


def job_of(name: str, reader: int) -> str:
    """The job of a reader of the crowd `name`."""
    if reader >= READERS:
        return f"{name} python"
    return f"{name} shared" if reader % 2 else f"{name} reader {reader}"


def records_of(directory: pathlib.Path, reader: int) -> pathlib.Path:
    """The file of a reader."""
    return directory / f"reader{reader}.records"


def main(task: CrowdTask) -> None:
    directory = pathlib.Path(task.records)
    directory.mkdir()
    with ThreadPoolExecutor(READERS + PYTHON_READERS + len(MODES) + 1) as pool:
        others = [pool.submit(saves.save, task.service, directory)]
        others += [
            pool.submit(Readers(mode, task.name, task.service, dataset_id, directory).read)
            for mode in MODES
            for dataset_id in [task.dataset_id if mode == "static" else task.endless_id]
        ]
        list(pool.map(partial(_read, task), range(READERS + PYTHON_READERS)))
        for other in others:
            other.result()


def _read(task: CrowdTask, reader: int) -> None:
    recorder = Recorder(records_of(pathlib.Path(task.records), reader))
    recorder.add(Started(task.name, time.monotonic()))
    dispatcher = DispatcherClient(task.service)
    of_python = reader >= READERS
    shared = of_python or reader % 2 == 1
    try:
        job = dispatcher.call_numbered(
            pb.GetOrCreateJobRequest(
                dataset_id=task.python_id if of_python else task.dataset_id,
                job_name=job_of(task.name, reader),
                sharding="DYNAMIC" if shared else "OFF",
            ),
            pb.GetOrCreateJobResponse,
        )
        reading = ReadOptions(dynamic=shared, hands_back=True)
        read_epoch(dispatcher, job.job_id, 1, recorder, pace_s=0.0, reading=reading)
    finally:
        dispatcher.close()
        recorder.close()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=CrowdTask))
