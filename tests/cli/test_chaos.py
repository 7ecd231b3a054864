"""`forebay chaos`: real clusters under real faults, and evidence that is not as it should be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.chaos.dataset import PASSES
from forebay.chaos.records import Got, read_records
from forebay.storage import open_storage

TIMEOUT_S = 300

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}
"""TensorFlow would leave that of functions that it translates, beside them in TMPDIR."""


def start(directory: Path, *arguments: object) -> subprocess.Popen[str]:
    """Start it, with its temporary files in `directory`."""
    return subprocess.Popen(
        [sys.executable, "-m", "forebay.service.cli", "chaos", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(directory), "COLUMNS": "200", **NO_BYTECODE},
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code, and all that it said."""
    output, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, output + errors


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < give_up
        time.sleep(0.05)


def blocks(directory: Path) -> list[Got]:
    """What the first trainer has got so far."""
    return [r for r in read_records(directory / "trainer0.records") if isinstance(r, Got)]


def children(parent: int) -> set[int]:
    """The processes that a process has started and that have not ended."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, ppid = path.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(ppid) == parent and state != "Z":
            found.add(int(path.parent.name))
    return found


def test_every_promise_is_kept(tmp_path: Path) -> None:
    """On Redis; .ci/run has `make chaos` on files and on PostgreSQL."""
    report_file = tmp_path / "report.json"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = start(
        temporary, "--seed", 5, "--minutes", 0.4, "--kill-every", 1, "--elements", 500,
        "--storage", "redis", "--json", report_file,
    )  # fmt: skip
    code, said = finish(process)
    assert code == 0, said
    assert "every promise was kept" in said and "BROKEN" not in said
    report = json.loads(report_file.read_bytes())
    verdict = report["verdict"]
    assert verdict["broken"] == [] and verdict["twice"] == 0 and verdict["lost_unexplained"] == 0
    of_an_epoch = 500 * PASSES
    assert verdict["delivered"] + sum(verdict["lost"].values()) == of_an_epoch * verdict["epochs"]
    assert report["ordered"]["epochs"] > 0
    assert report["journal_sound"] and report["journal_terms"] > 1
    assert len(report["hits"]) > 10 and sum(report["faults"].values()) == len(report["hits"])
    assert list(temporary.iterdir()) == []


def test_a_broken_promise(tmp_path: Path) -> None:
    """A trainer that says it got a block twice.

    No fault hits it: where one is lost too, two are as many as were leased.
    """
    out = tmp_path / "out"
    process = start(
        tmp_path, "--minutes", 0.05, "--elements", 200, "--out", out, "--seed", 1,
        "--dispatchers", 1, "--workers", 1, "--trainers", 1, "--kill-every", 10_000,
    )  # fmt: skip
    wait_until(lambda: out.is_dir() and sum(len(got.ids) for got in blocks(out)) > 100, process)
    records = out / "trainer0.records"
    got = [line for line in records.read_bytes().splitlines(True) if b'"got"' in line]
    with records.open("ab") as file:
        file.write(got[0])
    code, said = finish(process)
    assert code == 1
    assert "BROKEN: epoch 1: " in said and "delivered more often than they were leased" in said
    assert "every promise was kept" not in said
    assert f"logs, records and journal: {out}" in said
    assert (out / "journal").is_dir() and (out / "worker0.log").is_file()


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    process = start(tmp_path)

    def running() -> bool:
        return any(blocks(directory) for directory in tmp_path.iterdir())

    wait_until(running, process)
    started = children(process.pid)
    assert len(started) >= 6
    process.send_signal(signal.SIGINT)
    code, said = finish(process)
    assert code == 130, said
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
    assert list(tmp_path.iterdir()) == []


class TestErrors:
    def test_a_directory_that_is_there(self, tmp_path: Path) -> None:
        code, said = finish(start(tmp_path, "--out", tmp_path))
        assert code == 1 and "name a new directory" in said

    def test_a_storage_in_use(self, tmp_path: Path) -> None:
        storage = open_storage(str(tmp_path / "journal"))
        writer = storage.open_writer("test")
        writer.append([b"an event"])
        writer.close()
        storage.close()
        code, said = finish(start(tmp_path, "--storage", tmp_path / "journal"))
        assert code == 1 and "holds a journal already" in said

    def test_a_storage_that_cannot_be_used(self, tmp_path: Path) -> None:
        code, said = finish(start(tmp_path, "--storage", "/proc/forebay"))
        assert code == 1 and "dispatcher" in said and "before there were any faults" in said
        (kept,) = tmp_path.iterdir()
        assert f"logs, records and journal: {kept}" in said and (kept / "dispatcher0.log").exists()
        code, said = finish(start(tmp_path, "--storage", "memory:"))
        assert code == 1 and "memory:" in said

    def test_no_redis_server(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        code, said = finish(start(tmp_path, "--storage", "redis"))
        assert code == 1 and "install redis-server" in said
        assert list(tmp_path.iterdir()) == []
