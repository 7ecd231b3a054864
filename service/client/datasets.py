"""Lists and removes the datasets that a dispatcher has registered, without TensorFlow."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..connections.dispatcher_client import DispatcherClient
from ..errors import InvalidArgument
from ..proto import forebay_pb2 as pb
from ..structure import describe

PATIENCE_S = 60.0
"""How long to retry a dispatcher that does not answer."""


@dataclass(frozen=True)
class DatasetInfo:
    """A registered dataset, from `list_datasets`. Times are Unix times in milliseconds."""

    dataset_id: str
    elements: str | None  # their structure, in words; None: registered by tf.data service's client
    graph_bytes: int | None  # None: an earlier version registered it
    registered_ms: int | None
    used_ms: int | None  # when a client last registered, joined or left it
    jobs: tuple[str, ...]  # names of the jobs that read it or have read it
    consumers: int  # how many read it now

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "jobs": list(self.jobs)}


def list_datasets(
    service: str | tuple[str, str], *, timeout_s: float | None = PATIENCE_S
) -> list[DatasetInfo]:
    """The registered datasets, in the order of their registration.

    Args:
      service: as in `read`.
      timeout_s: how long to retry the dispatcher, in seconds; None: for ever.

    Raises Unavailable.
    """
    with DispatcherClient(service) as client:
        answer = client.call(
            pb.ListDatasetsRequest(), pb.ListDatasetsResponse, patience_s=timeout_s
        )
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
    """Remove a dataset, its jobs, and its graph from the storage; return the names of the jobs.

    The dispatcher forgets the jobs' progress: a new job of the same name starts from the beginning.
    Reading the id raises NotFound until another dataset is registered under it.

    Args:
      service: as in `read`.
      dataset_id: what `register_dataset` returned.
      force: remove it even while it is read; its readers get a NotFound error.
      timeout_s: how long to retry the dispatcher, in seconds; None: for ever.

    Raises NotFound, FailedPrecondition if a consumer reads it, Unavailable.
    """
    if not isinstance(dataset_id, str) or not dataset_id:
        raise InvalidArgument(f"dataset_id={dataset_id!r} must be a string, and not empty")
    with DispatcherClient(service) as client:
        request = pb.RemoveDatasetRequest(dataset_id=dataset_id, force=force)
        answer = client.call_numbered(request, pb.RemoveDatasetResponse, patience_s=timeout_s)
        return list(answer.jobs)
