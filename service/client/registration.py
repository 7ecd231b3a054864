"""Registers functions of splits, without TensorFlow. `api.py` registers all kinds through it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from ...journal.proto import events_pb2 as ev
from ...storage.extras import install
from ..block_limits import MAX_COMPONENTS
from ..connections.dispatcher_client import DispatcherClient
from ..errors import FailedPrecondition, InvalidArgument
from ..pipelines.definitions import UNKNOWN_CARDINALITY, require_bytes
from ..pipelines.python.columns import fields_of
from ..pipelines.python.given_specs import structure_of_spec
from ..pipelines.python.inferred import element_spec_of, inferred
from ..proto import forebay_pb2 as pb
from ..proto import tf_service_pb2
from . import functions
from .functions import PythonDataset, python_dataset
from .other_splits import widened
from .reader import PATIENCE_S

log = logging.getLogger(__name__)

Service = str | tuple[str, str]
Send = Callable[[Service, pb.RegisterDatasetRequest], str]

COMPRESSIONS: dict[str | None, ev.BlockCompression] = {
    "AUTO": ev.MEASURED,
    None: ev.NEVER,
    "SNAPPY": ev.NEVER,  # its elements are compressed already
    "ZSTD": ev.ZSTD,
    "LZ4": ev.LZ4,
}


def check_compression(compression: str | None) -> None:
    """Raises InvalidArgument."""
    if not isinstance(compression, str | None) or compression not in COMPRESSIONS:
        raise InvalidArgument(
            f"Invalid `compression` argument: {compression}. Must be one of {list(COMPRESSIONS)}."
        )


def function_of(dataset: Any, splits: Any, verify: bool, python: dict[str, Any]) -> Any:
    """Makes a PythonDataset of a function or a PCollection, with these arguments of
    `register_dataset`. Returns anything else unchanged. Raises InvalidArgument."""
    given = [*python] if splits is None else ["splits", *python]
    if verify:
        raise InvalidArgument(
            "verify=True is for the directory of a materialized dataset, whose files have "
            f"checksums, and this is {type(dataset)}: leave it out"
        )
    if given and isinstance(dataset, PythonDataset):
        raise InvalidArgument(
            f"{given} are given for a decorated function: give all to its decorator"
        )
    if functions.is_pcollection(dataset):
        if splits is not None:
            raise InvalidArgument(
                "a PCollection's splits are its source's: give split_bytes instead"
            )
        functions.require_options(python, "split_bytes")
        return functions.beam_dataset(dataset, **python)
    functions.require_options(python, "splits", "compression", "dataset_id", "verify")
    if splits is not None:
        return python_dataset(splits, **python)(dataset)
    if python:
        raise InvalidArgument(f"{[*python]} are for functions: give their `splits` as well")
    if callable(dataset) and not isinstance(dataset, PythonDataset):
        functions.require_no_arguments(dataset)
    return dataset


def require_expressible(structure: str) -> None:
    """Raises InvalidArgument if a function cannot yield elements of this structure."""
    try:
        fields, _ = fields_of(structure)
    except ValueError as error:
        raise InvalidArgument(str(error)) from error
    require_few_components(len(fields))


def require_few_components(components: int) -> None:
    """Raises InvalidArgument for no components, or for more than MAX_COMPONENTS."""
    if not components:
        raise InvalidArgument(
            "the elements have no tensors, and nothing would travel: let each have one at least, "
            "such as its number"
        )
    if components > MAX_COMPONENTS:
        raise InvalidArgument(
            f"an element of {components} tensors cannot travel, above {MAX_COMPONENTS}: stack them"
        )


def send_function(
    service: Service,
    request: pb.RegisterDatasetRequest,
    structure: str,
    element_spec: bytes,
    *,
    compression: str | None,
    dataset_id: str | None,
    cardinality: int,
    send: Send,
) -> str:
    """Completes and sends a request of `functions.request_of`; returns the dataset's id. Raises
    InvalidArgument."""
    if not isinstance(dataset_id, str | None):
        raise InvalidArgument(f"`dataset_id` must be a string, not {type(dataset_id)}")
    if compression == "SNAPPY":
        raise InvalidArgument(
            'compression="SNAPPY" compresses graphs\' elements; give "AUTO", None, "ZSTD" or "LZ4"'
        )
    request.structure = structure
    request.dataset_id = dataset_id or ""
    request.compression = COMPRESSIONS[compression]
    request.metadata = tf_service_pb2.DataServiceMetadata(
        element_spec=element_spec,
        compression=tf_service_pb2.DataServiceMetadata.COMPRESSION_OFF,
        cardinality=cardinality,
    ).SerializeToString()
    return send(service, request)


def described(request: pb.RegisterDatasetRequest, dataset: PythonDataset) -> tuple[str, bytes]:
    """The structure and TensorFlow's element_spec of what the function yields. Without an
    element_spec, calls the function. Raises InvalidArgument, and the function's errors."""
    if dataset.element_spec is None:
        structure = inferred(functions.first_elements(request))
        require_expressible(structure)
        structure = widened(request, structure, dataset.function)
    else:
        structure = structure_of_spec(dataset.element_spec)
        require_expressible(structure)
    return structure, element_spec_of(structure)


def registered(service: Service, request: pb.RegisterDatasetRequest) -> str:
    """Sends the request and returns the dataset's id. Logs a warning if another dataset has it."""
    require_bytes(request.graph or request.python)
    with DispatcherClient(service) as client:
        answer = client.call(
            request, pb.RegisterDatasetResponse, timeout_s=60, patience_s=PATIENCE_S
        )
        if answer.differs:
            log.warning(
                "dataset %r was registered before, with another %s, and that is what is read: "
                "register the new one under another dataset_id, or remove_dataset the old one "
                "first, with its jobs", answer.dataset_id, answer.differs,
            )  # fmt: skip
        return answer.dataset_id


def register_dataset(
    service: Service,
    dataset: Any,
    compression: str | None = "AUTO",
    dataset_id: str | None = None,
    *,
    splits: Any = None,
    verify: bool = False,
    **python: Any,
) -> str:
    """`forebay.service.register_dataset` without TensorFlow. It takes functions with `splits`,
    decorated functions and Beam's PCollections; otherwise it is as in api.py.

    Raises ValueError, Unavailable, and FailedPrecondition for datasets that need TensorFlow.
    """
    check_compression(compression)
    if not isinstance(dataset, str | os.PathLike):
        dataset = function_of(dataset, splits, verify, python)
    if not (callable(dataset) or isinstance(dataset, str | os.PathLike)):
        raise InvalidArgument(
            f"{dataset!r:.100} is no dataset: give a function with `splits`, a PCollection, or a "
            "tf.data.Dataset where there is TensorFlow"
        )
    if not isinstance(dataset, PythonDataset) or dataset.splits is None:
        raise FailedPrecondition(
            f"{dataset!r:.100} cannot be registered here, where there is no TensorFlow: "
            f"{install('tensorflow')}, or give a function with `splits`"
        )
    request = functions.request_of(dataset, functions.listed(dataset.splits))
    structure, element_spec = described(request, dataset)
    return send_function(
        service, request, structure, element_spec,
        compression=compression, dataset_id=dataset_id,
        cardinality=UNKNOWN_CARDINALITY, send=registered,
    )  # fmt: skip
