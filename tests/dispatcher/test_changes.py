"""Changes of schedules: whom the dispatcher asks, and when it decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from forebay.journal.datasets import SHARES
from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.state import GroupMember, State
from forebay.service.dispatcher.changes import ScheduleChanges
from forebay.service.errors import AlreadyExists, FailedPrecondition, InvalidArgument, Unavailable
from forebay.service.proto import forebay_pb2 as pb

from ..core.make_fold import Cluster, mixed

STEP = 8


class Decider:
    """Decides at once; while a proposal waits, `meanwhile` happens, and then time is over."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        mixed(self.cluster)
        self.stopped = asyncio.Event()
        self.meanwhile: Callable[[], None] = lambda: None
        self.failed: Exception | None = None

    @property
    def state(self) -> State:
        return self.cluster.state

    async def execute(self, command: c.Command) -> Any:
        if self.failed is not None:
            raise self.failed
        return self.cluster.do(command)

    async def wait_until(self, is_over: Callable[[], bool], _: int) -> None:
        if not is_over():
            self.meanwhile()

    def look_again(self) -> None:
        """Nobody waits."""

    def unavailable(self) -> Unavailable:
        return Unavailable("it stops")


class Group:
    """The job "mixed", its consumers, and what they are told."""

    def __init__(self, consumers: int = 2, joined: int = 2) -> None:
        self.decider = Decider()
        self.changes = ScheduleChanges(self.decider)  # type: ignore[arg-type]
        self.there = [self.join(index, consumers) for index in range(joined)]

    def join(self, index: int, consumers: int) -> ev.ConsumerJoined:
        joined: ev.ConsumerJoined = self.decider.cluster.do(
            c.JoinJob(
                dataset_id="mix", name="mixed", sharding=ev.OFF, epoch=0, schedules=True,
                order=ev.OrderSpec(seed=4, cycle_length=2, block_length=3),
                member=ev.GroupMember(
                    index=index, consumers=consumers, batch_size=STEP // consumers
                ),
            )
        )  # fmt: skip
        return joined

    def told(self, consumer: ev.ConsumerJoined) -> pb.ConsumerHeartbeatResponse:
        news = pb.ConsumerHeartbeatResponse()
        self.changes.tell(self.decider.state.iterations[consumer.iteration_id], 0, news)
        return news

    def answer(self, place: int, *consumers: ev.ConsumerJoined) -> None:
        """What these give next."""
        for consumer in consumers:
            number = self.told(consumer).proposal.number
            answer = pb.Proposal(number=number, place=place)
            self.changes.answered(consumer.iteration_id, consumer.consumer_id, answer)

    def change(self, **how: Any) -> int:
        request = pb.ChangeScheduleRequest(job="mixed", **how)
        if "stop" not in how:
            request.weights.add(source="of plain", weight=3)
        return asyncio.run(self.changes.change(request, None, "")).step

    @property
    def decided(self) -> int:
        (job,) = (job for job in self.decider.state.jobs.values() if job.name == "mixed")
        return len(job.changes)


def test_all_agree() -> None:
    group = Group()
    group.decider.meanwhile = lambda: group.answer(50, *group.there)
    assert group.change(from_step=9) == 9 and group.decided == 3
    news = group.told(group.there[0])
    assert len(news.changes) == 3 and not news.proposal.number
    weights = [share / SHARES for share in news.changes[-1].shares]
    assert weights == pytest.approx([3 / 3.5, 0.5 / 3.5]), "the other one had a half there"


def refused(group: Group, match: str, **how: Any) -> None:
    with pytest.raises(FailedPrecondition, match=match):
        group.change(**how)
    assert group.decided == 2
    assert not group.told(group.there[0]).proposal.number, "nobody holds any longer"


def test_one_is_further() -> None:
    group = Group()

    def answer() -> None:
        group.answer(88, group.there[0])
        group.answer(97, group.there[1])

    group.decider.meanwhile = answer
    refused(group, r"step 10 of job mixed is past: .* all before step 12", from_step=10)


def test_one_does_not_answer() -> None:
    group = Group()
    group.decider.meanwhile = lambda: group.answer(0, group.there[0])
    refused(group, r"consumer_index \[1\] of job mixed do not answer", from_step=10)


def test_one_that_was_given_up_may_still_read() -> None:
    refused(Group(3, 2), "read by 2 of 3 trainers", from_step=10)
    group = Group()

    def leave() -> None:
        group.answer(0, *group.there)
        group.decider.cluster.leave(group.there[1].consumer_id)

    group.decider.meanwhile = leave
    refused(group, "read by 1 of 2 trainers", from_step=10)


def test_one_that_is_replaced_meanwhile_is_asked_too() -> None:
    group = Group()

    def replace() -> None:
        group.answer(0, *group.there)
        group.decider.cluster.leave(group.there[1].consumer_id)
        group.join(1, 2)

    group.decider.meanwhile = replace
    refused(group, r"consumer_index \[1\] of job mixed do not answer", from_step=10)


def test_one_change_at_a_time() -> None:
    group = Group()
    request = pb.ChangeScheduleRequest(job="mixed", from_step=10, stop=12)
    also: list[BaseException | None] = []

    async def both() -> None:
        async def wait(_: Any, __: int) -> None:
            try:
                await group.changes.change(request, None, "")
            except FailedPrecondition as error:
                also.append(error)
            group.answer(0, *group.there)

        group.decider.wait_until = wait  # type: ignore[assignment, method-assign]
        await group.changes.change(request, None, "")

    asyncio.run(both())
    assert group.decided == 3 and "another change of job mixed is under way" in str(also[0])


