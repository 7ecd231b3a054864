"""The data connection: a worker's blocks to its consumers (service/proto/transfer.proto)."""

from __future__ import annotations

from .budget import ElementBudget
from .client import BlockClient
from .dial import WorkerRefused
from .local import LocalClient, has_local_workers, local_worker
from .messages import MAX_COMPONENTS, End, EndOfTask, TaskFailed, TaskUnknown
from .outputs import OutputCancelled, TaskOutput
from .server import BlockServer

__all__ = [
    "MAX_COMPONENTS",
    "BlockClient",
    "BlockServer",
    "ElementBudget",
    "End",
    "EndOfTask",
    "LocalClient",
    "OutputCancelled",
    "TaskFailed",
    "TaskOutput",
    "TaskUnknown",
    "WorkerRefused",
    "has_local_workers",
    "local_worker",
]
