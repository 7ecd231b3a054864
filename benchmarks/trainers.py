"""Row `trainers`: 1 and 4 of them on one worker, whose pipeline is what takes the time.

Each reads all of it, through the cross-trainer cache: what all get together should grow with their
number, as it is produced once.
"""

from __future__ import annotations

import functools
import statistics

from .cluster import Cluster, grow, own_clusters
from .machine import require
from .photographs import write_photographs
from .results import Better, Finding, Result
from .setting import Setting

TRAINERS = 4
LEAST_GAIN = 3.5
CASE = "photographs"
WHAT = f"batches of 32 JPEG photographs, augmented; {TRAINERS} trainers share a cache"


def trainers(setting: Setting) -> list[Finding]:
    """Of photographs that are decoded and augmented."""
    require("sklearn")
    write_photographs(setting.files)
    rates = {}
    with own_clusters(setting, "trainers") as sides:
        for number in (1, TRAINERS):
            grow(sides, readers=number)
            rates[number] = setting.alternate(
                **{side: functools.partial(_rate, sides[side]) for side in ("peer", "ours")}
            )
    gains = {
        side: [rate / statistics.median(rates[1][side]) for rate in rates[TRAINERS][side]]
        for side in ("peer", "ours")
    }
    return [
        Result(
            row="trainers",
            what=f"{WHAT}: all together",
            unit="batches/s",
            better=Better.MORE,
            ours=rates[TRAINERS]["ours"],
            peer=rates[TRAINERS]["peer"],
            required_ratio=1,
        ),
        Result(
            row="trainers",
            what=f"{WHAT}: all together, over one alone",
            unit="×",
            better=Better.MORE,
            ours=gains["ours"],
            peer=gains["peer"],
            required=LEAST_GAIN,
        ),
    ]


def _rate(cluster: Cluster) -> float:
    return cluster.measure(CASE, cached=True).elements_per_s
