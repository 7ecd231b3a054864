"""Checks: whether a bundle that is run again has the same elements.

Workers report the checksum of each bundle that they ran from its beginning to its end. The first
one of a bundle is kept with the job. Bundles are numbered through all epochs, since each epoch may
have its own elements.
"""

from __future__ import annotations

from ...journal.proto import events_pb2 as ev
from ..errors import InvalidArgument
from .base import Command, Decide, Decision, EventKind, Events
from .state import Job, State

MAX_CHECKSUMS = 1 << 17
"""How many checksums of a job are kept, and up to twice as many: those of the latest epochs."""

MAX_DIFFERING = 100
"""How many differing bundles of a job are kept: the first ones that were found."""


class CheckBundles(Command, frozen=True, kw_only=True):
    """→ BundlesChecked of the unknown ones and of those that differ, or nothing.

    Answers those that differ, and were not known to.
    """

    job_id: int
    bundles: tuple[int, ...]
    checksums: tuple[int, ...]  # of each


def _check_bundles(state: State, command: CheckBundles) -> Decision:
    if len(command.bundles) != len(command.checksums):
        raise InvalidArgument(
            f"{len(command.checksums)} checksums of {len(command.bundles)} bundles of job "
            f"{command.job_id}; report one of each"
        )
    job = state.jobs.get(command.job_id)
    if job is None or job.order is None:  # the worker is late: the job was removed
        return Decision([], [])
    new: dict[int, int] = {}
    differing: dict[int, None] = {}
    for bundle, checksum in zip(command.bundles, command.checksums, strict=True):
        if (before := job.checksums.get(bundle)) is None:
            before = new.setdefault(bundle, checksum)
        if before != checksum and bundle not in job.differing:
            differing[bundle] = None
    found = list(differing)[: MAX_DIFFERING - len(job.differing)]
    if not (new or found):
        return Decision([], [])
    checked = ev.BundlesChecked(
        job_id=job.job_id, bundles=new.keys(), checksums=new.values(), differing=found
    )
    return Decision([ev.Event(bundles_checked=checked)], found)


def _bundles_checked(state: State, event: ev.BundlesChecked) -> None:
    job = state.jobs[event.job_id]
    job.checksums.update(zip(event.bundles, event.checksums, strict=True))
    if len(job.checksums) > 2 * MAX_CHECKSUMS:
        for bundle in sorted(job.checksums)[:-MAX_CHECKSUMS]:
            del job.checksums[bundle]
    job.differing += event.differing


def describe_differing(job: Job) -> str:
    """Which bundles had other elements when they were run again; empty if none had."""
    if not job.differing or job.order is None:
        return ""
    listed = [
        f"{bundle % job.order.bundles} of epoch {bundle // job.order.bundles}"
        for bundle in job.differing[:5]
    ]
    more = " and others" if len(job.differing) > len(listed) else ""
    return (
        f"bundles {', '.join(listed)}{more} of job {job.user_name} had other elements "
        "when they were run again, so the pipeline does not give the same each time (clocks, "
        "unseeded functions in Python, arithmetic that differs by machine): after a restart, or a "
        "worker's death, its consumers may be given other elements than before"
    )


DECIDE: Decide = {CheckBundles: _check_bundles}
EVENTS: Events = {"bundles_checked": EventKind(_bundles_checked, is_quiet=True)}
