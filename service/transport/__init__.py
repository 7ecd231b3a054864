"""The data connection: carries a worker's blocks to consumers (service/proto/transfer.proto)."""

from __future__ import annotations

from .addresses import ConnectionRefused
from .budget import ElementBudget
from .client import BlockClient
from .dial import WorkerRefused
from .local import LocalClient, has_local_workers, local_worker
from .server import BlockServer
from .sessions import MAX_AWAY_BYTES

__all__ = [
    "MAX_AWAY_BYTES",
    "BlockClient",
    "BlockServer",
    "ConnectionRefused",
    "ElementBudget",
    "LocalClient",
    "WorkerRefused",
    "has_local_workers",
    "local_worker",
]
