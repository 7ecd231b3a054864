"""A report in tables, for people."""

from __future__ import annotations

import statistics

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .results import Result
from .run import BenchmarkReport


def render(report: BenchmarkReport) -> RenderableType:
    """The whole report; figures are medians of the rounds, with minimum and maximum below."""
    parts: list[RenderableType] = [_table(report.results)] if report.results else []
    parts += [Text(f"{row} failed: {why}", style="red") for row, why in report.failed.items()]
    notes = ", ".join(f"{key} {value}" for key, value in report.machine.items())
    parts.append(f"median (min–max) of {report.rounds} rounds; {notes}")
    if quiet := report.calibrations_ms:
        parts.append(
            f"how quiet the machine was: a fixed loop took {min(quiet):.0f}–{max(quiet):.0f} ms "
            f"over {len(quiet)} rounds, {statistics.median(quiet):.0f} ms in the middle"
        )
    return Group(*parts)


def _table(results: list[Result]) -> Table:
    table = Table(title="Forebay beside tf.data service")
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
