"""What heartbeats tell of loads becomes a number of workers, whoever comes and goes meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from forebay.service.core import commands as c
from forebay.service.dispatcher import loads as loads_module
from forebay.service.dispatcher.loads import HOLDS, Loads
from forebay.service.dispatcher.wanted_workers import Wanted
from forebay.service.proto import forebay_pb2 as pb

from ..core.given import Given

WINDOW_S = 20
EVERY_S = 5
BUDGET = 1 << 30


class Cluster(Given):
    """One job with a consumer, whose members tell the same shares of their time each EVERY_S."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now_s = 1000
        monkeypatch.setattr(loads_module, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.gone: dict[int, float] = {}  # consumers, and how long they are silent
        self.loads = Loads(self.state, 1000 * WINDOW_S, self.gone.get)
        self.joined = self.iteration("train")
        self.job_id = self.state.iterations[self.joined.iteration_id].job_id
        self.waits, self.works, self.unleased = 0.0, 1.0, 0.0
        self.taken = 0.01  # elements a millisecond
        self.silent = False
        self.speed = 0.01  # elements of a working millisecond
        self.also: dict[str, float] = {}  # what consumers of before do not tell
        self._counted: dict[tuple[str, str], float] = {}

    @property
    def wanted(self) -> Wanted:
        assert self.loads.wanted is not None
        return self.loads.wanted

    def _count(self, member: str, **shares: float) -> dict[str, int]:
        for name, share in shares.items():
            key = member, name
            self._counted[key] = self._counted.get(key, 0) + 1000 * EVERY_S * share
        return {name: int(self._counted[member, name]) for name in shares}

    def go_on(self, seconds: float) -> str:
        """Returns the cause of the last judgement."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            for worker in () if self.silent else self.state.workers.values():
                held = 1 - self.works - self.unleased
                times = self._count(
                    worker.address, working_ms=self.works, backpressured_ms=held,
                    no_split_ms=self.unleased, elements=self.works * self.speed,
                )  # fmt: skip
                load = pb.JobLoad(job_id=self.job_id, held_bytes=7, **times)
                host = pb.HostLoad(memory_bytes=9, busy_permille=250) if worker.uid == 2 else None
                beat = pb.WorkerHeartbeatRequest(loads=[load], memory_budget=BUDGET, host=host)
                self.loads.worker_told(worker.address, worker.uid, beat)
            for number in self.state.consumers.keys() - self.gone.keys():
                told = self._count(
                    "c", open_ms=1.0, waited_ms=self.waits, elements=self.taken, **self.also
                )  # fmt: skip
                self.loads.consumer_told(number, pb.ConsumerLoad(**told))
            self.now_s += EVERY_S
            list(self.loads.judge_all())
        return self.wanted.cause


def test_a_job_from_its_first_worker_to_its_last_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    loads = cluster.loads
    cluster.waits = 1.0
    assert cluster.go_on(EVERY_S) == "no worker"
    assert cluster.wanted.workers == 1
    for number in (1, 2):
        cluster.worker(number)
    assert cluster.go_on(EVERY_S) == "measuring"
    cluster.waits = 0.5
    assert cluster.go_on(2 * WINDOW_S) == "trainers wait"
    assert cluster.wanted.workers == 4
    assert cluster.wanted.reason == (
        "job train: trainers wait 50% of the time, and all 2 workers are busy: 4 would do"
    )
    told = loads.status()
    assert told["loads"][0]["busy"] == pytest.approx(2)
    assert told["loads"][0]["waits"] == pytest.approx(0.5)
    assert told["loads"][0]["elements_per_s"] == pytest.approx(20)
    held = {"job_id": cluster.job_id, "held_bytes": 7, "parked_tasks": 0, "shed_elements": 0}
    host = {"busy": 0.25, "processors": 0, "memory_bytes": 9, "memory_used_bytes": 0}
    assert told["memory"][1] == {
        "address": "w:2", "budget_bytes": BUDGET, "host": host, "cache": None, "jobs": [held]
    }  # fmt: skip
    assert told["memory"][0]["host"] is None

    third = cluster.worker(3)  # before it is measured, nothing is said of three workers
    assert cluster.go_on(EVERY_S) == "trainers wait"
    assert cluster.wanted.workers == 4
    cluster.when(c.LoseWorker(worker_id=third, reason="gone"))
    cluster.waits, cluster.works = 0.0, 0.2
    assert cluster.go_on((HOLDS - 1) * WINDOW_S) == "workers idle"
    assert cluster.wanted.workers == 4  # for long enough
    assert cluster.go_on(3 * WINDOW_S) == "workers idle"
    assert cluster.wanted.workers == 1
    assert len(loads.status()["memory"]) == 2

    cluster.when(c.LeaveIteration(consumer_id=cluster.joined.consumer_id, reason=""))
    assert cluster.go_on(HOLDS * WINDOW_S - EVERY_S) == "nobody reads"
    assert cluster.wanted.workers == 1
    cluster.go_on(2 * WINDOW_S)
    assert loads.wanted == (0, "nobody reads", "nobody reads")


def test_who_is_gone_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    loads, consumer = cluster.loads, cluster.joined.consumer_id
    cluster.worker(1)
    cluster.go_on(2 * WINDOW_S)
    assert loads.consumers(cluster.job_id)[consumer]["elements_per_s"] == pytest.approx(10)
    cluster.gone[consumer] = 12.5
    told = loads.consumers(cluster.job_id)[consumer]
    assert (told["gone_s"], told["elements_per_s"]) == (12.5, None)
    assert cluster.go_on(EVERY_S) == "nobody reads"
    assert "elements_per_s" not in loads.status()["loads"][0]
    del cluster.gone[consumer]  # it is back
    assert cluster.go_on(WINDOW_S) == "enough"
    assert loads.consumers(cluster.job_id)[consumer]["gone_s"] is None


def test_a_job_waits_whose_readers_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    loads, job_id = cluster.loads, cluster.job_id
    cluster.worker(1)
    assert not loads.waits(job_id)  # nothing was told
    for waits, taken, also, expected in (
        (0.5, 0.01, {}, False), (1.0, 0.01, {}, False), (1.0, 0.0, {}, True), (0.0, 0.0, {}, False),
        (0.0, 0.0, {**dict.fromkeys(("dispatcher_ms", "no_task_ms", "bytes"), 0.0),
                    "network_ms": 1.0}, True),
    ):  # fmt: skip
        cluster.waits, cluster.taken, cluster.also = waits, taken, also
        cluster.go_on(2 * WINDOW_S)
        assert loads.waits(job_id) == expected
    cluster.gone[cluster.joined.consumer_id] = 9.0  # as TensorFlow's, it tells nothing
    cluster.go_on(2 * WINDOW_S)
    assert not loads.waits(job_id)  # its worker makes elements
    cluster.speed = 0.0
    cluster.go_on(2 * WINDOW_S)
    assert loads.waits(job_id)
    cluster.works = 0.3  # trainers hold it up
    cluster.go_on(2 * WINDOW_S)
    assert not loads.waits(job_id)


def test_no_more_workers_than_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    task = cluster.task_of(cluster.worker(1))
    cluster.worker(2)
    (source,) = cluster.state.iterations[cluster.joined.iteration_id].ledgers
    cluster.waits = 1.0
    for left, workers in ((1, 3), (0, 2)):
        while source.next < source.size - left:
            assert cluster.lease(task, 100)
        cluster.go_on((HOLDS + 2) * WINDOW_S)
        assert (cluster.wanted.workers, cluster.wanted.cause) == (workers, "no splits")


def test_made_elements_need_a_worker_until_trainers_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    task = cluster.task_of(cluster.worker(1))
    cluster.go_on(2 * WINDOW_S)
    while cluster.lease(task, 100):
        pass
    cluster.when(c.CompleteTask(task_id=task))
    assert cluster.state.iterations[cluster.joined.iteration_id].finished
    cluster.silent = True  # workers tell of unfinished tasks
    assert cluster.go_on(4 * WINDOW_S) == "made"
    assert cluster.wanted.workers == 1


def test_who_waits_for_splits_needs_no_more_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    for number in (1, 2, 3, 4):
        cluster.worker(number)
    cluster.waits, cluster.works, cluster.unleased = 0.9, 0.1, 0.9
    assert cluster.loads.wanted is None
    assert cluster.go_on(2 * WINDOW_S) == "source"
    assert cluster.wanted.workers == 4  # a first judgement, too, has to last
    cluster.go_on((HOLDS + 2) * WINDOW_S)
    assert (cluster.wanted.workers, cluster.wanted.cause) == (1, "source")


def test_who_drains_is_missed_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    first = cluster.worker(1)
    for number in (2, 3, 4):
        cluster.worker(number)
    cluster.waits, cluster.works = 0.0, 0.1
    cluster.go_on((HOLDS + 3) * WINDOW_S)
    assert cluster.wanted.workers < 4
    for number in (2, 3, 4):
        cluster.worker(number, draining=True)
    cluster.waits, cluster.works = 0.2, 0.6
    cluster.go_on(3 * WINDOW_S)
    assert cluster.wanted.workers < 4
    cluster.when(c.LoseWorker(worker_id=first, reason="killed"))
    assert cluster.go_on(EVERY_S) == "no worker"


def test_a_job_of_which_nothing_is_told_wants_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    cluster.silent = True
    first, second = cluster.worker(1), cluster.worker(2)
    for worker_id in (second, first):
        assert cluster.go_on(2 * WINDOW_S) == "no worker"
        assert cluster.wanted.workers == len(cluster.state.workers)
        cluster.when(c.LoseWorker(worker_id=worker_id, reason="gone"))


def test_strangers_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.worker(1)
    cluster.go_on(2 * WINDOW_S)
    before = cluster.loads.status()
    cluster.loads.consumer_told(12345, pb.ConsumerLoad(open_ms=1, waited_ms=1))
    load = pb.JobLoad(job_id=cluster.job_id, working_ms=1 << 60)
    other = pb.JobLoad(job_id=12345, working_ms=1)
    beat = pb.WorkerHeartbeatRequest(loads=[load, other])
    cluster.loads.worker_told("w:1", 4711, beat)
    cluster.loads.worker_told("w:9", 1, beat)
    list(cluster.loads.judge_all())
    assert cluster.loads.status() == before


def test_reports_of_two_shapes_begin_anew() -> None:
    reports = loads_module.Reports()
    for now_s, counters in ((1, (1, 1, 1)), (2, (2, 2, 2, 0, 0, 0, 0)), (3, (5, 2, 2, 0, 0, 0, 0))):
        reports.add(now_s, counters)
    assert reports.grown(0) == (3, 0, 0, 0, 0, 0, 0)
