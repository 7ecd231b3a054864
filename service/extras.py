"""Imports the packages of extras, when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from ..storage.extras import install
from .errors import FailedPrecondition


def imported(module: str, extra: str, path: str) -> Any:
    """The module that reads `path`. Raises FailedPrecondition where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise FailedPrecondition(
            f"{path} is read by {module.partition('.')[0]}, which is not installed here ({error}): "
            f"{install(extra)}"
        ) from error
