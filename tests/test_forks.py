"""Programs that are forked do what they do by their command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from . import forks

IMPORTS = ("json",)
PROGRAM = """
import os, signal, sys, threading
print(__name__, sys.argv, os.getcwd(), os.environ.get("FOREBAY_PORT"), os.environ["MARK"])
print(os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGCHLD), threading.active_count())
print(sys.stdin.read(), sorted(os.listdir("/proc/self/fd"))[:3], file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("how", ["-c", "-m", "file"])
def test_a_fork_is_as_its_command_would_be(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARK", "here")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = {
        "-c": ["-c", PROGRAM, "a b"],
        "-m": ["-m", "platform", "--terse"],
        "file": ["program.py", "a b"],
    }[how]
    there = subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        start_new_session=True,
    )  # fmt: skip
    here = forks.run(arguments, 60, IMPORTS)
    assert (here.returncode, here.stdout, here.stderr) == (
        there.returncode, there.stdout, there.stderr,
    )  # fmt: skip


def test_forks_end_with_the_process_that_is_forked() -> None:
    parent = (
        "import json, os, sys\n"
        "from tests.forks import Fork\n"
        "fork = Fork(['-c', 'import signal; print(1, flush=True); signal.pause()'], ('json',))\n"
        "fork.line(); print(fork.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    root = Path(__file__).parent.parent
    ran = subprocess.run(
        [sys.executable, "-c", parent], cwd=root, stdout=subprocess.PIPE, text=True, timeout=60
    )
    pid = ran.stdout.strip()
    subprocess.run(["tail", "--pid", pid, "-f", "/dev/null"], timeout=60, check=True)
