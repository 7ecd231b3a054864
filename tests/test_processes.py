"""ChildProcess processes end with their parent, and say why they could not start."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.service.processes import ChildProcess, free_port, hide_from_user, tail

TIMEOUT_S = 30

# A daemon's: its standard descriptors are closed, and the next ones have these numbers.
DAEMON = """
import os, sys
os.dup2(1, 50)
os.closerange(0, 3)
from forebay.service.pipelines.kinds.functions import python_dataset, request_of
from forebay.service.pipelines.python.pipeline import PythonPipeline
dataset = python_dataset(range(3))(lambda split: [split] * 2)
request = request_of(dataset, range(3))
structure = '{"tensor":"int64","shape":[]}'
pipeline = PythonPipeline(request.python, request.sources, structure)
found = [n for block in pipeline.run(None).blocks() for n in block.components[0].values.tolist()]
pipeline.close()
os.write(50, str(found).encode())
"""

# Both sleep until they are killed, which is what is tested; the minutes only bound a failure.
PARENT = """
import pathlib, sys, time
from forebay.service.processes import ChildProcess
command = [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(600)"]
child = ChildProcess(command, pathlib.Path(sys.argv[1]), piped=True)
child.line()
{also}
print(child.pid, flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    """Whether a process has ended, even if nobody has asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def kill_parent(tmp_path: Path, also: str = "") -> int:
    """Start a child of a child, kill the parent, and return who is left."""
    program = PARENT.format(also=also)
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not gone(pid)
    parent.kill()
    parent.wait(TIMEOUT_S)
    parent.stdout.close()
    return pid


def wait_until_gone(pid: int) -> None:
    subprocess.run(["tail", "--pid", str(pid), "-f", "/dev/null"], timeout=TIMEOUT_S, check=True)


def test_a_python_dataset_of_a_daemon_whose_descriptors_are_closed() -> None:
    done = subprocess.run([sys.executable, "-c", DAEMON], capture_output=True, timeout=TIMEOUT_S)
    assert (done.stdout, done.returncode) == (b"[0, 0, 1, 1, 2, 2]", 0)


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    wait_until_gone(kill_parent(tmp_path))


def test_even_one_that_is_paused(tmp_path: Path) -> None:
    wait_until_gone(kill_parent(tmp_path, "child.send_signal(19)"))


def test_output_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for number in range(3):
        child = ChildProcess([sys.executable, "-c", f"print({number})"], log)
        assert child.finish(TIMEOUT_S) == 0
    assert tail(log, 2) == "1\n2"
    assert ChildProcess(["no-such-command"], log).finish(TIMEOUT_S) == 1
    assert "cannot run no-such-command" in tail(log, 1)


def test_end(tmp_path: Path) -> None:
    polite = ChildProcess(["sleep", "600"], tmp_path / "log")
    assert polite.end() == polite.end() == -signal.SIGTERM
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    stubborn = ChildProcess([sys.executable, "-c", deaf], tmp_path / "log", piped=True)
    assert stubborn.line() == "1"
    assert stubborn.end(timeout_s=0.1) == -signal.SIGKILL
    slow = ChildProcess(["sleep", "600"], tmp_path / "log", piped=True)
    assert slow.line(timeout_s=0.1) == ""
    assert slow.finish() == -signal.SIGKILL


def test_a_free_port_is_free_and_stays_so() -> None:
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 1
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < lowest for port in ports)


def test_a_child_is_not_told_what_was_meant_for_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_STORAGE", "file:///of/somebody/else")
    show = "import os; print(sorted(k for k in os.environ if k.startswith('FOREBAY')))"
    child = ChildProcess([sys.executable, "-c", show], tmp_path / "log")
    assert child.finish(TIMEOUT_S) == 0
    assert tail(tmp_path / "log") == "[]"


@pytest.mark.parametrize("hidden", [False, True])
def test_a_child_sees_neither_environment_nor_descriptors_of_a_hidden_process(hidden: bool) -> None:
    told, tell = os.pipe()
    parent = os.fork()
    if not parent:
        try:
            if not os.getuid():
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            ctypes.CDLL(None).prctl(4, 1)  # it is 0 behind setuid
            if hidden:
                hide_from_user()
            looked_at = os.getpid()
            if not (child := os.fork()):
                ctypes.CDLL(None).prctl(4, 1)
                for what in ("environ", "maps", "mem", "fd/0"):
                    try:
                        open(f"/proc/{looked_at}/{what}", "rb").close()
                        os.write(tell, b"open ")
                    except OSError as error:
                        os.write(tell, f"{errno.errorcode[error.errno or 0]} ".encode())
                os._exit(0)
            os.waitpid(child, 0)
        finally:
            os._exit(0)
    os.waitpid(parent, 0)
    os.close(tell)
    with open(told) as answers:
        found = answers.read().split()
    assert found == (["EACCES"] * 4 if hidden else ["open"] * 4)
