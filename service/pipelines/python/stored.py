"""The stored form of a Python dataset, and its requirements on the process that runs it."""

from __future__ import annotations

import logging
import sys
from importlib import metadata

from ...errors import FailedPrecondition
from ...proto.python_pb2 import PythonDataset

log = logging.getLogger(__name__)


def python_version() -> str:
    """The Python version that pickled functions require."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def package_version(name: str) -> str | None:
    """The package's version; None if it isn't installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def require_runnable(dataset: PythonDataset) -> None:
    """Raises FailedPrecondition if the dataset is of a kind that is gone; with both versions if
    this process's differ from those that it was pickled with. Another cloudpickle of the same major
    version is a warning."""
    if not (dataset.splits or dataset.files):
        raise FailedPrecondition(
            "the dataset is a function that builds a tf.data.Dataset, which workers no longer run: "
            "register a function of splits, or what the function returns"
        )
    if dataset.function and dataset.python != python_version():
        raise FailedPrecondition(
            f"the dataset was registered by Python {dataset.python}, and this worker has Python "
            f"{python_version()}, which cannot read its function: run both by the same one"
        )
    for name, version in sorted(dataset.packages.items()):
        here = package_version(name)
        if name == "cloudpickle" and here and here.split(".")[0] == version.split(".")[0]:
            if here != version:
                log.warning(
                    "the dataset was registered with cloudpickle %s, and this worker has %s: "
                    "if its function cannot be read, install the same version", version, here,
                )  # fmt: skip
        elif here != version:
            raise FailedPrecondition(
                f"the dataset was registered with {name} {version}, and this worker has "
                f"{here or 'none'}: install the same version"
            )
