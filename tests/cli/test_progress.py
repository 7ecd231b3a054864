"""Long commands show how far they are, on a terminal alone."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from forebay.journal.codec import encode
from forebay.journal.proto import events_pb2 as ev
from forebay.journal.verification import SHOWN
from forebay.service.cli.progress_bar import Pace
from forebay.storage import open_storage

from ..terminals import written_to


@pytest.fixture
def journal(tmp_path: pathlib.Path) -> str:
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
        assert b"/3000" in shown and b"records/s" in shown
    else:
        assert shown == b""


def test_the_time_to_go_is_of_what_all_steps_took() -> None:
    pace = Pace("rows")
    assert pace.said(0) == ""
    pace.look(100, 2, 12)  # a run before did two
    assert pace.said(150) == ""
    pace.look(160, 3, 12)
    pace.look(280, 4, 12)  # 90 s each
    assert pace.said(280) == "0.7 a minute, 12 min to go"
    pace.look(300, 4, 12)  # nothing new
    assert pace.said(310) == "0.7 a minute, 12 min to go"
    assert pace.said(1000) == pace.said(370) == "0.7 a minute, 10 min to go"  # one takes longer
    pace.look(1180, 12, 12)
    assert pace.said(1180) == "0.6 a minute, 0 s to go"
    quick = Pace("records")
    quick.look(0, 0, 9000)
    quick.look(2, 3000, 9000)
    assert quick.said(2) == "1,500.0 records/s, 4 s to go"
