"""`make demo`, the first thing that a new user runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"


@pytest.mark.timeout(300)
def test_it_says_what_it_shows_and_nothing_else() -> None:
    command = [sys.executable, str(DEMO), "--epochs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    first, *_, last = done.stdout.splitlines()
    assert first == "1797 handwritten digits in 16 TFRecord files"
    assert last == "every image once an epoch, and resumed exactly"
    told = re.findall(r"read in order, (.+?) *│ (1797 images, SHA-256 \w{20})", done.stdout)
    (undisturbed, order), (resumed, same) = told
    assert (undisturbed, resumed) == ("undisturbed", "with a resume")
    assert order == same
    assert "after 896 images; 2 trainers went on" in done.stdout
