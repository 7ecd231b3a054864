"""Displacing real processes: paused ones, killed ones, and several that want the place."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay.storage import FileStorage, Locked, Writer

WRITER = """
import sys
from forebay.storage import Fenced, FileStorage
writer = FileStorage(sys.argv[1], segment_bytes=2000).open_writer("the paused one", lease_ms=50)
print("open", flush=True)
try:
    while True:
        last = writer.append([b"paused"] * 3)
        print(last, flush=True)
        if last % 60 == 0:
            writer.write_snapshot(last, b"%d" % last)
            print("snapshot", last, flush=True)
        if last % 180 == 0:
            writer.trim(last - 60)
except Fenced:
    print("fenced", flush=True)
"""

CHALLENGER = """
import sys, time
from forebay.storage import FileStorage, Locked
storage = FileStorage(sys.argv[1])
while True:
    try:
        writer = storage.open_writer("a challenger", lease_ms=600_000)
        break
    except Locked:
        print("locked", flush=True)
        time.sleep(0.005)
print("writer", writer.append([b"challenger"]), flush=True)
sys.stdin.read()
"""


@contextmanager
def running(script: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def take_over(path: Path) -> Writer:
    storage = FileStorage(path, segment_bytes=2000)
    deadline = time.monotonic() + 60
    while True:
        try:
            return storage.open_writer("the test", lease_ms=600_000)
        except Locked:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def test_a_paused_writer_wakes_up_fenced(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for number in range(12):
        path = tmp_path / str(number)
        with running(WRITER, path) as process:
            assert line(process) == ["open"]
            for _ in range(chance.randrange(1, 120)):
                last = line(process)
            time.sleep(chance.random() * 0.002)
            process.send_signal(signal.SIGSTOP)
            writer = take_over(path)
            inherited = writer.last_sequence
            for _ in range(5):
                writer.append([b"new"] * 2)
            storage = FileStorage(path)
            before = list(storage.read(storage.first_sequence() - 1)), storage.snapshots()
            process.send_signal(signal.SIGCONT)
            said = [last]
            while said[-1] != ["fenced"]:
                said.append(line(process))
                assert said[-1], "it ended in another way"
        acknowledged = [int(words[0]) for words in said if words[0].isdigit()]
        assert max(acknowledged, default=0) <= inherited
        assert inherited - max(acknowledged, default=inherited) <= 3
        snapshots = {int(words[1]) for words in said if words[0] == "snapshot"}
        assert snapshots <= set(storage.snapshots())
        assert (list(storage.read(storage.first_sequence() - 1)), storage.snapshots()) == before
        records = before[0]
        first = records[0].sequence
        assert [r.sequence for r in records] == list(range(first, inherited + 11))
        assert [r.data for r in records if r.sequence > inherited] == [b"new"] * 10
        assert {r.data for r in records if r.sequence <= inherited} <= {b"paused"}
        writer.append([b"new"])
        writer.close()


def test_a_killed_writer_makes_way_at_once(tmp_path: Path) -> None:
    # Its lease, ten minutes, is not waited for.
    for number in range(1, 4):
        with running(CHALLENGER, tmp_path) as process:
            assert line(process) == ["writer", str(number)]
    writer = FileStorage(tmp_path).open_writer("the test")
    assert (writer.term, writer.last_sequence) == (4, 3)
    assert not list(tmp_path.glob("takeover-*"))
    writer.close()


@pytest.mark.parametrize("holder_ends", [True, False])
def test_one_of_several_challengers_wins(tmp_path: Path, holder_ends: bool) -> None:
    holder = FileStorage(tmp_path).open_writer("the test", lease_ms=600_000 if holder_ends else 300)
    holder.append([b"holder"])
    with (
        running(CHALLENGER, tmp_path) as first,
        running(CHALLENGER, tmp_path) as second,
        running(CHALLENGER, tmp_path) as third,
    ):
        everybody = [first, second, third]
        if holder_ends:
            assert [line(process) for process in everybody] == [["locked"]] * 3
            holder.close()
        for _ in range(10_000):
            winners = [p for p in everybody if line(p) == ["writer", "2"]]
            if winners:
                break
        assert len(winners) == 1
        for process in everybody:
            if process not in winners:
                # What it had said before the winner won is read as well.
                assert [line(process) for _ in range(100)] == [["locked"]] * 100
        # While all are there: whoever is killed leaves the lock to the others.
        assert [r.data for r in FileStorage(tmp_path).read()] == [b"holder", b"challenger"]
    holder.close()
