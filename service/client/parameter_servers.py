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
from .options import ReadOptions

theirs = tf.data.experimental.service
"""TensorFlow's own."""

Service = str | tuple[str, str]


def are_there() -> bool:
    """Whether this process is connected to a job "ps", as by every `ParameterServerStrategy`."""
    return any("/job:ps/" in device.name for device in tf.config.list_logical_devices())


def arguments(service: Service, how: ReadOptions) -> dict[str, Any]:
    """Those of TensorFlow's `from_dataset_id` and `distribute` that read so, but for the transfer
    protocol: TensorFlow has its own protocols. Raises InvalidArgument."""
    of_a_round = how.num_consumers is not None
    return {
        "service": one_address(service),
        "processing_mode": theirs.ShardingPolicy(how.policy.value),
        "job_name": how.job_name,
        "consumer_index": how.consumer_index if of_a_round else None,
        "num_consumers": how.num_consumers,
        "max_outstanding_requests": how.max_elements,
        "cross_trainer_cache": how.cache and theirs.CrossTrainerCache(how.cache.trainer_id),
        "target_workers": how.targets.name,
    }


def of_elements(compression: str | None) -> str | None:
    """TensorFlow's compression for ours; it does not know blocks, nor their compressions."""
    return compression if compression in (None, "SNAPPY") else "AUTO"


def one_address(service: Service) -> str:
    """Raises InvalidArgument for several."""
    named = "://".join(service) if isinstance(service, tuple) else service
    if isinstance(named, str) and "," in named:
        raise InvalidArgument(
            f"service={named!r} has several addresses, and beside parameter servers TensorFlow's "
            "own operations read, which take one: give that of a balancer before the dispatchers"
        )
    return named
