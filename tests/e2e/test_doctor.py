"""`forebay doctor` on real processes: a job for each bottleneck, failed reads, killed trainers."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tensorflow as tf
from tensorflow.data.experimental import service as stock

from forebay import service
from forebay.journal.reasons import READ_FAILED
from forebay.service.errors import PipelineError
from forebay.service.findings import job_name
from forebay.service.processes import free_port

from .. import forks
from ..cluster import WorkerProcess
from ..pipelines.compositions import write_save
from ..scrapes import get, scraped, value
from ..standbys import status, wait_until
from ..stock import DispatcherProcess, ServerProcess

OPTIONS = {"processes": 1, "heartbeat_interval_ms": 300}
SLOW = {"TEST_IS_SLOW": "1"}
SHARED: Mapping[str, Any] = {"processing_mode": "distributed_epoch"}
ORDERED = {"ordered": True, "seed": 1}

pytestmark = pytest.mark.timeout(120)


def quick(split: int) -> Iterator[int]:
    time.sleep(0.001)
    yield split


def steady(split: int) -> Iterator[int]:
    for _ in range(5):
        time.sleep(0.04)
        yield split


def slow_somewhere(split: int) -> Iterator[int]:
    for _ in range(5):
        time.sleep(0.3 if "TEST_IS_SLOW" in os.environ else 0.02)
        yield split


def third_fails(split: int) -> Iterator[int]:
    yield split
    if split == 3:
        raise ValueError


TRAINER = """
import json, sys, time
from forebay import service
target, dataset_id, job, step_s, how = sys.argv[1:]
print("reads", flush=True)
for _ in service.read(target, dataset_id, job_name=job, **json.loads(how)):
    time.sleep(float(step_s))
"""


@contextlib.contextmanager
def trainer(
    target: str, dataset_id: str, job: str, step_s: float = 0.0, how: Mapping[str, Any] = SHARED
) -> Iterator[None]:
    """Takes an element each `step_s`, if there is one."""
    arguments = (target, dataset_id, job, str(step_s), json.dumps(how))
    process = ServerProcess(forks.Fork(["-c", TRAINER, *arguments]))
    try:
        process.first_line()
        yield
    finally:
        process.kill()


def doctor(dispatcher: DispatcherProcess, *arguments: str) -> tuple[int, str]:
    """Its exit code, and what it says."""
    command = ["-m", "forebay.service.cli", "doctor", dispatcher.target, *arguments]
    done = forks.run(command, 60, forks.DISPATCHER)
    return done.returncode, done.stdout


class Page(NamedTuple):
    """What an operator reads who has only the dispatcher's page."""

    findings: list[str]
    plots: dict[str, str]  # what is said of each, by its title
    lines: list[str]  # of all plots, as SVG's paths
    lately: str


def page(port: int) -> Page:
    code, text = get(port, "/")
    assert code == 200
    plots = re.findall(r'aria-label="(.+?): (.*?)" preserve', html.unescape(text))
    return Page(
        [plain(each) for each in re.findall(r'<li class="f-\w+">(.*?)</li>', text, re.DOTALL)],
        dict(plots),
        re.findall(r'class="line l\d" d="(.*?)"', text),
        plain(text.rpartition("Lately")[2]),
    )


def plain(part: str) -> str:
    return " ".join(html.unescape(re.sub("<.*?>", "", part)).split())


