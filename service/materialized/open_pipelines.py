"""Keeps the pipelines of directories open in this process, for several DoFns.

Some runners create and end a DoFn for each bundle. Opening a pipeline may take as long as a bundle:
it traces a graph, or forks a process that imports. So an unused pipeline stays open for IDLE_S.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from ...storage.errors import Corrupt
from .. import pipelines
from ..errors import FailedPrecondition, InvalidArgument
from ..pipelines import Pipeline
from ..pipelines.definitions import fingerprint
from ..proto import forebay_pb2 as pb
from . import files
from .layout import Plan, read_plan

IDLE_S = 10.0


class _Key(NamedTuple):
    directory: str
    plan: bytes


class OpenPipeline:
    """A plan and its pipeline. Each `enter` needs one `leave`."""

    def __init__(self, key: _Key, plan: Plan, pipeline: Pipeline) -> None:
        self.plan = plan
        self.pipeline = pipeline
        self._key = key
        self._users = 0
        self._timer: threading.Timer | None = None

    def enter(self) -> None:
        """The caller holds the lock."""
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
            if self._users or _open_pipelines.get(self._key) is not self:
                return
            del _open_pipelines[self._key]
            if self._timer is not None:
                self._timer.cancel()
        self.pipeline.close()


_lock = threading.Lock()
_open_pipelines: dict[_Key, OpenPipeline] = {}


def enter(directory: str, op_libraries: Sequence[str], *, own_process: bool) -> OpenPipeline:
    """Open a directory's pipeline, or use the open one. `op_libraries` have the graph's custom ops.
    `own_process`: this process is the runner's, not the user's.

    Raises FailedPrecondition without a plan, Corrupt, and what opening the pipeline raises.
    """
    plan = read_plan(directory)
    if plan is None:
        raise FailedPrecondition(
            f"{directory} has no plan, as it is seen on {os.uname().nodename}: the runner's "
            "workers must see it under this name"
        )
    key = _Key(directory, plan.encode())
    with _lock:
        if key not in _open_pipelines:
            pipeline = _opened(directory, plan, op_libraries, own_process)
            _open_pipelines[key] = OpenPipeline(key, plan, pipeline)
        _open_pipelines[key].enter()
        return _open_pipelines[key]


def read_dataset(directory: str, plan: Plan) -> pb.GetDatasetResponse:
    """The materialized dataset. Raises NotFound, Unavailable, and Corrupt for another dataset."""
    path = f"{directory}/{plan.dataset_name}"
    try:
        dataset = pb.GetDatasetResponse.FromString(files.read(path))
        if fingerprint(dataset.definition, dataset.graph) == plan.fingerprint:
            return dataset
        why = "it is of another dataset than the plan"
    except (DecodeError, InvalidArgument) as error:
        why = str(error)
    raise Corrupt(
        f"{path} is damaged ({why}): run the same `forebay materialize` again, which mends it", path
    )


def _opened(directory: str, plan: Plan, op_libraries: Sequence[str], own_process: bool) -> Pipeline:
    dataset = read_dataset(directory, plan)
    if dataset.definition.HasField("tf_data_graph"):
        if own_process:
            pipelines.hide_gpus()
        pipelines.load(op_libraries)
    rules = pipelines.PythonRules(processes=1, where=os.uname().nodename)
    return pipelines.open_pipeline(dataset.definition, dataset.graph, python=rules)


def close_idle() -> None:
    """Close all unused pipelines now."""
    with _lock:
        idle = [*_open_pipelines.values()]
    for opened in idle:
        opened.close_if_idle()
