"""The root of Forebay's errors, and the storage's errors.

ForebayError
├── StorageError         the storage cannot do what was asked
│   ├── StorageUnusable    wrong URL, not writable, not a storage   (the operator's fault)
│   │   ├── StorageUnavailable   unreachable, loading, full: may become usable again by itself
│   │   └── Volatile         its settings can lose acknowledged records
│   ├── Locked             another writer holds it
│   ├── Fenced             a later term exists: this writer must stop
│   ├── OutOfSequence      a sequence that does not fit the log (our bug)
│   ├── AppendFailed       full disk, failed fsync: the outcome is unknown
│   ├── NewerFormat        written by a later version of the program
│   ├── Missing            no such blob, snapshot or (trimmed) record
│   └── Corrupt            what is stored is not what was written
└── …                    service/errors.py draws the rest

A message says what was wrong, with which value, and what to do.
"""

from __future__ import annotations

REPAIR = "or repair the journal (forebay journal repair --truncate-corrupt)"
ACCEPT_LOSS = "accept their loss: forebay journal repair --truncate-corrupt"
"""What is left to do if no backup has what is missing."""


class ForebayError(Exception):
    """Any error that Forebay raises on purpose."""


class StorageError(ForebayError):
    """The storage cannot do what was asked of it."""


class StorageUnusable(StorageError):
    """The URL is wrong, or what it names cannot be used as a storage."""


class StorageUnavailable(StorageUnusable):
    """The storage cannot be used now, but perhaps later. A caller that can wait should retry."""


class Volatile(StorageUnusable):
    """The storage's settings can lose acknowledged records. The message names the setting."""


class Locked(StorageError):
    """Another process is the writer of this storage.

    If `silence_ms` is not 0, the process may have ended. Its claim lapses once it has been
    silent for that long. `owner` is the writer, as it has named itself; "": not known.
    """

    def __init__(self, message: str, silence_ms: int = 0, owner: str = "") -> None:
        super().__init__(message)
        self.silence_ms = silence_ms
        self.owner = owner


class Fenced(StorageError):
    """A writer of a later term exists. This one must stop at once."""


class OutOfSequence(StorageError):
    """A sequence does not fit what the log holds. Nothing was changed."""


class AppendFailed(StorageError):
    """The outcome of an append is unknown. The writer must stop and replay."""


class NewerFormat(StorageError):
    """The data was written by a later version of Forebay, and is left untouched."""


class Missing(StorageError):
    """The blob or snapshot does not exist, or the records were trimmed."""


class Corrupt(StorageError):
    """Stored data is damaged in a way that a crash cannot explain. The message says where."""
