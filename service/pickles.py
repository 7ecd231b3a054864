"""Deterministic cloudpickle: equal values give the same bytes in each process.

A dataset's id is the digest of its bytes, and each trainer that shares a job registers it. In
cloudpickle's own pickles, classes have random names, sets are in hash order, and equal strings
may be one object or several.

Some pickles still differ: those of objects whose contents differ between processes, such as a text
made from a set. cloudpickle itself pickles objects that are nested too deeply for a Python pickler,
or that are in a set that they refer to.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import importlib.metadata
import io
import os
import pathlib
import pickle
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar

import cloudpickle
from cloudpickle import cloudpickle as internals

from . import generators

_PLAIN = {str, bytes, int, float}
_OF_FOLDERS = {"__path__", "__spec__", "__loader__"}
_BUILT_IN = {*_PLAIN, bool, type(None), tuple, list, dict}


pickling = threading.RLock()
"""The process's lock for changes to cloudpickle's internals."""


@contextmanager
def same_names() -> Iterator[None]:
    """Within the block, a class's id follows from its module, its name, and how many classes of
    that name came before it. The caller holds `pickling`."""
    numbers: collections.Counter[str] = collections.Counter()
    names: dict[Any, str] = {}

    def name_of(kind: Any) -> str:
        if kind not in names:
            name = f"{kind.__module__}.{getattr(kind, '__qualname__', kind.__name__)}"
            names[kind] = hashlib.sha256(f"{name} {numbers[name]}".encode()).hexdigest()[:32]
            numbers[name] += 1
        return names[kind]

    with _instead(_get_or_create_tracker_id=name_of):
        yield


def dumps(value: Any, *, marks_generators: bool = False) -> bytes:
    """Pickle a value. With `marks_generators`, `generators.loads` finds its random number
    generators. Raises what pickling raises."""
    if isinstance(value, list) and (kinds := set(map(type, value))) <= _PLAIN:  # perhaps millions
        if kinds == {str}:
            one: dict[str, str] = {}
            value = [*map(one.setdefault, value, value)]
        return bytes(cloudpickle.dumps(value))
    file = io.BytesIO()
    try:
        _Pickler(file, marks_generators).dump(value)
    except RecursionError:
        file = io.BytesIO()
        (_CloudPickler if marks_generators else cloudpickle.Pickler)(file).dump(value)
    return file.getvalue()


def loads(*pickled: bytes) -> list[Any]:
    """Unpickle as another process would: no class is shared with this process, or with another
    call, whatever its name."""
    by_class, by_id = weakref.WeakKeyDictionary[Any, str](), weakref.WeakValueDictionary[str, Any]()
    with pickling, _instead(
        _DYNAMIC_CLASS_TRACKER_BY_CLASS=by_class, _DYNAMIC_CLASS_TRACKER_BY_ID=by_id
    ):  # fmt: skip
        return [cloudpickle.loads(data) for data in pickled]


@contextmanager
def _instead(**values: Any) -> Iterator[None]:
    before = {name: getattr(internals, name) for name in values}
    vars(internals).update(values)
    try:
        yield
    finally:
        vars(internals).update(before)


class _Pickler(pickle._Pickler):
    """Cloudpickle's pickler on Python's own: C's pickler has no hooks for sets and strings."""

    dispatch: ClassVar[dict[Any, Any]] = dict(pickle._Pickler.dispatch)
    dispatch_table = cloudpickle.Pickler.dispatch_table
    _function_reduce = cloudpickle.Pickler._function_reduce
    _dynamic_function_reduce = cloudpickle.Pickler._dynamic_function_reduce
    _function_getnewargs = cloudpickle.Pickler._function_getnewargs

    def __init__(self, file: io.BytesIO, marks_generators: bool) -> None:
        super().__init__(file, cloudpickle.DEFAULT_PROTOCOL)
        self._marks_generators = marks_generators
        self.globals_ref: dict[int, Any] = {}  # as cloudpickle's own begins
        self._strings: dict[str, str] = {}

    def save(self, value: Any, save_persistent_id: bool = True) -> Any:
        kind = type(value)
        if kind is str:
            value = self._strings.setdefault(value, value)
        if kind not in _BUILT_IN:
            return super().save(value, save_persistent_id)  # type: ignore[misc]
        # Do the same as the pickler, but skip its calls of reducer_override.
        own: Any = self  # typeshed lacks these methods
        own.framer.commit_frame()
        if (known := own.memo.get(id(value))) is not None:
            return own.write(own.get(known[0]))
        return own.dispatch[kind](own, value)

    def _save_buffer(self, buffer: pickle.PickleBuffer) -> None:
        """Pickle an array's contents. Python's own method memoizes empty contents under the id of
        `b""`. That fails if the memo has `b""`, and turns each later `b""` into a bytearray."""
        with buffer.raw() as contents:
            self.save(bytes(contents) if contents.readonly else bytearray(contents))

    dispatch[pickle.PickleBuffer] = _save_buffer

    def reducer_override(self, value: Any) -> Any:
        if self._marks_generators and (marked := generators.reduced(value)) is not NotImplemented:
            return marked
        if type(value) is set or type(value) is frozenset:
            return type(value), (_in_order(value),)
        if isinstance(value, ModuleType) and getattr(value, "__file__", None) is None:
            make, arguments = internals._module_reduce(value)
            if make is internals.dynamic_subimport:  # a namespace package: its paths are local
                name, state = arguments
                return make, (name, {k: v for k, v in state.items() if k not in _OF_FOLDERS})
        return cloudpickle.Pickler.reducer_override(self, value)


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc] # it has no types
    """For values that are nested too deeply."""

    def reducer_override(self, value: Any) -> Any:
        marked = generators.reduced(value)
        return super().reducer_override(value) if marked is NotImplemented else marked


def _in_order(values: set[Any] | frozenset[Any]) -> Sequence[Any]:
    if len(kinds := set(map(type, values))) == 1 and kinds <= _PLAIN:
        return sorted(values)
    return sorted(values, key=dumps)


@contextmanager
def by_value() -> Iterator[None]:
    """Inside, the user's own modules, which are not installed, are pickled by value."""
    with pickling, same_names():
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
        places = () if known else _places(module)
        if places and not any(_is_installed(name, place) for place in places):
            own.append(module)
    return own


def _places(module: ModuleType) -> Sequence[str]:
    """The module's file, or the folders of a package without a file."""
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        return [file]
    if file is None and isinstance(module, ModuleType):
        with contextlib.suppress(KeyError):  # its parent package is gone
            return [*map(str, vars(module).get("__path__", ()))]
    return []


@functools.cache
def _is_installed(name: str, place: str) -> bool:
    path = os.path.realpath(place)
    parts = path.split(os.sep)
    if {"site-packages", "dist-packages"} & set(parts) or path.startswith(_python_folders()):
        return True
    package = name.partition(".")[0]
    return any(
        part.partition(".")[0] == package and package in _packages_in(os.sep.join(parts[:at]))
        for at, part in enumerate(parts)
    )


@functools.cache
def _python_folders() -> tuple[str, ...]:
    """Where this Python has its own modules, and installs others."""
    return tuple(f"{os.path.realpath(path)}{os.sep}" for path in sysconfig.get_paths().values())


@functools.cache
def _packages_in(folder: str) -> frozenset[str]:
    """The modules that are installed in a folder, as by `pip install --target`: what the folder's
    distributions say that they have. Others beside them are the user's."""
    return frozenset(
        file.parts[0].partition(".")[0]
        for distribution in pathlib.Path(folder).glob("*.dist-info")
        for file in importlib.metadata.Distribution.at(distribution).files or ()
    )
