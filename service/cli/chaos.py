"""`forebay chaos`: runs a cluster on this machine under random faults, and checks its promises."""

from __future__ import annotations

import pathlib
import random
import shutil
import signal
import tempfile
from typing import TYPE_CHECKING

import typer

from ..connections.credentials import use_credentials
from ..errors import ForebayError
from .extras import require_tools

if TYPE_CHECKING:
    from ...chaos.report import ChaosReport

ONLY = typer.Option([], help='A kind of fault, such as "kill worker"; repeatable. By default, all.')


def chaos(
    seed: int | None = typer.Option(
        None, min=0, help="Seed of the plan of faults; random by default."
    ),
    minutes: float = typer.Option(1.0, min=0.05, max=100_000, help="How long there are faults."),
    storage: str = typer.Option(
        "files",
        help='"files", "redis" or "postgres" (a server of its own), or the URL of an '
        "empty storage.",
        envvar="FOREBAY_CHAOS_STORAGE",  # FOREBAY_STORAGE is a dispatcher's
    ),
    dispatchers: int = typer.Option(2, min=1, help="One leads, the others stand by."),
    workers: int = typer.Option(
        2,
        min=1,
        envvar="FOREBAY_CHAOS_WORKERS",  # FOREBAY_WORKERS is a dispatcher's
    ),
    trainers: int = typer.Option(2, min=1),
    kill_every: float = typer.Option(2.0, min=0.1, help="Seconds between faults, on average."),
    elements: int = typer.Option(
        1000, min=1, help="Elements in each of an epoch's 4 passes; two workers make 500 a second."
    ),
    hosts: bool = typer.Option(
        False,
        help="Give each process a host of its own (a network namespace of Linux), and cut "
        "hosts off from each other, too.",
    ),
    tls: bool = typer.Option(
        False,
        help="Mutual TLS between all processes, with certificates that are replaced every "
        "few seconds.",
        envvar="FOREBAY_CHAOS_TLS",
    ),
    only: list[str] = ONLY,
    out: str = typer.Option(
        "", help="Keep logs, records and journal in this directory, which must not exist."
    ),
    json_file: str = typer.Option(
        "",
        "--json",
        help="Write the report to this file.",
        envvar="FOREBAY_CHAOS_JSON",  # elsewhere it is a flag
    ),
) -> None:
    """Run a cluster on this machine under random faults, and check what it promises.

    Exits 1 if a promise was broken. The seed fixes the plan of faults, not how real processes
    interleave: the same seed may find something at one time and not at another.
    """
    require_tools("chaos", "chaos")
    use_credentials(None)  # the cluster's servers are plain
    if hosts:  # before there are threads
        from ...chaos.hosts import enter_private_network

        enter_private_network()
    from rich.console import Console

    from ...chaos.cluster import Options
    from ...chaos.report import render
    from ...chaos.run import run_chaos

    if json_file and not pathlib.Path(json_file).parent.is_dir():  # check before the run
        raise ForebayError(f"--json {json_file} cannot be written: its directory does not exist")
    options = Options(
        seed=random.randrange(1 << 32) if seed is None else seed,
        duration_s=60 * minutes,
        kill_every_s=kill_every,
        storage=storage,
        dispatchers=dispatchers,
        workers=workers,
        trainers=trainers,
        elements=elements,
        only=tuple(only),
        hosts=hosts,
        tls=tls,
    )
    directory, keep = _make_directory(out), True
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it like Ctrl-C
    console = Console()
    try:
        with console.status("") as shown:
            report = run_chaos(options, directory, lambda what: shown.update(f"chaos: {what}"))
        keep = bool(out) or not report.kept
        console.print(render(report))
        if json_file:
            _write(report, json_file)
        for promise in report.verdict.broken:
            console.print(f"BROKEN: {promise}", style="bold red", markup=False, soft_wrap=True)
        if report.kept:
            console.print("every promise was kept", style="bold")
    except KeyboardInterrupt:
        keep = bool(out)
        raise
    finally:
        if keep and any(directory.iterdir()):
            console.print(f"logs, records and journal: {directory}", markup=False, soft_wrap=True)
        else:
            shutil.rmtree(directory)
    raise typer.Exit(0 if report.kept else 1)


def _make_directory(out: str) -> pathlib.Path:
    if not out:
        return pathlib.Path(tempfile.mkdtemp(prefix="forebay-chaos-"))
    try:
        pathlib.Path(out).mkdir(parents=True)
    except OSError as error:
        raise ForebayError(f"--out {out} cannot be made: {error}; name a new directory") from None
    return pathlib.Path(out)


def _write(report: ChaosReport, json_file: str) -> None:
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(report), indent=2)
    try:
        pathlib.Path(json_file).write_bytes(text + b"\n")
    except OSError as error:
        raise ForebayError(f"--json {json_file} cannot be written: {error}") from None
