"""Objects of a store: which there are, what they are known by, and their bytes.

s3://, gs://, az:// and http(s):// are read by obstore, whose retries are used; hf:// and other URLs
by fsspec. Nothing here knows a credential: both find them in the environment of the process.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import logging
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

import tenacity

from ....storage.extras import install
from ...errors import FailedPrecondition, InvalidArgument
from ...extras import imported
from .manifest import MANY, FileEntry

log = logging.getLogger(__name__)

RETRY_S = 60.0
"""For one request, with all its retries."""

_URL = re.compile(r"([A-Za-z][\w+.-]*)://")
_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    "gs": "gs",
    **dict.fromkeys(("az", "adl", "azure", "abfs", "abfss"), "azure"),
    **dict.fromkeys(("http", "https"), "https"),
}
"""Of the schemes that obstore reads, by scheme."""

OPTIONS = ("anonymous", "region", "endpoint")
"""storage_options."""

_ADVICE = {
    errno.ENOENT: "it is not there, or was deleted",
    errno.EACCES: "this process has no right to it, or no valid credentials: set them in the "
    "environment of the process that reads it, or give storage_options={'anonymous': True}",
    errno.EIO: "the store does not answer, or with an error",
}
_STORES_WORDS = re.compile(r"<[^:]*?<Code>(.*?)</Code>(?:\s*<Message>(.*?)</Message>)?.*")
_HF_ADVICE = ", or is private: set HF_TOKEN where this runs; a data set is hf://datasets/OWNER/NAME"


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


def require_options(options: Any) -> dict[str, Any]:
    """storage_options as they are registered; a worker asks again, as anybody may have made what
    is registered. Raises InvalidArgument."""
    if not options:
        return {}
    if not isinstance(options, dict) or not options.keys() <= {*OPTIONS}:
        raise InvalidArgument(
            f"storage_options may have {[*OPTIONS]} only, and no secrets: they are registered. "
            "Processes find credentials in their own environment"
        )
    if "endpoint" in options and options.get("anonymous") is not True:
        raise InvalidArgument(
            f"endpoint={redacted(str(options['endpoint']))!r:.100} needs anonymous=True: workers "
            "send credentials to no address that a dataset names. Set AWS_ENDPOINT_URL, or its "
            "kin, where they run"
        )
    if not isinstance(options.get("anonymous", True), bool) or any(
        not isinstance(options.get(name, "x"), str) for name in ("region", "endpoint")
    ):
        raise InvalidArgument(f"storage_options={options!r:.100}: a bool, and texts")
    if not re.fullmatch(r"https?://[\w.:\[\]-]+/?", options.get("endpoint", "http://x")):
        raise InvalidArgument(
            f"endpoint={redacted(options['endpoint'])!r:.100} must be http(s)://HOST[:PORT]"
        )
    if not re.fullmatch(r"[a-z0-9-]+", options.get("region", "x")):
        raise InvalidArgument(f"region={options['region']!r:.100} is none: such as 'eu-west-1'")
    return {name: options[name] for name in sorted(options)}


def of_object_store(url: str, options: dict[str, Any]) -> dict[str, str] | None:
    """storage_options, as the packages of Delta Lake and Lance call them; None for a path."""
    if not is_url(url):
        return None
    given = {**require_options(options), "allow_http": True}
    of = {"anonymous": "skip_signature"}
    return {f"aws_{of.get(name, name)}": str(value).lower() for name, value in given.items()}


def require_plain(url: str) -> None:
    """Raises InvalidArgument for a URL that may have a secret."""
    scheme, _, rest = url.partition("://")
    scheme, host = scheme.lower(), rest.partition("/")[0]
    if not host:
        raise InvalidArgument(f"{redacted(url)} names no bucket or host")
    asks = scheme.startswith("http") and re.search(r"[?#]", rest)
    if asks or "::" in url or ("@" in host and not scheme.startswith("abfs")):
        raise InvalidArgument(
            f"{redacted(url)} has a query, a fragment or a user's name, which may be secret, and "
            "URLs are registered: give it without, and credentials in the processes' environment"
        )


def redacted(text: str) -> str:
    """Without queries and users of URLs."""
    text = re.sub(r"(://)[^/\s@]+@", r"\1…@", text)
    return re.sub(r"(://[^\s?\"')]*)\?[^\s\"')]*", r"\1?…", text)


def pinned(url: str) -> str:
    """With the commit that a repository of Hugging Face has now in place of its branch, so that
    what it names never changes; other URLs as they are. Raises OSError, FailedPrecondition."""
    if not url.startswith("hf://") or _is_pinned(url):
        return url
    fs, path = _filesystem(url)
    with _errors_named(url):
        place = fs.resolve_path(path)
        if not hasattr(place, "repo_id"):  # a bucket
            return url
        from huggingface_hub import HfApi, constants

        about = HfApi(fs.endpoint, fs.token).repo_info(
            place.repo_id, revision=place.revision, repo_type=place.repo_type
        )
        kind = constants.REPO_TYPES_URL_PREFIXES.get(place.repo_type, "")
        slash = "/" if path.endswith("/") or url.endswith("/") else ""
        return f"hf://{kind}{place.repo_id}@{about.sha}/{place.path_in_repo.rstrip('/')}{slash}"


def _is_pinned(url: str) -> bool:
    return re.match(r"hf://[^@]+@[0-9a-f]{40}(/|$)", url) is not None


def listed(url: str, options: dict[str, Any]) -> list[FileEntry]:
    """All objects below a directory, sorted. Raises OSError."""
    if url.lower().startswith("http"):
        raise InvalidArgument(f"{url} cannot be listed, as HTTP has no lists: name the files")
    if _by_obstore(url):
        with _errors_named(url):
            obstore, store, key = _store(url, options)
            root = url[: len(url) - len(key)]
            prefix = key.rstrip("/")
            try:
                batches = [*obstore.list(store, prefix=prefix or None)]
            except obstore.exceptions.InvalidPathError as error:
                if _EXTRAS[url.partition(":")[0].lower()] != "s3":
                    said = str(error).partition("\n")[0]
                    raise FailedPrecondition(
                        f"{url} cannot be listed ({said}): rename that object, or name the files"
                    ) from error
                batches = [_listed_by_boto3(url, root, prefix, options)]
            found = [_entry(root + one["path"], one) for batch in batches for one in batch]
    else:
        fs, path = _filesystem(url)
        with _errors_named(url):
            scheme = _URL.match(url)[0]  # type: ignore[index]
            found = [
                _entry(scheme + name, about) for name, about in fs.find(path, detail=True).items()
            ]
    return sorted(found, key=lambda entry: entry.path)


def _listed_by_boto3(
    url: str, root: str, prefix: str, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Without objects that obstore cannot ask for, which a warning names."""
    import boto3
    import botocore.config

    how = {"signature_version": botocore.UNSIGNED} if options.get("anonymous") else {}
    client = boto3.client(
        "s3", region_name=options.get("region"), endpoint_url=options.get("endpoint"),
        config=botocore.config.Config(**how),
    )  # fmt: skip
    below = {"Bucket": root.split("/")[2], "Prefix": f"{prefix}/" if prefix else ""}
    pages = client.get_paginator("list_objects_v2").paginate(**below)
    found = {one["Key"]: one for page in pages for one in page.get("Contents", ())}
    if odd := [key for key in found if _is_odd(key)]:
        log.warning(
            "%s has objects %s, and no name may have an empty part, ., .. or a control character: "
            "they are left out",
            url, odd[:MANY],
        )  # fmt: skip
    return [
        {"path": key, "size": one["Size"], "e_tag": one["ETag"]}
        for key, one in found.items()
        if key not in odd
    ]


