"""An ordered read goes on elsewhere when a worker's process has ended, without the dispatcher."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.client import silence
from forebay.service.client.heartbeats import Heartbeats

from ..cluster import WorkerProcess
from ..stock import DispatcherProcess

NEVER_MS = 3_600_000


def test_others_are_asked_for_what_a_killed_worker_was_to_make(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "SLOW_S", 3600.0)  # nor does it wait until the worker is silent
    monkeypatch.setattr(Heartbeats, "refused", lambda *_: None)  # nobody tells the dispatcher
    with (
        DispatcherProcess(
            tmp_path, reconnect_grace_ms=NEVER_MS, worker_timeout_ms=-1
        ) as dispatcher,
        WorkerProcess(dispatcher.address) as killed,
        WorkerProcess(dispatcher.address),
    ):
        service.wait_for_workers(dispatcher.target, 2)
        dataset = tf.data.Dataset.range(40).map(lambda x: tf.fill([100_000], x))
        dataset_id = service.register_dataset(dispatcher.target, dataset)
        how: Any = {"ordered": True, "seed": 1, "bundle_splits": 1, "cycle_length": 2}
        with service.read(dispatcher.target, dataset_id, **how) as elements:
            undisturbed = [int(element[0]) for element in elements]
        with service.read(dispatcher.target, dataset_id, **how) as elements:
            got = [int(next(elements)[0])]
            killed.kill()
            got += [int(element[0]) for element in elements]
        assert got == undisturbed and sorted(got) == [*range(40)]
