"""A chaos run: starts the cluster, injects faults, lets it settle, and judges."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ..service.errors import InvalidArgument
from ..storage import open_storage
from .cluster import SETTLE_S, Cluster, Options
from .faults import Faults
from .members import TRAINERS
from .plan import Fault, make_plan
from .report import ChaosReport, judge


def run_chaos(options: Options, directory: Path, tell: Callable[[str], None]) -> ChaosReport:
    """Run chaos in the main thread, with its files in `directory`. `tell` gets what it does.

    Leaves no process behind. Raises ForebayError if the cluster cannot be started, and
    StorageError if its journal cannot be read at the end.
    """
    if options.hosts and "://" in options.storage and not options.storage.startswith("file:"):
        raise InvalidArgument(
            f"--hosts with --storage {options.storage}: the hosts of a run reach only each other; "
            "use --storage redis or postgres, which start a server for the run, or files"
        )
    _require_empty(options.storage)
    plan = make_plan(
        options.seed, options.duration_s, options.kill_every_s, options.members, options.only
    )
    cluster = Cluster(options, directory)
    faults = Faults(cluster)
    try:
        tell("starting")
        cluster.start()
        began_s = time.monotonic()
        _inject(cluster, faults, plan, began_s, tell)
        _wait_until(cluster, began_s + options.duration_s)
        ended_s = time.monotonic()
        tell("settling")
        settled = cluster.settle()
        for role in (*TRAINERS, "worker", "dispatcher"):
            cluster.stop(role)
        report = judge(cluster, faults, options, began_s, ended_s)
        if not settled:
            report.verdict.broken.append(
                f"the last epoch had not ended {SETTLE_S:.0f} s after the last fault"
            )
        return report
    finally:
        cluster.close()


def _inject(
    cluster: Cluster, faults: Faults, plan: list[Fault], began_s: float, tell: Callable[[str], None]
) -> None:
    for fault in plan:
        _wait_until(cluster, began_s + fault.at_s)
        faults.hit(fault)
        missed = "" if faults.done[-1].name else " (it is away)"
        tell(f"{fault.at_s:6.1f} s  {fault.kind} {fault.number}{missed}")


def _wait_until(cluster: Cluster, at_s: float) -> None:
    timeout_s = at_s - time.monotonic()
    if timeout_s > 0:
        cluster.wait(lambda: False, timeout_s)


def _require_empty(url: str) -> None:
    if url in ("files", "redis", "postgres"):
        return
    if url.startswith("memory:"):
        raise InvalidArgument("--storage memory: is lost with the first dispatcher; name another")
    storage = open_storage(url)
    try:
        if storage.extent().last > 0:
            raise InvalidArgument(
                f"{storage.url} holds a journal already: chaos needs a storage of its own, so name "
                "an empty directory, or an unused prefix"
            )
    finally:
        storage.close()
