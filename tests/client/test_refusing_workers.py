"""Reads of bundles go on elsewhere when a worker's process has ended, without the dispatcher."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.client.heartbeats import Heartbeats
from forebay.service.client.slices import Slices

from ..cluster import WorkerProcess
from ..stock import DispatcherProcess

IN_ORDER = {"ordered": True, "cycle_length": 2}


@pytest.mark.parametrize("way", [IN_ORDER, {"delivery": "at_least_once"}])
def test_others_are_asked_for_what_a_killed_worker_was_to_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: dict[str, Any]
) -> None:
    """At once, also if the trainer has many elements and takes long for each."""
    got, asked, heard, refused = list[int](), list[int](), threading.Event(), Slices.refused

    def record(slices: Slices, worker_uid: int) -> None:
        asked.append(len(got))
        refused(slices, worker_uid)

    monkeypatch.setattr(Slices, "refused", record)
    monkeypatch.setattr(Heartbeats, "refused", lambda *_: heard.set())  # and not the dispatcher
    with (
        DispatcherProcess(tmp_path) as dispatcher,
        WorkerProcess(dispatcher.address) as killed,
        WorkerProcess(dispatcher.address),
    ):
        service.wait_for_workers(dispatcher.target, 2)
        dataset = tf.data.Dataset.range(40).map(lambda x: tf.fill([100_000], x))
        dataset_id = service.register_dataset(dispatcher.target, dataset)
        how: Any = {"shuffle": False, "bundle_splits": 1, **way}
        with service.read(dispatcher.target, dataset_id, **how) as elements:
            got.append(int(next(elements)[0]))
            time.sleep(1)  # more elements come than the trainer takes
            heard.clear()
            killed.kill()
            assert heard.wait(60)
            got.extend(int(element[0]) for element in elements)
        assert asked[0] < 8
        assert (got if way is IN_ORDER else sorted(got)) == [*range(40)]
