"""Python datasets, as they are registered: a function and its splits, pickled by value."""

from __future__ import annotations

import contextlib
import functools
import glob
import inspect
import itertools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import cloudpickle

from ...journal.proto import events_pb2 as ev
from .. import pickles
from ..errors import InvalidArgument
from ..pipelines.python.columns import Misfit, iterated
from ..pipelines.python.nursery import BEAM
from ..pipelines.python.stored import package_version, python_version
from ..proto import forebay_pb2 as pb
from ..proto import python_pb2

FOREBAY = "forebay"
"""The distribution. A chain is pickled with its classes' names only."""

MAX_SPLITS = 10_000_000
LOOKED_AT = 10
"""Elements of the first split, and splits at most, that a spec is inferred from."""

ON_ERROR = {"raise": python_pb2.RAISE, "skip": python_pb2.SKIP, "retry": python_pb2.RETRY}


@dataclass(frozen=True)
class PythonDataset:
    """A function that `register_dataset` takes, with what belongs to it. Made by
    `python_dataset`; to be called as the function is."""

    function: Callable[..., Any]
    splits: Any
    element_spec: Any = None
    packages: tuple[str, ...] = ()
    on_error: str = "raise"
    limit: int = 100
    timeout_s: float | None = None

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidArgument(f"{self.function!r} is no function; give one that takes a split")
        if not isinstance(self.on_error, str) or self.on_error not in ON_ERROR:
            raise InvalidArgument(f"on_error={self.on_error!r} must be one of {[*ON_ERROR]}")
        if self.splits is None and self.on_error != "raise":
            raise InvalidArgument(
                f"on_error={self.on_error!r} is for functions of splits; one that builds a dataset "
                "cannot go on where it failed"
            )
        if not _is_number(self.limit, int) or self.limit < 0:
            raise InvalidArgument(
                f"limit={self.limit!r} must be an int, at least 0: how many splits may be skipped, "
                "or how often one is retried"
            )
        seconds = self.timeout_s
        if seconds is not None and not (_is_number(seconds, int | float) and seconds > 0):
            raise InvalidArgument(
                f"timeout_s={seconds!r} must be a number of seconds above 0, or None for no limit"
            )


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _names(packages: Any) -> tuple[str, ...]:
    """Raises InvalidArgument."""
    if not isinstance(packages, str | bytes | Mapping) and isinstance(packages, Iterable):
        found = tuple(packages)
        if all(isinstance(name, str) for name in found):
            return found
    raise InvalidArgument(
        f"packages={packages!r} must be a list of names of distributions, such as ['numpy']"
    )


def require_options(given: Iterable[str], *others: str) -> None:
    """That these are what `python_dataset` takes, or among the others. Raises InvalidArgument."""
    known = [*inspect.signature(python_dataset).parameters, *others]
    if unknown := [name for name in given if name not in known]:
        raise InvalidArgument(
            f"{unknown} are no options of a Python dataset, which has {known}: how often a split "
            "is retried is `limit`, and how many processes run it an option of the worker's, "
            "--processes"
        )


def python_dataset(
    splits: Any,
    *,
    element_spec: Any = None,
    packages: Iterable[str] = (),
    on_error: str = "raise",
    limit: int = 100,
    timeout_s: float | None = None,
) -> Callable[[Callable[..., Any]], PythonDataset]:
    """A decorator: the function is a dataset, to be registered by `register_dataset`.

    The function is called with each split, and returns an iterable of elements, as a generator
    does: arrays, numbers, strings, bytes and None, in dicts with strings as keys and in tuples. It
    runs in processes of the workers: what it reads must be there.

    It may be an object with `__call__`. Its `setup()`, if it has one, is called once in each
    process, before the first split, for what is dear or cannot be pickled, such as a model; its
    `teardown()` once there is nothing more to do, unless the process is killed. Where it is
    registered, both are called as well, around the calls that show what elements are. Nothing is
    called where a split begins and ends: that is where the function does.

    Args:
      splits: what workers share out among themselves: a sequence, such as a list or a range, or
        another iterable that ends; a string is a glob pattern of files, which is looked up here.
      element_spec: as of a `tf.data.Dataset`: of each element. By default it is that of the first
        elements, for which the function is called here; dimensions that differ are unknown.
      packages: names of distributions of which workers must have the versions that are here.
      on_error: what becomes of a split for which the function raises, or whose process ends:
        "raise" (who reads gets the error, with the function's own traceback), "skip" (the rest of
        the split is left out) or "retry" (it is run again, and goes on behind the last element
        that came; the function must yield the same again).
      limit: how many splits are skipped in an epoch, by all workers, or how often a worker retries
        one. What is skipped, and why, is an event of the journal, which `forebay status` shows.
      timeout_s: how long an element may take, in seconds, before its process is killed; its start,
        with the function's imports and `setup`, may take a minute at least.

    Raises ValueError for arguments that make no sense.
    """

    def made(function: Callable[..., Any]) -> PythonDataset:
        return PythonDataset(
            function, splits, element_spec, _names(packages), on_error, limit, timeout_s
        )

    return made


