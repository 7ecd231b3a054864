"""`forebay dispatcher` and `forebay worker`: servers that run until a signal stops them."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal

import typer

from ...storage.errors import StorageUnusable
from ..connections.credentials import credentials_of_server, use_credentials
from ..dispatcher.options import DispatcherOptions
from ..errors import ForebayError
from ..processes import DROPPED, EXIT_WITH_PARENT, end_with_parent, hide_from_user
from ..worker.options import WorkerOptions
from .logs import FORMAT, LogFormat, log_to_stderr
from .options import takes


@takes(DispatcherOptions)
def dispatcher(
    options: DispatcherOptions,
    *,
    exit_with_parent: bool = typer.Option(
        False, EXIT_WITH_PARENT, help="Stop when the parent has ended.", hidden=True
    ),
    log_format: LogFormat = FORMAT,
) -> None:
    """Run a dispatcher. Prints its target on one line when it serves; SIGTERM stops it."""
    from ..dispatcher.server import serve

    log_to_stderr(log_format)
    if exit_with_parent:
        end_with_parent()
    try:
        stopped = asyncio.run(
            serve(options, ready=lambda address: print(f"grpc://{address}", flush=True))
        )
    except StorageUnusable as error:
        raise ForebayError(f"{error} (--storage, FOREBAY_STORAGE)") from error
    raise typer.Exit(0 if stopped else 1)


@takes(WorkerOptions)
def worker(options: WorkerOptions, *, log_format: LogFormat = FORMAT) -> None:
    """Run a worker. Prints its address on one line when it is registered.

    SIGTERM drains it: it starts no further splits, and exits once its trainers have received the
    elements of the started ones. After the drain timeout it drops the rest, logs what it dropped,
    and exits with code 3.
    """
    from .. import malloc, pipelines

    pipelines.hide_gpus()
    malloc.manage_large_tensors()
    from ..worker.task_pipeline import Pipelines
    from ..worker.worker import Worker

    log_to_stderr(log_format)
    if options.tls_cert or options.token_file:
        hide_from_user()
    running = Worker(options, pipelines=Pipelines(warm=True))
    use_credentials(credentials_of_server(options))  # in users' functions, too
    running.start()
    gc.collect()
    gc.freeze()  # TensorFlow's objects: to look through them took a third of processor time
    # A Python signal handler runs only in this thread, once that is back in the interpreter. So
    # it cannot set an event whose lock this thread holds. If another thread gets the signal, or
    # it comes just before this one waits, nothing ends the wait. The C handler writes at once.
    interrupted, interrupt = os.pipe()
    os.set_blocking(interrupt, False)
    signal.set_wakeup_fd(interrupt, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):  # earlier, there was nothing to drain
        signal.signal(number, lambda *_: None)
    print(running.address, flush=True)
    by = signal.Signals(os.read(interrupted, 1)[0]).name
    logging.getLogger(__name__).info("drains and ends, as it was told to by %s", by)
    raise typer.Exit(0 if running.stop(drain=True) else DROPPED)
