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
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...journal.proto import events_pb2 as ev
from ..core import commands as c
from ..core.base import Numbered
from ..core.state import Iteration, Job
from ..errors import FailedPrecondition, InvalidArgument
from ..proto import forebay_pb2 as pb
from .decider import Decider
from .job_schedules import JobSchedules

ANSWER_MS = 7_000
"""How long consumers may take to answer a proposal: a little longer than a heartbeat waits."""

MAX_REASON = 1_000
"""Characters. It stays with the job."""

MAX_STEP = 1 << 40

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
        self.schedules = JobSchedules(decider.state)
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

    async def change(
        self, request: pb.ChangeScheduleRequest, numbered: Numbered, who: str
    ) -> pb.ChangeScheduleResponse:
        """Raises InvalidArgument, NotFound, FailedPrecondition, AlreadyExists, Unavailable."""
        job = self.schedules.find(request.job)
        if numbered is not None and (answer := self._decider.state.answers.get(numbered[0])):
            known, is_again = ev.Event.FromString(answer.event), answer.number == numbered[1]
            if is_again and known.HasField("schedule_changed"):
                return self._response(job, known.schedule_changed.change.place)
            if is_again and known.HasField("job_forked"):
                place = known.job_forked.fork.place
                return pb.ChangeScheduleResponse(step=request.from_step, place=place)
        steps = self.schedules.steps(job)
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
        if request.fork:
            change.place = steps.behind(first)
            self.schedules.require_known(job, change)
            return await self._fork(job, change.place, request, numbered, who)
        if not request.stop and not request.HasField("from_step"):
            await self._earliest(job, request, change, numbered)
            return self._response(job, change.place)
        change.place = steps.place_of(first)
        if stop:
            change.skipped = steps.place_of(stop) - change.place
            self.schedules.require_not_repeated(job, change, first, stop)
            self.schedules.require_known(job, change)
        else:
            change.shares.extend(self.schedules.shares(job, request, change.place))
        if (furthest := await self._propose(job, change, numbered)) is not None:
            raise FailedPrecondition(
                f"step {request.from_step} of job {job.user_name} is past: its trainers were given "
                f"all before step {steps.step_of(furthest)} already; give a step some way behind "
                "that, or none for the earliest one that is possible"
            )
        return self._response(job, change.place)

    async def _fork(
        self, job: Job, place: int, request: pb.ChangeScheduleRequest, numbered: Numbered, who: str
    ) -> pb.ChangeScheduleResponse:
        if request.fork.startswith("dataset_id=/"):
            raise InvalidArgument(f"fork={request.fork!r} is a whole name: give another name")
        fork = ev.Fork(origin=job.job_id, place=place, reason=request.reason, who=who)
        command = c.GetOrCreateJob(
            request=numbered,
            dataset_id=job.dataset_id,
            name=job.name.removesuffix(job.user_name) + request.fork,  # as trainers of `job` say it
            sharding=job.sharding,
            fork=fork,
        )
        await self._decider.execute(command)
        return pb.ChangeScheduleResponse(step=request.from_step, place=place)

    async def _earliest(
        self,
        job: Job,
        request: pb.ChangeScheduleRequest,
        change: ev.ScheduleChange,
        numbered: Numbered,
    ) -> None:
        """Make the change as early as possible."""
        if not (readers := self.schedules.readers(job)):
            raise FailedPrecondition(
                f"nobody reads job {job.user_name}, so its next step is not known: give from_step, "
                "at or behind the step that its trainers go on with"
            )
        furthest: int | None = max(reader.position or 0 for reader in readers)
        ahead = 1
        for _ in range(TRIES):
            assert furthest is not None
            steps = self.schedules.steps(job)
            step = steps.step_of(furthest) + ahead
            change.place = steps.place_of(step)
            change.shares[:] = self.schedules.shares(job, request, change.place)
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
        if not self.schedules.readers(job):
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
                silent = [
                    r for r in self.schedules.readers(job) if r.consumer_id not in proposal.answers
                ]
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
        members = [r.member for r in self.schedules.readers(job) if r.member is not None]
        if members and len(members) < members[0].consumers:
            raise FailedPrecondition(
                f"job {job.user_name} is read by {len(members)} of {members[0].consumers} "
                "trainers, and one that was given up may still read: change it once all are back, "
                "or none is"
            )

    def _response(self, job: Job, place: int) -> pb.ChangeScheduleResponse:
        return pb.ChangeScheduleResponse(step=self.schedules.steps(job).step_of(place), place=place)
