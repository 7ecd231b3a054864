"""Describes the machine and its other load, without its name."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import platform
import time
from importlib import metadata
from typing import Any

from ..service.errors import ForebayError
from ..storage.extras import install

TURNS = 1_000_000
EXTRAS = {"tensorflow": "tensorflow-cpu", "sklearn": "bench", "PIL": "bench"}
PACKAGES = ("forebay", "tensorflow", "tensorflow-cpu", "grpcio", "numpy", "protobuf")


def require(*modules: str) -> None:
    """Raise ForebayError with the package to install, unless all modules can be imported."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        extras = sorted({EXTRAS[module] for module in missing})
        raise ForebayError(
            f"this needs {' and '.join(missing)}, not installed here: {install(*extras)}"
        )


def filesystem(directory: str | os.PathLike[str]) -> str:
    """The type of the file system that a directory is on, such as ext4."""
    path = pathlib.Path(directory).resolve()
    mounts = [line.split() for line in pathlib.Path("/proc/mounts").read_text().splitlines()]
    types = {mount[1]: mount[2] for mount in mounts}  # of mounts on one place, the last one
    return next(types[str(p)] for p in (path, *path.parents) if str(p) in types)


def describe(directory: pathlib.Path) -> dict[str, Any]:
    """The machine and the versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),  # of others, before: noise
        "memory_gb": round(memory / 1e9),
        "kernel": platform.release(),
        "filesystem": filesystem(directory),
        "python": platform.python_version(),
        **{p: metadata.version(p) for p in PACKAGES if [*metadata.distributions(name=p)]},
    }


def calibrate() -> float:
    """The milliseconds of a fixed loop: more than usual if others use the machine."""
    begun = time.perf_counter()
    total = 0
    for turn in range(TURNS):
        total += turn
    return (time.perf_counter() - begun) * 1e3


def process_cpu_s(pid: int) -> float:
    """The CPU time of a process until now, user and system."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def forget_peak(pid: int) -> None:
    """Reset a process's VmHWM, its peak memory (proc(5), clear_refs)."""
    pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")


def memory_mb(pid: int, field: str) -> float:
    """A line of a process' memory, VmRSS (now) or VmHWM (the peak), in units of 10⁶ bytes; 0 if the
    process has ended and its parent has not noticed."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    lines = (line.split()[1] for line in status.splitlines() if line.startswith(field))
    return int(next(lines, 0)) * 1024 / 1e6
