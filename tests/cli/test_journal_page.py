"""docs/journal.md: its program reads journals as the page says, with protobuf alone."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.service.cli import app
from forebay.service.cli.audit import _replayed
from forebay.service.cli.audit_shared import claimed
from forebay.storage import FileStorage
from forebay.storage.tfrecord import frame

from ..core.make_fold import FOLDS

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/journal/golden/format-1"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's program, beside the modules that its command makes."""
    directory = tmp_path_factory.mktemp("page")
    for proto in ("journal/proto/events.proto", "storage/proto/segment.proto"):
        shutil.copy(ROOT / proto, directory)
    page = (ROOT / "docs/journal.md").read_text()
    (command,) = re.findall(r"^protoc (.*)$", page, re.MULTILINE)
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (directory / "program.py").write_text(
        f"{code}\nassert not any(m.split('.')[0] == 'forebay' for m in sys.modules)\n"
    )
    protoc = [Path(sys.executable).with_name("protoc"), "-I.", *command.split()]
    subprocess.run(protoc, cwd=directory, check=True, timeout=60)
    return directory / "program.py"


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def read(program: Path, journal: Path) -> list[dict[str, Any]]:
    ran = subprocess.run(
        [sys.executable, program.name, journal],
        cwd=program.parent, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert not ran.returncode, ran.stderr
    return lines(ran.stdout)


def shown(journal: Path) -> list[dict[str, Any]]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        app(["journal", "show", str(journal), "--limit", "0", "--json"], standalone_mode=False)
    return lines(printed.getvalue())


def fold(name: str, journal: Path) -> None:
    """A journal of two writers, which a crash has cut off."""
    events = json.loads((FOLDS / f"format-1-{name}.json").read_text())["events"]
    for part in (events[:20], events[20:]):
        writer = FileStorage(journal).open_writer("test")
        for event in part:
            writer.append([bytes.fromhex(event)])
        writer.close()
    *_, last = sorted(journal.glob("**/*.tfrecord"))
    last.write_bytes(last.read_bytes() + frame(b"unfinished" * 99)[:500])


def test_the_program_reads_what_journal_show_prints(program: Path, tmp_path: Path) -> None:
    """All kinds of events are in the folds. In the golden journal a writer was displaced."""
    journals = [tmp_path / "golden"]
    shutil.copytree(GOLDEN, journals[0])
    for name in ("live", "moved", "claimed", "saved"):
        journals.append(tmp_path / name)
        fold(name, journals[-1])
    for journal in journals:
        found = read(program, journal)
        for line in found:
            line.pop("position_key", None)  # secret
            if line["event"] == "bundles_claimed":
                line.pop("bundles", None)  # the program's own
        assert found == shown(journal)


def test_the_program_finds_the_bundles_that_the_audit_names(program: Path, tmp_path: Path) -> None:
    fold("claimed", tmp_path / "claimed")
    _, histories, _ = _replayed(FileStorage(tmp_path / "claimed"))
    (history,) = [each for each in histories.jobs.values() if each.job.is_claimed]
    named = {
        str(reader["consumer_id"]): [each["bundle"] for each in reader["bundles"]]
        for reader in claimed(history)["readers"]
    }
    found: dict[str, list[int]] = {consumer_id: [] for consumer_id in named}
    for line in read(program, tmp_path / "claimed"):
        if line["event"] == "bundles_claimed":
            found[line["consumer_id"]] += line["bundles"]
    assert found == named and any(named.values())
