"""Row `postgres`: the journal in its own PostgreSQL, on this machine.

The peer has no such feature.
"""

from __future__ import annotations

import contextlib
import pathlib
import signal
import time
from collections.abc import Iterator

from ..chaos.cluster import SERVES
from ..chaos.postgres import USER, make_cluster, server_command, signal_server
from ..service import processes
from ..service.errors import ForebayError
from .durable import durable_events
from .results import Result
from .setting import Setting

REQUIRED = 10_000  # events/s
START_S = 60.0


@contextlib.contextmanager
def postgres_storage(directory: pathlib.Path) -> Iterator[str]:
    """A PostgreSQL with its defaults in `directory`; the URL of a storage in it."""
    for path in (directory, directory.parent):
        path.chmod(0o711)  # PostgreSQL is not run as root
    make_cluster(directory / "data")
    port = processes.free_port()
    log = directory / "log"
    server = processes.ChildProcess(server_command(directory / "data", port), log)
    give_up_s = time.monotonic() + START_S
    try:
        while SERVES["postgres"] not in log.read_text():
            if server.poll() is not None or time.monotonic() > give_up_s:
                raise ForebayError(f"PostgreSQL does not serve: {processes.tail(log)}")
            time.sleep(0.02)
        yield f"postgresql://{USER}@127.0.0.1:{port}/postgres"
    finally:
        signal_server(server.pid, signal.SIGKILL)
        server.finish()


def postgres(setting: Setting) -> list[Result]:
    """Durable events per second, from many callers with one event after another."""
    with postgres_storage(setting.directory("postgres")) as url:
        how = " in PostgreSQL, fsync on"
        return [durable_events("postgres", how, url, setting, REQUIRED)]
