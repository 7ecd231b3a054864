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

import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated

import msgspec

from ..errors import InvalidArgument
from .admission import Identity
from .credentials import content_of
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

_Patterns = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
_Most = Annotated[int, msgspec.Meta(ge=0)] | None


class Grant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What some peers may do."""

    to: _Patterns
    roles: Annotated[frozenset[str], msgspec.Meta(min_length=1)]
    datasets: _Patterns = ("*",)
    jobs: _Patterns = ("*",)
    max_datasets: _Most = None
    max_jobs: _Most = None
    max_consumers: _Most = None

    def covers(self, dataset_id: str | None, job_name: str | None) -> bool:
        """Whether both match their patterns; None always does."""
        return _matches(dataset_id, self.datasets) and _matches(job_name, self.jobs)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    grant: Annotated[tuple[Grant, ...], msgspec.Meta(min_length=1)]


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
    text, _ = content_of(path, "--access-file", MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise InvalidArgument(f"--access-file {path} has more than {MAX_FILE_BYTES} bytes")
    try:
        found = msgspec.convert(tomllib.loads(text.decode()), _File)
    except msgspec.ValidationError as error:
        raise InvalidArgument(
            f"--access-file {path} is not a list of [[grant]] as docs/operations.md has it: {error}"
        ) from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is one
        raise InvalidArgument(f"--access-file {path} is not TOML: {error}") from None
    for number, grant in enumerate(found.grant):
        if unknown := sorted(grant.roles - ROLES.keys()):
            raise InvalidArgument(
                f"--access-file {path}: {unknown[0]!r} is no role; use {', '.join(ROLES)} - at "
                f"`$.grant[{number}].roles`"
            )
    return found.grant
