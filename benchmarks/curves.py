"""Rows `elements_curve` and `splits_curve`: the time to read a whole dataset, by its size."""

from __future__ import annotations

from .cluster import SIDES, shared_clusters
from .results import Curve, Finding
from .setting import Setting

LIMITS_S = {"ours": 100.0, "peer": 12.0, "uncompressed": 12.0}
ELEMENTS = (10_000, 30_000, 100_000, 1_000_000, 10_000_000)
SPLITS = (1_000, 10_000, 100_000, 1_000_000)
QUICK = (1_000, 2_000)


def elements_curve(setting: Setting) -> list[Finding]:
    """Scalars under OFF: one split, whatever their number."""
    what = "seconds to read all scalars, batched in-graph"
    return [_curve(setting, "elements_curve", what, "scalars", "elements", ELEMENTS)]


def splits_curve(setting: Setting) -> list[Finding]:
    """Scalars under DYNAMIC: a split for each."""
    what = "seconds to read all splits of one element (DYNAMIC), batched in-graph"
    return [_curve(setting, "splits_curve", what, "splits", "splits", SPLITS)]


def _curve(
    setting: Setting, row: str, what: str, case: str, unit: str, sizes: tuple[int, ...]
) -> Curve:
    """Read each size once, the sides in turn; a side that timed out reads no larger one."""
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    sides = dict(shared_clusters(setting))
    for size in QUICK if setting.quick else sizes:
        for name, cluster in tuple(sides.items()):
            reading = cluster.measure(case, size=size, seconds=LIMITS_S[name])
            if reading.ended:
                lines[name].append((size, reading.first_s + reading.seconds))
            else:
                del sides[name]
    limits = ", ".join(f"{SIDES[name].label} {limit:g} s" for name, limit in LIMITS_S.items())
    return Curve(
        row=row,
        what=what,
        x=unit,
        y="seconds",
        lines={SIDES[name].label: line for name, line in lines.items()},
        note=f"a line ends where a side would have taken longer than it was given: {limits}",
    )
