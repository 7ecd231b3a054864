"""NodeWorker: a worker of Forebay as a child process, on a node of another system's cluster."""

from __future__ import annotations

import dataclasses
import threading

from ..processes import ChildProcess
from ..servers import WorkerConfig, first_line, worker_process

AFTER_DRAIN_S = 10.0
"""How long a worker may take to say goodbye after it has drained."""


class NodeWorker:
    """Is pickled to its node, and launched there. `config` is that of the worker; without a `host`,
    it listens on its node's address. Raises InvalidArgument."""

    def __init__(self, config: WorkerConfig) -> None:
        self._options = config.options()
        self._has_host = config.host is not None
        self._process: ChildProcess | None = None
        self._log: threading.Thread | None = None

    @property
    def stop_timeout_s(self) -> float:
        """How long `stop` waits for the worker before it kills it."""
        return self._options.drain_timeout_ms / 1000 + AFTER_DRAIN_S

    def launch(self, node_host: str) -> None:
        """Start it, in a lasting thread: Linux ends it with the thread that started it."""
        options = self._options
        if not self._has_host:
            options = dataclasses.replace(options, host=node_host)
        self._process = worker_process(options)

    def wait_until_registered(self) -> None:
        """Raises ForebayError with the reason if it cannot start."""
        assert self._process is not None
        _, self._log = first_line(self._process, "worker")

    def wait_until_ended(self) -> None:
        """Return once it has ended, whoever ended it."""
        if (process := self._process) is not None:
            process.wait()

    def stop(self) -> None:
        """It drains. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.end(self.stop_timeout_s)
        if self._log is not None:
            self._log.join(AFTER_DRAIN_S)
