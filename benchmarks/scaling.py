"""Rows `workers` and `consumers`: the total rate of several of them on one machine.

Under OFF each worker produces the whole dataset; consumers share a job.
"""

from __future__ import annotations

import functools

from .cluster import grow, own_clusters
from .elements import Kind, findings_of
from .results import Finding
from .setting import Setting

NUMBERS = (1, 2, 4)
CASE = "medium"
ELEMENTS = "16 KB uint8 elements"


def workers(setting: Setting) -> list[Finding]:
    """1, 2 and 4 workers for one consumer."""
    return _row("workers", setting)


def consumers(setting: Setting) -> list[Finding]:
    """1, 2 and 4 consumers of one worker."""
    return _row("consumers", setting)


def _row(row: str, setting: Setting) -> list[Finding]:
    findings: list[Finding] = []
    with own_clusters(setting, row) as sides:
        for number in NUMBERS[:2] if setting.quick else NUMBERS:
            grow(
                sides,
                workers=number if row == "workers" else 1,
                readers=number if row == "consumers" else 1,
            )
            readings = setting.alternate(
                **{
                    side: functools.partial(cluster.measure, CASE, seconds=setting.seconds / 2)
                    for side, cluster in sides.items()
                }
            )
            what = f"{ELEMENTS}, {number} {row if number > 1 else row[:-1]}, eager"
            findings += findings_of(row, Kind(case=CASE, what=what), readings)
    return findings