def _is_odd(key: str) -> bool:
    parts = key.removesuffix("/").split("/") if key else []
    return not {"", ".", ".."}.isdisjoint(parts) or bool(re.search(r"[\x00-\x1f\x7f]", key))


def head(url: str, options: dict[str, Any]) -> FileEntry:
    """Raises OSError."""
    with _errors_named(url):
        if _by_obstore(url):
            obstore, store, key = _store(url, options)
            try:
                return _entry(url, obstore.head(store, key))
            except obstore.exceptions.BaseError as error:
                if re.search("status code: 40[013]", str(error)):
                    obstore.get_range(store, key, start=0, end=1)  # the store says what is wrong
                raise
        fs, path = _filesystem(url)
        about = fs.info(path)
        if about.get("type") == "directory":
            raise FileNotFoundError(errno.ENOENT, "it is a directory")
        return _entry(url, about)


def fetch(entry: FileEntry, options: dict[str, Any], start: int, stop: int) -> bytes:
    """A range of an object's bytes. Raises OSError, and FailedPrecondition if the object is
    another one than was registered."""
    try:
        with _errors_named(entry.path):
            return _fetched(entry, options, start, stop)
    except FileNotFoundError as error:
        raise entry.fault(f"cannot be read ({error.strerror})") from error
    except OSError as error:
        if error.errno == errno.EIO:  # perhaps since it is shorter now
            with contextlib.suppress(OSError):
                entry.require_same(head(entry.path, options))
        raise


