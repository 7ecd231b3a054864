"""Many readers at once on one worker: it is busy, and not dead."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tensorflow as tf

from forebay import service
from forebay.journal.proto import events_pb2 as ev
from forebay.storage import FileStorage

from ..cluster import WorkerProcess
from ..stock import DispatcherProcess

READERS = 100
ELEMENTS = 50


def test_every_reader_of_a_crowd_gets_what_it_asked_for(tmp_path: Path) -> None:
    together = threading.Barrier(READERS)

    def read(number: int) -> list[int]:
        policy = service.ShardingPolicy.DYNAMIC if number % 2 else service.ShardingPolicy.OFF
        together.wait()
        with service.read(dispatcher.target, dataset_id, processing_mode=policy) as elements:
            return sorted(map(int, elements))

    with (
        DispatcherProcess(tmp_path) as dispatcher,
        WorkerProcess(dispatcher.address),
        ThreadPoolExecutor(READERS) as pool,
    ):
        dataset_id = service.register_dataset(dispatcher.target, tf.data.Dataset.range(ELEMENTS))
        got = list(pool.map(read, range(READERS)))
    assert got == [list(range(ELEMENTS))] * READERS
    events = [ev.Event.FromString(record.data) for record in FileStorage(tmp_path).read()]
    assert len(events) > READERS
    assert not [e for e in events if e.HasField("worker_lost") and not e.worker_lost.left]
