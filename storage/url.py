"""Opens the storage at a URL."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from .base import Storage
from .errors import StorageUnusable
from .local.files import FileStorage
from .memory import MemoryStorage
from .redis.address import SCHEMES, redact

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_NO_COLON = re.compile(rf"(memory|file|{'|'.join(map(re.escape, SCHEMES))})//")
_OFFER = (
    "use memory:, file:///directory, a plain path, redis://host:port/db, rediss://…, "
    "unix:///socket, or redis+sentinel://host:port/service"
)


def open_storage(url: str, *, allow_volatile: bool = False) -> Storage:
    """The storage at `url`.

    `url` is `memory:`, `file:///directory`, a plain path, or a Redis URL (redis/address.py). Each
    `memory:` storage is a new one. Opening changes nothing; `open_writer` creates what is
    missing. Without `allow_volatile`, it refuses a Redis whose settings can lose acknowledged
    records. Raises StorageUnusable.
    """
    scheme = _SCHEME.match(url)
    if scheme is None:
        if not url:
            raise StorageUnusable(f"the storage URL is empty; {_OFFER}")
        if url.startswith(":"):
            raise StorageUnusable(f"storage {redact(url)!r} lacks a scheme; {_OFFER}")
        if _NO_COLON.match(url):
            raise StorageUnusable(f"storage {redact(url)!r} lacks the colon of a scheme; {_OFFER}")
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
    if scheme[0].lower().removesuffix(":") in SCHEMES:
        from .redis.storage import RedisStorage  # importing it takes a while

        return RedisStorage(url, allow_volatile=allow_volatile)
    raise StorageUnusable(
        f"storage {redact(url)!r}: there is no storage of the scheme {scheme[0]!r}; {_OFFER}"
    )
