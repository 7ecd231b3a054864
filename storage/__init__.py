"""Pluggable storages for a journal: each has a fenced log, snapshots and blobs under one URL."""

from __future__ import annotations

from .base import Extent, Holdings, Record, Storage, Writer, blob_digest, blob_name
from .errors import (
    AppendFailed,
    Away,
    Corrupt,
    Fenced,
    ForebayError,
    Locked,
    Missing,
    NewerFormat,
    OutOfSequence,
    StorageError,
    StorageUnusable,
    Volatile,
)
from .local.files import FileStorage
from .memory import MemoryStorage
from .url import open_storage

__all__ = [
    "AppendFailed",
    "Away",
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
    "StorageUnusable",
    "Volatile",
    "Writer",
    "blob_digest",
    "blob_name",
    "open_storage",
]
