"""`forebay dataset …`: lists and removes registered datasets."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import typer

from ..findings import duration
from ..http.families import printable
from .console import plain_console
from .options import JSON, SERVICE, FlagCommand, connects
from .status import PATIENCE_S

app = typer.Typer(help="List and remove registered datasets.", no_args_is_help=True)

DATASET_ID = typer.Argument("", help="As `forebay dataset list` shows it.", show_default=False)


@app.command("list", cls=FlagCommand)
@connects
def list_(service: str = SERVICE, as_json: bool = JSON) -> None:
    """List each dataset's id, elements, graph size, age, jobs, and when it was used last."""
    from ..client.datasets import list_datasets

    found = list_datasets(service, timeout_s=PATIENCE_S)
    if as_json:
        print(json.dumps([dataset.as_json() for dataset in found], indent=2))
    else:
        plain_console().print(render(found, time.time()))


@app.command(cls=FlagCommand)
@connects
def remove(
    service: str = SERVICE,
    dataset_id: str = DATASET_ID,
    force: bool = typer.Option(
        False, help="Remove it even if it is read; its readers get an error."
    ),
) -> None:
    """Remove a dataset, its jobs, and its graph from the storage.

    What has been read of the jobs' epochs is forgotten. Refused while somebody reads it.
    """
    from ..client.datasets import remove_dataset

    service, dataset_id = service_and_dataset(service, dataset_id)
    jobs = remove_dataset(service, dataset_id, force=force, timeout_s=PATIENCE_S)
    with_jobs = f", and its jobs {', '.join(jobs)}" if jobs else ""
    print(printable(f"dataset {dataset_id} is removed{with_jobs}"))


def service_and_dataset(service: str, dataset_id: str) -> tuple[str, str]:
    """Parse the arguments SERVICE DATASET_ID. A single argument is the dataset's id if the
    environment gives the service. Raises typer.BadParameter."""
    known = os.environ.get("FOREBAY_SERVICE", "")
    if not dataset_id and known and service != known:
        service, dataset_id = known, service
    if not dataset_id:
        raise typer.BadParameter(
            f"the id of a dataset is missing behind the service {service!r}; `forebay dataset list "
            f"{service}` shows them"
        )
    return service, dataset_id


def render(found: Any, now_s: float) -> Any:
    """The datasets as a table for a plain console."""
    from rich.table import Table

    columns = ("dataset", "elements", "graph", "registered", "last use", "jobs")
    table = Table(*columns, title="datasets", title_justify="left")
    for column in table.columns[:2]:
        column.overflow = "fold"
    for dataset in found:
        used = "now" if dataset.consumers else _ago(dataset.used_ms, now_s)
        prefix = f"dataset_id=/{dataset.dataset_id}/"  # tf.data service's clients put it there
        table.add_row(
            dataset.dataset_id,
            dataset.elements or "–",
            f"{dataset.graph_bytes:,} bytes" if dataset.graph_bytes else "–",
            _ago(dataset.registered_ms, now_s),
            used,
            printable(", ".join(job.removeprefix(prefix) for job in dataset.jobs)),
        )
    return table


def _ago(time_ms: int | None, now_s: float) -> str:
    return "–" if time_ms is None else f"{duration(max(0, round(now_s - time_ms / 1000)))} ago"
