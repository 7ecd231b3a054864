"""Access rules: what the peers that a dispatcher lets in may do.

The file is TOML, and a list of grants. A peer may do what one of its grants allows:

    [[grant]]
    to = ["team-a-*"]            # names of certificates, or of token files without their endings
    roles = ["trainer", "python"]
    datasets = ["team-a/*"]      # ids, by default all
    jobs = ["team-a/*"]          # names, by default all; "" is the name of anonymous ones
    max_datasets = 100           # of those that the grant covers; by default without a bound
    max_jobs = 100
    max_consumers = 1000

Patterns are those of a shell: `*`, `?` and `[…]`; case counts. The file is read again when it
changes.
"""

from __future__ import annotations

import dataclasses
import os
import stat
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from ..errors import InvalidArgument
from .admission import Identity
from .reloaded import Reloaded

TRAINER, GRAPHS, PYTHON = "trainer", "graphs", "python"
WORKER, OPERATOR, VIEWER = "worker", "operator", "viewer"
SCHEDULER = "scheduler"

ROLES = {
    TRAINER: "registers datasets, and reads them; has workers save them",
    GRAPHS: "registers graphs of any operations, such as read_file; besides trainer",
    PYTHON: "registers datasets that are Python code, which workers run; besides trainer",
    WORKER: "runs the tasks of these datasets and jobs; without patterns, all of them, and saves",
    SCHEDULER: "changes the schedules of these jobs: weights of mixtures, steps that are left out",
    OPERATOR: "removes datasets, and sees all that a viewer sees",
    VIEWER: "sees the status and the list of datasets",
}
"""What each role may do."""

MAX_FILE_BYTES = 100_000

_LIMITS = ("max_datasets", "max_jobs", "max_consumers")


@dataclasses.dataclass(frozen=True)
class Grant:
    """What some peers may do."""

    to: tuple[str, ...]
    roles: frozenset[str]
    datasets: tuple[str, ...] = ("*",)
    jobs: tuple[str, ...] = ("*",)
    max_datasets: int | None = None
    max_jobs: int | None = None
    max_consumers: int | None = None

    def covers(self, dataset_id: str | None, job_name: str | None) -> bool:
        """Whether both match their patterns; None always does."""
        return _matches(dataset_id, self.datasets) and _matches(job_name, self.jobs)


class AccessRules:
    """The grants of a file. Thread-safe."""

    def __init__(self, path: str) -> None:
        """Raises InvalidArgument, with what is wrong in the file."""
        self.path = path
        self._grants = Reloaded(f"--access-file {path}", [path], lambda: _load(path))
        self._grants.content()

    def of(self, peer: Identity) -> Iterator[Grant]:
        """The peer's grants."""
        for grant in self._grants.content():
            if any(_matches(name, grant.to) for name in peer.names):
                yield grant


def _matches(name: str | None, patterns: tuple[str, ...]) -> bool:
    return name is None or any(fnmatchcase(name, pattern) for pattern in patterns)


def _load(path: str) -> tuple[Grant, ...]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InvalidArgument(f"--access-file {path} is no file; give a file")
        with open(path, "rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise InvalidArgument(f"--access-file {path} has more than {MAX_FILE_BYTES} bytes")
        content = tomllib.loads(text.decode())
    except OSError as error:
        raise InvalidArgument(
            f"--access-file {path} cannot be read: {error.strerror}; give a file that this user "
            "may read"
        ) from None
    except InvalidArgument:
        raise
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is one
        raise InvalidArgument(f"--access-file {path} is not TOML: {error}") from None
    grants = content.pop("grant", [])
    if content or not isinstance(grants, list) or not grants:
        wrong = f"has {', '.join(map(repr, content))}" if content else "has no grant"
        raise InvalidArgument(f"--access-file {path} {wrong}: it is a list of [[grant]]")
    return tuple(
        _grant(given, f"--access-file {path}, grant {n}") for n, given in enumerate(grants, 1)
    )


def _grant(given: Any, where: str) -> Grant:
    fields = {field.name for field in dataclasses.fields(Grant)}
    if not isinstance(given, dict) or (unknown := given.keys() - fields):
        what = ", ".join(sorted(unknown)) if isinstance(given, dict) else repr(given)
        raise InvalidArgument(f"{where} has {what}: a grant has {', '.join(sorted(fields))}")
    for name in ("to", "roles", "datasets", "jobs"):
        value = given.get(name, ["*"] if name in ("datasets", "jobs") else [])
        if not isinstance(value, list) or not value or not all(isinstance(x, str) for x in value):
            raise InvalidArgument(f"{where}: {name} must be a list of strings, and is {value!r}")
    for name in _LIMITS:
        value = given.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidArgument(f"{where}: {name} must be a number from 0 on, and is {value!r}")
    for role in given["roles"]:
        if role not in ROLES:
            raise InvalidArgument(f"{where}: {role!r} is no role; use {', '.join(ROLES)}")
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return Grant(**{**given, **lists, "roles": frozenset(given["roles"])})
