"""The index of decisions: the present folder passes, and what an index must not hide is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "decisions.py"

FIRST = "## 1. A window of bytes\n\n*2026-11-21 · in force*\n\n**Decision.** Bytes.\n"
SECOND = (
    "## 2. A window of time\n\n*2026-11-22 · in force · also 3, 4*\n\n**Decision.** Milliseconds.\n"
)


def decisions(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_present_index_is_up_to_date() -> None:
    done = decisions(ROOT / "docs" / "decisions", "--check")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        (SECOND.replace("## 2.", "## 5."), "2: missing"),
        (SECOND.replace("3, 4", "1"), "1: in delivery.md and worker.md"),
        (SECOND.replace("*2026-11-22 · in force · also 3, 4*\n\n", ""), "is not `*<date>"),
        (SECOND.replace("2. A", "A"), "is not `## <number>. <title>`"),
    ],
)
def test_faults_are_refused(tmp_path: Path, second: str, fault: str) -> None:
    (tmp_path / "delivery.md").write_text(FIRST)
    (tmp_path / "worker.md").write_text(second)
    done = decisions(tmp_path)
    assert done.returncode == 1
    assert fault in done.stderr
    assert not (tmp_path / "README.md").exists()
