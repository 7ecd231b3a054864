"""Programs of Python's that begin with their imports done, as processes of their own.

Importing TensorFlow takes five seconds of processor time, and a dispatcher's modules half of one,
which was most of what tests cost that start servers. So one process does nothing but import, and
what tests start is forked from it. That is safe: an import starts no threads but OpenBLAS's, which
prepare for forks themselves. `forebay chaos` and `forebay bench` start servers by their commands.

Run as a program, this file is the process that is forked; its arguments are what it imports.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TextIO

from forebay.service.processes import EXIT_WITH_PARENT, ChildProcess

COMMAND = ("forebay.service.cli",)
TENSORFLOW = (
    *COMMAND,
    "tensorflow.data.experimental.service",
    "forebay.service.client.api",
    "forebay.service.worker.worker",
    "forebay.service.pipelines.python.pipeline",
    "forebay.service.pipelines.tf_data.pipeline",
    "grpc.experimental",
)
DISPATCHER = (
    *COMMAND,
    "forebay.service.dispatcher.server",
    "forebay.storage.redis.storage",
    "grpc.experimental",
)
LARGEST_REQUEST = 1 << 20
PR_SET_PDEATHSIG = 1


class Fork:
    """`python` with these arguments: -m MODULE …, -c CODE …, or FILE …

    It has this process's environment without FOREBAY_…, with what `environment` adds, its standard
    error if `errors` is no other descriptor, and dies with it. Its input is a pipe, and its output
    too, unless it is to be the descriptor `output`. It could do without `imports`, which make it
    faster.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        imports: tuple[str, ...] = TENSORFLOW,
        *,
        output: int | None = None,
        errors: int = 2,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        address = _address(imports)
        stdin, self._stdin = os.pipe()
        self.stdout: TextIO | None = None
        stdout = output
        if stdout is None:
            read, stdout = os.pipe()
            self.stdout = os.fdopen(read, encoding="utf-8")
        own = {k: v for k, v in os.environ.items() if not k.startswith("FOREBAY_")}
        request = {
            "arguments": [*map(str, arguments)],
            "environment": {**own, **environment},
            "directory": os.getcwd(),
        }
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(address)
        socket.send_fds(self._server, [json.dumps(request).encode()], [stdin, stdout, errors])
        self.pid = int(self._server.recv(64))
        self._code: int | None = None
        os.close(stdin)
        if output is None:
            os.close(stdout)

    def line(self) -> str:
        """The next line of its output; "" if there is none, as it has ended."""
        assert self.stdout is not None
        return self.stdout.readline().strip()

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit code, once it has ended. Raises subprocess.TimeoutExpired."""
        if self._code is None:
            ended = select.poll()  # for select knows no descriptor above 1,023
            ended.register(self._server, select.POLLIN)
            if not ended.poll(None if timeout_s is None else 1000 * timeout_s):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s or 0)
            self._code = int(self._server.recv(64))
            self._server.close()
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait until it has worked."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def close_input(self) -> None:
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    def finish(self, timeout_s: float | None = None) -> int:
        """Wait until it has ended, and close its input and output; its exit code. Idempotent."""
        code = self.wait(timeout_s)
        self.close_input()
        if self.stdout is not None:
            self.stdout.close()
        return code


def run(
    arguments: Sequence[str],
    timeout_s: float = 100,
    imports: tuple[str, ...] = TENSORFLOW,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, as subprocess.run does, with all that it says. No input is there.

    Raises subprocess.TimeoutExpired, with what it has said: by default before pytest's own timeout.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        descriptors = {"output": output.fileno(), "errors": errors.fileno()}
        program = Fork(arguments, imports, **descriptors, environment=environment)
        program.close_input()
        try:
            code = program.finish(timeout_s)
        except subprocess.TimeoutExpired as error:
            program.kill()
            error.add_note(f"of {arguments}, which has said:\n{_read(output)}{_read(errors)}")
            raise
        finally:
            program.kill()
        return subprocess.CompletedProcess(arguments, code, _read(output), _read(errors))


def _read(said: TextIO) -> str:
    said.seek(0)
    return said.read()


@functools.cache
def _address(imports: tuple[str, ...]) -> bytes:
    """Where the process listens that is forked; it is started when it is first needed."""
    server = ChildProcess(
        [sys.executable, __file__, *imports], None, piped=True, exit_with_parent=True
    )

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.finish()

    atexit.register(end)
    address = bytes.fromhex(server.line())
    assert address, f"one of {imports} cannot be imported: see above"
    return address


# -- the process that is forked --------------------------------------------------------------------


def _serve(imports: Sequence[str]) -> list[str]:
    """Fork for each request until the parent has gone. Returns in the forks only: what to run."""
    for name in imports:
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gc.freeze()  # so that no fork looks through it all again, and copies it
    listener.bind("")  # the kernel chooses a name
    listener.listen(128)
    print(listener.getsockname().hex(), flush=True)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    heard: list[Any] = [0, ended, listener]
    while True:
        ready = select.select(heard, [], [])[0]
        if 0 in ready:
            os._exit(0)  # and the forks end
        if ended in ready:
            os.read(ended, 4096)
            for process in [*running]:
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    _tell(running.pop(process), os.waitstatus_to_exitcode(status))
        if listener in ready:
            connection, _ = listener.accept()
            message, descriptors, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 3)
            process = os.fork()
            if process:
                running[process] = connection
                for descriptor in descriptors:
                    os.close(descriptor)
                connection.send(b"%d" % process)
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (listener, connection, *running.values()):
                end.close()
            os.close(ended)
            os.close(wake)
            return _become(json.loads(message), descriptors)


def _tell(connection: socket.socket, code: int) -> None:
    with contextlib.suppress(OSError), connection:  # nobody may wait for it
        connection.send(b"%d" % code)


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> list[str]:
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.chdir(request["directory"])
    return request["arguments"]


def _run(arguments: list[str]) -> None:
    """As Python's command line does it."""
    match arguments:
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), vars(main))
        case [file, *rest]:
            sys.argv = [file, *rest]
            runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    _run(_serve([name for name in sys.argv[1:] if name != EXIT_WITH_PARENT]))
