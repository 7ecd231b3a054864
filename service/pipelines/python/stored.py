"""What is stored of a Python dataset, and what it needs of the process that runs it."""

from __future__ import annotations

import sys
from importlib import metadata

from ...errors import FailedPrecondition
from ...proto.python_pb2 import PythonDataset


def is_built(dataset: PythonDataset) -> bool:
    """Whether its function builds it, in each process that runs it; else it is one of splits."""
    return not dataset.splits


def python_version() -> str:
    """That pickled functions are bound to."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def package_version(name: str) -> str | None:
    """None if it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def require_versions(dataset: PythonDataset) -> None:
    """Raises FailedPrecondition, with both, if this process has others than it was pickled with."""
    if dataset.python != python_version():
        raise FailedPrecondition(
            f"the dataset was registered by Python {dataset.python}, and this worker has Python "
            f"{python_version()}, which cannot read its function: run both by the same one"
        )
    for name, version in sorted(dataset.packages.items()):
        if (here := package_version(name)) != version:
            raise FailedPrecondition(
                f"the dataset was registered with {name} {version}, and this worker has "
                f"{here or 'none'}: install the same version"
            )
