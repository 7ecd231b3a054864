"""The plot of a run: elements a second over time, with a mark for each fault."""

from __future__ import annotations

import pathlib
from typing import Any

from ..service.errors import ForebayError
from .report import ChaosReport

COLOURS = {"dispatcher": "tab:red", "worker": "tab:blue", "trainer": "tab:green",
           "claimer": "tab:olive", "ordered": "tab:pink", "redis": "tab:purple",
           "postgres": "tab:purple", "storage": "tab:brown", "crowd": "tab:orange",
           "network": "tab:cyan"}  # fmt: skip
LINES: dict[str, Any] = {"kill": "-", "terminate": "--", "pause": "-.", "start": "-"}
CONNECTIONS: Any = ":"  # faults of connections


def write_plot(report: ChaosReport, path: pathlib.Path) -> None:
    """Write a PNG. Raises ForebayError without matplotlib, or if it cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError:
        raise ForebayError("the plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.step(range(len(report.throughput)), report.throughput, where="post", color="black")
    for hit in report.hits:
        action, role = hit.kind.split()
        role = "dispatcher" if role in ("leader", "standby") else role
        style = LINES.get(action, CONNECTIONS)
        axes.axvline(hit.at_s, color=COLOURS[role], linestyle=style, linewidth=0.8)
    roles = dict.fromkeys(hit.kind.split()[1] for hit in report.hits)
    shown = [role for role in COLOURS if role in roles or (role == "dispatcher" and roles)]
    marks = [Line2D([], [], color=COLOURS[role], label=role) for role in shown]
    marks += [
        Line2D([], [], color="grey", linestyle=style, label=label)
        for label, style in {**LINES, "connections": CONNECTIONS}.items()
    ]
    axes.legend(handles=marks, ncols=len(marks), loc="upper center", bbox_to_anchor=(0.5, -0.15))
    axes.set(
        title=f"forebay chaos, seed {report.options.seed}, {report.options.storage}",
        xlabel="seconds since the faults began",
        ylabel="elements a second",
        ylim=(0, None),
    )
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ForebayError(f"the plot could not be written to {path}: {error}") from None
