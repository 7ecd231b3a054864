"""Changes of schedules: all who read a job know of a change before they come to its place.

A change is *proposed* to all consumers of the job, in the answers to their heartbeats. Each answers
where it is, and gives nothing of the place or behind it until the proposal is over. If one is
further already, or does not answer, the change is refused, and no event says anything of it.
Otherwise it is journaled, and each consumer goes on with it. If the dispatcher dies meanwhile, the
next one knows by its journal whether it holds, and tells consumers either way.

A group that lacks a consumer is not asked: who was given up may still read.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...journal.datasets import SHARES
from ...journal.proto import events_pb2 as ev
from ..core import commands as c
from ..core.base import Numbered
from ..core.lengths import UNKNOWN, lengths_of
from ..core.schedules import change_message, named, ordered_job
from ..core.state import Consumer, Iteration, Job
from ..errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from ..picks import shares
from ..proto import forebay_pb2 as pb
from ..schedule import EpochSteps, Schedule, described
from .decider import Decider

ANSWER_MS = 7_000
"""How long consumers may take to answer a proposal: a little longer than a heartbeat waits."""

MAX_REASON = 1_000
"""Characters. It stays with the job."""

MAX_STEP = 1 << 40

SHOWN = 5  # changes of a job, in the status; the audit has all

TRIES = 8
"""So often the earliest step is proposed anew, each time further ahead of who was there already."""


@dataclass
class _Proposal:
    number: int
    place: int
    answers: dict[int, int] = field(default_factory=dict)  # by consumer: what it gives next

    def refused(self) -> int | None:
        """How far the consumer is that is further; None if none is."""
        furthest = max(self.answers.values(), default=0)
        return furthest if furthest > self.place else None


class ScheduleChanges:
    """Runs on the dispatcher's event loop."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._proposals: dict[int, _Proposal] = {}  # by iteration: consumers may hold before it
        self._numbers = itertools.count(random.getrandbits(48))

    # -- what consumers are told, and say ------------------------------------------------------

    def is_news(self, iteration_id: int, request: pb.ConsumerHeartbeatRequest) -> bool:
        """Whether a proposal began or ended since the consumer's answer."""
        proposal = self._proposals.get(iteration_id)
        number = 0 if proposal is None else proposal.number
        return request.HasField("answer") and number != request.answer.number

    def tell(self, iteration: Iteration, known: int, news: pb.ConsumerHeartbeatResponse) -> None:
        """Say what is proposed, and the job's changes behind the `known` ones."""
        job = self._decider.state.jobs[iteration.job_id]
        for change in job.changes[known:]:
            news.changes.add(place=change.place, shares=change.shares, skipped=change.skipped)
        if (proposal := self._proposals.get(iteration.iteration_id)) is not None:
            news.proposal.number, news.proposal.place = proposal.number, proposal.place

    def answered(self, iteration_id: int, consumer_id: int, answer: pb.Proposal) -> None:
        proposal = self._proposals.get(iteration_id)
        if proposal is not None and proposal.number == answer.number:
            proposal.answers[consumer_id] = answer.place
            self._decider.look_again()

    # -- changes -------------------------------------------------------------------------------

    def status(self) -> list[dict[str, Any]]:
        """Of jobs that have changes: the last ones, in steps of the group that joined last."""
        return [
            {
                "job_id": job.job_id,
                "changes": [
                    described(change, self._steps(job, number), self._names(job))
                    for number, change in [*enumerate(job.changes)][-SHOWN:]
                ],
            }
            for job in self._decider.state.jobs.values()
            if job.changes and job.step
        ]

    async def change(
        self, request: pb.ChangeScheduleRequest, numbered: Numbered, who: str
    ) -> pb.ChangeScheduleResponse:
        """Raises InvalidArgument, NotFound, FailedPrecondition, AlreadyExists, Unavailable."""
        job = ordered_job(self._decider.state, self._find(request.job))
        if numbered is not None and (answer := self._decider.state.answers.get(numbered[0])):
            known = ev.Event.FromString(answer.event)
            if answer.number == numbered[1] and known.HasField("schedule_changed"):
                return self._response(job, known.schedule_changed.change.place)
        steps = self._steps(job)
        if len(request.reason) > MAX_REASON:
            raise InvalidArgument(
                f"a reason of {len(request.reason)} characters: give one of at most {MAX_REASON}"
            )
        change = ev.ScheduleChange(reason=request.reason, who=who)
        first, stop = request.from_step, request.stop
        if not 0 <= first <= MAX_STEP or (stop and not first < stop <= MAX_STEP):
            raise InvalidArgument(
                f"from_step={first} and stop={stop}: give a first step from 0 to {MAX_STEP}, and "
                "one behind it to skip what is before that"
            )
        if not request.stop and not request.HasField("from_step"):
            await self._earliest(job, request, change, numbered)
            return self._response(job, change.place)
        change.place = steps.place_of(first)
        if stop:
            change.skipped = steps.place_of(stop) - change.place
            self._require_new(job, change, first, stop)
            self._require_known(job, change)
        else:
            change.shares.extend(self._shares(job, request, change.place))
        if (furthest := await self._propose(job, change, numbered)) is not None:
            raise FailedPrecondition(
                f"step {request.from_step} of job {job.user_name} is past: its trainers were given "
                f"all before step {steps.step_of(furthest)} already; give a step some way behind "
                "that, or none for the earliest one that is possible"
            )
        return self._response(job, change.place)

    async def _earliest(
        self,
        job: Job,
        request: pb.ChangeScheduleRequest,
        change: ev.ScheduleChange,
        numbered: Numbered,
    ) -> None:
        """Make the change as early as possible."""
        if not (readers := self._readers(job)):
            raise FailedPrecondition(
                f"nobody reads job {job.user_name}, so its next step is not known: give from_step, "
                "at or behind the step that its trainers go on with"
            )
        furthest: int | None = max(reader.position or 0 for reader in readers)
        ahead = 1
        for _ in range(TRIES):
            assert furthest is not None
            steps = self._steps(job)
            step = steps.step_of(furthest) + ahead
            change.place = steps.place_of(step)
            change.shares[:] = self._shares(job, request, change.place)
            if (furthest := await self._propose(job, change, numbered)) is None:
                return
            ahead *= 4
        raise FailedPrecondition(
            f"the trainers of job {job.user_name} are too fast to be told of step {step} before "
            "they are there: give a from_step further ahead"
        )

    async def _propose(self, job: Job, change: ev.ScheduleChange, numbered: Numbered) -> int | None:
        """Make the change, unless a consumer is further already: its place."""
        state = self._decider.state
        iteration_id = next(iter(job.iterations.values()), 0)
        if iteration_id in self._proposals:
            raise FailedPrecondition(
                f"another change of job {job.user_name} is under way: look at it, and try again"
            )
        if not self._readers(job):
            await self._decide(job, change, numbered, ())
            return None
        self._require_all(job)
        proposal = _Proposal(next(self._numbers), change.place)
        self._proposals[iteration_id] = proposal

        def is_over() -> bool:
            iteration = state.iterations.get(iteration_id)
            here = set() if iteration is None else iteration.consumers
            return not here or here <= proposal.answers.keys() or proposal.refused() is not None

        try:  # a caller that has gone cancels this
            self._decider.look_again()
            await self._decider.wait_until(is_over, ANSWER_MS)
            if self._decider.stopped.is_set():
                raise self._decider.unavailable()
            if (furthest := proposal.refused()) is None:
                self._require_all(job)
                silent = [r for r in self._readers(job) if r.consumer_id not in proposal.answers]
                if silent:
                    indexes = [r.member.index for r in silent if r.member is not None]
                    raise FailedPrecondition(
                        f"the trainers with consumer_index {indexes[:5]} of job {job.user_name} do "
                        "not answer, and all must know of a change before it holds: try again "
                        "once they do, or once they were replaced"
                    )
                await self._decide(job, change, numbered, proposal.answers)
        finally:
            if not self._decider.stopped.is_set():  # else it may hold: consumers wait for who knows
                self._proposals.pop(iteration_id, None)
                self._decider.look_again()
        return furthest

    async def _decide(
        self, job: Job, change: ev.ScheduleChange, numbered: Numbered, readers: Iterable[int]
    ) -> None:
        command = c.ChangeSchedule(
            request=numbered, job_id=job.job_id, change=change, readers=tuple(readers)
        )
        await self._decider.execute(command)

    def _require_all(self, job: Job) -> None:
        """Raises FailedPrecondition if the group lacks a consumer."""
        members = [r.member for r in self._readers(job) if r.member is not None]
        if members and len(members) < members[0].consumers:
            raise FailedPrecondition(
                f"job {job.user_name} is read by {len(members)} of {members[0].consumers} "
                "trainers, and one that was given up may still read: change it once all are back, "
                "or none is"
            )

    def _require_new(self, job: Job, skip: ev.ScheduleChange, first: int, stop: int) -> None:
        """Raises AlreadyExists if the last change was the same skip: somebody repeats himself."""
        if not job.changes or not (last := job.changes[-1]).skipped or last.reason != skip.reason:
            return
        before = self._steps(job, len(job.changes) - 1)
        ends = before.place_of(first), before.place_of(stop)
        if ends == (last.place, last.place + last.skipped):
            raise AlreadyExists(
                f"job {job.user_name} leaves out these steps already; to leave out as many behind "
                "them, give another reason"
            )

    def _readers(self, job: Job) -> list[Consumer]:
        state = self._decider.state
        its = (state.iterations[number] for number in job.iterations.values())
        return [state.consumers[i] for each in its for i in each.consumers]

    # -- what is asked -------------------------------------------------------------------------

    def _find(self, name: str) -> int:
        """The id of the job that has this name to its users, or this id."""
        found = named(self._decider.state, name)
        if len(found) > 1:
            ids = ", ".join(str(job.job_id) for job in found)
            raise InvalidArgument(f"{len(found)} jobs are named {name!r}: give an id, of {ids}")
        if not found:
            raise NotFound(f"there is no job {name!r}: `forebay status` has those that there are")
        return found[0].job_id

    def _sources(self, job: Job) -> Sequence[ev.MixtureSource]:
        """Of a mixture; none: it reads a dataset by itself. Raises NotFound if it was removed."""
        state = self._decider.state
        return state.datasets[ordered_job(state, job.job_id).dataset_id].outline.mixture.sources

    def _names(self, job: Job) -> list[str]:
        return [source.name for source in self._sources(job)]

    def _schedule(self, job: Job, changes: int | None = None) -> Schedule:
        """With all changes, or so many."""
        shares_of = [source.share for source in self._sources(job)] or [SHARES]
        return Schedule(shares_of, map(change_message, job.changes[:changes]))

    def _steps(self, job: Job, changes: int | None = None) -> EpochSteps:
        """Those of the group that joined last."""
        if not job.step:
            raise FailedPrecondition(
                f"job {job.user_name} was never read, so its global batch is not known: start its "
                "trainers once"
            )
        readers = (reader.member for reader in self._readers(job))  # of an earlier version's state
        drops = job.drops_remainder or any(m is not None and m.drop_remainder for m in readers)
        return EpochSteps(self._schedule(job, changes), job.step, self._total(job)[1], drops)

    def _total(self, job: Job) -> tuple[int, int | None]:
        """How many elements an epoch is known to have, and has if that is known."""
        lengths = lengths_of(self._decider.state, job)
        known = sum(length for length in lengths if length >= 0)
        has_end = UNKNOWN not in lengths and not self._sources(job)
        return known, known if has_end else None

    def _require_known(self, job: Job, skip: ev.ScheduleChange) -> None:
        """Raises FailedPrecondition if an epoch may end before the skip does, or in it."""
        known, total = self._total(job)
        if total is None and not self._sources(job) and skip.place + skip.skipped > known:
            raise FailedPrecondition(
                f"an epoch of job {job.user_name} is known to have {known} elements, until more "
                "was read, and may end before the steps that are to be skipped do: read up to "
                "there first, or give a smaller stop"
            )

    def _shares(self, job: Job, request: pb.ChangeScheduleRequest, place: int) -> tuple[int, ...]:
        """Those that the weights make, beside those that the other sources have at this place."""
        names = self._names(job)
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

    def _response(self, job: Job, place: int) -> pb.ChangeScheduleResponse:
        return pb.ChangeScheduleResponse(step=self._steps(job).step_of(place), place=place)
