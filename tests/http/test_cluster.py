"""What dispatchers and workers say over HTTP, held against what they do."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import prometheus_client
import pytest
import tensorflow as tf

from forebay import service
from forebay.journal.codec import decode
from forebay.service.client import consumer, heartbeats
from forebay.service.processes import free_port
from forebay.storage import open_storage

from .. import forks
from ..cluster import WorkerProcess
from ..scrapes import get, parsed, scraped, value
from ..standbys import LEASE_MS, status, wait_until
from ..stock import DispatcherProcess

ELEMENTS = 4_000
LARGE = 1 << 20  # bytes
NASTY = '"}\\\n# <script>alert(1)</script>\u202e' + 900 * "x"


def test_what_is_scraped_is_what_was_read(tmp_path: Path) -> None:
    port = free_port()
    before = service.metrics()
    registry = prometheus_client.CollectorRegistry()
    with contextlib.ExitStack() as stack:
        dispatcher = stack.enter_context(
            DispatcherProcess(tmp_path / "j", http_port=port, snapshot_events=1)
        )
        config = service.WorkerConfig(dispatcher.address, http_port=0)
        workers = [stack.enter_context(service.WorkerServer(config)) for _ in range(2)]
        dataset_id = service.register_dataset(
            dispatcher.target, tf.data.Dataset.range(ELEMENTS).batch(2)
        )
        with service.read(
            dispatcher.target, dataset_id, processing_mode="distributed_epoch", job_name=NASTY
        ) as elements:
            next(elements)
            assert service.metrics(registry)["open_consumers"] == 1
            assert value(scraped(port), "forebay_dispatcher_consumers") == 1
            number = 1 + sum(1 for _ in elements)
        series = scraped(port)
        told = status(dispatcher)
        (job,) = told["jobs"]
        (source,) = job["iterations"][0]["sources"]
        of_job = {"job_id": str(job["job_id"])}
        assert value(series, "forebay_job_splits_begun_total", **of_job) == source["begun"]
        assert value(series, "forebay_job_splits_lost_total", **of_job) == source["lost"] == 0
        leased = value(series, "forebay_job_splits_leased_total", **of_job)
        returned = value(series, "forebay_job_splits_returned_total", **of_job)
        assert leased - returned == source["begun"] == ELEMENTS
        assert value(series, "forebay_journal_sequence") == told["sequence"]
        wait_until(knows_the_snapshot, port, tmp_path / "j")
        assert value(series, "forebay_dispatcher_term") == told["term"] == 1
        assert value(series, "forebay_dispatcher_leases") == told["leases"] == 0
        assert value(series, "forebay_dispatcher_workers", state="ready") == 2
        appends = value(series, "forebay_journal_append_seconds_count")
        assert appends == value(series, "forebay_journal_sync_seconds_count") > 0
        (labels,) = [dict(found) for name, found in series if name == "forebay_job_info"]
        assert labels["job_name"].startswith(NASTY[:3])
        assert len(labels["job_name"]) == 100
        assert labels["dataset_id"] == dataset_id

        there = [scraped(worker.http_address) for worker in workers]
        made = sum(value(one, "forebay_worker_elements_total", **of_job) for one in there)
        size = sum(value(one, "forebay_worker_bytes_total", **of_job) for one in there)
        assert (made, size) == (number, 8 * ELEMENTS)
        assert sum(value(x, "forebay_worker_connections_total", kind="first") for x in there) == 2
        for one in there:
            of_state = {**of_job, "state": "working"}
            assert value(one, "forebay_worker_task_seconds_total", **of_state) > 0
        after = service.metrics(registry)
        ours = parsed(prometheus_client.generate_latest(registry).decode())
        assert after["elements"] - before["elements"] == number
        assert after["bytes"] - before["bytes"] == 8 * ELEMENTS
        assert value(ours, "forebay_client_elements_total") == after["elements"]
        assert after["open_consumers"] == 0
        waited = sum(after["wait_seconds"].values()) - sum(before["wait_seconds"].values())
        assert 0 < waited <= after["seconds"] - before["seconds"]

        again = service.read(
            dispatcher.target, dataset_id, delivery="at_least_once", bundle_splits=ELEMENTS // 10
        )
        assert sum(1 for _ in again) == ELEMENTS // 2
        bundles = [v for (name, _), v in scraped(port).items() if "_bundles_" in name]
        assert bundles == [10, 10]  # claimed and done

        assert get(workers[0].http_address, "/readyz") == (200, "ok\n")
        assert get(workers[0].http_address, "/healthz") == (200, "ok\n")
        address = workers[0].http_address
        workers[0].stop()
        with pytest.raises(OSError):
            get(address, "/healthz")
        dispatcher.kill_and_restart()
        wait_until(knows_the_snapshot, port, tmp_path / "j")


def knows_the_snapshot(port: int, journal: Path) -> bool:
    """Whether what is said of the newest snapshot is what the journal's files say."""
    series = scraped(port)
    storage = open_storage(str(journal))
    newest, snapshot = int(value(series, "forebay_journal_sequence")), max(storage.snapshots())
    until_ms, from_ms = (
        decode(record.sequence, record.data).time_ms
        for record in (next(iter(storage.read(number - 1))) for number in (newest, snapshot))
    )
    storage.close()
    said = (series.get((f"forebay_journal_{name}", ())) for name in
            ("replay_events", "snapshot_age_seconds"))  # fmt: skip
    return [*said] == [newest - snapshot, (until_ms - from_ms) / 1000]


