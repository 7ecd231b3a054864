"""Opens the pipeline of a directory's dataset, in a process of the runner's or in the user's."""

from __future__ import annotations

import os
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from ...storage.errors import Corrupt
from .. import pipelines
from ..errors import FailedPrecondition, InvalidArgument
from ..pipelines import Pipeline
from ..pipelines.definitions import fingerprint
from ..proto import forebay_pb2 as pb
from . import files
from .layout import Plan, read_plan


def open_pipeline(
    directory: str, op_libraries: Sequence[str], *, own_process: bool
) -> tuple[Plan, Pipeline]:
    """A directory's plan, and its pipeline; close that. `op_libraries` have the graph's custom ops.
    `own_process`: this process is the runner's, not the user's.

    Raises FailedPrecondition without a plan, Corrupt, and what opening the pipeline raises.
    """
    node = os.uname().nodename
    plan = read_plan(directory)
    if plan is None:
        raise FailedPrecondition(
            f"{directory} has no plan, as it is seen on {node}: the runner's workers must see it "
            "under this name"
        )
    dataset = read_dataset(directory, plan)
    if dataset.definition.HasField("tf_data_graph"):
        if own_process:
            pipelines.hide_gpus()
        pipelines.load(op_libraries)
    rules = pipelines.PythonRules(processes=1, where=node)
    return plan, pipelines.open_pipeline(dataset.definition, dataset.graph, python=rules)


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
