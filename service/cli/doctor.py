"""`forebay doctor`: where the time goes, what to change, and what it may bring."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import typer

from ..diagnosis import WAITS_FOR, WORKERS_DO, findings
from ..findings import Finding, duration, job_name, silent_s
from ..http.families import printable
from .console import plain_console
from .options import JSON, SERVICE, connects
from .status import PATIENCE_S, as_of, only

FOUND = 3
"""The exit code with findings that are more than notes."""


@connects
def doctor(
    service: str = SERVICE,
    job: str = typer.Argument(
        "", help="Only this job: its name, or its id.", envvar="FOREBAY_JOB", show_default=False
    ),
    as_json: bool = JSON,
) -> None:
    """Where the time goes, what holds trainers up, and what to do about it.

    The exit code is 0 if there is nothing to do, and 3 with a problem or something slow. It is 1
    without an answer, or without such a job.
    """
    from ..client.dispatcher_status import fetch_status
    from ..connections.dispatcher_client import DispatcherClient

    with DispatcherClient(service) as client:
        status = only(fetch_status(client, PATIENCE_S), job)
    found = findings(status)
    if as_json:
        print(json.dumps([finding._asdict() for finding in found], indent=2))
    else:
        console = plain_console()
        ago_s = silent_s(status)
        times = [*_times(status)]
        if ago_s and times:
            times.insert(0, f"as of {as_of(ago_s)}:")
        # The storage comes first: all else waits for it.
        for line in (*_told(found), *times) if ago_s else (*times, *_told(found)):
            console.print(printable(line), soft_wrap=True)
    if any(finding.severity != "note" for finding in found):
        raise typer.Exit(FOUND)


def _times(status: dict[str, Any]) -> Iterator[str]:
    """Where the time of trainers and workers goes, by job."""
    from rich.filesize import decimal

    names = {job["job_id"]: job_name(job) for job in status["jobs"]}
    for load in status.get("loads", []):
        if load["job_id"] not in names or "waits" not in load:
            continue
        waits_for = load.get("waits_for") or {"workers": load["waits"]}
        shares = {cause: share for cause, share in waits_for.items() if share}
        waits = [
            f"wait {shares[cause]:.0%} for {what}"
            for cause, what in WAITS_FOR.items()
            if cause in shares
        ]
        trains = max(0.0, 1 - sum(shares.values()))
        rate = f"{load['elements_per_s']:,.1f} elements/s"
        if received := load.get("bytes_per_s"):
            rate += f", {decimal(int(received))}/s"
        yield f"job {names[load['job_id']]}: {rate}"
        yield f"  trainers: {', '.join([f'train {trains:.0%} of the time', *waits])}"
        workers = load["workers"]
        by_worker = load.get("by_worker", [])
        parts = (
            f"{sum(one[key] for one in by_worker):.1f} {what}" for key, what in WORKERS_DO.items()
        )
        yield f"  {workers} worker{'' if workers == 1 else 's'}: {', '.join(parts)}"


def _told(found: list[Finding]) -> Iterator[str]:
    if not found:
        yield "nothing to do"
    for finding in found:
        since = "" if finding.since_s is None else f" (for {duration(finding.since_s)})"
        yield f"{finding.severity}: {finding.subject}: {finding.what}{since}"
        if finding.advice:
            yield f"  advice: {finding.advice}"
        if finding.gain is not None:
            yield f"  gain: at most {finding.gain:.1f} times the elements/s"
