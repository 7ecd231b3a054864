"""What a job does, and what became of it, from events and heartbeats in any order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.journal.reasons import GOODBYE, READ_FAILED, REPAIRED, SILENT
from forebay.service.core import commands as c
from forebay.service.core.job_states import JobObservations, job_state
from forebay.service.core.machine import apply
from forebay.service.core.state import Iteration, Job
from forebay.service.core.status import status
from forebay.service.dashboard import views
from forebay.service.diagnosis import findings
from forebay.service.dispatcher import job_reports
from forebay.service.dispatcher.job_reports import MOST_ERRORS, JobReports
from forebay.service.findings import error_text
from forebay.service.proto import forebay_pb2 as pb

from ..core.given import Given


@pytest.mark.parametrize(
    ("expected", "epochs", "unfinished", "consumers", "observations"),
    [
        ("idle", 0, 0, 0, JobObservations()),
        ("finished", 3, 0, 0, JobObservations()),
        ("finished", 3, 0, 0, JobObservations(failed=True)),  # after its error it went on
        ("running", 3, 1, 2, JobObservations()),
        ("running", 3, 1, 2, JobObservations(failed=True, gone=[{}])),
        ("waiting", 1, 1, 2, JobObservations(waits=True)),
        ("idle", 1, 1, 2, JobObservations(waits=True, gone=[{}, {}])),
        ("failed", 1, 1, 1, JobObservations(failed=True, gone=[{}])),
        ("failed", 1, 1, 0, JobObservations(failed=True)),
        ("failed", 0, 0, 0, JobObservations(failed=True)),  # its epoch was collected
        ("idle", 1, 1, 0, JobObservations()),
    ],
)
def test_states(
    expected: str, epochs: int, unfinished: int, consumers: int, observations: JobObservations
) -> None:
    """Epochs that are over may be summarized."""
    job = Job(1, "train", "d", ev.DYNAMIC, None, False, 0)
    over = epochs - unfinished
    its = [Iteration(i, 1, i, [], finished=i < over) for i in range(epochs)]
    if unfinished:
        its[-1].consumers = {*range(consumers)}
    assert job_state(job, its, observations) == expected
    if over:
        job.summarized = [(0, over)]
    assert job_state(job, its[over:], observations) == expected


class Cluster(Given):
    """A leader's reports."""

    now_ms, step_ms = 10**9, 100

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = SimpleNamespace(time_ns=lambda: self.now_ms * 10**6)
        monkeypatch.setattr(job_reports, "time", clock)
        super().__init__()
        self.reports = JobReports(self)  # type: ignore[arg-type] # as a decider

    def leave(self, joined: ev.ConsumerJoined, reason: str = GOODBYE) -> None:
        self.when(c.LeaveIteration(consumer_id=joined.consumer_id, reason=reason))

    def beat(self, worker_id: int, *errors: pb.ReadError) -> None:
        worker = self.state.workers[worker_id]
        beat = pb.WorkerHeartbeatRequest(errors=errors)
        self.reports.worker_told(worker.address, worker.uid, beat)

    def job_of(self, joined: ev.ConsumerJoined) -> int:
        return self.state.iterations[joined.iteration_id].job_id

    def state_of(self, job_id: int) -> str:
        job = self.state.jobs[job_id]
        its = [self.state.iterations[i] for i in job.iterations.values()]
        return job_state(job, its, JobObservations(**self.reports.of(job_id)))


GONE = "/data/7.tfrecord; No such file or directory"


def error(job_id: int, **more: Any) -> pb.ReadError:
    return pb.ReadError(
        **{"job_id": job_id, "code": "NOT_FOUND", "message": GONE, "times": 1, **more}
    )


def test_a_job_that_failed_until_somebody_reads_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    worker_id = cluster.worker(1)
    joined = cluster.iteration("train")
    job_id = cluster.job_of(joined)
    assert cluster.state_of(job_id) == "running"
    cluster.leave(joined, f"{READ_FAILED}NOT_FOUND: {GONE}")
    assert cluster.state_of(job_id) == "failed"
    (observations,) = cluster.reports.of(job_id)["errors"]
    assert (observations["worker"], observations["message"]) == (None, f"NOT_FOUND: {GONE}")
    for _ in range(3):  # each heartbeat says it again
        cluster.beat(worker_id, error(job_id, ago_ms=50))
    (observations,) = cluster.reports.of(job_id)["errors"]
    assert (observations["worker"], observations["code"], observations["times"]) == (
        "w:1",
        "NOT_FOUND",
        1,
    )
    again = cluster.iteration("train")
    assert cluster.state_of(job_id) == "running"
    cluster.leave(again)
    assert cluster.state_of(job_id) == "idle"
    assert cluster.reports.of(job_id)["left"]["reason"] == GOODBYE

    # Whoever comes gets the error of a task that has ended: TensorFlow's own clients tell nothing.
    ended = error(job_id, for_good=True, task_id=cluster.task_of(worker_id), times=2, ago_ms=10**6)
    cluster.beat(worker_id, ended)
    cluster.leave(cluster.iteration("train"))
    assert cluster.state_of(job_id) == "failed"
    later = JobReports(cluster)  # type: ignore[arg-type]
    assert [e["message"] for e in later.of(job_id)["errors"]] == [f"NOT_FOUND: {GONE}"]
    cluster.reports = later
    cluster.beat(worker_id, ended)
    assert cluster.state_of(job_id) == "failed"  # a new leader knows it, too


