"""What is decided of mixtures and of the schedules of their jobs, where readers cannot show it."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.journal.datasets import SHARES
from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core import schedules
from forebay.service.core.datasets import mixture
from forebay.service.errors import FailedPrecondition, InvalidArgument, Unimplemented

from .make_fold import Cluster, mixed


@pytest.fixture
def cluster() -> Cluster:
    """Nobody reads its job "mixed"."""
    made = Cluster()
    mixed(made)
    return made


def join(cluster: Cluster, **how: Any) -> ev.ConsumerJoined:
    order = ev.OrderSpec(seed=4, cycle_length=2, block_length=3)
    member = ev.GroupMember(consumers=1, batch_size=4)
    known = {"dataset_id": "mix", "name": "mixed", "sharding": ev.OFF, "order": order}
    joined: ev.ConsumerJoined = cluster.do(
        c.JoinJob(**{**known, "epoch": 0, "member": member, "schedules": True, **how})
    )
    return joined


def change(cluster: Cluster, *readers: int, place: int = 100, skipped: int = 4) -> Any:
    (job,) = (job for job in cluster.state.jobs.values() if job.name == "mixed")
    asked = ev.ScheduleChange(place=place, skipped=skipped)
    return cluster.do(c.ChangeSchedule(job_id=job.job_id, change=asked, readers=readers))


def test_a_trainer_that_knows_no_mixtures_is_refused(cluster: Cluster) -> None:
    """It would read the numbers of bundles as those of one dataset, also of a job that exists."""
    with pytest.raises(Unimplemented, match="a mixture, and this trainer's Forebay knows none"):
        join(cluster, schedules=False)


def test_a_change_holds_for_exactly_those_who_agree(cluster: Cluster) -> None:
    reader = join(cluster).consumer_id
    for agreed in ((), (reader, reader + 1)):
        with pytest.raises(FailedPrecondition, match="came or left just now"):
            change(cluster, *agreed)
    assert change(cluster, reader) == 100


def test_a_retry_is_answered_and_decides_nothing(cluster: Cluster) -> None:
    count = len(cluster.events)
    again = ev.ScheduleChange(place=24, skipped=8)
    job_id = next(job.job_id for job in cluster.state.jobs.values() if job.name == "mixed")
    asked = c.ChangeSchedule(request=("skips", 1), job_id=job_id, change=again, readers=())
    assert cluster.do(asked) == 24 and len(cluster.events) == count


@pytest.mark.parametrize(
    "wrong", [{"place": -1}, {"skipped": -1}, {"skipped": 0}, {"shares": [SHARES]}, {"shares": [1]}]
)
def test_a_change_that_is_none_is_refused(cluster: Cluster, wrong: dict[str, Any]) -> None:
    job_id = next(job.job_id for job in cluster.state.jobs.values() if job.name == "mixed")
    asked = ev.ScheduleChange(
        **{"place": 100, **({} if "shares" in wrong else {"skipped": 4}), **wrong}
    )
    with pytest.raises(InvalidArgument):
        cluster.do(c.ChangeSchedule(job_id=job_id, change=asked, readers=()))


def test_changes_are_bounded(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "MAX_CHANGES", 2)
    with pytest.raises(FailedPrecondition, match="has 2 changes, and may have no more"):
        change(cluster)


def test_shares_and_names_are_checked_where_it_is_registered(cluster: Cluster) -> None:
    def source(name: str, share: int) -> ev.MixtureSource:
        return ev.MixtureSource(name=name, dataset_id="plain", share=share)

    for sources, match in (
        ([source("a", SHARES - 1)], "do not add up"),
        ([source("a", SHARES + 1), source("b", -1)], "do not add up"),
        ([source("a", 1), source("a", SHARES - 1)], "give each a name"),
        ([source("", SHARES)], "give each a name"),
        ([], "without sources"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            mixture(cluster.state, sources)
