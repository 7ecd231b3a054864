"""Reading under parameter servers, where other processes read than the one that makes the dataset.

A `ClusterCoordinator` traces the function that makes a dataset. Its workers, which are TensorFlow
processes, run the graph, each a dataset of its own. Forebay reads with a Python function of the
process that made the dataset, which workers lack. In one process, all would share one reader, and
each iteration would be another epoch. So TensorFlow's own operations read there, and also register
in graphs.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..errors import InvalidArgument
from .options import ReadOptions, ShardingPolicy

theirs = tf.data.experimental.service

Service = str | tuple[str, str]


def are_there() -> bool:
    """Whether this process is connected to a job "ps", as by every `ParameterServerStrategy`."""
    return any("/job:ps/" in device.name for device in tf.config.list_logical_devices())


def from_dataset_id(
    service: Service,
    dataset_id: Any,
    element_spec: Any,
    policy: ShardingPolicy,
    job_name: str | None,
    how: ReadOptions,
) -> Any:
    """Raises InvalidArgument, and what TensorFlow's does."""
    return theirs.from_dataset_id(
        service=_one_address(service),
        dataset_id=dataset_id,
        element_spec=element_spec,
        **_arguments(policy, job_name, how),
    )


def distribute(
    service: Service,
    dataset: Any,
    compression: str | None,
    policy: ShardingPolicy,
    job_name: str | None,
    how: ReadOptions,
) -> Any:
    """Raises InvalidArgument, and what TensorFlow's does."""
    distributed = theirs.distribute(
        service=_one_address(service),
        compression=_of_elements(compression),
        **_arguments(policy, job_name, how),
    )
    return dataset.apply(distributed)


def register_dataset(
    service: Service, dataset: Any, compression: str | None, dataset_id: str | None
) -> str:
    """Returns the id as a tensor. Raises InvalidArgument, and TensorFlow's errors."""
    registered: str = theirs.register_dataset(
        _one_address(service), dataset, _of_elements(compression), dataset_id
    )
    return registered


def _arguments(policy: ShardingPolicy, job_name: str | None, how: ReadOptions) -> dict[str, Any]:
    """All arguments but the transfer protocol: TensorFlow has its own protocols."""
    of_a_round = how.num_consumers is not None
    return {
        "processing_mode": theirs.ShardingPolicy(policy.value),
        "job_name": job_name,
        "consumer_index": how.consumer_index if of_a_round else None,
        "num_consumers": how.num_consumers,
        "max_outstanding_requests": how.max_elements,
        "cross_trainer_cache": how.cache and theirs.CrossTrainerCache(how.cache.trainer_id),
        "target_workers": how.targets.name,
    }


def _of_elements(compression: str | None) -> str | None:
    """TensorFlow's compression for ours; it does not know blocks, nor their compressions."""
    return compression if compression in (None, "SNAPPY") else "AUTO"


def _one_address(service: Service) -> str:
    named = "://".join(service) if isinstance(service, tuple) else service
    if isinstance(named, str) and "," in named:
        raise InvalidArgument(
            f"service={named!r} has several addresses, and beside parameter servers TensorFlow's "
            "own operations read, which take one: give that of a balancer before the dispatchers"
        )
    return named
