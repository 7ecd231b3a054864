"""Row `first_element`: how long a trainer waits for its first element.

The time begins with the call of `from_dataset_id`. The process has imported everything, its dataset
is registered, and the worker has run other jobs. *Cold*: the trainer has read nothing yet, and
nobody has read a dataset of such a graph and element_spec. *Warm*: both have run it before.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from .cluster import BenchmarkCluster, shared_clusters
from .elements import HOW
from .results import Better, Finding, Result
from .setting import Setting

REQUIRED = {"cold": 1.0, "warm": 1.5}


def first_element(setting: Setting) -> list[Finding]:
    """Images: a single one is large enough to be sent at once."""
    sides = shared_clusters(setting)
    waits = setting.alternate(
        **{
            side: functools.partial(_waits_s, cluster, itertools.count(300))
            for side, cluster in sides.items()
        }
    )
    return [
        Result(
            row="first_element",
            what=f"{state}: time to the first of 150 KB uint8 images; peer: {how}",
            unit="s",
            better=Better.LESS,
            ours=[wait[state] for wait in waits["ours"]],
            peer=[wait[state] for wait in waits[peer]],
            required_ratio=least,
        )
        for state, least in REQUIRED.items()
        for peer, how in HOW.items()
    ]


def _waits_s(cluster: BenchmarkCluster, widths: Iterator[int]) -> dict[str, float]:
    width = next(widths)
    with cluster.fresh_reader():
        return {
            state: cluster.measure("images of a width", size=width, seconds=0).first_s
            for state in REQUIRED
        }
