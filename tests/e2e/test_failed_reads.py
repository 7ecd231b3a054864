"""Files go in mid-epoch, and a trainer is killed: what an operator is told, by real processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.data.experimental import service as stock

from forebay import service
from forebay.journal.reasons import READ_FAILED
from forebay.service.errors import PipelineError
from forebay.service.processes import free_port

from ..cluster import WorkerProcess
from ..scrapes import get, scraped, value
from ..standbys import status, wait_until
from ..stock import DispatcherProcess
from .test_doctor import doctor, page, plain, trainer

pytestmark = pytest.mark.timeout(120)
FILES, RECORDS = 12, 200


def written(folder: Path) -> list[str]:
    folder.mkdir()
    paths = [str(folder / f"{number:02}.tfrecord") for number in range(FILES)]
    for path in paths:
        with tf.io.TFRecordWriter(path) as writer:
            for _ in range(RECORDS):
                writer.write(bytes(10_000))
    return paths


def graph(paths: list[str]) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(paths).flat_map(tf.data.TFRecordDataset)


def read_until_it_fails(elements: Iterator[Any], paths: list[str]) -> str:
    next(elements)
    for path in paths:
        Path(path).unlink()
    with pytest.raises((tf.errors.NotFoundError, PipelineError)) as raised:
        for _ in elements:
            pass
    return str(raised.value)


def test_a_read_that_failed_is_a_finding_and_stays_one(tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as stack:
        dispatcher = stack.enter_context(
            DispatcherProcess(tmp_path / "journal", http_port=port, reconnect_grace_ms=500)
        )
        worker = stack.enter_context(WorkerProcess(dispatcher.address, heartbeat_interval_ms=300))
        target, how = dispatcher.target, {"processing_mode": "distributed_epoch"}
        endless = service.register_dataset(target, lambda n: [n], splits=range(10**9))
        stack.enter_context(trainer(target, endless, "goes on", 0.01))

        paths = written(tmp_path / "theirs")
        dataset_id = service.register_dataset(target, graph(paths))
        spec = tf.TensorSpec([], tf.string)
        theirs = stock.from_dataset_id(
            service=target, dataset_id=dataset_id, element_spec=spec, job_name="theirs", **how
        )
        read_until_it_fails(iter(theirs), paths)
        paths = written(tmp_path / "ours")
        dataset_id = service.register_files(target, paths)
        ours = service.read(target, dataset_id, job_name="ours", delivery="at_least_once")
        read_until_it_fails(ours, paths)

        def jobs() -> Any:
            now = status(dispatcher)
            return {job["name"].rpartition("/")[2]: job for job in now["jobs"]}

        def told(job: str) -> bool:
            """By all who tell it: the command, the page, and the metrics."""
            code, text = doctor(dispatcher, job)
            named = rf"problem.* job {job}: .*{tmp_path}/{job}/\d\d.tfrecord.*No such file"
            found = [one for one in page(port).findings if re.search(named, one)]
            found_of = jobs()[job]
            job_id = found_of["job_id"]
            failed = {"job_id": str(job_id), "state": "failed"}
            shown = plain(get(port, f"/jobs/{job_id}")[1])
            return (
                code == 3 and f"job {job}: its read failed" in text and worker.address in text
                and "start its trainers again" in text and bool(found)
                and found_of["state"] == "failed"
                and value(scraped(port), "forebay_job_state", **failed) == 1
                and "To go–" in shown and f"{job} · Forebay" in shown
                and worker.address in shown.partition("Errors, by worker")[2]
            )  # fmt: skip

        for job in ("theirs", "ours"):
            wait_until(told, job)
        assert "failed" not in doctor(dispatcher, "goes on")[1]
        assert jobs()["ours"]["left"]["reason"].startswith(READ_FAILED)
        dispatcher.kill_and_restart()
        for job in ("theirs", "ours"):  # a new leader does not say that all is well
            wait_until(told, job)


def test_a_killed_trainers_rate_counts_no_more(tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as stack:
        dispatcher = stack.enter_context(
            DispatcherProcess(
                tmp_path / "journal",
                http_port=port,
                load_window_ms=11_000,
                client_timeout_ms=30_000,
                reconnect_grace_ms=500,
            )
        )
        stack.enter_context(WorkerProcess(dispatcher.address, heartbeat_interval_ms=300))
        endless = service.register_dataset(dispatcher.target, lambda n: [n], splits=range(10**9))

        def of_job() -> tuple[str, Any, str]:
            """Its state, its elements a second, and the page."""
            found = status(dispatcher)
            (job,), loads = found["jobs"] or [{"state": ""}], found["loads"]
            rate = next((load.get("elements_per_s") for load in loads), None)
            return job["state"], rate, plain(get(port, "/")[1])

        with trainer(dispatcher.target, endless, "killed", 0.01):
            wait_until(lambda: of_job()[0] == "running" and (of_job()[1] or 0) > 10)
        killed = "problem job killed: its trainer says nothing any more"
        wait_until(lambda: of_job()[:2] == ("idle", None) and killed in of_job()[2])
        assert "killed idle" in of_job()[2].partition("Not read now")[2]
        now = status(dispatcher)
        (job,) = now["jobs"]
        shown = plain(get(port, f"/jobs/{job['job_id']}")[1])
        assert "gone, silent for" in shown
        peer = job["gone"][0]["peer"]
        assert re.fullmatch(r"127\.0\.0\.1:\d+", peer) and f"1 gone, at {peer}" in shown
        assert f"see its process, which called from {peer}, and" in doctor(dispatcher)[1]
