"""`distributed_save`: Forebay's version of TensorFlow's call of the same name."""

from __future__ import annotations

import uuid

import tensorflow as tf
from tensorflow.core.protobuf import snapshot_pb2

from ...journal.proto import events_pb2 as ev
from ..address_forms import parse_service
from ..connections.dispatcher_client import DispatcherClient
from ..errors import InvalidArgument
from ..pipelines.tf_data.element_specs import encode_element_spec, plain
from ..pipelines.tf_data.evaluate import evaluate
from ..pipelines.tf_data.imports import graph_of
from ..pipelines.tf_data.split_sources import split_sources
from ..proto import forebay_pb2 as pb
from .api import Dataset
from .reader import PATIENCE_S
from .registration import Service
from .tf_errors import raising_tensorflows

_COMPRESSIONS: dict[str | None, str] = {
    "AUTO": "SNAPPY",
    "SNAPPY": "SNAPPY",
    "GZIP": "GZIP",
    None: "",
}


@plain
@raising_tensorflows()
def distributed_save(
    dataset: Dataset, path: str, service: Service, compression: str | None = "AUTO"
) -> None:
    """Have the service's workers save a dataset to a directory; return once that has begun.

    `tf.data.Dataset.load(path, wait=True)` reads it, even while it is being written, and raises the
    error of a failed save. Each element is saved once, in no order. A worker saves one part of the
    dataset's splits at a time, as a dataset of its own: a `batch` or `shuffle` works within that
    part. The uncommitted work of a dead worker is computed again. The save survives restarts of the
    dispatcher and the workers.

    Args:
      dataset: a finite `tf.data.Dataset`, without Python functions. For Forebay's workers it must
        have one source of splits, or several that are zipped. It must not count elements or drop a
        remainder (`repeat`, `take`, `skip`, `scan`, `unique`, `drop_remainder`): do that after
        loading. It must yield the same elements each time, so no clocks or mutable tables.
      path: an absolute path where nothing exists yet. The dispatcher, all workers and all readers
        must share its file system under this name, and it must support rename.
      service: as in `register_dataset`. The dispatcher's storage must survive its restarts.
      compression: of the files: "AUTO", "SNAPPY", "GZIP" or None.

    Raises ValueError for invalid arguments, AlreadyExists if the dataset was saved there or
    something else is there, and FailedPrecondition if the directory cannot be written. Raises
    Unimplemented, with the reason, for a dataset that cannot be divided, and Unavailable. Each is
    an error of `tf.errors` too.
    """
    parse_service(service)
    request = save_request(dataset, path, compression)
    request.request.CopyFrom(ev.Request(caller=uuid.uuid4().hex, number=1))  # for a retry
    with DispatcherClient(service) as client:
        client.call(request, pb.StartSaveResponse, timeout_s=60, patience_s=PATIENCE_S)


def save_request(dataset: Dataset, path: str, compression: str | None) -> pb.StartSaveRequest:
    """The request of `distributed_save`, without a request number. Raises InvalidArgument."""
    if not isinstance(compression, str | None) or compression not in _COMPRESSIONS:
        raise InvalidArgument(
            f"Invalid `compression` argument: {compression}. Must be one of {list(_COMPRESSIONS)}."
        )
    if not isinstance(dataset, tf.data.Dataset):
        raise InvalidArgument(f"`dataset` must be a tf.data.Dataset, not {type(dataset)}")
    if not isinstance(path, str) or not path:
        raise InvalidArgument(f"`path` must be the path of a directory, not {path!r}")
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise InvalidArgument(
            "Saving an infinite dataset is not allowed: limit it, for example with `take`"
        )
    policy = dataset.options().experimental_external_state_policy
    policy = policy or tf.data.experimental.ExternalStatePolicy.WARN
    graph = graph_of(dataset, policy)
    metadata = snapshot_pb2.DistributedSnapshotMetadata(
        element_spec=encode_element_spec(dataset.element_spec),
        compression=_COMPRESSIONS[compression],
    )
    return pb.StartSaveRequest(
        path=path,
        graph=graph,
        sources=split_sources(graph, evaluate),
        metadata=metadata.SerializeToString(),
    )
