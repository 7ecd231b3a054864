"""What the figures were measured on. Nothing that names the machine."""

from __future__ import annotations

import os
import pathlib
import platform
from importlib.metadata import version
from typing import Any


def filesystem(directory: str | os.PathLike[str]) -> str:
    """The type of the file system that a directory is on, such as ext4."""
    path = pathlib.Path(directory).resolve()
    mounts = [line.split() for line in pathlib.Path("/proc/mounts").read_text().splitlines()]
    types = {mount[1]: mount[2] for mount in mounts}  # of mounts on one place, the last one
    return next(types[str(p)] for p in (path, *path.parents) if str(p) in types)


def describe(directory: pathlib.Path) -> dict[str, Any]:
    """The machine and the versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    packages = ("forebay", "tensorflow-cpu", "grpcio", "protobuf")
    return {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),  # of others, before: noise
        "memory_gb": round(memory / 1e9),
        "kernel": platform.release(),
        "filesystem": filesystem(directory),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }
