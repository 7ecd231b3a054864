"""Journals that earlier versions wrote must replay, to the same events."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from forebay.journal.codec import encode
from forebay.journal.proto.events_pb2 import Event
from forebay.journal.replaying import replay
from forebay.journal.verification import verify
from forebay.storage import FileStorage

from .make_golden import GOLDEN, STATE, all_events, describe, make

TESTS = Path(__file__).parent.parent
JOURNALS = sorted(path for path in GOLDEN.iterdir() if path.is_dir())


def test_golden_files_are_as_they_were_written() -> None:
    """Those of the core, too. What is written over is no longer what an earlier version wrote."""
    lines = (TESTS / "golden.sha256").read_text().splitlines()
    frozen = {name: digest for digest, name in (line.split("  ") for line in lines)}
    there = {
        str(path.relative_to(TESTS)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in (GOLDEN, TESTS / "core" / "golden")
        for path in folder.rglob("*")
        if path.is_file()
    }
    changed = sorted(name for name in frozen if there.get(name) != frozen[name])
    assert not changed, "put these back, and add another one beside them"
    new = sorted(there.keys() - frozen.keys())
    assert not new, "in tests: sha256sum these >> golden.sha256"


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.name)
def test_a_golden_journal_replays(path: Path) -> None:
    storage = FileStorage(path)
    assert verify(storage).problems == []
    expected = json.loads(path.with_suffix(".json").read_text())
    terms = [record.term for record in storage.read()]
    replayed = replay(storage)
    assert replayed.state == STATE
    late = [describe(event, terms[sequence - 1]) for sequence, event in replayed.events]
    early = [
        describe(event, terms[sequence - 1])
        for sequence, event in replay(storage, at=replayed.snapshot_sequence - 1).events
    ]
    assert late == expected[replayed.snapshot_sequence :]
    assert early == expected[: replayed.snapshot_sequence - 1]


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.name)
def test_a_golden_journal_can_be_continued(path: Path, tmp_path: Path) -> None:
    copy = FileStorage(shutil.copytree(path, tmp_path / "copy"))
    last = copy.extent().last
    writer = copy.open_writer("the test")
    event = Event(time_ms=1)
    event.leader_elected.term = writer.term
    event.leader_elected.journal_id = "golden"
    assert writer.append([encode(event)]) == last + 1
    writer.close()
    assert verify(copy).problems == []


def test_every_kind_of_event_is_in_some_golden_journal() -> None:
    kinds = {field.name for field in Event.DESCRIPTOR.oneofs_by_name["event"].fields}
    golden = {
        event.WhichOneof("event")
        for path in JOURNALS
        for record in FileStorage(path).read()
        for event in [Event.FromString(record.data)]
    }
    assert golden == kinds, "make another one, with make_golden.py"


def test_a_new_golden_journal_would_be_sound(tmp_path: Path) -> None:
    make(tmp_path / "new")
    storage = FileStorage(tmp_path / "new")
    assert verify(storage).problems == []
    assert storage.holdings().segments > 1
    assert len(list(storage.read())) == len(all_events()) + 1