def test_a_wait_has_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (consumer, heartbeats):  # after two of them, the dispatcher counts as away
        monkeypatch.setattr(module, "HEARTBEAT_S", 0.25)

    def waited(cause: str) -> float:
        return service.metrics()["wait_seconds"][cause]

    port = free_port()
    with DispatcherProcess(tmp_path / "j", http_port=port) as dispatcher:
        dataset_id = service.register_dataset(dispatcher.target, tf.data.Dataset.range(1 << 40))
        elements = service.read(
            dispatcher.target,
            dataset_id,
            processing_mode="distributed_epoch",
            data_transfer_protocol="tcp",
        )
        got = threading.Semaphore(0)

        def read() -> None:
            for _ in elements:
                got.release()

        before = {cause: waited(cause) for cause in ("no_task", "dispatcher")}
        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: waited("no_task") > before["no_task"])
        dispatcher.kill()
        wait_until(lambda: waited("dispatcher") > before["dispatcher"])
        dispatcher.restart()
        with WorkerProcess(dispatcher.address) as worker:
            got.acquire()
            worker.kill()

        def lost() -> int:
            told = status(dispatcher)
            (iteration,) = told["jobs"][0]["iterations"]
            return sum(source["lost"] for source in iteration["sources"])

        wait_until(lambda: lost() > 0)
        (splits,) = (v for (name, _), v in scraped(port).items() if "splits_lost_total" in name)
        assert splits == lost()
        with WorkerProcess(dispatcher.address):
            elements.leave()  # with the next element
            reader.join()


def test_a_draining_worker_works_and_is_not_ready(tmp_path: Path) -> None:
    with DispatcherProcess(tmp_path / "j") as dispatcher:
        worker = service.WorkerServer(
            service.WorkerConfig(dispatcher.address, http_port=0, drain_timeout_ms=600_000)
        )
        large = tf.data.Dataset.from_tensors(tf.zeros([LARGE], tf.uint8)).repeat()
        dataset_id = service.register_dataset(dispatcher.target, large)
        endless = service.read(
            dispatcher.target,
            dataset_id,
            processing_mode="parallel_epochs",
            max_outstanding_requests=1,
        )
        with endless as elements:
            next(elements)
            # Only one goes to the reader, so the worker drains until that leaves.
            held = "forebay_worker_buffer_bytes"
            wait_until(lambda: value(scraped(worker.http_address), held) > 6 * LARGE)
            told = status(dispatcher)
            at = {"job_id": str(told["jobs"][0]["job_id"]), "state": "backpressured"}
            spent = "forebay_worker_task_seconds_total"
            wait_until(lambda: value(scraped(worker.http_address), spent, **at) > 0)
            drain = threading.Thread(target=worker.stop, kwargs={"drain": True})
            drain.start()
            wait_until(lambda: get(worker.http_address, "/readyz") == (503, "drains\n"))
            assert get(worker.http_address, "/healthz") == (200, "ok\n")
            assert value(scraped(worker.http_address), "forebay_worker_draining") == 1
        drain.join()


@contextlib.contextmanager
def scraping(ports: list[int], answers: list[tuple[int, str]]) -> Iterator[None]:
    """Scrape without pause, and collect all answers; refused and broken connections are none."""
    stopped = threading.Event()

    def scrape(port: int) -> None:
        while not stopped.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                answers.append(get(port, "/metrics"))

    threads = [threading.Thread(target=scrape, args=(port,)) for port in ports]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def ready(port: int) -> tuple[int, str]:
    try:
        return get(port, "/readyz")
    except OSError:
        return 0, ""


def test_readiness_follows_the_leader_while_both_are_scraped(
    redis_storage_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ports = [free_port(), free_port()]
    answers: list[tuple[int, str]] = []
    with contextlib.ExitStack() as stack:
        pair = []
        for port in ports:
            process = DispatcherProcess(
                redis_storage_url, http_port=port, standby=True, leader_lease_ms=LEASE_MS
            )
            pair.append(stack.enter_context(process))
            wait_until(lambda: ready(ports[0]) == (200, "ok\n"))
        wait_until(lambda: ready(ports[1])[1] == f"stands by, leader {pair[0].address}\n")
        assert ready(ports[1])[0] == 503
        assert get(ports[1], "/healthz")[0] == 200
        for _ in range(2):
            with pytest.raises(grpc.RpcError, match="stands by"):
                status(pair[1])
        assert value(scraped(ports[1]), "forebay_dispatcher_refused_requests_total") == 2
        third = ["-m", "forebay.service.cli", "dispatcher", "--http-port", str(ports[0])]
        refused = forks.run(third, 60, forks.DISPATCHER)
        assert refused.returncode == 1
        assert f"--http-port: cannot listen on 127.0.0.1:{ports[0]}: it is in" in refused.stderr
        assert ready(ports[0]) == (200, "ok\n")
        with scraping(ports, answers):
            pair[0].kill()
            wait_until(lambda: ready(ports[1]) == (200, "ok\n"))
            pair[0].restart()
            wait_until(lambda: ready(ports[0])[0] == 503)
        with pair[1].paused():
            wait_until(lambda: ready(ports[0]) == (200, "ok\n"))
        wait_until(lambda: ready(ports[1])[1] == f"stands by, leader {pair[0].address}\n")
        first, second = map(scraped, ports)
        assert value(first, "forebay_dispatcher_leads") == 1
        assert value(second, "forebay_dispatcher_leads") == 0
        # A busy machine may have silenced a leader, and so begun further terms.
        assert value(first, "forebay_dispatcher_term") >= 3
        assert value(second, "forebay_dispatcher_displaced_total") >= 1
    assert {code for code, _ in answers} == {200}
    assert all(value(parsed(text), "forebay_dispatcher_leads") in (0, 1) for _, text in answers)
    assert "Traceback" not in capfd.readouterr().err
