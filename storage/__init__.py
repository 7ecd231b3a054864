"""Pluggable storages for a journal: each has a fenced log, snapshots and blobs under one URL.

The storages themselves are imported when they are first used: readers need the errors alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import Extent, Holdings, Record, Storage, Writer, blob_digest, blob_name
from .errors import (
    AppendFailed,
    Corrupt,
    Fenced,
    ForebayError,
    Locked,
    Missing,
    NewerFormat,
    OutOfSequence,
    StorageError,
    StorageUnavailable,
    StorageUnusable,
    Volatile,
)

if TYPE_CHECKING:
    from .local.files import FileStorage
    from .memory import MemoryStorage
    from .url import open_storage

__all__ = [
    "AppendFailed",
    "Corrupt",
    "Extent",
    "Fenced",
    "FileStorage",
    "ForebayError",
    "Holdings",
    "Locked",
    "MemoryStorage",
    "Missing",
    "NewerFormat",
    "OutOfSequence",
    "Record",
    "Storage",
    "StorageError",
    "StorageUnavailable",
    "StorageUnusable",
    "Volatile",
    "Writer",
    "blob_digest",
    "blob_name",
    "open_storage",
]

_HOMES = {"FileStorage": ".local.files", "MemoryStorage": ".memory", "open_storage": ".url"}


if not TYPE_CHECKING:  # else a misspelt name would have any type

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
