"""From a URL to a storage."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from .base import Storage
from .errors import StorageUnusable
from .files import FileStorage
from .memory import MemoryStorage

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_OFFER = "use memory:, file:///directory, or a plain path"


def open_storage(url: str) -> Storage:
    """The storage at `url`: `memory:`, `file:///directory` or a plain path.

    Each `memory:` storage is a new one. Opening changes nothing; what is not there yet is made
    by `open_writer`. Raises StorageUnusable.
    """
    scheme = _SCHEME.match(url)
    if scheme is None:
        if not url:
            raise StorageUnusable(f"the storage URL is empty; {_OFFER}")
        return FileStorage(url)
    if url in ("memory:", "memory://"):
        return MemoryStorage()
    if scheme[0].lower() == "file:":
        host, path = urlsplit(url)[1:3]
        if host not in ("", "localhost") or not path.startswith("/"):
            raise StorageUnusable(
                f"storage {url!r} names no directory of this host; write file:///directory"
            )
        return FileStorage(unquote(path))
    raise StorageUnusable(
        f"storage {url!r}: there is no storage of the scheme {scheme[0]!r}; {_OFFER}"
    )