def test_the_earliest_step_is_behind_who_is_furthest() -> None:
    group = Group()
    proposed: list[int] = []

    def answer() -> None:
        place = group.told(group.there[0]).proposal.place
        proposed.append(place)
        group.answer(min(place + 40, 200), *group.there)

    group.decider.meanwhile = answer
    step = group.change()
    assert group.decided == 3 and proposed[-1] >= 200 and proposed == sorted(proposed)
    assert step > proposed[0] // STEP

    def run() -> None:
        group.answer(group.told(group.there[0]).proposal.place + 1_000_000, *group.there)

    group.decider.meanwhile = run
    with pytest.raises(FailedPrecondition, match="too fast"):
        group.change()


def test_a_caller_that_goes_holds_nobody() -> None:
    group = Group()

    async def go() -> None:
        async def wait(_: Any, __: int) -> None:
            await asyncio.sleep(60)

        group.decider.wait_until = wait  # type: ignore[assignment, method-assign]
        request = pb.ChangeScheduleRequest(job="mixed", from_step=10, stop=12)
        asked = asyncio.create_task(group.changes.change(request, None, ""))
        await asyncio.sleep(0)
        assert group.told(group.there[0]).proposal.number
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(go())
    assert not group.told(group.there[0]).proposal.number and group.decided == 2


def test_only_who_can_answer_is_woken() -> None:
    """A trainer of an earlier version would ask again at once, as it answers no proposal."""
    group = Group()
    iteration_id = group.there[0].iteration_id

    def look() -> None:
        earlier, later = pb.ConsumerHeartbeatRequest(), pb.ConsumerHeartbeatRequest()
        later.answer.SetInParent()
        assert not group.changes.is_news(iteration_id, earlier)
        assert group.changes.is_news(iteration_id, later)
        group.answer(50, *group.there)

    group.decider.meanwhile = look
    assert group.change(from_step=9) == 9


def test_nobody_reads() -> None:
    """Only a step that is given: nobody knows where they go on."""
    group = Group(joined=1)
    group.decider.cluster.leave(group.there[0].consumer_id)
    with pytest.raises(FailedPrecondition, match="its next step is not known: give from_step"):
        group.change()
    assert group.change(from_step=1) == 1 and group.decided == 3


@pytest.mark.parametrize("how", [{"from_step": -1}, {"from_step": 5, "stop": 5}, {"stop": -3}])
def test_steps_that_are_none(how: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="give a first step from 0 to"):
        Group().change(**how)


@pytest.mark.parametrize("stops", [True, False])
def test_a_journal_that_fails(stops: bool) -> None:
    """Consumers hold until a dispatcher knows; but not if this one goes on."""
    group = Group()
    group.decider.meanwhile = lambda: group.answer(0, *group.there)
    group.decider.failed = Unavailable("no journal")
    if stops:
        group.decider.stopped.set()
    with pytest.raises(Unavailable):
        group.change(from_step=10)
    assert bool(group.told(group.there[0]).proposal.number) == stops


def test_the_status_has_jobs_by_name_also_while_one_is_replayed() -> None:
    group = Group()
    schedules, cluster = group.changes.schedules, group.decider.cluster
    (origin,) = schedules.status()
    assert [change["from_step"] for change in origin["changes"]] == [0, 5, 3]
    cluster.do(
        c.JoinJob(
            dataset_id="mix", name="", sharding=ev.OFF, epoch=0, schedules=True,
            fork=schedules.replay("mixed", "somebody"),
            member=ev.GroupMember(consumers=1, batch_size=8),
        )
    )  # fmt: skip
    assert [job["job_id"] for job in schedules.status()] == [origin["job_id"]]
    reader, *_ = schedules.readers(job := schedules.find("mixed"))
    reader.member = GroupMember(0, 2, 0, 4, drop_remainder=True)
    assert schedules.drops_remainder(job) > job.drops_remainder, "of an earlier version's state"


def test_the_status_has_the_first_weights_the_fork_and_the_last_changes() -> None:
    group = Group(joined=1)
    group.decider.cluster.leave(group.there[0].consumer_id)
    for step in range(20, 24):
        group.change(from_step=step)
    request = pb.ChangeScheduleRequest(job="mixed", from_step=30, fork="b")
    asyncio.run(group.changes.change(request, None, ""))
    for job, first in zip(group.changes.schedules.status(), ([0], [0, 30]), strict=True):
        assert [each["from_step"] for each in job["changes"]] == [*first, 3, *range(20, 24)]


def test_a_fork_that_is_asked_for_again_parts_where_it_did() -> None:
    group = Group()
    for consumer in group.there:
        group.decider.cluster.leave(consumer.consumer_id)
    fork = pb.ChangeScheduleRequest(job="mixed", fork="other", from_step=10)
    first = asyncio.run(group.changes.change(fork, ("caller", 1), ""))
    assert group.changes.schedules.find("other").name == "other", "named as its origin is"
    _, forked = group.changes.schedules.status()
    assert [c["from_step"] for c in forked["changes"]] == [0, 10, 5, 3], "steps as at the fork"
    group.change(from_step=1, stop=2)
    assert asyncio.run(group.changes.change(fork, ("caller", 1), "")) == first
    for name in ("other", "dataset_id=/plain/other"):
        with pytest.raises((AlreadyExists, InvalidArgument), match="give another name"):
            fork.fork = name
            asyncio.run(group.changes.change(fork, ("caller", 2), ""))
