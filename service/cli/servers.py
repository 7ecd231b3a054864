"""`forebay dispatcher` and `forebay worker`: servers that run until they are told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading

import typer

from ..connections.protocols import SERVED, transfer_protocol
from ..dispatcher.options import DispatcherOptions
from ..errors import InvalidArgument
from ..processes import DROPPED

DEFAULTS = DispatcherOptions()


def _log_to_stderr() -> None:
    level = os.environ.get("FOREBAY_LOG_LEVEL", "info")
    if level.upper() not in logging.getLevelNamesMapping():
        raise InvalidArgument(
            f"FOREBAY_LOG_LEVEL={level!r} is no level; use debug, info, warning, error or critical"
        )
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def _exit_with_parent() -> None:
    """End this process once its standard input closes: its parent holds the other end."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="forebay-parent-watch", daemon=True).start()


def dispatcher(
    port: int = typer.Option(0, min=0, max=65535, help="0: any free one.", envvar="FOREBAY_PORT"),
    storage: str = typer.Option(
        "memory:",
        help="Where the journal lives: file:///dir, a plain path, redis://host:port/db, or memory: "
        "(lost at exit).",
        envvar="FOREBAY_STORAGE",
    ),
    existing: bool = typer.Option(
        False, "--existing",
        help="Refuse to begin a new journal: for every start but a storage's first.",
        envvar="FOREBAY_EXISTING",
    ),
    host: str = typer.Option("127.0.0.1", help="Address to listen on.", envvar="FOREBAY_HOST"),
    address: str = typer.Option(
        "", help="What clients are told, HOST:PORT; %port% stands for --port. By default, the "
        "address that it listens on.", envvar="FOREBAY_ADDRESS",
    ),
    standby: bool = typer.Option(
        False, "--standby", help="Wait for the leader on this storage to fall silent, then lead.",
        envvar="FOREBAY_STANDBY",
    ),
    leader_lease_ms: int = typer.Option(
        DEFAULTS.leader_lease_ms, min=100, help="How long a silent leader keeps its place.",
        envvar="FOREBAY_LEADER_LEASE_MS",
    ),
    allow_volatile: bool = typer.Option(
        False, "--allow-volatile",
        help="Use a Redis whose settings can lose acknowledged events.",
        envvar="FOREBAY_ALLOW_VOLATILE",
    ),
    job_gc_check_interval_ms: int = typer.Option(
        DEFAULTS.job_gc_check_interval_ms, min=1,
        help="How often it looks for iterations that nobody reads.",
        envvar="FOREBAY_JOB_GC_CHECK_INTERVAL_MS",
    ),
    job_gc_timeout_ms: int = typer.Option(
        DEFAULTS.job_gc_timeout_ms, min=-1,
        help="Collect an iteration that nobody read for so long; -1: never.",
        envvar="FOREBAY_JOB_GC_TIMEOUT_MS",
    ),
    dynamic_gc_timeout_ms: int = typer.Option(
        DEFAULTS.dynamic_gc_timeout_ms, min=-1,
        help="The same with DYNAMIC sharding. If somebody joins such an iteration again, it goes "
        "on with the splits that are left.",
        envvar="FOREBAY_DYNAMIC_GC_TIMEOUT_MS",
    ),
    max_idle_iterations: int = typer.Option(
        DEFAULTS.max_idle_iterations, min=-1,
        help="Of the iterations of a job that nobody reads, such as epochs that were left early, "
        "keep the latest so many at once; -1: all.",
        envvar="FOREBAY_MAX_IDLE_ITERATIONS",
    ),
    worker_timeout_ms: int = typer.Option(
        DEFAULTS.worker_timeout_ms, min=-1,
        help="Give up a worker that is silent for so long; -1: never.",
        envvar="FOREBAY_WORKER_TIMEOUT_MS",
    ),
    reconnect_grace_ms: int = typer.Option(
        DEFAULTS.reconnect_grace_ms, min=100,
        help="How long a worker has to come back whose connection broke; three times that after a "
        "change of dispatchers.",
        envvar="FOREBAY_RECONNECT_GRACE_MS",
    ),
    client_timeout_ms: int = typer.Option(
        DEFAULTS.client_timeout_ms, min=-1,
        help="Give up a consumer that is silent for so long; -1: never.",
        envvar="FOREBAY_CLIENT_TIMEOUT_MS",
    ),
    snapshot_events: int = typer.Option(
        DEFAULTS.snapshot_events, min=1, help="Events between snapshots of the state, at least.",
        envvar="FOREBAY_SNAPSHOT_EVENTS",
    ),
    retention_hours: float = typer.Option(
        DEFAULTS.retention_hours, min=0.0, help="How long history is kept.",
        envvar="FOREBAY_RETENTION_HOURS",
    ),
    exit_with_parent: bool = typer.Option(
        False, help="Stop when standard input closes.", hidden=True
    ),
) -> None:  # fmt: skip
    """Run a dispatcher. Prints its target on one line when it serves; SIGTERM stops it."""
    from ..dispatcher.server import serve

    _log_to_stderr()
    options = DispatcherOptions(
        storage=storage,
        existing=existing,
        host=host,
        port=port,
        address=address,
        standby=standby,
        leader_lease_ms=leader_lease_ms,
        allow_volatile=allow_volatile,
        job_gc_check_interval_ms=job_gc_check_interval_ms,
        job_gc_timeout_ms=job_gc_timeout_ms,
        dynamic_gc_timeout_ms=dynamic_gc_timeout_ms,
        max_idle_iterations=max_idle_iterations,
        worker_timeout_ms=worker_timeout_ms,
        client_timeout_ms=client_timeout_ms,
        reconnect_grace_ms=reconnect_grace_ms,
        snapshot_events=snapshot_events,
        retention_hours=retention_hours,
    )
    if exit_with_parent:
        _exit_with_parent()
    stopped = asyncio.run(
        serve(options, ready=lambda address: print(f"grpc://{address}", flush=True))
    )
    raise typer.Exit(0 if stopped else 1)


