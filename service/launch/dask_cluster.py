"""ForebayWorkers: a plugin of Dask that runs a worker of Forebay beside each Dask worker.

    client = distributed.Client(scheduler)
    client.register_plugin(ForebayWorkers(WorkerConfig("10.0.0.5:5050", insecure=True)))
    …
    client.unregister_worker_plugin(ForebayWorkers.name)  # they drain

A Dask worker that comes later gets one, too. Each is a process of its own, so Dask's tasks and its
limits of memory do not concern it, and it ends with its Dask worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading

from distributed import Worker, WorkerPlugin

from ..processes import ChildProcess
from ..servers import WorkerConfig, first_line, worker_process

AFTER_DRAIN_S = 10.0
"""How long a worker may take to say goodbye after it has drained."""


class ForebayWorkers(WorkerPlugin):
    """Give it to `Client.register_plugin`, which returns when the workers are registered."""

    name = "forebay-workers"

    def __init__(self, config: WorkerConfig, *, resource: str = "") -> None:
        """`config` is that of each worker. Without a `host`, it listens on the address of its Dask
        worker, and then beyond loopback needs TLS or `insecure`; files for TLS lie under the same
        paths on all machines. With a port other than 0, a machine can have one worker.

        With a `resource`, such as "forebay", only Dask workers that have it get one:
        `dask worker --resources forebay=1`. Give it to one Dask worker of each machine: a worker of
        Forebay uses all processors. Raises InvalidArgument.
        """
        self._options = config.options()
        self._has_host = config.host is not None
        self._resource = resource
        self._process: ChildProcess | None = None
        self._log: threading.Thread | None = None

    async def setup(self, worker: Worker) -> None:
        """Raises ForebayError with the reason if it cannot start."""
        if self._resource and self._resource not in worker.state.total_resources:
            return
        options = self._options
        if not self._has_host:
            options = dataclasses.replace(options, host=worker.ip)
        # In this thread, the event loop's: Linux ends the child with the thread that started it.
        self._process = worker_process(options)
        _, self._log = await asyncio.to_thread(first_line, self._process, "worker")

    async def teardown(self, worker: Worker) -> None:
        """It drains. Dask may kill it before: a Nanny waits a few seconds for its Dask worker."""
        process, self._process = self._process, None
        if process is None:
            return
        await asyncio.to_thread(process.end, self._options.drain_timeout_ms / 1000 + AFTER_DRAIN_S)
        if self._log is not None:
            await asyncio.to_thread(self._log.join, AFTER_DRAIN_S)
