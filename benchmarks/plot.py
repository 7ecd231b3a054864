"""Plots a run from its JSON: a bar for each ratio, and the curves."""

from __future__ import annotations

import json
import math
import pathlib
import statistics
from typing import Any

from ..service.errors import ForebayError, InvalidArgument
from .machine import require

BAR, NOISE, MARK = "tab:blue", "black", "tab:red"
COLOURS = ("tab:orange", "tab:green", "tab:blue")
DPI = 120
NAME = 60  # characters of a bar's label


def load(file: pathlib.Path) -> dict[str, Any]:
    """Load the record of an earlier run. Raises InvalidArgument for another file."""
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("results"), list):
        raise InvalidArgument(f'{file} is no record of a run: it has no list "results"')
    return record


def write_plots(record: dict[str, Any], beside: pathlib.Path) -> list[pathlib.Path]:
    """Write PNGs next to the file `beside`, with its name; return their paths.

    `record` is a report's JSON; one without ratios or curves gives no such picture. Raises
    ForebayError without matplotlib, or if a file cannot be written.
    """
    require("matplotlib")
    from matplotlib.figure import Figure

    written = []
    bars = [result for result in record["results"] if result["ratios"]]
    curves = [curve for curve in record.get("curves", ()) if any(curve["lines"].values())]
    for name, draw, drawn in (("ratios", _ratios, bars), ("curves", _curves, curves)):
        if not drawn:
            continue
        figure = Figure(layout="constrained")
        draw(figure, drawn)
        figure.suptitle(f"Forebay beside tf.data service, {record['started'][:10]}, "
                        f"{record['machine']['cores']} cores")  # fmt: skip
        path = beside.with_name(f"{beside.stem}-{name}.png")
        try:
            figure.savefig(path, format="png", dpi=DPI)
        except OSError as error:
            raise ForebayError(f"the plot could not be written to {path}: {error}") from None
        written.append(path)
    return written


def _ratios(figure: Any, results: list[dict[str, Any]]) -> None:
    """Plot medians as bars, their noise as whiskers, and requirements as marks."""
    from matplotlib.lines import Line2D

    figure.set_size_inches(12, 1.5 + 0.3 * len(results))
    axes = figure.add_subplot()
    places = range(len(results))
    medians = [statistics.median(result["ratios"]) for result in results]
    noise = [
        [median - min(result["ratios"]) for median, result in zip(medians, results, strict=True)],
        [max(result["ratios"]) - median for median, result in zip(medians, results, strict=True)],
    ]
    lengths = [median - 1 for median in medians]  # bars begin at 1: a worse figure goes left
    axes.barh(places, lengths, left=1, color=BAR)
    axes.errorbar(medians, places, xerr=noise, fmt="none", ecolor=NOISE, elinewidth=0.8)
    for place, median, result in zip(places, medians, results, strict=True):
        axes.annotate(
            f" {median:.3g} ×", (max(1, *result["ratios"]), place), va="center", fontsize="small"
        )
        if (ratio := result.get("required_ratio")) is not None:
            axes.plot([ratio, ratio], [place - 0.45, place + 0.45], color=MARK, linewidth=2)
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set(
        xscale="log",
        xlabel="how many times better than the peer (median; whiskers: least and most)",
    )
    axes.set_yticks(places, [_name(result) for result in results], fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.01)
    axes.legend(handles=[Line2D([], [], color=MARK, linewidth=2, label="required")])


def _name(result: dict[str, Any]) -> str:
    what, semicolon, how = result["what"].partition(";")
    what = what if len(what) <= NAME else f"{what[: NAME - 1]}…"
    return f"{what}{semicolon}{how}"


def _curves(figure: Any, curves: list[dict[str, Any]]) -> None:
    """A plot for each, with both axes logarithmic."""
    columns = min(2, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure.set_size_inches(6.5 * columns, 1 + 4.5 * rows)
    for axes, curve in zip(
        figure.subplots(rows, columns, squeeze=False).flat, curves, strict=False
    ):
        colours = COLOURS[-len(curve["lines"]) :]
        for (side, line), colour in zip(curve["lines"].items(), colours, strict=True):
            if line:
                axes.plot(*zip(*line, strict=True), marker="o", label=side, color=colour)
        axes.set(xscale="log", yscale="log", xlabel=curve["x"], ylabel=curve["y"])
        axes.set_title(curve["what"], fontsize="small")
        axes.grid(which="major", linewidth=0.3)
        axes.legend(fontsize="small")
    for axes in figure.axes[len(curves) :]:
        axes.remove()
