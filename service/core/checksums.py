"""Checksums: whether a bundle that is run again has the same elements.

Workers report the checksum of each bundle that they ran from its beginning to its end. The first
one of a bundle is kept with the job. A later run whose checksum is another one is a *mismatch*, and
`differing` names its bundle. Bundles are numbered through all epochs, since each epoch may have its
own elements.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...journal.proto import events_pb2 as ev
from ..errors import InvalidArgument
from .base import Command, Decision, EventKind, require_one_of_each
from .iterations import first_epoch
from .state import Job, State

MAX_CHECKSUMS = 1 << 17
"""How many checksums of a job are kept at least: those that were reported last. At most twice as
many."""

MAX_MISMATCHES = 100
"""How many mismatches of a job are kept: the first ones that were found."""


class CheckBundles(Command, frozen=True, kw_only=True):
    """→ BundlesChecked of the unknown ones and of the new mismatches, or nothing.

    Answers the bundles of the new mismatches.
    """

    job_id: int
    bundles: tuple[int, ...]
    checksums: tuple[int, ...]  # of each


def _check_bundles(state: State, command: CheckBundles) -> Decision:
    who = f"a worker, of job {command.job_id},"
    require_one_of_each(who, "checksums", command.checksums, command.bundles)
    job = state.jobs.get(command.job_id)
    if job is None or job.order is None:  # the worker is late: the job was removed
        return Decision([], [])
    if job.order.bundles == 0 or min(command.bundles, default=0) < 0:
        raise InvalidArgument(
            f"checksums of bundles {command.bundles[:10]} of job {job.user_name}, which has "
            f"{job.order.bundles} bundles in each epoch; report those that it has"
        )
    new: dict[int, int] = {}
    mismatches: dict[int, None] = {}
    for bundle, checksum in zip(command.bundles, command.checksums, strict=True):
        if (before := job.checksums.get(bundle)) is None:
            before = new.setdefault(bundle, checksum)
        if before != checksum and bundle not in job.differing:
            mismatches[bundle] = None
    found = list(mismatches)[: MAX_MISMATCHES - len(job.differing)]
    if not (new or found):
        return Decision([], [])
    checked = ev.BundlesChecked(
        job_id=job.job_id, bundles=new.keys(), checksums=new.values(), differing=found
    )
    return Decision([checked], found)


def _bundles_checked(state: State, event: ev.BundlesChecked) -> None:
    job = state.jobs[event.job_id]
    if event.checksums:  # events of before 2026-11-26 have none that are compared
        job.checksums.update(zip(event.bundles, event.checksums, strict=True))
    if len(job.checksums) > 2 * MAX_CHECKSUMS:
        for bundle in list(job.checksums)[:-MAX_CHECKSUMS]:
            del job.checksums[bundle]
    job.differing += event.differing


def describe_mismatches(job: Job, bundles: Sequence[int] | None = None) -> str:
    """Which bundles had other elements when they were run again: these, or by default all that are
    known; empty if there are none."""
    bundles = job.differing if bundles is None else bundles
    if not bundles or job.order is None:
        return ""
    numbers = [divmod(bundle, job.order.bundles) for bundle in bundles[:5]]
    begin = first_epoch(job)
    listed = ", ".join(f"{bundle} of epoch {epoch - begin}" for epoch, bundle in numbers)
    more = " and others" if len(bundles) > len(numbers) else ""
    return (
        f"bundles of job {job.user_name} had other elements when they were run again: {listed}"
        f"{more}. After a restart, or a worker's death, its consumers may get other elements than "
        "before: remove clocks from the pipeline, and give what draws in Python a seed from the "
        "split (or machines differ in arithmetic)"
    )


DECIDE = {CheckBundles: _check_bundles}
EVENTS = {"bundles_checked": EventKind(_bundles_checked, is_quiet=True)}
