"""Child processes: how they are started, watched and ended, and end with their parent."""

from __future__ import annotations

import contextlib
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
"""A worker's exit code, if its trainers did not take all that had been begun."""

EXIT_WITH_PARENT = "--exit-with-parent"
"""The flag of a command that calls `end_with_parent`."""

LOG_LEVEL = "FOREBAY_LOG_LEVEL"
"""The variable that says how much a server logs; no option of one command."""

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


class Child(subprocess.Popen[str]):
    """A command as a child process, which ends when its parent does, however that ends.

    On Linux it is killed when the thread that started it ends: start it in one that lasts. A
    command that has `--exit-with-parent` ends by itself, in order, whatever thread started it and
    on every system: say so with `exit_with_parent`.

    It gets this process's environment without FOREBAY_…, which is not meant for it, and with
    `environment`. What it says is appended to the file `log`, except, if `piped`, its output, of
    which `line` is the next line. Instead of a file, `log` can be what Popen takes for `stderr`.
    It inherits these `descriptors`, under the same numbers.
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
                stdin=subprocess.PIPE,  # of which it may read an end, if we end
                stdout=subprocess.PIPE if piped else said,
                stderr=said,
                text=True,
                env={**inherited, **_ENVIRONMENT, **environment},
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is for the parent, who ends its children in order
            )

    def line(self, timeout_s: float | None = None) -> str:
        """The next line of its output; "" if there is none, as it has ended.

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
        """SIGKILL, and wait until it has worked."""
        super().kill()
        self.wait()

    def end(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM, and SIGKILL if that is not enough; its exit code. Idempotent."""
        self.terminate()
        try:
            self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        return self.finish()

    def finish(self, timeout_s: float | None = None) -> int:
        """Wait until it has ended, and close its input and output; its exit code. Idempotent.

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
    """From now on: SIGTERM for this process, once its parent has ended; or `end` is called then.

    That shows as the end of its standard input, of which its parent holds the other end; on
    Linux also if somebody else has that, too, such as a process that the parent has forked.
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
