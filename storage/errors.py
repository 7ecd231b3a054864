"""Root of Forebay's errors, and those of the storage.

ForebayError
├── StorageError         the storage cannot do what was asked
│   ├── StorageUnusable    wrong URL, not writable, not a storage   (the operator's fault)
│   ├── Locked             another writer holds it
│   ├── Fenced             a later term exists: this writer must stop
│   ├── OutOfSequence      an append that does not follow the last record (our bug)
│   ├── AppendFailed       full disk, failed fsync: the outcome is unknown
│   ├── NewerFormat        written by a later version of the program
│   ├── Missing            no such blob or snapshot
│   └── Corrupt            what is stored is not what was written
└── …                    service/errors.py draws the rest

A message says what was wrong, with which value, and what to do.
"""

from __future__ import annotations


class ForebayError(Exception):
    """Any error that Forebay raises on purpose."""


class StorageError(ForebayError):
    """The storage cannot do what was asked of it."""


class StorageUnusable(StorageError):
    """The URL is wrong, or what it names cannot be used as a storage."""


class Locked(StorageError):
    """Another process is the writer of this storage."""


class Fenced(StorageError):
    """A writer of a later term exists. This one must stop at once."""


class OutOfSequence(StorageError):
    """An append did not follow the last record. Nothing was written."""


class AppendFailed(StorageError):
    """The outcome of an append is unknown. The writer must stop and replay."""


class NewerFormat(StorageError):
    """The data was written by a later version of Forebay, and is left untouched."""


class Missing(StorageError):
    """There is no blob or snapshot of that name."""


class Corrupt(StorageError):
    """Stored data is damaged in a way that no crash explains."""
