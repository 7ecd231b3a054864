"""The processes of both sides: servers and readers."""

from __future__ import annotations

import functools
import json
import pathlib
import sys
import tempfile
from typing import Any

from ..service.errors import ForebayError
from ..service.processes import ChildProcess

STOP_TIMEOUT_S = 30
ANSWER_TIMEOUT_S = 120
OURS, PEERS = "forebay", "peer"  # where the dispatchers' journals are, in their directory
COLLECT_MS = 1_000


class Responder(ChildProcess):
    """A Python process that answers on its standard output, a line at a time.

    Being a context manager, it stops at the end of the context.
    """

    def __init__(self, module: str, *arguments: object, exit_with_parent: bool = False) -> None:
        self._module = module
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
        super().__init__(
            [sys.executable, "-m", module, *map(str, arguments)],
            self._log.fileno(),
            piped=True,
            exit_with_parent=exit_with_parent,
        )

    def answer(self) -> str:
        """Its next line of output. Raises ForebayError, with its error output, if it ends."""
        line = self.line(ANSWER_TIMEOUT_S)
        if not line:
            code = self.wait(STOP_TIMEOUT_S)
            self._log.seek(0)
            raise ForebayError(
                f"{self._module} did not answer and ended with exit code {code} (-9 after "
                f"{ANSWER_TIMEOUT_S} s):\n{self._log.read()}"
            )
        return line

    def ask(self, **question: Any) -> None:
        """Send it a line of JSON; `answer_json` is what it says to that."""
        assert self.stdin is not None
        self.stdin.write(json.dumps(question) + "\n")
        self.stdin.flush()

    @functools.cached_property
    def greeting(self) -> str:
        return self.answer()

    def wait_until_ready(self) -> None:
        """Raises ForebayError, with its error output, if it ends instead."""
        assert self.greeting

    def answer_json(self) -> Any:
        return json.loads(self.answer())

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Send SIGTERM, then SIGKILL after a timeout."""
        self.end(STOP_TIMEOUT_S)
        self._log.close()


class Server(Responder):
    """A process that prints its address on its first line of output."""

    @property
    def address(self) -> str:
        """Where it serves: "host:port". Waits until it does."""
        return self.greeting.removeprefix("grpc://")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


def our_dispatcher(
    directory: pathlib.Path, port: int = 0, *options: object, collect: bool = False
) -> Server:
    """Forebay's dispatcher. Nobody times out: what members do here may be simulated.

    `collect`: jobs that nobody reads any more end soon, so that the rounds before leave no buffers
    behind; of the peer, too.
    """
    collect_ms = ("--job-gc-check-interval-ms", COLLECT_MS, "--job-gc-timeout-ms", COLLECT_MS)
    return Server(
        "forebay.service.cli",
        "dispatcher",
        *("--storage", directory / OURS),
        *("--port", port),
        *("--worker-timeout-ms", -1),
        *("--client-timeout-ms", -1),
        *(collect_ms if collect else ()),
        *options,
        exit_with_parent=True,
    )


def our_worker(dispatcher: Server, *options: object) -> Server:
    return Server("forebay.service.cli", "worker", "--dispatcher", dispatcher.address, *options)


def peer_dispatcher(directory: pathlib.Path, port: int = 0, *, collect: bool = False) -> Server:
    """tf.data service's dispatcher, in fault-tolerant mode."""
    collect_ms = COLLECT_MS if collect else 0  # 0: its default, minutes
    arguments = ("dispatcher", port, directory / PEERS, collect_ms)
    return Server("forebay.benchmarks.peer", *arguments)


def peer_worker(dispatcher: Server) -> Server:
    return Server("forebay.benchmarks.peer", "worker", dispatcher.address)
