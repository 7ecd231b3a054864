"""What `forebay status` shows of loads: wanted workers, waits of trainers, memory of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..diagnosis import duration
from ..http.families import label_value

SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "job": lambda job: job["job_id"],
    "waits": lambda job: -job.get("waits", 0.0),
    "rate": lambda job: -job.get("elements_per_s", 0.0),
    "busy": lambda job: -job.get("busy", 0.0),
    "memory": lambda job: -job["held_bytes"],
}
"""By what jobs can be sorted; the first ones are those that need a look."""


def tables(summary: dict[str, Any], names: dict[int, str], sort: str) -> Iterator[Any]:
    """Of the jobs in `names`. Dispatchers of earlier versions say nothing of it."""
    from rich.filesize import decimal
    from rich.table import Table

    if wanted := summary.get("wanted_workers"):
        ready = wanted["ready"]
        yield f"workers wanted: {wanted['workers']}, ready: {ready}; {wanted['reason']}"
    memory = [*_held(summary, names)]
    held = {job_id: sum(job["held_bytes"] for _, job in memory if job["job_id"] == job_id)
            for job_id in names}  # fmt: skip
    listed = [
        {**job, "held_bytes": held[job["job_id"]]}
        for job in summary.get("loads", [])
        if job["job_id"] in names
    ]
    columns = ("job", "elements/s", "trainers wait", "busy workers", "memory", "wanted")
    loads = Table(*columns, title="loads", title_justify="left")
    listed.sort(key=SORTS[sort])
    for job in listed:
        measured = ("–", "–", "–")
        if "waits" in job:
            busy = f"{job['busy']:.1f} of {job['workers']}"
            measured = (f"{job['elements_per_s']:.1f}", f"{job['waits']:.0%}", busy)
        wanted, size = job["wanted"]["workers"], decimal(job["held_bytes"])
        loads.add_row(names[job["job_id"]], *measured, size, str(wanted))
    if loads.row_count:
        yield loads
    if loads.row_count > 1 or not summary.get("wanted_workers"):
        yield from (f"{names[job['job_id']]}: {job['wanted']['reason']}" for job in listed)
    budgets = Table(title="memory of workers", title_justify="left")
    budgets.add_column("worker", overflow="fold", min_width=15)
    for name in ("job", "holds", "of", "tasks parked", "elements dropped"):
        budgets.add_column(name)
    for worker, job in memory:
        if job["held_bytes"] or job["parked_tasks"] or job["shed_elements"]:
            budgets.add_row(
                label_value(worker["address"]), names[job["job_id"]],
                decimal(job["held_bytes"]), decimal(worker["budget_bytes"]),
                str(job["parked_tasks"]), str(job["shed_elements"]),
            )  # fmt: skip
    if budgets.row_count:
        yield budgets


def progress_of(save: dict[str, Any], rate: dict[str, Any]) -> tuple[str, str, str, str]:
    """Splits, elements, rate and time to go, as far as they are known."""
    from rich.filesize import decimal

    # TensorFlow's workers tell which splits they begin, and earlier versions do not report more.
    done, sizes = save.get("written"), [size for size in save.get("splits", []) if size is not None]
    done = save.get("assigned") if done is None else done
    splits = "" if done is None else f"{done} of {min(sizes)}" if sizes else str(done)
    per_s = f"{rate['elements_per_s']:,.1f}/s" if rate else ""
    if rate.get("bytes_per_s"):
        per_s += f", {decimal(int(rate['bytes_per_s']))}/s"
    left_s = rate.get("left_s")
    left = "" if left_s is None else duration(left_s)
    return splits, f"{save.get('elements', 0):,}", per_s, left


def _held(
    summary: dict[str, Any], names: dict[int, str]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for worker in summary.get("memory", []):
        for job in worker["jobs"]:
            if job["job_id"] in names:
                yield worker, job