@pytest.mark.parametrize("client", ["forebay", "tensorflow"])
def test_a_job_without_a_name_is_remembered_when_it_has_failed(
    client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(monkeypatch)
    worker_id = cluster.worker(1)
    joined = cluster.iteration()
    job_id = cluster.job_of(joined)
    cluster.leave(joined, READ_FAILED + GONE if client == "forebay" else GOODBYE)
    assert job_id not in cluster.state.jobs
    cluster.beat(worker_id, error(job_id))
    (removed,) = cluster.reports.removed()
    assert removed["job_id"] == job_id and removed["errors"][-1]["worker"] == "w:1"
    status = {"jobs": [], "removed_jobs": [removed], "loads": [], "now_ms": cluster.now_ms}
    (found,) = findings(status)
    assert (found.severity, found.subject) == ("problem", f"job {job_id}")
    assert "at worker w:1: NOT_FOUND: /data/7.tfrecord" in found.what
    late = {**status, "now_ms": cluster.now_ms + 10**7}
    assert findings(late) == findings({**late, "removed_jobs": []}) == []


def test_errors_are_bounded_and_other_ends_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    worker_id = cluster.worker(1)
    joined = cluster.iteration("train")
    job_id = cluster.job_of(joined)
    for number in range(3 * MOST_ERRORS):
        cluster.beat(worker_id, error(job_id, message=f"no {number}", ago_ms=10**6 - number))
    observations = [e["message"] for e in cluster.reports.of(job_id)["errors"]]
    assert observations == [f"no {number}" for number in range(2 * MOST_ERRORS, 3 * MOST_ERRORS)]
    cluster.beat(worker_id, error(4711))  # of a job of another journal
    cluster.beat(worker_id, error(job_id, message="long ago", ago_ms=2**62))
    assert min(e["time_ms"] for e in cluster.reports.of(job_id)["errors"]) >= 0
    other = cluster.iteration("other")
    cluster.leave(other, SILENT)
    reports = cluster.reports.of(cluster.job_of(other))
    assert (reports["errors"], reports["failed"]) == ([], False)
    assert reports["left"]["reason"] == SILENT


def test_lost_splits_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    joined = cluster.iteration("train")
    job_id = cluster.job_of(joined)
    for number in (1, 2):
        assert cluster.lease(cluster.task_of(cluster.worker(number)), number)
    cluster.when(c.LoseWorker(worker_id=min(cluster.state.workers), reason="no sign of life"))
    cluster.leave(joined)
    cluster.when(c.CollectIteration(iteration_id=joined.iteration_id))
    observations = [(loss["splits"], loss["why"]) for loss in cluster.reports.of(job_id)["losses"]]
    assert observations == [
        (1, "worker w:1 was given up: no sign of life"), (2, "nobody read the epoch any more"),
    ]  # fmt: skip
    jobs = [{**job, **cluster.reports.of(job_id)} for job in status(cluster.state)["jobs"]]
    (found,) = findings({"jobs": jobs, "loads": [], "now_ms": cluster.now_ms})
    assert (found.severity, found.subject) == ("problem", "job train")
    assert found.what == "3 splits were lost: nobody read the epoch any more"
    assert "forebay audit" in found.advice
    jobs[0]["losses"] = jobs[0]["losses"][1:]  # nobody misses those
    (found,) = findings({"jobs": jobs, "loads": [], "now_ms": cluster.now_ms})
    assert (found.severity, found.what[:7]) == ("note", "2 split")


def test_an_error_of_python_is_said_once() -> None:
    trace = "Traceback (most recent call last):\n  File x\nValueError: bad record"
    of = {"code": "INTERNAL", "message": f"ValueError('bad record')\n{trace}"}
    assert error_text(of) == "INTERNAL: ValueError('bad record')"
    of["message"] = f"element 3\n{trace}"
    assert error_text(of) == "INTERNAL: element 3 ValueError: bad record"


def test_elements_that_a_worker_drops_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of pipelines that mix splits, of which nobody tells which are lost."""
    cluster = Cluster(monkeypatch)
    job_id = cluster.job_of(cluster.iteration("train"))
    worker_id = cluster.worker(1)
    lease = cluster.lease(cluster.task_of(worker_id), 4)
    assert lease is not None
    for dropped in (200, 11):
        begun = (lease.lease_id,)
        cluster.when(c.LeaseSplits(task_id=lease.task_id, begun=begun, dropped=dropped))
    cluster.when(c.LoseWorker(worker_id=worker_id, reason=GOODBYE, left=True))
    jobs = [{**job, **cluster.reports.of(job_id)} for job in status(cluster.state)["jobs"]]
    (found,) = findings({"jobs": jobs, "loads": [], "now_ms": cluster.now_ms + 1_000})
    assert found.severity == "problem" and found.since_s == pytest.approx(1.1)
    assert found.what.startswith("211 elements that workers had made were lost: ")


def test_a_loss_is_explained_though_the_next_decision_makes_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    job_id = cluster.job_of(cluster.iteration("train"))
    lease = cluster.lease(cluster.task_of(cluster.worker(1)), 4)
    assert lease is not None
    cluster.when(c.LeaseSplits(task_id=lease.task_id, lost=(lease.lease_id,)))
    other = cluster.iteration("other")  # the event behind the loss is of a job that is new
    (loss,) = cluster.reports.of(job_id)["losses"]
    assert loss["splits"] == 4 and loss["why"]
    assert cluster.reports.of(cluster.job_of(other))["losses"] == []


def test_a_save_that_failed_is_a_finding_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    started = cluster.when(
        c.StartSave(path="/s", definition=ev.DatasetDefinition(), metadata=b"", prepared="/p")
    )
    assert cluster.reports.failed_saves() == []
    cluster.when(c.FailSave(save_id=started.save_id, code="DATA_LOSS", message="/a\nis torn"))
    observations = {"jobs": [], "loads": [], "failed_saves": cluster.reports.failed_saves()}
    (found,) = findings({**observations, "now_ms": cluster.now_ms + 1_000})
    assert (found.severity, found.subject) == ("problem", "save /s")
    assert (found.what, found.since_s) == ("it failed: DATA_LOSS: /a is torn", 1.0)
    assert findings({**observations, "now_ms": cluster.now_ms + 10**7}) == []


def test_a_reader_that_was_dismissed_has_no_cause_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    job_id = cluster.job_of(cluster.iteration("train"))
    assert cluster.lease(cluster.task_of(cluster.worker(1)), 3)
    cut = ev.LeaderElected(term=2, journal_id="k", after_repair=True)
    apply(cluster.state, ev.Event(leader_elected=cut))
    cluster.when(c.ElectLeader(term=3, address="a:1", version="0", journal_id="j"))
    assert cluster.state_of(job_id) == "failed"
    of: dict[str, Any] = {"job_id": job_id, "name": "train", "dataset_id": "d", "state": "failed"}
    job = of | cluster.reports.of(job_id)
    found, _ = findings({"jobs": [job], "loads": [], "now_ms": cluster.now_ms})
    assert (found.severity, found.what) == ("problem", f"its trainer was dismissed: {REPAIRED}")
    assert found.advice == "start its trainers again, unless they had ended"
    assert [loss["why"] for loss in job["losses"]] == [REPAIRED]


def test_dead_jobs_come_below_living_ones_and_the_latest_first() -> None:
    def job(job_id: int, state: str, used_ms: int) -> dict[str, Any]:
        of: dict[str, Any] = {
            "job_id": job_id, "name": f"j{job_id}", "dataset_id": "d", "sharding": "DYNAMIC",
            "state": state, "used_ms": used_ms, "iterations": [], "lost_splits": 0,
            "skipped_splits": 0, "warning": None, "cross_trainer_cache": False, "splits_per_s": 9.0,
        }  # fmt: skip
        return of | dict.fromkeys(("errors", "gone", "losses"), ()) | {"left": None}

    listed = [
        job(1, "finished", 5_000), job(2, "running", 0), job(3, "failed", 9_000),
        job(4, "waiting", 0), job(5, "idle", 1_000),
    ]  # fmt: skip
    rows = views.jobs({"jobs": listed, "now_ms": 10_000})
    assert [row["id"] for row in rows] == [4, 2, 3, 1, 5]
    assert [row["age_s"] for row in rows[2:]] == [1, 5, 9]
    assert [row["splits_per_s"] for row in rows] == [None, 9.0, None, None, None]
