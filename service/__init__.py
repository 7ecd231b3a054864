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
    from .client.api import distribute as distribute
    from .client.api import from_dataset_id as from_dataset_id
    from .client.api import register_dataset as register_dataset
    from .client.datasets import DatasetInfo as DatasetInfo
    from .client.datasets import list_datasets as list_datasets
    from .client.datasets import remove_dataset as remove_dataset
    from .client.dispatcher_status import wait_for_workers as wait_for_workers
    from .client.files import register_files as register_files
    from .client.metrics import metrics as metrics
    from .client.options import SHARD_HINT as SHARD_HINT
    from .client.options import CrossTrainerCache as CrossTrainerCache
    from .client.options import ShardingPolicy as ShardingPolicy
    from .client.reader import ElementIterator as ElementIterator
    from .client.reader import read as read
    from .client.registration import register_mixture as register_mixture
    from .client.saves import distributed_save as distributed_save
    from .client.schedules import batch_of as batch_of
    from .client.schedules import change_weights as change_weights
    from .client.schedules import fork_job as fork_job
    from .client.schedules import skip_steps as skip_steps
    from .client.tf_position import OrderedPosition as OrderedPosition
    from .client.tfds import register_tfds as register_tfds
    from .connections.credentials import Credentials as Credentials
    from .connections.credentials import use_credentials as use_credentials
    from .errors import ForebayError as ForebayError
    from .materialized.run import Materialized as Materialized
    from .materialized.run import materialize as materialize
    from .pipelines.kinds.functions import PythonDataset as PythonDataset
    from .pipelines.kinds.functions import python_dataset as python_dataset
    from .servers import DispatcherConfig as DispatcherConfig
    from .servers import DispatchServer as DispatchServer
    from .servers import WorkerConfig as WorkerConfig
    from .servers import WorkerServer as WorkerServer
    from .task_context import Role as Role
    from .task_context import TaskContext as TaskContext
    from .trainers.across import distribute_across as distribute_across
    from .trainers.preemption import PreemptionHandler as PreemptionHandler

_HOMES = {
    ".client.api": ("distribute", "from_dataset_id", "register_dataset"),
    ".client.datasets": ("DatasetInfo", "list_datasets", "remove_dataset"),
    ".client.files": ("register_files",),
    ".pipelines.kinds.functions": ("PythonDataset", "python_dataset"),
    ".client.metrics": ("metrics",),
    ".client.options": ("SHARD_HINT", "CrossTrainerCache", "ShardingPolicy"),
    ".client.registration": ("register_mixture",),
    ".client.schedules": ("batch_of", "change_weights", "fork_job", "skip_steps"),
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
    __all__ = sorted(_HOME_OF)

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
    return sorted(_HOME_OF)
