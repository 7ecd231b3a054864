"""Row `trainers`: 1 and 4 trainers on one worker, whose pipeline is the bottleneck.

Each reads the whole dataset, through the cross-trainer cache. Elements are computed once, so the
total rate should grow with the number of trainers.
"""

from __future__ import annotations

import functools

from .cluster import BenchmarkCluster, grow, own_clusters
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
    with own_clusters(setting, "trainers") as sides:
        grow(sides, readers=TRAINERS)
        rates = setting.alternate(
            **{
                f"{side} {number}": functools.partial(_rate, sides[side], number)
                for side in ("peer", "ours")
                for number in (1, TRAINERS)
            }
        )
    together = {side: rates[f"{side} {TRAINERS}"] for side in ("peer", "ours")}
    gains = {
        side: [all_ / one for all_, one in zip(together[side], rates[f"{side} 1"], strict=True)]
        for side in ("peer", "ours")
    }
    return [
        Result(
            row="trainers",
            what=f"{WHAT}: all together",
            unit="batches/s",
            better=Better.MORE,
            ours=together["ours"],
            peer=together["peer"],
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


def _rate(cluster: BenchmarkCluster, trainers: int) -> float:
    return cluster.measure(CASE, trainers=trainers).elements_per_s