def test_each_bottleneck_is_told_and_a_followed_advice_ends_it(tmp_path: Path) -> None:
    port, worker_port = free_port(), free_port()
    with contextlib.ExitStack() as stack:
        dispatcher = stack.enter_context(
            DispatcherProcess(
                tmp_path / "journal", load_window_ms=2_000, client_timeout_ms=2_000,
                reconnect_grace_ms=1_000, http_port=port,
            )
        )  # fmt: skip
        target, saved = dispatcher.target, tmp_path / "saved"
        assert doctor(dispatcher)[0] == 0
        assert doctor(dispatcher, "no such job")[0] == 1
        bad = stack.enter_context(WorkerProcess(dispatcher.address, SLOW, **OPTIONS))
        stack.enter_context(WorkerProcess(dispatcher.address, http_port=worker_port, **OPTIONS))
        skips = service.register_dataset(target, third_fails, splits=range(9), on_error="skip")
        assert len([*service.read(target, skips, job_name="skips", **SHARED)]) == 9
        of_functions: dict[str, tuple[Callable[[int], Iterator[int]], float]] = {
            "slow trainer": (quick, 0.05),
            "slow worker": (slow_somewhere, 0.0),
            "too few workers": (steady, 0.012),
        }
        for job, (function, step_s) in of_functions.items():
            dataset_id = service.register_dataset(target, function, splits=range(100_000))
            stack.enter_context(trainer(target, dataset_id, job, step_s))
        for job, width in ("in order", 1), ("side by side", 8):
            how = {**ORDERED, "cycle_length": width}
            stack.enter_context(trainer(target, dataset_id, job, how=how))
        write_save(saved, {"chunk_0_0_1": [1]})
        loaded = tf.data.Dataset.load(str(saved), wait=True)
        dataset_id = service.register_dataset(target, loaded)
        stack.enter_context(trainer(target, dataset_id, "slow source"))

        def told(severity: str, subject: str, *parts: str) -> bool:
            return any(
                one.startswith(f"{severity} {subject}: ")
                and all(part in one for part in parts)
                and re.search(r"since \d\d:\d\d:\d\d UTC \(\d", one)
                for one in page(port).findings
            )

        advice = "What to do: "
        for expected in (
            ("note", "job slow trainer", "they are what is slow"),
            ("slow", f"worker {bad.address}", "of job slow worker", f"{advice}see what else its"),
            ("slow", "job too few workers", "of 2 workers are busy", advice, "start ", "at most "),
            ("slow", "job in order", advice, "(cycle_length, now 1)"),
            ("slow", "job slow source", f"wait for the save {saved}", advice),
        ):
            wait_until(told, *expected)
        wait_until(lambda: all("L" in line for line in page(port).lines))  # over some time
        plots = page(port).plots
        assert plots["Workers"].startswith("there 2, wanted ")
        assert re.match(r"made [\d.,]+; the most was ", plots["Rate"])
        assert {"Buffers", "Consumers", "Journal"} < plots.keys()
        told_of = status(dispatcher)
        loads = told_of["loads"]
        assert {len(load["waits_for"]) for load in loads if "waits" in load} == {4}
        scrape, of_worker = scraped(port), scraped(worker_port)
        ids = {job_name(job): str(job["job_id"]) for job in told_of["jobs"]}
        assert value(scrape, "forebay_job_splits_skipped_total", job_id=ids["skips"]) == 1
        few = {"job_id": ids["too few workers"]}

        def measured_as_made() -> bool:
            """Which on a busy machine is not so at each moment."""
            now, said = scraped(port), page(port).plots["Trainers wait for"]
            (of_workers,) = re.findall(r"elements of workers (\d+)%", said)
            waits = {
                cause: value(now, "forebay_job_wait_cause_ratio", cause=cause, **few)
                for cause in ("workers", "network", "dispatcher", "no_task")
            }
            return (
                int(of_workers) > 50  # those of the source
                and waits.pop("workers") > 0.05 > max(waits.values())
                and value(now, "forebay_job_busy_workers", **few) > 1
                and value(now, "forebay_job_wanted_workers", **few) > 2
            )

        wait_until(measured_as_made)

        def wanted_is_told() -> bool:
            wanted = status(dispatcher)["wanted_workers"]
            now, why = scraped(port), (("cause", wanted["cause"]),)
            return wanted["workers"] == value(now, "forebay_wanted_workers") and (
                ("forebay_wanted_workers_info", why) in now
            )

        wait_until(wanted_is_told)
        at = {"job_id": ids["slow source"], "state": "no_split"}
        assert value(of_worker, "forebay_worker_task_seconds_total", **at) > 0
        held = [v for (name, _), v in of_worker.items() if name.endswith("job_buffer_bytes")]
        assert sum(held) == value(of_worker, "forebay_worker_buffer_bytes") > 0
        rates: Any = {load["job_id"]: load.get("elements_per_s") for load in loads}
        named = {job_name(job): rates.get(job["job_id"], 0) for job in told_of["jobs"]}
        assert named["side by side"] > 2 * named["in order"]  # the advice is true
        assert any(load["bytes_per_s"] for load in loads)
        code, text = doctor(dispatcher)
        assert code == 3 and "then start " in text and "gain: at most " in text
        wait_until(lambda: doctor(dispatcher, "slow trainer")[0] == 0)  # its start is over
        code, text = doctor(dispatcher, "too few workers", "--json")
        assert code == 3 and json.loads(text)[0]["subject"] == "job too few workers"

        for _ in range(2):
            stack.enter_context(WorkerProcess(dispatcher.address, **OPTIONS))
        wait_until(told, "note", "job too few workers", "they are what is slow")
        with bad.paused():
            wait_until(told, "problem", f"worker {bad.address}", "it says nothing, though", advice)
        bad.kill()
        lost = "problem", f"worker {bad.address}", "it was given up", f"{advice}see its log"
        wait_until(told, *lost)
        splits, told_of = 0, status(dispatcher)
        scrape = scraped(port)
        for job in told_of["jobs"]:
            gone = sum(x["lost"] for it in job["iterations"] for x in it["sources"])
            of_job = {"job_id": str(job["job_id"])}
            splits += gone
            assert gone == 0 or value(scrape, "forebay_job_splits_lost_total", **of_job) == gone
        assert splits > 0
        dispatcher.kill_and_restart()
        wait_until(told, "note", "dispatcher", "leads in term 2", f"{advice}the log of the one")
        assert told(*lost)
        wait_until(lambda: "s after the event before" in page(port).lately)
        assert "was given up" in page(port).lately


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
