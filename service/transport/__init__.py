"""The data connection: a worker's blocks to its consumers (service/proto/transfer.proto)."""

from __future__ import annotations

from .client import PROTOCOLS, BlockClient, WorkerRefused
from .messages import End, EndOfTask, TaskFailed, TaskUnknown
from .outputs import OutputCancelled, TaskOutput
from .server import BlockServer

__all__ = [
    "PROTOCOLS",
    "BlockClient",
    "BlockServer",
    "End",
    "EndOfTask",
    "OutputCancelled",
    "TaskFailed",
    "TaskOutput",
    "TaskUnknown",
    "WorkerRefused",
]
