"""ForebayWorkers: a plugin of Dask that runs a worker of Forebay beside each Dask worker.

    client = distributed.Client(scheduler)
    client.register_plugin(ForebayWorkers(WorkerConfig("10.0.0.5:5050", insecure=True)))
    …
    client.unregister_worker_plugin(ForebayWorkers.name)  # they drain

A Dask worker that comes later gets one, too. Each is a process of its own, so Dask's tasks and its
limits of memory do not concern it, and it ends with its Dask worker.
"""

from __future__ import annotations

from distributed import Worker, WorkerPlugin

from ...storage.thread_pool import in_a_thread
from ..servers import WorkerConfig
from .node_worker import NodeWorker


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
        self._worker = NodeWorker(config)
        self._resource = resource

    async def setup(self, worker: Worker) -> None:
        """Raises ForebayError with the reason if it cannot start."""
        if self._resource and self._resource not in worker.state.total_resources:
            return
        self._worker.launch(worker.ip)  # in this thread, the event loop's, which lasts
        await in_a_thread("forebay-dask", self._worker.wait_until_registered)

    async def teardown(self, worker: Worker) -> None:
        """It drains. Dask may kill it before: a Nanny waits a few seconds for its Dask worker."""
        await in_a_thread("forebay-dask", self._worker.stop)
