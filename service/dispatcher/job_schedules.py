"""What the schedules of jobs say, as of now, in steps of the group that joined last."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from ...journal.datasets import MAX_POSITION, SHARES
from ...journal.proto import events_pb2 as ev
from ..core.jobs import ordered_job, readers_of
from ..core.lengths import UNKNOWN, lengths_of
from ..core.schedules import change_message, named
from ..core.state import Consumer, Job, State
from ..errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from ..picks import shares
from ..proto import forebay_pb2 as pb
from ..schedule import EpochSteps, Schedule, decisions

SHOWN = 5
"""The last changes of a job that the status has. The audit has all."""

KEPT = 64
"""Schedules in the cache: to make one with a thousand changes takes 40 ms. A job only gets more
changes, so their number says which schedule it is."""


class JobSchedules:
    """The schedules of all jobs of a state."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._made = lru_cache(maxsize=KEPT)(self._make)

    def status(self) -> list[dict[str, Any]]:
        """Of each job with a name that was read and has any: the first weights, the fork that it
        began with, and the last changes, in steps of the group that joined last."""
        return [
            {
                "job_id": job.job_id,
                "changes": [*decisions(job, self._sources(job), partial(self.steps, job), SHOWN)],
            }
            for job in self._state.jobs.values()
            if job.name and job.step and (job.changes or job.fork or self._sources(job))
        ]

    def replay(self, name: str, who: str) -> ev.Fork:
        """A fork with the whole schedule of the job. Raises NotFound, FailedPrecondition."""
        job = self.find(name)
        return ev.Fork(origin=job.job_id, place=MAX_POSITION, reason="replay", who=who)

    def find(self, name: str) -> Job:
        """The job that has this name to its users, or this id. Raises InvalidArgument, NotFound,
        and FailedPrecondition if it is not read in order."""
        found = named(self._state, name)
        if len(found) > 1:
            ids = ", ".join(str(job.job_id) for job in found)
            raise InvalidArgument(f"{len(found)} jobs are named {name!r}: give an id, of {ids}")
        if not found:
            raise NotFound(f"there is no job {name!r}: `forebay status` has those that there are")
        return ordered_job(self._state, found[0].job_id)

    def _sources(self, job: Job) -> Sequence[ev.MixtureSource]:
        """Of a mixture; none: it reads a dataset by itself. Raises NotFound if it was removed."""
        if job.job_id not in self._state.jobs:
            raise NotFound(f"job {job.job_id} is not known: it was removed")
        return self._state.datasets[job.dataset_id].outline.mixture.sources

    def _schedule(self, job: Job, changes: int | None = None) -> Schedule:
        """With all changes, or so many."""
        shares_of = tuple(source.share for source in self._sources(job)) or (SHARES,)
        return self._made(job.job_id, shares_of, len(job.changes) if changes is None else changes)

    def _make(self, job_id: int, shares_of: tuple[int, ...], changes: int) -> Schedule:
        known = self._state.jobs[job_id].changes[:changes]
        return Schedule(shares_of, map(change_message, known))

    def steps(self, job: Job, changes: int | None = None) -> EpochSteps:
        """Those of the group that joined last."""
        if not job.step:
            raise FailedPrecondition(
                f"job {job.user_name} was never read, so its global batch is not known: start its "
                "trainers once"
            )
        schedule = self._schedule(job, changes)  # raises NotFound for a job that was removed
        return EpochSteps(schedule, job.step, self._total(job)[1], self.drops_remainder(job))

    def drops_remainder(self, job: Job) -> bool:
        """Whether the group that joined last reads whole steps only. An earlier version's state
        says so of the members alone."""
        members = (reader.member for reader in self.readers(job))
        return job.drops_remainder or any(m is not None and m.drop_remainder for m in members)

    def _total(self, job: Job) -> tuple[int, int | None]:
        """How many elements an epoch is known to have, and has if that is known."""
        lengths = lengths_of(self._state, job)
        known = sum(length for length in lengths if length >= 0)
        has_end = UNKNOWN not in lengths and not self._sources(job)
        return known, known if has_end else None

    def require_known(self, job: Job, skip: ev.ScheduleChange) -> None:
        """Raises FailedPrecondition if an epoch may end before the skip or the fork, or in it."""
        known, total = self._total(job)
        if total is None and not self._sources(job) and skip.place + skip.skipped > known:
            raise FailedPrecondition(
                f"an epoch of job {job.user_name} is known to have {known} elements, until more "
                f"was read, and may end before position {skip.place + skip.skipped}: read up to "
                "there or replay that step first, which counts them, or give an earlier one"
            )

    def shares(self, job: Job, request: pb.ChangeScheduleRequest, place: int) -> tuple[int, ...]:
        """Those that the weights make, beside those that the other sources have at this place."""
        names = [source.name for source in self._sources(job)]
        weights = {each.source: each.weight for each in request.weights}
        if not names:
            raise InvalidArgument(
                f"job {job.user_name} reads dataset {job.dataset_id}, which is no mixture and has "
                "no weights"
            )
        if unknown := [name for name in weights if name not in names]:
            raise InvalidArgument(
                f"the mixture of job {job.user_name} has no source {unknown}: its sources are "
                f"{names}"
            )
        now = self._schedule(job).shares_at(place)
        return shares(
            [weights.get(name, share / SHARES) for name, share in zip(names, now, strict=True)]
        )

    def require_not_repeated(
        self, job: Job, skip: ev.ScheduleChange, first: int, stop: int
    ) -> None:
        """Raises AlreadyExists if the last change was the same skip: somebody repeats himself."""
        if not job.changes or not (last := job.changes[-1]).skipped or last.reason != skip.reason:
            return
        before = self.steps(job, len(job.changes) - 1)
        ends = before.place_of(first), before.place_of(stop)
        if ends == (last.place, last.place + last.skipped):
            raise AlreadyExists(
                f"job {job.user_name} leaves out these steps already; to leave out as many behind "
                "them, give another reason"
            )

    def readers(self, job: Job) -> list[Consumer]:
        return [self._state.consumers[number] for number in readers_of(self._state, job)]
