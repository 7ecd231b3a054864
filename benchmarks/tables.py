"""A report in tables, for people."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .results import Costs, Curve, Feeding, Result
from .run import BenchmarkReport

CURVE_WIDTH = 90


def render(report: BenchmarkReport) -> RenderableType:
    """The whole report; figures are medians of the rounds, with minimum and maximum below."""
    parts: list[RenderableType] = []
    if results := report.of(Result):
        parts.append(_results(results))
    if costs := report.of(Costs):
        parts.append(_costs(costs))
    parts += _feedings(report.of(Feeding))
    parts += map(_curve, report.of(Curve))
    parts += [Text(f"{row} failed: {why}", style="red") for row, why in report.failed.items()]
    notes = ", ".join(f"{key} {value}" for key, value in report.machine.items())
    parts.append(f"median (min–max) of {report.rounds} rounds; {notes}")
    if quiet := report.calibrations_ms:
        parts.append(
            f"how quiet the machine was: a fixed loop took {min(quiet):.0f}–{max(quiet):.0f} ms "
            f"over {len(quiet)} rounds, {statistics.median(quiet):.0f} ms in the middle"
        )
    return Group(*parts)


def _results(results: list[Result]) -> Table:
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


def _costs(costs: list[Costs]) -> Table:
    """Medians only, the sides of one case below each other."""
    table = Table(title="What it costs", show_lines=True)
    table.add_column("what")
    table.add_column("side", no_wrap=True)
    for header in ("elements/s", "MB/s", "worker CPU\ns/GB", "client CPU\ns/GB",
                   "worker peak\nMB", "client peak\nMB"):  # fmt: skip
        table.add_column(header, justify="right", no_wrap=True)
    for (_, what), sides in itertools.groupby(costs, lambda cost: (cost.row, cost.what)):
        lines = [(_short(c.side), *map(_median, c.figures().values())) for c in sides]
        table.add_row(what, *("\n".join(column) for column in zip(*lines, strict=True)))
    return table


def _feedings(feedings: list[Feeding]) -> Iterator[Table]:
    """A table a row of the benchmark: medians, and the spread of the ratio."""
    for (row, what), ways in itertools.groupby(feedings, lambda f: (f.row, f.what)):
        table = Table(title=f"{row}: {what}; processor time of all processes")
        table.add_column("way", no_wrap=True, min_width=26)
        for header in ("elements/s", "MB/s", "CPU µs each", "of it client", "× bare", "(min–max)",
                       "required"):  # fmt: skip
            table.add_column(header, justify="right", no_wrap=True)
        for feeding in ways:
            ratios = feeding.ratios()
            table.add_row(
                feeding.way,
                *map(_median, feeding.figures().values()),
                f"{number(min(ratios))}–{number(max(ratios))}",
                _required(feeding),
            )
        yield table


def _required(feeding: Feeding) -> str:
    return "\n".join(
        f"{what} [green]✓[/]" if met else f"{what} [red]{number(found)} ✗[/]"
        for what, found, met in feeding.requirements()
    )


def _short(side: str) -> str:
    """A setting of a service, below the line of that service."""
    service, comma, setting = side.partition(", ")
    return f"  {setting}" if comma else service


def _median(figures: list[float]) -> str:
    return number(statistics.median(figures))


def _curve(curve: Curve) -> Table:
    table = Table(
        title=f"{curve.what}: {curve.y}", caption=curve.note or None, min_width=CURVE_WIDTH
    )
    xs = sorted({x for line in curve.lines.values() for x, _ in line})
    for header in (curve.x, *curve.lines):
        table.add_column(header, justify="right")
    lines = [dict(line) for line in curve.lines.values()]
    for x in xs:
        table.add_row(number(x), *(number(line[x]) if x in line else "" for line in lines))
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
