"""Registers datasets of all kinds. It imports TensorFlow only for kinds that need it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from ...journal.proto import events_pb2 as ev
from ...storage.extras import install
from ..connections.dispatcher_client import DispatcherClient
from ..errors import FailedPrecondition, InvalidArgument
from ..picks import shares
from ..pipelines import has_tensorflow
from ..pipelines.definitions import fingerprint, require_bytes
from ..pipelines.kinds.beam import beam_dataset, is_pcollection
from ..pipelines.kinds.functions import PythonDataset, definition, python_dataset, require_options
from ..proto import forebay_pb2 as pb
from .reader import PATIENCE_S

log = logging.getLogger(__name__)

Service = str | tuple[str, str]

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


def require_id(dataset_id: Any) -> None:
    """Raises InvalidArgument."""
    if not isinstance(dataset_id, str | None):
        raise InvalidArgument(f"`dataset_id` must be a string, not {type(dataset_id)}")


def checked(dataset: Any, splits: Any, verify: bool, python: dict[str, Any]) -> Any:
    """The dataset, or the PythonDataset that a function or a PCollection makes with these
    arguments of `register_dataset`. Raises InvalidArgument."""
    given = [*python] if splits is None else ["splits", *python]
    if isinstance(dataset, str | os.PathLike):
        if given:
            raise InvalidArgument(
                f"{sorted(given)} are for functions; of a directory's dataset all is known"
            )
        return dataset
    if verify:
        raise InvalidArgument(
            "verify=True is for the directory of a materialized dataset, whose files have "
            f"checksums, and this is {type(dataset)}: leave it out"
        )
    if given and isinstance(dataset, PythonDataset):
        raise InvalidArgument(
            f"{given} are given for a decorated function: give all to its decorator"
        )
    if is_pcollection(dataset):
        if splits is not None:
            raise InvalidArgument(
                "a PCollection's splits are its source's: give split_bytes instead"
            )
        require_options(python, "split_bytes")
        return beam_dataset(dataset, **python)
    require_options(python, "splits", "compression", "dataset_id", "verify")
    if splits is not None:
        return python_dataset(splits, **python)(dataset)
    if python:
        raise InvalidArgument(f"{[*python]} are for functions: give their `splits` as well")
    if callable(dataset) and not isinstance(dataset, PythonDataset):
        raise InvalidArgument(
            f"{getattr(dataset, '__qualname__', repr(dataset))} is a function, and no `splits` are "
            "given that it is to be called with: give some, such as range(100) or '/data/*.npz'; "
            "of a function that returns a tf.data.Dataset, register what it returns"
        )
    return dataset


def definition_of(
    dataset: Any, compression: str | None, *, verify: bool = False
) -> pb.RegisterDatasetRequest:
    """What is registered of what `checked` has returned. Raises InvalidArgument, and
    FailedPrecondition for a kind that needs TensorFlow where there is none."""
    compressed = compression == "SNAPPY"
    if isinstance(dataset, PythonDataset):
        request = definition(dataset)
    elif not has_tensorflow():
        raise FailedPrecondition(
            f"{dataset!r:.100} cannot be registered here, where there is no TensorFlow: "
            f"{install('tensorflow')}, or give a function with `splits`, or files to register_files"
        )
    elif isinstance(dataset, str | os.PathLike):
        from ..materialized import registered as materialized

        request = materialized.definition(dataset, verify=verify, compressed=compressed)
    else:
        from ..pipelines.kinds import graphs

        request = graphs.definition(dataset, compressed=compressed)
    return compressed_by(compression, request)


def compressed_by(
    compression: str | None, request: pb.RegisterDatasetRequest
) -> pb.RegisterDatasetRequest:
    """The request, with this compression. Raises InvalidArgument."""
    if compression == "SNAPPY" and request.python:
        raise InvalidArgument(
            'compression="SNAPPY" compresses graphs\' elements; give "AUTO", None, "ZSTD" or "LZ4"'
        )
    request.compression = COMPRESSIONS[compression]
    return request


def fingerprint_of(request: pb.RegisterDatasetRequest) -> str:
    """A hash that equal datasets have in common. Raises InvalidGraph."""
    kind = ev.DatasetDefinition()
    if request.python:
        kind.python_function.SetInParent()
    return fingerprint(kind, request.python or request.graph)


def registered(
    service: Service, request: pb.RegisterDatasetRequest, dataset_id: str | None = None
) -> str:
    """Sends the request and returns the dataset's id. Logs a warning if another dataset has it.
    Raises InvalidArgument."""
    require_id(dataset_id)
    request.dataset_id = dataset_id or ""
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
    dataset = checked(dataset, splits, verify, python)
    if not (callable(dataset) or isinstance(dataset, str | os.PathLike)):
        raise InvalidArgument(
            f"{dataset!r:.100} is no dataset: give a function with `splits`, a PCollection, or a "
            "tf.data.Dataset where there is TensorFlow"
        )
    return registered(service, definition_of(dataset, compression, verify=verify), dataset_id)


def register_mixture(
    service: Service, sources: Mapping[str, tuple[str, float]], *, dataset_id: str | None = None
) -> str:
    """Register a weighted mixture of registered datasets, and return its id.

    A mixture is read with `ordered=True`, like any dataset, and has no end: each source repeats, in
    epochs of its own. Which source a position takes its element from is arithmetic: at every
    prefix, each source has its weight's share of the elements, within 2. The k-th element of a
    source is the k-th that reading it by itself in this order would give.

    Args:
      service: as in `register_dataset`.
      sources: by name, a dataset's id and its weight. Weights are numbers of at least 0, in any
        unit: only their proportions count. The order of the names makes no difference.
      dataset_id: as in `register_dataset`.

    Raises ValueError for wrong weights and for sources whose elements differ in element_spec,
    NotFound for an unknown dataset, and Unimplemented for one that cannot be read in order.
    """
    if not isinstance(sources, Mapping) or not sources:
        raise InvalidArgument(
            f"sources={sources!r:.200}: give a dict of names, each with a dataset's id and a weight"
        )
    for name, source in sources.items():
        is_pair = isinstance(source, tuple | list) and len(source) == 2
        if not (isinstance(name, str) and name and is_pair and isinstance(source[0], str)):
            raise InvalidArgument(
                f"source {name!r} is {source!r:.200}: give a name, a dataset's id and a weight, as "
                'in {"web": ("17", 0.7)}'
            )
    names = sorted(sources)
    found = shares([sources[name][1] for name in names])
    request = pb.RegisterDatasetRequest(
        mixture=[
            ev.MixtureSource(name=name, dataset_id=sources[name][0], share=share)
            for name, share in zip(names, found, strict=True)
        ]
    )
    return registered(service, request, dataset_id)