class _CutShort(OSError):
    """A body ended early."""


@tenacity.retry(
    retry=tenacity.retry_if_exception_type(_CutShort),
    stop=tenacity.stop_after_delay(RETRY_S),
    wait=tenacity.wait_random_exponential(0.1, 5.0),
    reraise=True,
)
def _fetched(entry: FileEntry, options: dict[str, Any], start: int, stop: int) -> bytes:
    if _by_obstore(entry.path):
        obstore, store, key = _store(entry.path, options)
        answer = obstore.get(store, key, options={"range": (start, stop)})
        entry.require_same(_entry(entry.path, answer.meta))
        try:
            data = answer.bytes()
        except obstore.exceptions.BaseError as error:
            raise _CutShort(errno.EIO, redacted(str(error))) from error
    else:
        fs, path = _filesystem(entry.path)
        pinned = _is_pinned(entry.path)
        how = {"cache_type": "none", "size": entry.size} if pinned else {}
        data = fs.cat_file(path, start=start, end=stop, **how)
        if not pinned:  # the answer has no version, and what was changed before is changed now
            fs.invalidate_cache()
            entry.require_same(_entry(entry.path, fs.info(path)))
    if len(data) != stop - start:
        raise _CutShort(errno.EIO, f"its body had {len(data)} of {stop - start} bytes")
    return data  # type: ignore[no-any-return]


def put(url: str, data: bytes, options: dict[str, Any]) -> None:
    """Raises OSError."""
    with _errors_named(url):
        if _by_obstore(url):
            obstore, store, key = _store(url, options)
            obstore.put(store, key, data)
        else:
            fs, path = _filesystem(url)
            fs.pipe_file(path, data)


def _entry(url: str, about: Any) -> FileEntry:
    """What obstore, or a file system of fsspec, says of an object."""
    names = ("e_tag", "ETag", "etag", "blob_id", "version", "sha", "md5Hash", "last_modified")
    for name in (*names, "LastModified", "mtime", "created"):
        if (value := about.get(name)) is not None:
            break
    else:
        name, value = "size", about["size"]
    if isinstance(value, datetime.datetime):
        value = value.isoformat() if value.timestamp() else None
    if value is None or (name == "size" and url.lower().startswith("http")):
        raise FailedPrecondition(
            f"{url}: its server says neither an ETag nor a time, so that a change of it would not "
            "be noticed: serve it by another one, or copy it"
        )
    if name.lower().replace("_", "") == "etag":
        name, value = "ETag", value.removeprefix("W/").strip('"')
    return FileEntry(url, int(about["size"]), f"{name} {value}", 0)


def _by_obstore(url: str) -> bool:
    return url.partition("://")[0].lower() in _EXTRAS


def _store(url: str, options: dict[str, Any]) -> tuple[Any, Any, str]:
    """obstore, the store of a URL, and the URL's key there. Raises FailedPrecondition, and
    InvalidArgument for options that the store does not take."""
    options = require_options(options)
    global _first_process
    scheme, _, rest = url.partition("://")
    host, _, key = rest.partition("/")
    if _is_odd(key):
        raise InvalidArgument(
            f"{redacted(url)!r} has an empty name, ., .. or a control character in it, which "
            "cannot be asked for"
        )
    _first_process = _first_process or os.getpid()
    if _first_process != os.getpid():  # its threads are not here, and are waited for
        raise FailedPrecondition(
            f"{redacted(url)} cannot be read in a fork of a process that has read such files: "
            "start it with multiprocessing's method spawn"
        )
    extra = _EXTRAS[scheme.lower()]
    obstore = imported("obstore", extra, redacted(url))
    takes = {"s3": OPTIONS, "gs": OPTIONS[:1], "azure": OPTIONS[:1]}.get(extra, ())
    if others := [name for name in options if name not in takes]:
        raise InvalidArgument(f"storage_options has {others}, which {scheme}:// does not take")
    with _opening:  # many threads ask for the first one at a time, and boto3 takes long
        endpoint, given = os.environ.get("AWS_ENDPOINT_URL"), tuple(sorted(options.items()))
        return obstore, _opened(f"{scheme}://{host}", given, endpoint), key


