"""Programs that are forked do what they do by their command."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys

import pytest

from . import forks
from .forks import Fork

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
    how: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
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


def test_what_was_meant_for_this_process_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_PORT", "7")
    ran = forks.run(["-c", "import os; print(os.environ.get('FOREBAY_PORT'))"], 60, IMPORTS)
    assert ran.stdout == "None\n"


def test_how_a_fork_ends() -> None:
    waits = "import sys; print('up', flush=True); sys.stdin.read(); sys.exit(3)"
    told, left = Fork(["-c", waits], IMPORTS), Fork(["-c", waits], IMPORTS)
    assert told.line() == left.line() == "up"
    assert told.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        told.wait(0)
    told.terminate()
    assert told.finish(60) == told.finish() == told.poll() == -signal.SIGTERM
    told.kill()  # too late, and no harm
    left.close_input()
    assert left.finish(60) == 3


def test_what_cannot_be_imported_is_said() -> None:
    with pytest.raises(AssertionError, match=r"'no_such_module'.*cannot be imported"):
        Fork(["-c", ""], ("no_such_module",))


def test_forks_end_with_the_process_that_is_forked() -> None:
    parent = (
        "import json, os, sys\n"
        "from tests.forks import Fork\n"
        "fork = Fork(['-c', 'import signal; print(1, flush=True); signal.pause()'], ('json',))\n"
        "fork.line(); print(fork.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    root = pathlib.Path(__file__).parent.parent
    ran = subprocess.run(
        [sys.executable, "-c", parent], cwd=root, stdout=subprocess.PIPE, text=True, timeout=60
    )
    pid = ran.stdout.strip()
    subprocess.run(["tail", "--pid", pid, "-f", "/dev/null"], timeout=60, check=True)


def test_a_program_that_does_not_end_in_time_is_named() -> None:
    waits = "import signal; signal.pause()"
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        forks.run(["-c", waits], 0, IMPORTS)
    (note,) = raised.value.__notes__
    assert waits in note
