"""The pipeline of a directory, as this process has it open.

Some runners make and end a DoFn for each bundle, and to open a pipeline may take as long as to run
one: a graph is traced, a process is forked that imports. So who is the last to leave one leaves it
open for a while.
"""

from __future__ import annotations

import os
import threading
from typing import NamedTuple

from .. import pipelines
from ..errors import FailedPrecondition
from ..pipelines import Pipeline
from ..proto import forebay_pb2 as pb
from . import files
from .layout import DATASET, Plan, read_plan

IDLE_S = 10.0


class _Key(NamedTuple):
    directory: str
    plan: bytes


class Opened:
    """A plan and its pipeline. `leave` it once."""

    def __init__(self, key: _Key, plan: Plan, pipeline: Pipeline) -> None:
        self.plan = plan
        self.pipeline = pipeline
        self._key = key
        self._users = 0
        self._timer: threading.Timer | None = None

    def enter(self) -> None:
        """With the lock."""
        self._users += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def leave(self) -> None:
        with _lock:
            self._users -= 1
            if not self._users:
                self._timer = threading.Timer(IDLE_S, self.close_if_idle)
                self._timer.name, self._timer.daemon = "forebay-idle-pipeline", True
                self._timer.start()

    def close_if_idle(self) -> None:
        with _lock:
            if self._users or _opened.get(self._key) is not self:
                return
            del _opened[self._key]
            if self._timer is not None:
                self._timer.cancel()
        self.pipeline.close()


_lock = threading.Lock()
_opened: dict[_Key, Opened] = {}


def enter(directory: str) -> Opened:
    """Raises FailedPrecondition if there is nothing to be done, and what opening it does."""
    plan = read_plan(directory)
    if plan is None:
        raise FailedPrecondition(
            f"{directory} has no plan, as it is seen on {os.uname().nodename}: the runner's "
            "workers must see it under this name"
        )
    key = _Key(directory, plan.encode())
    with _lock:
        if key not in _opened:
            _opened[key] = Opened(key, plan, _open(directory))
        _opened[key].enter()
        return _opened[key]


def _open(directory: str) -> Pipeline:
    dataset = pb.GetDatasetResponse.FromString(files.read(f"{directory}/{DATASET}"))
    if dataset.definition.HasField("tf_data_graph"):
        pipelines.load()
    rules = pipelines.PythonRules(processes=1, where=os.uname().nodename)
    return pipelines.open_pipeline(dataset.definition, dataset.graph, python=rules)


def close_idle() -> None:
    """Close at once what nobody uses."""
    with _lock:
        idle = [*_opened.values()]
    for opened in idle:
        opened.close_if_idle()
