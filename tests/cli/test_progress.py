"""Long commands show how far they are, on a terminal alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.journal.codec import encode
from forebay.journal.proto import events_pb2 as ev
from forebay.journal.verification import SHOWN
from forebay.storage import open_storage

from ..terminals import written_to


@pytest.fixture
def journal(tmp_path: Path) -> str:
    """A journal of 3 × SHOWN events."""
    url = f"file://{tmp_path / 'journal'}"
    storage = open_storage(url)
    writer = storage.open_writer("test")
    elected = ev.LeaderElected(term=writer.term, format=1, journal_id="j")
    events = [encode(ev.Event(time_ms=1, leader_elected=elected))]
    registered = ev.DatasetRegistered(dataset_id="d")
    events += (3 * SHOWN - 1) * [encode(ev.Event(time_ms=1, dataset_registered=registered))]
    writer.append(events)
    writer.close()
    storage.close()
    return url


@pytest.mark.parametrize("on_terminal", [True, False])
def test_verify_shows_its_progress_on_a_terminal(journal: str, on_terminal: bool) -> None:
    master, slave = os.openpty() if on_terminal else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay.service.cli", "journal", "verify", journal],
        stdout=subprocess.PIPE, stderr=slave, env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
    )  # fmt: skip
    os.close(slave)
    shown = written_to(master)
    with process:
        assert process.stdout is not None
        assert b"records 1 to 3000" in process.stdout.read()
    if on_terminal:
        assert b"/3000" in shown and b":" in shown
    else:
        assert shown == b""
