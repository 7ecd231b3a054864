"""Cloudpickle's pickles, such that equal values are the same bytes in each process.

A dataset's id is that of its bytes, and trainers that share a job each register it. In
cloudpickle's own, classes have random names, sets are in the order of their hashes, and equal
strings are one or several, as the interpreter happens to have made them.

What remains: objects that have other contents in each process, such as a text that was made of a
set; and what is nested too deeply for a pickler in Python, or is in a set that it leads back to,
which cloudpickle pickles.
"""

from __future__ import annotations

import collections
import hashlib
import io
import pickle
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as internals

_PLAIN = {str, bytes, int, float}
_OF_FOLDERS = {"__path__", "__spec__", "__loader__"}
_BUILT_IN = {*_PLAIN, bool, type(None), tuple, list, dict}


pickling = threading.RLock()
"""Of what is cloudpickle's, and one for all."""


@contextmanager
def same_names() -> Iterator[None]:
    """Within, a class is named by its module, its name, and how many of that name came before it.
    Under `pickling`."""
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


def dumps(value: Any) -> bytes:
    """Raises what pickling does."""
    if isinstance(value, list) and (kinds := set(map(type, value))) <= _PLAIN:  # perhaps millions
        if kinds == {str}:
            one: dict[str, str] = {}
            value = [*map(one.setdefault, value, value)]
        return bytes(cloudpickle.dumps(value))
    file = io.BytesIO()
    try:
        _Pickler(file).dump(value)
    except RecursionError:
        return bytes(cloudpickle.dumps(value))
    return file.getvalue()


def loads(*pickled: bytes) -> list[Any]:
    """As another process would have them: no class in them is one that is here, or that another
    call has made, whatever their names."""
    by_class, by_id = weakref.WeakKeyDictionary[Any, str](), weakref.WeakValueDictionary[str, Any]()
    with pickling, _instead(
        _DYNAMIC_CLASS_TRACKER_BY_CLASS=by_class, _DYNAMIC_CLASS_TRACKER_BY_ID=by_id
    ):  # fmt: skip
        return [cloudpickle.loads(data) for data in pickled]


@contextmanager
def _instead(**values: Any) -> Iterator[None]:
    """Of what cloudpickle has for itself."""
    before = {name: getattr(internals, name) for name in values}
    vars(internals).update(values)
    try:
        yield
    finally:
        vars(internals).update(before)


class _Pickler(pickle._Pickler):
    """Cloudpickle's, by the pickler in Python, as C's asks nobody about sets and strings."""

    dispatch_table = cloudpickle.Pickler.dispatch_table
    _function_reduce = cloudpickle.Pickler._function_reduce
    _dynamic_function_reduce = cloudpickle.Pickler._dynamic_function_reduce
    _function_getnewargs = cloudpickle.Pickler._function_getnewargs

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, cloudpickle.DEFAULT_PROTOCOL)
        self.globals_ref: dict[int, Any] = {}  # as cloudpickle's own begins
        self._strings: dict[str, str] = {}

    def save(self, value: Any, save_persistent_id: bool = True) -> Any:
        kind = type(value)
        if kind is str:
            value = self._strings.setdefault(value, value)
        if kind not in _BUILT_IN:
            return super().save(value, save_persistent_id)  # type: ignore[misc]
        # As the pickler would, which first asks about each whether somebody reduces it.
        own: Any = self  # of whose methods typeshed has few
        own.framer.commit_frame()
        if (known := own.memo.get(id(value))) is not None:
            return own.write(own.get(known[0]))
        return own.dispatch[kind](own, value)

    def reducer_override(self, value: Any) -> Any:
        if type(value) is set or type(value) is frozenset:
            return type(value), (_in_order(value),)
        if isinstance(value, ModuleType) and getattr(value, "__file__", None) is None:
            make, arguments = internals._module_reduce(value)
            if make is internals.dynamic_subimport:  # a package of folders: they are this process's
                name, state = arguments
                return make, (name, {k: v for k, v in state.items() if k not in _OF_FOLDERS})
        return cloudpickle.Pickler.reducer_override(self, value)


def _in_order(values: set[Any] | frozenset[Any]) -> Sequence[Any]:
    if len(kinds := set(map(type, values))) == 1 and kinds <= _PLAIN:
        return sorted(values)
    return sorted(values, key=dumps)
