"""Row `jax`: batches as global arrays, beside NumPy arrays. Only Forebay has both."""

from __future__ import annotations

import functools

from .cluster import SIDES, BenchmarkCluster
from .machine import require
from .results import Better, Costs, Finding, Result
from .setting import Setting

WHAT = "4.8 MB uint8 batches as global jax.Arrays over two CPU devices"
READ = "the same, as `read` has them"
LEAST = 0.9


def jax(setting: Setting) -> list[Finding]:
    """Batches are registered as such, of 32 images each."""
    require("jax")
    cluster = BenchmarkCluster(SIDES["ours"], setting, setting.directory("jax"))
    try:
        cluster.grow(workers=1, readers=1)
        cluster.wait_until_ready()
        readings = setting.alternate(
            ours=functools.partial(cluster.measure, "batches into JAX"),
            read=functools.partial(cluster.measure, "batches into NumPy"),
        )
    finally:
        cluster.close()
    return [
        Result(
            row="jax",
            what=f"{WHAT}; peer: {READ}",
            unit="batches/s",
            better=Better.MORE,
            ours=[reading.elements_per_s for reading in readings["ours"]],
            peer=[reading.elements_per_s for reading in readings["read"]],
            required_ratio=LEAST,
        ),
        Result(
            row="jax",
            what=f"{WHAT}: CPU for each, of worker and client; peer: {READ}",
            unit="ms",
            better=Better.LESS,
            ours=[reading.cpu_ms_per_element for reading in readings["ours"]],
            peer=[reading.cpu_ms_per_element for reading in readings["read"]],
            required_ratio=LEAST,
        ),
        Costs(row="jax", what=WHAT, side="Forebay", readings=readings["ours"]),
        Costs(row="jax", what=READ, side="Forebay", readings=readings["read"]),
    ]
