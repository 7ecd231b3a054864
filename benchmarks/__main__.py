"""python -m benchmarks [ROW …] [--rounds N] [--quick] [--json FILE] [--directory DIR]"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from .elements import batches, scalars
from .failover import failover
from .machine import describe, filesystem
from .memory import memory
from .redis import redis, redis_restart
from .restart import restart
from .results import Result
from .setting import Setting
from .splits import get_split, leases

ROWS: dict[str, Callable[[Setting], list[Result]]] = {
    "restart": restart,
    "leases": leases,
    "get_split": get_split,
    "scalars": scalars,
    "batches": batches,
    "memory": memory,
    "redis": redis,
    "redis_restart": redis_restart,
    "failover": failover,
}
ROUNDS = 5
SECONDS = 5.0
QUICK_SECONDS = 0.5
WIDTH = 120  # of the table, at least


def main() -> int:
    arguments = parse()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # for TensorFlow, wherever it is used
    started = datetime.datetime.now(datetime.UTC)
    console = Console(stderr=True)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=arguments.directory) as name:
        setting = Setting(
            rounds=arguments.rounds,
            quick=arguments.quick,
            path=pathlib.Path(name),
            seconds=QUICK_SECONDS if arguments.quick else SECONDS,
        )
        machine = describe(setting.path)
        for row in arguments.rows or ROWS:
            with console.status(f"measuring {row} …"):
                results += ROWS[row](setting)
    Console(width=max(WIDTH, console.width)).print(table(results, machine))
    if file := arguments.json or default_file(started, arguments.quick):
        file.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "started": started.isoformat(timespec="seconds"),
            "quick": arguments.quick,
            "machine": machine,
            "results": [result.as_json() for result in results],
        }
        file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        console.print(f"written to {file}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__package__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"{', '.join(ROWS)}; default: all")
    parser.add_argument("--rounds", type=int, help=f"of measuring each side; default: {ROUNDS}")
    parser.add_argument("--quick", action="store_true", help="only try out whether it runs")
    parser.add_argument("--json", type=pathlib.Path, help="default: benchmarks/results/<date>.json")
    parser.add_argument(
        "--directory", default=tempfile.gettempdir(), help="for journals; on a disk"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.rows) - ROWS.keys():
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if filesystem(arguments.directory) == "tmpfs" and not arguments.quick:
        parser.error(
            f"{arguments.directory} is in memory, where fsync costs nothing; give a --directory "
            "on a disk"
        )
    arguments.rounds = arguments.rounds or (1 if arguments.quick else ROUNDS)
    return arguments


def default_file(started: datetime.datetime, quick: bool) -> pathlib.Path | None:
    """Where the figures go if nothing is said; those of a trial go nowhere."""
    if quick:
        return None
    return pathlib.Path(__file__).parent / "results" / f"{started:%Y-%m-%d-%H%M}.json"


def table(results: list[Result], machine: dict[str, object]) -> Table:
    table = Table(
        title="Forebay beside tf.data service",
        caption="median (min–max) of the rounds; "
        + ", ".join(f"{k} {v}" for k, v in machine.items()),
    )
    for header in ("row", "what", "tf.data service", "Forebay", "ratio", "required"):
        table.add_column(header, justify="left" if header in ("row", "what") else "right")
    for result in results:
        met = "" if not result.requirement() else " [green]✓[/]" if result.met() else " [red]✗[/]"
        table.add_row(
            result.row,
            f"{result.what} ({result.unit})",
            spread(result.peer),
            spread(result.ours),
            spread(result.ratios(), " ×"),
            result.requirement() + met,
        )
    return table


def spread(figures: list[float], unit: str = "") -> str:
    """The median, and the noise around it."""
    if not figures:
        return ""
    median = f"{number(statistics.median(figures))}{unit}"
    if len(figures) == 1:
        return median
    return f"{median}\n[dim]({number(min(figures))}–{number(max(figures))})[/]"


def number(figure: float) -> str:
    """Three digits, and thousands set apart."""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


if __name__ == "__main__":
    sys.exit(main())
