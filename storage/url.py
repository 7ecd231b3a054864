"""Opens the storage at a URL: one of ours, or one of another package, by its scheme."""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

from . import other_packages
from .base import Storage
from .errors import ForebayError, StorageUnusable
from .extras import install
from .local.files import FileStorage
from .memory import MemoryStorage
from .parameters import redact

GROUP = "forebay.storage"
"""The group of entry points by which other packages bring storages. An entry point's name is a URL
scheme, in small letters. What it names is called like `_memory`: with the URL, and
`allow_volatile`; it returns a Storage."""

Factory = Callable[..., object]


def _memory(url: str, *, allow_volatile: bool) -> Storage:
    if url not in ("memory:", "memory://"):
        raise StorageUnusable(f"storage {url!r}: nothing follows the colon of memory:; {_offer()}")
    return MemoryStorage()


def _files(url: str, *, allow_volatile: bool) -> Storage:
    host, path = urlsplit(url)[1:3]
    if host not in ("", "localhost") or not path.startswith("/"):
        raise StorageUnusable(
            f"storage {url!r} names no directory of this host; write file:///directory"
        )
    return FileStorage(unquote(path))


def _redis(url: str, *, allow_volatile: bool) -> Storage:
    from .redis.storage import RedisStorage  # importing it takes a while

    return RedisStorage(url, allow_volatile=allow_volatile)


def _postgres(url: str, *, allow_volatile: bool) -> Storage:
    try:
        from .postgres.storage import PostgresStorage
    except ImportError as error:  # also psycopg without its libpq
        raise StorageUnusable(
            f"storage {redact(url)} needs psycopg ({error}): {install('postgres')}"
        ) from error
    return PostgresStorage(url, allow_volatile=allow_volatile)


# Ours are not entry points: to read those of all installed packages takes 20 ms and more.
_OURS: dict[str, Factory] = {
    "memory": _memory,
    "file": _files,
    **dict.fromkeys(("redis", "rediss", "unix", "redis+sentinel"), _redis),
    **dict.fromkeys(("postgresql", "postgres"), _postgres),
}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_NO_COLON = re.compile(rf"({'|'.join(map(re.escape, _OURS))})//")


def open_storage(url: str, *, allow_volatile: bool = False) -> Storage:
    """The storage at `url`.

    `url` is `memory:`, `file:///directory`, a plain path, a Redis URL (redis/address.py), a
    PostgreSQL URL (postgres/address.py), or has the scheme of a storage that another package
    brings (docs/storages.md). Each `memory:` storage is a new one. Opening changes nothing;
    `open_writer` creates what is missing. Without `allow_volatile`, it refuses a Redis or
    PostgreSQL whose settings can lose acknowledged records. Raises StorageUnusable.
    """
    if (scheme := _SCHEME.match(url)) is None:
        if not url:
            raise StorageUnusable(f"the storage URL is empty; {_offer()}")
        if url.startswith(":"):
            raise StorageUnusable(f"storage {redact(url)!r} lacks a scheme; {_offer()}")
        if _NO_COLON.match(url):
            raise StorageUnusable(
                f"storage {redact(url)!r} lacks the colon of a scheme; {_offer()}"
            )
        return FileStorage(url)
    name = scheme[1].lower()
    factory = _OURS.get(name) or _load(name, url)
    try:
        storage = factory(url, allow_volatile=allow_volatile)
    except ForebayError:
        raise
    except Exception as error:
        raise StorageUnusable(
            f"storage {redact(url)!r}: what the scheme {name!r} names raised "
            f"{type(error).__name__}; mend that package"
        ) from error
    if not isinstance(storage, Storage):
        raise StorageUnusable(
            f"storage {redact(url)!r}: what the scheme {name!r} names returned a "
            f"{type(storage).__name__}, which is no forebay.storage.Storage; mend that package"
        )
    return storage


def _load(scheme: str, url: str) -> Factory:
    """The factory that another package brings for the scheme. Raises StorageUnusable."""
    where = f"storage {redact(url)!r}"
    try:
        if (entry := other_packages.find(GROUP, scheme)) is not None:
            return other_packages.load(entry)  # type: ignore[no-any-return]
    except other_packages.Unusable as error:
        raise StorageUnusable(f"{where}: {error}") from error
    raise StorageUnusable(f"{where}: there is no storage of the scheme {scheme!r}; {_offer()}")


def _offer() -> str:
    others = [name for name in other_packages.names_of(GROUP) if name not in _OURS]
    return (
        "use memory:, file:///directory, a plain path, redis://host:port/db, rediss://…, "
        "unix:///socket, redis+sentinel://host:port/service, "
        f"postgresql://host:port/database{''.join(f', {name}:…' for name in others)}, or install "
        "the package that brings the scheme"
    )
