"""Row `first_element`: how long a fresh trainer waits for its first element.

From the call of `from_dataset_id` on, in a process that has imported everything and whose
dataset is registered. The worker is not fresh: it has run other jobs.
"""

from __future__ import annotations

import functools

from .cluster import BenchmarkCluster, shared_clusters
from .elements import HOW
from .results import Better, Finding, Result
from .setting import Setting


def first_element(setting: Setting) -> list[Finding]:
    """Of images, one of which is an element that nobody would wait to gather others with."""
    sides = shared_clusters(setting)
    waits = setting.alternate(
        **{side: functools.partial(_wait_s, cluster) for side, cluster in sides.items()}
    )
    return [
        Result(
            row="first_element",
            what=f"time to the first of 150 KB uint8 images; peer: {how}",
            unit="s",
            better=Better.LESS,
            ours=waits["ours"],
            peer=waits[peer],
        )
        for peer, how in HOW.items()
    ]


def _wait_s(cluster: BenchmarkCluster) -> float:
    with cluster.fresh_reader():
        return cluster.measure("images", seconds=0).first_s
