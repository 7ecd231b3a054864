"""What is registered with a dispatcher: a list of it, and how to remove it. Without TensorFlow."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..connections.dispatcher_client import DispatcherClient
from ..errors import InvalidArgument
from ..proto import forebay_pb2 as pb
from ..structure import describe

PATIENCE_S = 60.0
"""How long a dispatcher is looked for."""


@dataclass(frozen=True)
class DatasetInfo:
    """A registered dataset, as `list_datasets` finds it. Times are Unix times in milliseconds."""

    dataset_id: str
    elements: str | None  # what they are, in words; None: tf.data service's client registered it
    graph_bytes: int | None  # None: an earlier version registered it
    registered_ms: int | None
    used_ms: int | None  # when somebody registered, joined or left it last
    jobs: tuple[str, ...]  # names of those that read it, or have read it
    consumers: int  # who read it now

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "jobs": list(self.jobs)}


def list_datasets(
    service: str | tuple[str, str], *, timeout_s: float | None = PATIENCE_S
) -> list[DatasetInfo]:
    """The datasets that are registered, in the order in which they were.

    Args:
      service: as in `read`.
      timeout_s: how long the dispatcher is looked for, in seconds; None: for ever.

    Raises Unavailable.
    """
    client = DispatcherClient(service)
    try:
        answer = client.call(
            pb.ListDatasetsRequest(), pb.ListDatasetsResponse, patience_s=timeout_s
        )
    finally:
        client.close()
    return [_info(**fields) for fields in json.loads(answer.datasets)]


def _info(structure: str | None, jobs: list[str], **fields: Any) -> DatasetInfo:
    return DatasetInfo(elements=structure and describe(structure), jobs=tuple(jobs), **fields)


def remove_dataset(
    service: str | tuple[str, str],
    dataset_id: str,
    *,
    force: bool = False,
    timeout_s: float | None = PATIENCE_S,
) -> list[str]:
    """Remove a dataset, and its graph from the storage; return the names of its jobs.

    They go with it: what has been read of their epochs is forgotten, and who gives such a name to
    a job begins another one. Its id leads to NotFound, until another dataset is registered by it.

    Args:
      service: as in `read`.
      dataset_id: what `register_dataset` returned.
      force: also if it is being read; its readers get a NotFound error.
      timeout_s: how long the dispatcher is looked for, in seconds; None: for ever.

    Raises NotFound, FailedPrecondition if somebody reads it, Unavailable.
    """
    if not isinstance(dataset_id, str) or not dataset_id:
        raise InvalidArgument(f"dataset_id={dataset_id!r} must be a string, and not empty")
    client = DispatcherClient(service)
    try:
        request = pb.RemoveDatasetRequest(dataset_id=dataset_id, force=force)
        answer = client.call_numbered(request, pb.RemoveDatasetResponse, patience_s=timeout_s)
        return list(answer.jobs)
    finally:
        client.close()
