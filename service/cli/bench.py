"""`forebay bench`: the benchmarks, side by side with tf.data service in the same run."""

from __future__ import annotations

import pathlib
import tempfile
import time

import typer

from ..connections.credentials import use_credentials
from ..errors import ForebayError, InvalidArgument
from .extras import require_tools
from .progress_bar import progress

WIDTH = 130  # of the tables, at least
ROWS = typer.Argument(
    None, metavar="[ROW]…", help="What to measure, by default all. An unknown row lists them."
)


def bench(
    rows: list[str] = ROWS,
    rounds: int | None = typer.Option(
        None, min=1, help="How often to measure each side; 5 by default."
    ),
    quick: bool = typer.Option(
        False, "--quick", help="Only try out whether it runs: the figures mean nothing."
    ),
    json_file: str = typer.Option(
        "",
        "--json",
        help="Where the figures go; by default forebay-bench-<date>.json here, and nowhere if "
        "--quick.",
        envvar="FOREBAY_BENCH_JSON",  # elsewhere it is a flag
    ),
    directory: str = typer.Option(tempfile.gettempdir(), help="A folder for journals, on a disk."),
) -> None:
    """Measure Forebay beside TensorFlow's tf.data service, each in processes of its own."""
    require_tools("bench", "benchmarks")
    use_credentials(None)  # servers of both sides are plain
    from rich.console import Console

    from ...benchmarks.run import run, write
    from ...benchmarks.tables import render

    started = time.strftime("%Y-%m-%d-%H%M", time.gmtime())
    with progress("rows") as show:
        try:
            report = run(
                rows or [],
                rounds=rounds,
                quick=quick,
                directory=directory,
                progress=lambda row, done, of: show(done, of, f"measuring {row}"),
            )
        except InvalidArgument as error:
            raise typer.BadParameter(str(error)) from None
    Console(width=max(WIDTH, Console().width)).print(render(report))
    if json_file or not quick:
        file = pathlib.Path(json_file or f"forebay-bench-{started}.json")
        write(report, file)
        print(f"written: {file}")
    if report.interrupted:
        raise KeyboardInterrupt
    if report.failed:
        raise ForebayError(f"not all was measured: {', '.join(report.failed)} failed, see above")
