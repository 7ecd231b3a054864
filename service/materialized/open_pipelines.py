"""Keeps the pipelines of directories open in this process, for several DoFns.

Some runners create and end a DoFn for each bundle. Opening a pipeline may take as long as a bundle:
it traces a graph, or forks a process that imports. So an unused pipeline stays open for IDLE_S.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass
class OpenPipeline:
    """A plan and its pipeline. Each `enter` needs one `leave`."""

    plan: Plan
    pipeline: Pipeline
    key: tuple[str, bytes]
    users: int = 0
    timer: threading.Timer | None = None  # closes it if it stays idle

    def leave(self) -> None:
        with _lock:
            self.users -= 1
            if not self.users:
                self.timer = threading.Timer(IDLE_S, self.close_if_idle)
                self.timer.name, self.timer.daemon = "forebay-idle-pipeline", True
                self.timer.start()

    def close_if_idle(self) -> None:
        with _lock:
            if self.users or _open_pipelines.get(self.key) is not self:
                return
            del _open_pipelines[self.key]
            if self.timer is not None:
                self.timer.cancel()
        self.pipeline.close()


_lock = threading.Lock()
_open_pipelines: dict[tuple[str, bytes], OpenPipeline] = {}  # by directory and plan


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
    key = directory, plan.encode()
    with _lock:
        found = _open_pipelines.get(key)
        if found is None:
            pipeline = _opened(directory, plan, op_libraries, own_process)
            found = _open_pipelines[key] = OpenPipeline(plan, pipeline, key)
        found.users += 1
        if found.timer is not None:
            found.timer.cancel()
        return found


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
        f"{path} is damaged ({why}): run the same `forebay materialize` again, which mends it"
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
