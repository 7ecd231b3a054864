"""Reading in other processes than the one that says what is read: under parameter servers.

A `ClusterCoordinator` traces the function that makes a dataset, and its workers run the graph, each
a dataset of its own. They are processes of TensorFlow's, and what reads the datasets of this
package is a function of Python's, in the process that said so: others lack it, and in one process
all would share one reader, whose iterations are one epoch after another. So where there are
parameter servers TensorFlow's own operations read, and in graphs they register.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..errors import InvalidArgument
from .options import ReadOptions, ShardingPolicy

theirs = tf.data.experimental.service

Service = str | tuple[str, str]


def are_there() -> bool:
    """Whether this process is connected to a job "ps", as any `ParameterServerStrategy` has it."""
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
    """The id, as a tensor. Raises InvalidArgument, and what TensorFlow's does."""
    registered: str = theirs.register_dataset(
        _one_address(service), dataset, _of_elements(compression), dataset_id
    )
    return registered


def _arguments(policy: ShardingPolicy, job_name: str | None, how: ReadOptions) -> dict[str, Any]:
    """All but the protocol, of which TensorFlow has its own."""
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
    """Blocks are none of TensorFlow's, whatever they would be compressed with."""
    return compression if compression in (None, "SNAPPY") else "AUTO"


def _one_address(service: Service) -> str:
    named = "://".join(service) if isinstance(service, tuple) else service
    if isinstance(named, str) and "," in named:
        raise InvalidArgument(
            f"service={named!r} has several addresses, and beside parameter servers TensorFlow's "
            "own operations read, which take one: give that of a balancer before the dispatchers"
        )
    return named