def listed(splits: Any) -> Sequence[Any]:
    """Raises InvalidArgument."""
    if isinstance(splits, str | os.PathLike):
        found = sorted(glob.glob(os.fspath(splits), recursive=True))
        if not found:
            raise InvalidArgument(f"no file matches splits={os.fspath(splits)!r} here")
        return found
    if not isinstance(splits, Iterable) or isinstance(splits, bytes):
        hint = f": range({splits!r}) are so many" if _is_number(splits, int) else ""
        raise InvalidArgument(
            f"splits={splits!r} must be a list, a range, a pattern of files …{hint}"
        )
    if isinstance(splits, range):
        return splits
    found = list(itertools.islice(splits, MAX_SPLITS + 1))
    if len(found) > MAX_SPLITS:
        raise InvalidArgument(
            f"splits={splits!r} yields more than {MAX_SPLITS}: let each split be more of the data"
        )
    return found


def beam_dataset(pcollection: Any, split_bytes: int | None = None, **how: Any) -> PythonDataset:
    """Of a PCollection that was built and not run; `how` is as for `python_dataset`.

    Raises InvalidArgument for what is no chain of ParDos behind bounded reads, and for
    `split_bytes` that make no sense, or would not be heeded.
    """
    from ..pipelines.beam.translation import translate

    with _by_value():  # splits and side inputs are pickled there
        chain, splits = translate(pcollection, split_bytes)
    how["packages"] = (BEAM, FOREBAY, *_names(how.get("packages", ())))
    return PythonDataset(chain, splits, **how)


def is_pcollection(dataset: Any) -> bool:
    """Or several outputs of one transform."""
    if "apache_beam" not in sys.modules:
        return False
    from apache_beam import pvalue

    return isinstance(dataset, pvalue.PCollection | pvalue.DoOutputsTuple)


def first_elements(request: pb.RegisterDatasetRequest) -> list[Any]:
    """Of the first split that has some. Raises InvalidArgument, and what the function does."""
    with unpickled(request) as (function, splits):
        for split in splits[:LOOKED_AT]:
            try:
                elements = iterated(function(split))
            except Misfit as misfit:
                raise InvalidArgument(f"split {split!r:.100}: {misfit}") from None
            if found := list(itertools.islice(elements, LOOKED_AT)):
                return found
    if not len(splits):
        raise InvalidArgument(
            "there are no splits, so it is not known what elements are: give splits that are "
            "there, or element_spec"
        )
    raise InvalidArgument(
        f"the function yields no element for its first {min(len(splits), LOOKED_AT)} splits, so it "
        "is not known what elements are: give element_spec"
    )


@contextmanager
def unpickled(request: pb.RegisterDatasetRequest) -> Iterator[tuple[Callable[..., Any], Any]]:
    """The function and its splits as a worker has them, set up: what they do to themselves does
    not come into what is registered. There are no splits of a function that builds a dataset."""
    stored = python_pb2.PythonDataset.FromString(request.python)
    function, *splits = pickles.loads(stored.function, *filter(None, [stored.splits]))
    getattr(function, "setup", _nothing)()
    try:
        yield function, splits[0] if splits else ()
    finally:
        getattr(function, "teardown", _nothing)()


