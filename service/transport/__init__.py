"""The data connection: carries a worker's blocks to consumers (service/proto/transfer.proto)."""

from __future__ import annotations

from .budget import ElementBudget as ElementBudget
from .client import BlockClient as BlockClient
from .dial import ConnectionRefused as ConnectionRefused
from .dial import WorkerRefused as WorkerRefused
from .local import LocalClient as LocalClient
from .local import has_local_workers as has_local_workers
from .local import local_worker as local_worker
from .server import BlockServer as BlockServer
from .sessions import MAX_AWAY_BYTES as MAX_AWAY_BYTES
