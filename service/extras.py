"""Imports the packages of extras, when they are needed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from ..storage.extras import install
from .errors import FailedPrecondition, ForebayError


@contextlib.contextmanager
def needing(what: str, extra: str, kind: type[ForebayError] = FailedPrecondition) -> Iterator[None]:
    """Imports packages of an extra; `what` says what needs which. An ImportError is of this kind
    then, with what to install."""
    try:
        yield
    except ImportError as error:
        raise kind(f"{what}, not installed here ({error}): {install(extra)}") from error


def imported(module: str, extra: str, what: str) -> Any:
    """The module that `what` needs. Raises FailedPrecondition where it is not installed."""
    with needing(f"{what} needs {module.partition('.')[0]}", extra):
        return importlib.import_module(module)


_FRAMEWORKS = {"jax": "jax", "keras": "tensorflow", "tensorflow": "tensorflow", "torch": "torch"}
"""Extras, by what is imported."""


@contextlib.contextmanager
def told_what_to_install() -> Iterator[None]:
    """Imports what needs a framework. A ModuleNotFoundError says which extra has it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (extra := _FRAMEWORKS.get(error.name or "")) is None:
            raise
        raise ModuleNotFoundError(f"{error}: {install(extra)}", name=error.name) from error