def _nothing() -> None: ...


def request_of(
    dataset: PythonDataset, splits: Sequence[Any] | None, structure: str = ""
) -> pb.RegisterDatasetRequest:
    """All but the metadata; without splits, of a function that builds a dataset. Raises
    InvalidArgument."""
    versions = {name: package_version(name) or "" for name in ("cloudpickle", *dataset.packages)}
    if missing := [name for name, version in versions.items() if not version]:
        raise InvalidArgument(f"packages={[*dataset.packages]}: {missing} are not installed here")
    with _by_value():
        stored = python_pb2.PythonDataset(
            function=_pickled(dataset.function),
            splits=b"" if splits is None else _pickled(splits),
            python=python_version(),
            packages=versions,
            on_error=ON_ERROR[dataset.on_error],
            limit=dataset.limit,
            timeout_s=dataset.timeout_s or 0,
        )
    request = pb.RegisterDatasetRequest(
        python=stored.SerializeToString(deterministic=True), structure=structure
    )
    if splits is not None:
        request.sources.add(count=len(splits))
    return request


def add_sources(
    request: pb.RegisterDatasetRequest, sources: Iterable[ev.SplitSource], contents: bytes
) -> None:
    """Of a dataset that the function builds: its processes compare them, and their contents, with
    what they build."""
    request.sources.extend(sources)
    stored = python_pb2.PythonDataset.FromString(request.python)
    stored.sources.extend(request.sources)
    stored.contents = contents
    request.python = stored.SerializeToString(deterministic=True)


def _pickled(value: Any) -> bytes:
    try:
        return pickles.dumps(value)
    except Exception as error:
        raise InvalidArgument(
            f"{_culprit(value)} cannot be pickled, and so not be sent to workers ({error}): make "
            "it within the function, or within what it imports"
        ) from error


def _culprit(value: Any) -> str:
    """What of a function or a sequence it is that cannot be pickled, in words."""
    parts: Mapping[str, Any] = {}
    if inspect.isfunction(value):
        known = inspect.getclosurevars(value)
        parts = {
            f"the variable {name!r} of {value.__qualname__}": part
            for name, part in {**known.globals, **known.nonlocals}.items()
        }
    elif isinstance(value, list):
        parts = {f"split {number}": part for number, part in enumerate(value)}
    for name, part in parts.items():
        try:
            cloudpickle.dumps(part)
        except Exception:  # noqa: BLE001 - whatever pickling it raises
            return f"{name} ({part!r:.100})"
    return f"{value!r:.100}"


@contextmanager
def _by_value() -> Iterator[None]:
    """Within, what modules have that are the user's own, and not installed, travels along."""
    with pickles.pickling, pickles.same_names():
        before = {module.__name__ for module in _own_modules() if _is_by_value(module)}
        added = [module for module in _own_modules() if module.__name__ not in before]
        for module in added:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in added:
                cloudpickle.unregister_pickle_by_value(module)


def _is_by_value(module: ModuleType) -> bool:
    return module.__name__ in cloudpickle.list_registry_pickle_by_value()


def _own_modules() -> list[ModuleType]:
    own = []
    for name, module in list(sys.modules.items()):
        known = name == "__main__" or name.partition(".")[0] == "forebay"
        known = known or getattr(module, "__name__", None) != name
        if not known and (places := _places(module)) and not any(map(_is_installed, places)):
            own.append(module)
    return own


def _places(module: ModuleType) -> Sequence[str]:
    """Its file; of a package without one, its folders."""
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        return [file]
    if file is None and isinstance(module, ModuleType):
        with contextlib.suppress(KeyError):  # what it is a part of has gone
            return [*map(str, vars(module).get("__path__", ()))]
    return []


@functools.cache
def _is_installed(file: str) -> bool:
    folders = [os.path.realpath(folder) for folder in sysconfig.get_paths().values()]
    path = os.path.realpath(file)
    if {"site-packages", "dist-packages"} & set(path.split(os.sep)):
        return True
    return any(path.startswith(f"{folder}{os.sep}") for folder in folders)