def worker(
    dispatcher: str = typer.Option(
        ..., help="HOST:PORT of the dispatcher; several, comma-separated.",
        envvar="FOREBAY_DISPATCHER",
    ),
    port: int = typer.Option(0, min=0, max=65535, help="0: any free one.", envvar="FOREBAY_PORT"),
    host: str = typer.Option("127.0.0.1", help="Address to listen on.", envvar="FOREBAY_HOST"),
    data_port: int = typer.Option(
        0, min=0, max=65535, help="Of the data connections; 0: any free one.",
        envvar="FOREBAY_DATA_PORT",
    ),
    address: str = typer.Option(
        "", help="What clients are told, HOST:PORT; %port% stands for --port. By default, the "
        "address that it listens on.", envvar="FOREBAY_ADDRESS",
    ),
    data_address: str = typer.Option(
        "", help="What clients are told of the data connections, HOST:PORT; %port% stands for "
        "--data-port. By default, the host of --address.", envvar="FOREBAY_DATA_ADDRESS",
    ),
    data_transfer_protocol: str = typer.Option(
        "AUTO", help="Offer elements in this way only: unix, tcp or grpc.",
        envvar="FOREBAY_DATA_TRANSFER_PROTOCOL",
    ),
    tags: str = typer.Option("", help="Comma-separated.", envvar="FOREBAY_TAGS"),
    dispatcher_timeout_ms: int = typer.Option(
        60_000, min=1, help="How long to look for the dispatcher at the start.",
        envvar="FOREBAY_DISPATCHER_TIMEOUT_MS",
    ),
    drain_timeout_ms: int = typer.Option(
        20_000, min=0,
        help="How long trainers have to take what has been begun, when the worker is told to stop.",
        envvar="FOREBAY_DRAIN_TIMEOUT_MS",
    ),
) -> None:  # fmt: skip
    """Run a worker. Prints its address on one line when it is registered.

    SIGTERM drains it: it begins nothing more, and ends once the trainers that read have what has
    been begun. If they do not take it within the drain timeout, it is dropped, the log says what,
    and the exit code is 3.
    """
    from ..worker import Worker, WorkerOptions

    if not dispatcher:
        raise InvalidArgument("--dispatcher is empty; give the HOST:PORT of a dispatcher")
    _log_to_stderr()
    interrupted = threading.Event()
    running = Worker(
        WorkerOptions(
            dispatcher=dispatcher,
            host=host,
            port=port,
            data_port=data_port,
            address=address,
            data_address=data_address,
            data_transfer_protocol=transfer_protocol(data_transfer_protocol, SERVED),
            tags=tuple(tag for tag in tags.split(",") if tag),
            dispatcher_timeout_ms=dispatcher_timeout_ms,
            drain_timeout_ms=drain_timeout_ms,
        )
    )
    running.start()
    for number in (signal.SIGTERM, signal.SIGINT):  # before this there is nothing to drain
        signal.signal(number, lambda *_: interrupted.set())
    print(running.address, flush=True)
    while not interrupted.wait(60):
        pass
    raise typer.Exit(0 if running.stop(drain=True) else DROPPED)
