"""What dispatchers and workers say over HTTP, held against what they do."""

from __future__ import annotations

import contextlib
import http.client
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import prometheus_client
import pytest
import tensorflow as tf
from prometheus_client.parser import text_string_to_metric_families

from forebay import service
from forebay.service.processes import free_port

from ..cluster import WorkerProcess
from ..standbys import LEASE_MS, status, wait_until
from ..stock import DispatcherProcess

ELEMENTS = 4_000
LARGE = 1 << 20  # bytes
NASTY = '"}\\\n# <script>alert(1)</script>\u202e' + 900 * "x"

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def get(address: str | int, path: str) -> tuple[int, str]:
    """The status and the body. Raises OSError and HTTPException."""
    host = address if isinstance(address, str) else f"127.0.0.1:{address}"
    with contextlib.closing(http.client.HTTPConnection(host, timeout=30)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def parsed(text: str) -> Series:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(address: str | int) -> Series:
    code, text = get(address, "/metrics")
    assert code == 200, text
    return parsed(text)


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, tuple(sorted(labels.items()))]


def test_what_is_scraped_is_what_was_read(tmp_path: pathlib.Path) -> None:
    port = free_port()
    before = service.metrics()
    registry = prometheus_client.CollectorRegistry()
    with contextlib.ExitStack() as stack:
        dispatcher = stack.enter_context(DispatcherProcess(tmp_path / "j", http_port=port))
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
        told: Any = status(dispatcher)
        (job,) = told["jobs"]
        (source,) = job["iterations"][0]["sources"]
        of_job = {"job_id": str(job["job_id"])}
        assert value(series, "forebay_job_splits_begun_total", **of_job) == source["begun"]
        assert value(series, "forebay_job_splits_lost_total", **of_job) == source["lost"] == 0
        leased = value(series, "forebay_job_splits_leased_total", **of_job)
        returned = value(series, "forebay_job_splits_returned_total", **of_job)
        assert leased - returned == source["begun"] == ELEMENTS
        assert value(series, "forebay_journal_sequence") == told["sequence"]
        assert value(series, "forebay_journal_replay_events") == told["sequence"]
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

        assert get(workers[0].http_address, "/readyz") == (200, "ok\n")
        assert get(workers[0].http_address, "/healthz") == (200, "ok\n")
        address = workers[0].http_address
        workers[0].stop()
        with pytest.raises(OSError):
            get(address, "/healthz")


def test_a_wait_has_its_cause(tmp_path: pathlib.Path) -> None:
    def waited(cause: str) -> float:
        seconds: float = service.metrics()["wait_seconds"][cause]
        return seconds

    with DispatcherProcess(tmp_path / "j") as dispatcher:
        dataset_id = service.register_dataset(dispatcher.target, tf.data.Dataset.range(1 << 40))
        elements = service.read(dispatcher.target, dataset_id, data_transfer_protocol="tcp")
        got = threading.Semaphore(0)

        def read() -> None:
            for _ in elements:
                got.release()

        before = {cause: waited(cause) for cause in ("no_task", "network")}
        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: waited("no_task") > before["no_task"])
        with WorkerProcess(dispatcher.address) as worker:
            got.acquire()
            worker.kill()
        wait_until(lambda: waited("network") > before["network"])
        with WorkerProcess(dispatcher.address):
            elements.leave()  # with the next element
            reader.join()


def test_a_draining_worker_works_and_is_not_ready(tmp_path: pathlib.Path) -> None:
    with DispatcherProcess(tmp_path / "j") as dispatcher:
        worker = service.WorkerServer(
            service.WorkerConfig(dispatcher.address, http_port=0, drain_timeout_ms=600_000)
        )
        large = tf.data.Dataset.from_tensors(tf.zeros([LARGE], tf.uint8)).repeat()
        dataset_id = service.register_dataset(dispatcher.target, large)
        endless = service.read(dispatcher.target, dataset_id, processing_mode="parallel_epochs")
        with endless as elements:
            next(elements)
            # More waits there than goes to the reader, so the worker drains until that leaves.
            held = "forebay_worker_buffer_bytes"
            wait_until(lambda: value(scraped(worker.http_address), held) > 6 * LARGE)
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
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ports = [free_port(), free_port()]
    answers: list[tuple[int, str]] = []
    with contextlib.ExitStack() as stack:
        pair = []
        for port in ports:
            process = DispatcherProcess(
                tmp_path / "j", http_port=port, standby=True, leader_lease_ms=LEASE_MS
            )
            pair.append(stack.enter_context(process))
            wait_until(lambda: ready(ports[0]) == (200, "ok\n"))
        wait_until(lambda: ready(ports[1])[1] == f"stands by, leader {pair[0].address}\n")
        assert ready(ports[1])[0] == 503
        assert get(ports[1], "/healthz")[0] == 200
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
