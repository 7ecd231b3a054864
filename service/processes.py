"""ChildProcess processes: starts, watches and ends them, and lets them end with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from .errors import AddressInUse

STOP_TIMEOUT_S = 10.0
DROPPED = 3
"""A worker's exit code if its trainers did not read all started splits."""

EXIT_WITH_PARENT = "--exit-with-parent"
"""The flag of a command that calls `end_with_parent`."""

LOG_LEVEL = "FOREBAY_LOG_LEVEL"
"""The environment variable for a server's log level; for all commands, not an option of one."""

_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}

# Asks the kernel to kill this process with the thread that started it, then becomes the command.
# If the parent ended before that request, the process has another parent, and exits.
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
    """The command that runs a module of Forebay, such as "service.cli"."""
    return [sys.executable, "-m", f"forebay.{module}", *arguments]


def tied(command: Sequence[str]) -> list[str]:
    """Wrap the command so that Linux kills it when the thread that starts it ends.

    Call it in the process that starts it.
    """
    return [sys.executable, "-IS", "-c", _LAUNCH, str(os.getpid()), *command]


def hide_from_user() -> None:
    """Have the kernel keep this process's memory, environment and descriptors from other processes
    of its user, such as functions that it runs in children: PR_SET_DUMPABLE in prctl(2). Debuggers
    then need root, and there are no core dumps. Nothing on other systems."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(4, 0)


def open_standard_descriptors() -> None:
    """Open those of 0, 1 and 2 that are closed, as of a daemon, on /dev/null. Otherwise the next
    sockets would have these numbers, and be the standard streams of processes that are started."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)


class ChildProcess(subprocess.Popen[str]):
    """A command as a child process, which ends with its parent, however the parent ends.

    Linux kills it when the thread that started it ends, so start it in a lasting thread. With
    `exit_with_parent`, the command gets `--exit-with-parent` and ends itself in order, on every
    system and whatever thread started it.

    It gets this process's environment without FOREBAY_… variables, plus `environment`. Its stdout
    and stderr are appended to the file `log`; if `piped`, `line` reads stdout instead. `log` can
    also be a value for Popen's `stderr`. It inherits `descriptors`, under the same numbers.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: pathlib.Path | int | None,
        *,
        piped: bool = False,
        exit_with_parent: bool = False,
        environment: Mapping[str, str] = {},
        descriptors: Sequence[int] = (),
    ) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("FOREBAY_")}
        with contextlib.ExitStack() as stack:
            said = (
                log if log is None or isinstance(log, int) else stack.enter_context(log.open("a"))
            )
            super().__init__(
                [*command, EXIT_WITH_PARENT] if exit_with_parent else tied(command),
                stdin=subprocess.PIPE,  # its end-of-file tells the child that we ended
                stdout=subprocess.PIPE if piped else said,
                stderr=said,
                text=True,
                env={**inherited, **_ENVIRONMENT, **environment},
                pass_fds=descriptors,
                start_new_session=True,  # the parent alone gets Ctrl-C, and ends its children
            )

    def line(self, timeout_s: float | None = None) -> str:
        """The next line of its output; "" if it has ended.

        If it takes longer than `timeout_s`, it is killed.
        """
        assert self.stdout is not None
        impatience = threading.Timer(timeout_s or 0, self.kill)
        if timeout_s is not None:
            impatience.start()
        try:
            return self.stdout.readline().strip()
        finally:
            impatience.cancel()

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        super().kill()
        self.wait()

    def end(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Send SIGTERM, then SIGKILL after `timeout_s`; return the exit code. Idempotent."""
        self.terminate()
        try:
            self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        return self.finish()

    def finish(self, timeout_s: float | None = None) -> int:
        """Wait for its end, close its pipes and return the exit code. Idempotent.

        Raises subprocess.TimeoutExpired.
        """
        code = self.wait(timeout_s)
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return code


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def end_with_parent(end: Callable[[], object] = _terminate) -> None:
    """Watch the parent from now on; once it has ended, call `end` (default: SIGTERM to ourselves).

    The sign is the end of standard input, whose other end the parent holds. On Linux, a pidfd also
    shows it while another process, such as the parent's fork, holds that end, too.
    """
    ends = [0]
    with contextlib.suppress(AttributeError, OSError):  # another system, or an old kernel
        ends.append(os.pidfd_open(os.getppid()))

    def watch() -> None:
        while 0 in select.select(ends, [], [])[0] and os.read(0, 4096):
            pass
        end()

    threading.Thread(target=watch, name="forebay-parent-watch", daemon=True).start()


def tail(log: pathlib.Path, lines: int = 20) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def redis_program() -> str | None:
    """The path of this machine's Redis or Valkey server; None without one."""
    return shutil.which("redis-server") or shutil.which("valkey-server")


def free_port() -> int:
    """A free loopback port, outside of the range for outgoing connections.

    So a server that is restarted on it finds it free. Raises AddressInUse.
    """
    highest = 32_768  # the default start of Linux's range for outgoing connections
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
