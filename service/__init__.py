"""Forebay's public interface: a drop-in for `tf.data.experimental.service`, and `read`.

    from forebay import service

Each name is imported when it is first used, and TensorFlow only with names that need it: `read`,
the configurations and `DispatchServer` do not. Without TensorFlow, `register_dataset` takes only
functions of splits and PCollections.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client.api import distribute, from_dataset_id, register_dataset
    from .client.datasets import DatasetInfo, list_datasets, remove_dataset
    from .client.dispatcher_status import wait_for_workers
    from .client.files import register_files
    from .client.metrics import metrics
    from .client.options import SHARD_HINT, CrossTrainerCache, ShardingPolicy
    from .client.reader import ElementIterator, read
    from .client.registration import register_mixture
    from .client.saves import distributed_save
    from .client.schedules import change_weights, skip_steps
    from .client.tf_position import OrderedPosition
    from .client.tfds import register_tfds
    from .connections.credentials import Credentials, use_credentials
    from .errors import ForebayError
    from .materialized.run import Materialized, materialize
    from .pipelines.kinds.functions import PythonDataset, python_dataset
    from .servers import DispatcherConfig, DispatchServer, WorkerConfig, WorkerServer
    from .task_context import Role, TaskContext
    from .trainers.across import distribute_across
    from .trainers.preemption import PreemptionHandler

__all__ = [
    "SHARD_HINT",
    "Credentials",
    "CrossTrainerCache",
    "DatasetInfo",
    "DispatchServer",
    "DispatcherConfig",
    "ElementIterator",
    "ForebayError",
    "Materialized",
    "OrderedPosition",
    "PreemptionHandler",
    "PythonDataset",
    "Role",
    "ShardingPolicy",
    "TaskContext",
    "WorkerConfig",
    "WorkerServer",
    "change_weights",
    "distribute",
    "distribute_across",
    "distributed_save",
    "from_dataset_id",
    "list_datasets",
    "materialize",
    "metrics",
    "python_dataset",
    "read",
    "register_dataset",
    "register_files",
    "register_mixture",
    "register_tfds",
    "remove_dataset",
    "skip_steps",
    "use_credentials",
    "wait_for_workers",
]

_HOMES = {
    ".client.api": ("distribute", "from_dataset_id", "register_dataset"),
    ".client.datasets": ("DatasetInfo", "list_datasets", "remove_dataset"),
    ".client.files": ("register_files",),
    ".pipelines.kinds.functions": ("PythonDataset", "python_dataset"),
    ".client.metrics": ("metrics",),
    ".client.options": ("SHARD_HINT", "CrossTrainerCache", "ShardingPolicy"),
    ".client.registration": ("register_mixture",),
    ".client.schedules": ("change_weights", "skip_steps"),
    ".client.saves": ("distributed_save",),
    ".client.tf_position": ("OrderedPosition",),
    ".client.tfds": ("register_tfds",),
    ".client.reader": ("ElementIterator", "read"),
    ".client.dispatcher_status": ("wait_for_workers",),
    ".connections.credentials": ("Credentials", "use_credentials"),
    ".errors": ("ForebayError",),
    ".materialized.run": ("Materialized", "materialize"),
    ".servers": ("DispatchServer", "DispatcherConfig", "WorkerConfig", "WorkerServer"),
    ".trainers.across": ("distribute_across",),
    ".task_context": ("Role", "TaskContext"),
    ".trainers.preemption": ("PreemptionHandler",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


# gRPC's own fork support hangs in one of several hundred forks, and Forebay makes no gRPC calls in
# a fork (connections/relay.py). gRPC reads this variable only once, when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


if not TYPE_CHECKING:  # else a misspelt name would have any type

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = _HOME_OF[name]
        if (
            name == "register_dataset"
            and not import_module(".pipelines", __name__).has_tensorflow()
        ):
            home = ".client.registration"  # for datasets that need no TensorFlow
        with import_module(".extras", __name__).told_what_to_install():
            return getattr(import_module(home, __name__), name)


def __dir__() -> list[str]:
    return __all__
