"""Rows `redis` and `redis_restart`: the journal in its own Redis, on this machine.

The peer has no such feature.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import time
from collections.abc import Iterator

from redis import Redis

from ..service import processes
from ..service.errors import ForebayError
from .durable import durable_events
from .restart import fill_journal, kill_to_first_split
from .results import Better, Result
from .servers import Server
from .setting import Setting

EVENTS = 1_000_000
QUICK_EVENTS = 2_000
REQUIRED = {"always": 30_000, "everysec": 70_000}  # events/s


@contextlib.contextmanager
def redis_storage(directory: pathlib.Path, appendfsync: str) -> Iterator[str]:
    """A Redis with an append-only file in `directory`; the URL of a storage in it."""
    port = processes.free_port()
    program = processes.redis_program()
    if program is None:
        raise ForebayError("there is no redis-server on this machine: apt-get install redis-server")
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--appendonly", "yes", "--appendfsync", appendfsync, "--dir", str(directory)]
    server = processes.ChildProcess(command, directory / "log")
    try:
        with contextlib.closing(Redis(port=port)) as client:
            while True:
                with contextlib.suppress(ConnectionError, OSError):
                    if client.ping():
                        break
                if server.poll() is not None:
                    raise ForebayError(f"redis-server ended: {processes.tail(directory / 'log')}")
                time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.end()


def redis(setting: Setting) -> list[Result]:
    """Durable events per second, from many callers with one event after another."""
    results = []
    for appendfsync, required in REQUIRED.items():
        with redis_storage(setting.directory(f"redis-{appendfsync}"), appendfsync) as url:
            how = f", appendfsync {appendfsync}"
            results.append(durable_events("redis", how, url, setting, required))
    return results


def redis_restart(setting: Setting) -> list[Result]:
    """kill -9 of the only dispatcher, and a new one on its port."""
    events = QUICK_EVENTS if setting.quick else EVENTS
    with redis_storage(setting.directory("redis-restart"), "always") as url:
        iteration_id = asyncio.run(fill_journal(url, events))

        def start(port: int) -> Server:
            return Server(
                "forebay.service.cli",
                *("dispatcher", "--storage", url, "--port", port),
                exit_with_parent=True,
            )

        figures = [kill_to_first_split(start, iteration_id) for _ in range(setting.rounds)]
    return [
        Result(
            row="redis_restart",
            what=f"kill -9 to the first split, {events:,} events in Redis",
            unit="s",
            better=Better.LESS,
            ours=figures,
            required=1.5,
        )
    ]
