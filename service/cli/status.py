"""`forebay status`: what the dispatcher knows."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ..dispatcher_client import DispatcherClient


def status(
    service: str = typer.Argument(..., help="HOST:PORT of the dispatcher."),
    watch: bool = typer.Option(False, help="Keep showing it, until interrupted."),
    as_json: bool = typer.Option(False, "--json", help="As JSON, for programs."),
) -> None:
    """Workers, jobs and iterations with their progress, the leader, the journal's position."""
    from rich.console import Console
    from rich.live import Live

    from ..dispatcher_client import DispatcherClient

    client = DispatcherClient(service)
    try:
        if not watch:
            summary = _fetch(client)
            if as_json:
                print(json.dumps(summary, indent=2))
            else:
                Console().print(render(summary))
            return
        with Live(render(_fetch(client)), refresh_per_second=4) as live:
            while True:
                time.sleep(0.5)
                live.update(render(_fetch(client)))
    finally:
        client.close()


def _fetch(client: DispatcherClient) -> dict[str, Any]:
    from ..proto import forebay_pb2 as pb

    answer = client.call(pb.GetStatusRequest(), pb.GetStatusResponse, patience_s=5)
    summary: dict[str, Any] = json.loads(answer.status)
    return summary


def render(summary: dict[str, Any]) -> Any:
    """The status as something that rich prints."""
    from rich.console import Group
    from rich.table import Table

    head = (
        f"dispatcher {summary['leader']}  term {summary['term']}  "
        f"journal {summary['journal_id'][:8]} at sequence {summary['sequence']}  "
        f"{summary['leases']} leases out"
    )
    workers = Table(
        "worker", "kind", "running tasks", "tags", title="workers", title_justify="left"
    )
    for w in summary["workers"]:
        kind = "tf.data service" if w["stock"] else "forebay"
        workers.add_row(w["address"], kind, str(w["running_tasks"]), ",".join(w["tags"]))
    jobs = Table(
        "job", "dataset", "sharding", "epoch", "consumers", "tasks", "splits", "state",
        title="jobs", title_justify="left",
    )  # fmt: skip
    for job in summary["jobs"]:
        for it in job["iterations"]:
            tasks = f"{it['completed_tasks']} done, {it['running_tasks']} running"
            jobs.add_row(
                str(job["name"] or job["job_id"]),
                job["dataset_id"],
                job["sharding"],
                str(it["repetition"]),
                str(it["consumers"]),
                tasks,
                " | ".join(map(_progress, it["providers"])) or "–",
                "finished" if it["finished"] else "open",
            )
    if not summary.get("strangers"):
        return Group(head, workers, jobs)
    strangers = Table(
        "who", "knows journal", "up to event",
        title="refused, since they know another journal", title_justify="left",
    )  # fmt: skip
    for stranger in summary["strangers"]:
        strangers.add_row(stranger["who"], stranger["journal_id"], str(stranger["sequence"]))
    return Group(head, workers, jobs, strangers)


def _progress(provider: dict[str, Any]) -> str:
    size = "∞" if provider["splits"] is None else provider["splits"]
    lost = f", {provider['lost']} lost" if provider["lost"] else ""
    return f"{provider['completed']} of {size}, {provider['leased']} out{lost}"
