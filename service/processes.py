"""Commands as child processes that end with their parent, however it ends."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence

from .errors import AddressInUse

STOP_TIMEOUT_S = 10.0
DROPPED = 3
"""A worker's exit code, if its trainers did not take all that had been begun."""

_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}

# The kernel kills the child with the thread that started it; then it becomes the command. A
# parent that ended before it was asked to do so is noticed by the child's new parent.
_LAUNCH = """
import ctypes, os, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has gone")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot run {sys.argv[2]}: {error}")
"""


def forebay(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package, such as "cli"."""
    return [sys.executable, "-m", f"forebay.service.{module}", *arguments]


def tied(command: Sequence[str]) -> list[str]:
    """The command, run so that on Linux it is killed when the thread that starts it ends.

    Call it in the process that starts it.
    """
    return [sys.executable, "-IS", "-c", _LAUNCH, str(os.getpid()), *command]


def start(
    command: Sequence[str],
    log: pathlib.Path,
    *,
    piped: bool = False,
) -> subprocess.Popen[str]:
    """Start a command; what it says is appended to `log`, except, if `piped`, its output.

    It gets this process's environment without FOREBAY_…, which is not meant for it. Call
    it from the main thread: on Linux the child ends with the thread that started it.
    """
    with log.open("a") as file:
        return subprocess.Popen(
            tied(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else file,
            stderr=file,
            text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("FOREBAY_")}
            | _ENVIRONMENT,
            start_new_session=True,  # Ctrl-C is for the parent, who ends its children in order
        )


def end(process: subprocess.Popen[str], timeout_s: float = STOP_TIMEOUT_S) -> None:
    """SIGTERM, and SIGKILL if that is not enough; close its input and output. Idempotent."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def tail(log: pathlib.Path, lines: int = 20) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def redis_program() -> str | None:
    """A Redis server on this machine, or Valkey's, if there is one."""
    return shutil.which("redis-server") or shutil.which("valkey-server")


def free_port() -> int:
    """A loopback port that nobody listens on, and that no outgoing connection is given.

    So a server that is restarted on it finds it free. Raises AddressInUse.
    """
    highest = 32_768  # where Linux begins with outgoing connections, unless told otherwise
    try:
        highest = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        pass  # another system
    for _ in range(100):
        port = random.randrange(10_000, max(10_001, highest))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AddressInUse("no free port was found on 127.0.0.1 in 100 tries: too many are in use")
