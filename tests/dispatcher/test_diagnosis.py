"""What is concluded from the status of simulated loads; tests/e2e/test_doctor.py has real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.status import encoded_status
from forebay.service.diagnosis import findings
from forebay.service.dispatcher.history import RefusedPeer
from forebay.service.findings import Finding

from .test_loads import EVERY_S, WINDOW_S, Cluster

LED = {"leads_s": 1e6, "append_s": 0.02, "lost_workers": []}
TOLD = dict.fromkeys(("network_ms", "dispatcher_ms", "no_task_ms", "bytes"), 0.0)


def status(cluster: Cluster, **more: Any) -> dict[str, Any]:
    strangers = [RefusedPeer("worker w:9", "other", 3, 0)._asdict()] if more else []
    told = {**LED, **cluster.loads.status(), "strangers": strangers, **more}
    return dict(json.loads(b"".join(encoded_status(cluster.state, measured=told))))


def network(cluster: Cluster) -> None:
    cluster.waits, cluster.works = 0.5, 0.3
    cluster.also = {**TOLD, "bytes": 50_000.0}


def unreachable(cluster: Cluster) -> None:
    cluster.also = {**TOLD, "network_ms": 0.5}


def absent(cluster: Cluster) -> None:
    cluster.waits, cluster.works, cluster.unleased = 0.3, 0.1, 0.9  # as it leases no splits
    cluster.also = {**TOLD, "dispatcher_ms": 0.2}


def without_task(cluster: Cluster) -> None:
    cluster.also = {**TOLD, "no_task_ms": 0.25}


def leasing(cluster: Cluster) -> None:
    cluster.waits, cluster.works, cluster.unleased = 0.9, 0.1, 0.9


def plateau(cluster: Cluster) -> None:
    cluster.waits = 0.9
    cluster.go_on(2 * WINDOW_S)
    for number in (3, 4):
        cluster.worker(number)
    cluster.speed /= 2


def few_splits(cluster: Cluster) -> None:
    cluster.waits = 0.75
    cluster.register("few", ev.SplitSource(count=2))
    cluster.when(c.LeaveIteration(consumer_id=cluster.joined.consumer_id, reason=""))
    cluster.joined = cluster.iteration("of few", "few")
    cluster.job_id = cluster.state.iterations[cluster.joined.iteration_id].job_id
    lease_all(cluster)


def epoch_ends(cluster: Cluster) -> None:
    cluster.waits = 0.75
    lease_all(cluster)


def one_left(cluster: Cluster) -> None:
    cluster.waits = 0.75
    (source,) = cluster.state.iterations[cluster.joined.iteration_id].ledgers
    task = cluster.task_of(next(iter(cluster.state.workers)))
    while source.next < source.size - 1:
        assert cluster.lease(task, 100)


def lease_all(cluster: Cluster) -> None:
    tasks = [cluster.task_of(worker_id) for worker_id in cluster.state.workers]
    while cluster.lease(tasks[0], 1) or cluster.lease(tasks[1], 1):
        pass


def stock(cluster: Cluster) -> None:
    leave(cluster)
    cluster.worker(3, stock=True)
    cluster.silent = True


def leave(cluster: Cluster) -> None:
    for worker_id in [*cluster.state.workers]:
        cluster.when(c.LoseWorker(worker_id=worker_id, reason="gone"))


def silence(cluster: Cluster) -> None:
    cluster.silent = True


Told = tuple[str, str, str, float | None]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (network, ("slow", "the network holds them up, which carries 50 MB/s", "dtypes", 2.0)),
        (unreachable, ("slow", "wait 50% of the time for a connection", "--address", 2.0)),
        (absent, ("slow", "wait 20% of the time for the dispatcher", "standby", 1.25)),
        (without_task, ("slow", "for a worker to get a task", "workers are there", 4 / 3)),
        (leasing, ("slow", "wait for splits", "takes 20 ms", 10.0)),
        (plateau, ("slow", "4 workers brought no more than 2", "bring nothing", 10.0)),
        (few_splits, ("slow", "the source has too few", "divide the source", 4.0)),
        (one_left, ("slow", "wait 75% of the time, and 2.0 of 2", "start 1 more worker", 1.5)),
        (epoch_ends, ("note", "the epoch is about to end", "", None)),
        (leave, ("problem", "no worker is registered", "start workers", None)),
        (stock, ("note", "do not tell their times", "Forebay's workers", None)),
        (silence, ("problem", "none tells of a task of it", "logs", None)),
    ],
)
def test_a_case_of_each_kind(
    monkeypatch: pytest.MonkeyPatch, case: Callable[[Cluster], None], expected: Told
) -> None:
    cluster = Cluster(monkeypatch)
    for number in (1, 2):
        cluster.worker(number)
    case(cluster)
    cluster.go_on(4 * WINDOW_S)
    found = findings(status(cluster))
    severity, what, advice, gain = expected
    (one,) = [one for one in found if what in one.what]
    assert one.severity == severity
    assert one.subject in ("job train", "job of few")
    assert advice in one.advice
    assert one.gain == (None if gain is None else pytest.approx(gain, rel=0.02))
    assert {other.severity for other in found if other != one} <= {"note"}
    assert severity != "slow" or not any("not the data" in other.what for other in found)


def test_a_slow_worker_of_an_ordered_read_holds_up_all(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    for number in (1, 2, 3):
        cluster.worker(number)
    cluster.waits, cluster.works = 0.5, 0.4
    cluster.go_on(2 * WINDOW_S)
    told = status(cluster)
    (job,), (load,) = told["jobs"], told["loads"]
    job["order"] = {"claimed": False, "cycle_length": 1}
    (held,) = findings(told)
    assert "read more bundles side by side (cycle_length, now 1)" in held.advice
    load["by_worker"][1].update(working=1.0, elements_per_s=4.0)  # others make 4 in 0.4 of theirs
    (slow,) = findings(told)
    assert (slow.subject, slow.severity) == ("worker w:2", "slow")
    assert slow.gain == pytest.approx(2, rel=0.02)  # without an order: others would be of no help
    job["order"] = None
    assert findings(told)[1].gain == pytest.approx(1 + 6 / load["elements_per_s"], rel=0.02)


def test_a_worker_that_trainers_cannot_reach_is_named_and_nothing_else_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    for number in (1, 2, 3):
        cluster.worker(number)
    cluster.waits = 0.9
    cluster.go_on(2 * WINDOW_S)
    refusing = {"unreachable_workers": [{"address": "w:2", "since_s": 40.0}]}
    told = status(cluster) | refusing
    told["workers"][1]["data_addresses"] = ["tcp 127.0.0.1:9"]
    load = told["loads"][0]
    load["by_worker"][1].update(working=1.0, elements_per_s=0.0)
    for cause in ("trainers wait", "source"):
        load["wanted"]["cause"] = cause
        named, slow = findings(told)
        assert (named.severity, named.subject, named.since_s) == ("problem", "worker w:2", 40.0)
        assert named.what == "trainers cannot connect to its data address (tcp 127.0.0.1:9)"
        assert slow.advice == "see to worker w:2 first"
    cluster.also = {**TOLD, "network_ms": 1.0}  # the last one that could be reached has left
    cluster.waits = 0.0
    cluster.go_on(4 * WINDOW_S)
    named, cut = findings(status(cluster) | refusing)
    assert named.subject == "worker w:2"
    assert (cut.severity, cut.subject) == ("problem", "job train")
    assert "wait 100% of the time for a connection" in cut.what and cut.since_s


def test_a_slow_worker_is_named_before_further_ones_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    for number in (1, 2):
        cluster.worker(number)
    cluster.waits = 0.9
    cluster.go_on(2 * WINDOW_S)
    told = status(cluster)
    told["loads"][0]["by_worker"][1]["elements_per_s"] /= 24
    slow, few = findings(told)
    assert (slow.subject, slow.severity) == ("worker w:2", "slow")
    assert few.advice.startswith("see to worker w:2 first; then start 2 more workers")


def test_since_when_and_what_is_lost_and_what_earlier_versions_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    cluster.worker(1)
    cluster.waits = 0.5
    cluster.go_on(EVERY_S)
    assert [one.what for one in findings(status(cluster))] == ["it is being measured"]
    cluster.go_on(2 * WINDOW_S)
    (before,) = findings(status(cluster))
    cluster.go_on(WINDOW_S)
    (slow,) = findings(status(cluster))
    assert slow == before._replace(since_s=(before.since_s or 0.0) + WINDOW_S)
    assert slow.advice.startswith("start 1 more worker;") and slow.gain == pytest.approx(
        2, rel=0.02
    )

    lost = {"address": "w:7", "reason": "silent", "ago_s": 42.0, "back": False}
    back = {**lost, "address": "w:8", "back": True}
    old = {**lost, "address": "w:9", "ago_s": 1e4}
    repaired = {**lost, "address": "w:5", "repaired": True}
    came = {**repaired, "address": "w:6", "back": True}
    told = status(cluster, leads_s=10.0, lost_workers=[lost, back, old, repaired, came])
    told["term"] = 2
    told["memory"][0]["jobs"][0]["shed_elements"] = 5
    cache = {"held_bytes": 0, "limit_bytes": 10, "hit_bytes": 9, "missed_bytes": 20}
    told["memory"].append(told["memory"][0] | {"address": "w:2", "jobs": [], "cache": cache})
    of = {(one.severity, one.subject): one for one in findings(told)}
    assert [*of] == [
        ("problem", "dispatcher"), ("problem", "worker w:7"), ("slow", "job train"),
        ("note", "dispatcher"), ("note", "worker w:8"), ("note", "worker w:5"),
        ("note", "worker w:1"), ("note", "worker w:2"),
    ]  # fmt: skip
    assert "holds 0 of 10 bytes and helps" in of["note", "worker w:2"].what
    for less in {"hit_bytes": 21}, {"missed_bytes": 9}:  # it helps; an epoch may fit
        told["memory"][1]["cache"] = cache | less
        assert ("note", "worker w:2") not in {(one.severity, one.subject) for one in findings(told)}
    assert "worker w:9" in of["problem", "dispatcher"].what  # the stranger
    told["strangers"][0]["who"] = "a reader of dataset worker (token t)"
    claimed = [one.severity for one in findings(told) if "claim another journal" in one.what]
    assert claimed == ["note"], "no worker says so"
    assert of["problem", "worker w:7"].since_s == 42
    assert "given up" not in of["note", "worker w:5"].what
    told["loads"][0]["wanted"]["cause"] = "measuring"
    assert not any("tell too little" in one.what for one in findings(told))
    told["loads"][0]["tells"] = 0
    assert any("tell too little" in one.what for one in findings(told))
    for name in ("loads", "wanted_workers", "memory", "strangers", *LED):
        del told[name]
    upgrade = "it tells nothing of the time of trainers and workers: it is of an earlier version"
    assert findings(told) == [Finding("note", "dispatcher", upgrade, "upgrade it")]


def test_what_stands_still_comes_before_reads_that_failed_long_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And reads that failed alike are one finding."""
    cluster = Cluster(monkeypatch)
    cluster.worker(1)
    cluster.waits = 1.0
    cluster.go_on(4 * WINDOW_S)
    told = status(cluster) | {"strangers": [], "now_ms": 10**9}
    error = {"time_ms": 10**9 - 3_600_000, "times": 2, "worker": "w:1", "code": "NOT_FOUND",
             "message": "a" * 1_000, "for_good": False}  # fmt: skip
    told["removed_jobs"] = [
        {"job_id": n, "name": f"job{n}", "dataset_id": "d", "state": "failed", "errors": [error]}
        for n in range(28)
    ]
    told["loads"][0] |= {"waits_for": {"network": 1.0}, "elements_per_s": 0.0}
    still, failed = (one for one in findings(told) if one.severity == "problem")
    assert still.subject == "job train" and "for a connection" in still.what
    assert failed.subject == "jobs job0, job1, job2 and 25 more"
    assert failed.what.startswith("its read failed at worker w:1 (56 times): NOT_FOUND: aaa")
    assert len(failed.what) < 300


def test_a_new_leader_to_which_no_worker_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.worker(1)
    lost = {"address": "w:7", "reason": "silent", "ago_s": 42.0, "back": False}
    told = status(cluster, leads_s=60.0, lost_workers=[lost]) | {"term": 2, "strangers": []}
    assert not any("no worker has come" in one.what for one in findings(told))
    told["workers"] = []
    (alone,) = (one for one in findings(told) if "no worker has come" in one.what)
    assert alone.severity == "problem" and "addresses of all dispatchers" in alone.advice
    told["term"] = 1
    assert not any("no worker has come" in one.what for one in findings(told))