_first_process = 0  # that has used obstore
_opening = threading.Lock()


@functools.lru_cache(maxsize=64)
def _opened(root: str, options: tuple[tuple[str, Any], ...], _endpoint: str | None) -> Any:
    """A store, at the endpoint that the environment has."""
    import obstore.store

    given, scheme = dict(options), root.partition("://")[0].lower()
    config: dict[str, Any] = {
        "retry_config": {"retry_timeout": datetime.timedelta(seconds=RETRY_S), "max_retries": 30},
        "client_options": {"allow_http": True},
    }
    if scheme.startswith("http"):
        return obstore.store.from_url(root, **config)
    if given.get("anonymous"):
        config["skip_signature"] = True
    elif scheme in ("s3", "s3a"):
        with contextlib.suppress(ImportError):  # which knows profiles and single sign-on, too
            import boto3
            from botocore.configprovider import ConfiguredEndpointProvider
            from obstore.auth.boto3 import Boto3CredentialProvider

            if (session := boto3.Session()).get_credentials() is None:
                raise PermissionError(errno.EACCES, "no AWS credentials were found")
            config["credential_provider"] = Boto3CredentialProvider(session)
            of = session._session
            own = ConfiguredEndpointProvider(of.full_config, of.get_scoped_config(), "s3")
            found = {"region": session.region_name, "endpoint": own.provide()}
            config |= {name: value for name, value in found.items() if value}
    config |= {name: given[name] for name in ("endpoint", "region") if name in given}
    return obstore.store.from_url(root, **config)


def _filesystem(url: str) -> tuple[Any, str]:
    """fsspec's, and the URL's path there. Raises FailedPrecondition."""
    try:
        import fsspec.core

        return fsspec.core.url_to_fs(url)  # type: ignore[no-any-return]
    except (ImportError, ValueError) as error:
        scheme = url.partition("://")[0]
        advice = install("hf") if scheme == "hf" else "install the package that fsspec needs for it"
        raise FailedPrecondition(
            f"{redacted(url)} is read by fsspec, which cannot ({error}): {advice}"
        ) from error


@contextlib.contextmanager
def _errors_named(url: str) -> Iterator[None]:
    """Raises OSError with the URL, and what is wrong."""
    try:
        yield
    except (FailedPrecondition, InvalidArgument):
        raise
    except Exception as error:
        kind = _errno_of(error)
        if kind is None:
            raise
        said = " ".join(redacted(str(error).partition("Debug source:")[0]).split())
        said = _STORES_WORDS.sub(r"\1: \2", said)[:400]
        hint = _HF_ADVICE if url.startswith("hf://") and kind != errno.EIO else ""
        raise OSError(kind, f"{_ADVICE[kind]}{hint} ({said})", url) from error


def _errno_of(error: Exception) -> int | None:
    library, name = type(error).__module__.partition(".")[0], type(error).__name__
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if library == "botocore":
        status = (response or {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
    if library == "obstore" and (said := re.search(r"status code: (\d+)", str(error))):
        status = int(said[1])
    if isinstance(error, FileNotFoundError) or status == 404 or name == "NotFoundError":
        return errno.ENOENT
    denied = re.search("^(botocore.*(Credential|Token)|obstore(Permission|Unauth))", library + name)
    if isinstance(error, PermissionError) or status in (401, 403) or denied:
        return errno.EACCES
    of_library = library in ("aiohttp", "botocore", "httpx", "obstore")
    return errno.EIO if of_library or isinstance(error, OSError | ValueError) else None
