"""The memory limit of a process: the machine's memory, or its cgroup's limit if smaller."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def memory_limit(root: Path = Path("/")) -> int:
    """In bytes. `root` is the directory of /proc and /sys."""
    of_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([of_machine, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    """The limits of this process's cgroups and their ancestors, of cgroup v1 and v2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's, and the root directory has the limit.
        own = base / path.lstrip("/")
        for directory in {own, *own.parents, base}:
            if directory.is_relative_to(base) and (limit := _limit(directory / name)):
                yield limit


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": none
