"""The data connection: a worker's blocks to its consumers (service/proto/transfer.proto)."""

from __future__ import annotations

from .budget import ElementBudget
from .client import BlockClient, NobodyListens
from .dial import WorkerRefused
from .local import LocalClient, has_local_workers, local_worker
from .server import BlockServer

__all__ = [
    "BlockClient",
    "BlockServer",
    "ElementBudget",
    "LocalClient",
    "NobodyListens",
    "WorkerRefused",
    "has_local_workers",
    "local_worker",
]
