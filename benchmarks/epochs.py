"""Row `epochs`: a worker's memory growth over thousands of short epochs of one dataset."""

from __future__ import annotations

import contextlib

from .cluster import SIDES, BenchmarkCluster
from .results import Better, Result
from .setting import Setting

ELEMENTS = 10
WARM_UP = 100  # epochs, for one-time allocations


def epochs(setting: Setting) -> list[Result]:
    """Only our side; each epoch is its own job. One round: it takes minutes."""
    count = 20 if setting.quick else 5_000
    with contextlib.closing(
        BenchmarkCluster(SIDES["ours"], setting, setting.directory("epochs"))
    ) as ours:
        ours.grow(workers=1, readers=1)
        ours.wait_until_ready()
        before = _after(ours, 2 if setting.quick else WARM_UP)
        grown = _after(ours, count) - before
    return [
        Result(
            row="epochs",
            what=f"a worker's memory grows by, in {count:,} epochs of {ELEMENTS} elements",
            unit="MB",
            better=Better.LESS,
            ours=[grown],
            required=50,
        )
    ]


def _after(cluster: BenchmarkCluster, count: int) -> float:
    for _ in range(count):
        cluster.measure("scalars", size=ELEMENTS, seconds=60)
    return cluster.worker_rss_mb()
