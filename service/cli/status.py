"""`forebay status`: shows the dispatcher's state."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import typer

from ..errors import InvalidArgument, NotFound, Unavailable
from ..findings import change_text, duration, error_text, job_name, lost_text, silent_s
from ..http.families import label_value, printable
from .console import plain_console
from .options import JSON, SERVICE, connects

PATIENCE_S = 5.0
WATCH_S = 1.0
MOST_NAMED = 20
NAME_WIDTH = 24  # a job's longer name takes a second line

SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "job": lambda job: job["job_id"],
    "waits": lambda job: -job.get("waits", 0.0),
    "rate": lambda job: -job.get("elements_per_s", 0.0),
    "busy": lambda job: -job.get("busy", 0.0),
    "memory": lambda job: -job["held_bytes"],
}
"""By what jobs can be sorted; the first ones are those that need a look."""

WAIT_WORKERS = typer.Option(0, min=0, help="First wait until so many workers are registered.")
WAIT_TIMEOUT = typer.Option(
    60.0, min=0.0, help="Seconds to wait for them, and for the dispatcher, before giving up."
)


@connects
def status(
    service: str = SERVICE,
    watch: bool = typer.Option(False, help="Keep showing it, until interrupted."),
    as_json: bool = JSON,
    wait_workers: int = WAIT_WORKERS,
    wait_timeout_s: float = WAIT_TIMEOUT,
    job: str = typer.Option("", help="Only this job: its name, or its id.", show_default=False),
    sort: str = typer.Option("job", help=f"Loads by: {', '.join(SORTS)}."),
) -> None:
    """Workers, jobs with their progress and loads, the leader, the journal's position.

    The exit code is 1 without an answer, without so many workers, or without such a job; else 0.
    """
    from ..client.dispatcher_status import fetch_status, wait_for_workers
    from ..connections.dispatcher_client import DispatcherClient

    if sort not in SORTS:
        raise InvalidArgument(f"--sort {sort}: give one of {', '.join(SORTS)}")
    if watch and as_json:
        raise InvalidArgument("--watch shows tables: call again for the next --json")
    if wait_workers:
        wait_for_workers(service, wait_workers, timeout_s=wait_timeout_s)
    with DispatcherClient(service) as client:
        summary = only(fetch_status(client, PATIENCE_S), job)
        if as_json:
            print(json.dumps(summary, indent=2))
        elif not watch:
            plain_console().print(render(summary, sort))
        else:
            _watch(lambda: only(fetch_status(client, PATIENCE_S), job), summary, sort)


def _watch(fetch: Callable[[], dict[str, Any]], summary: dict[str, Any], sort: str) -> None:
    """Show it until interrupted, also while no dispatcher answers. Where nobody watches, as in a
    file, print each status once."""
    from rich.console import Group
    from rich.live import Live

    console = plain_console()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        show: Callable[[Any], None] = console.print
        if console.is_terminal:
            live = Live(console=console, screen=True, auto_refresh=False)
            for number in (signal.SIGTERM, signal.SIGHUP):  # the terminal is put back first
                signal.signal(number, lambda got, _: sys.exit(128 + got))
            stack.enter_context(live)
            show = partial(live.update, refresh=True)
        failed: list[Any] = []
        at = time.strftime("%X")
        while True:
            show(render(summary, sort) if not failed else Group(*failed))
            time.sleep(WATCH_S)
            try:
                summary, failed, at = fetch(), [], time.strftime("%X")
            except NotFound as error:  # the job may come
                failed = [str(error)]
            except Unavailable as error:
                failed = [f"as of {at}: {error}", render(summary, sort)]


def only(summary: dict[str, Any], job: str) -> dict[str, Any]:
    """The status with this job alone. Raises NotFound."""
    if not job:
        return summary

    def its(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [each for each in jobs if job in (job_name(each), str(each["job_id"]))]

    found, removed = its(summary["jobs"]), its(summary.get("removed_jobs", []))
    if not found and not removed:
        names = sorted(map(_name, summary["jobs"]))
        known = ", ".join(names[:MOST_NAMED]) or "none"
        more = f", and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        raise NotFound(f"there is no job {label_value(job)}; there are: {known}{more}")
    ids = {each["job_id"] for each in found}
    loads = [load for load in summary.get("loads", []) if load["job_id"] in ids]
    # The number of wanted workers is of all jobs together.
    return {
        **summary, "jobs": found, "removed_jobs": removed, "loads": loads, "wanted_workers": None,
    }  # fmt: skip


def render(summary: dict[str, Any], sort: str = "job") -> Any:
    """The status as tables for a plain console."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table

    head = (
        f"dispatcher {summary['leader']}  term {summary['term']}  "
        f"journal {summary['journal_id'][:8]} at sequence {summary['sequence']}  "
        f"{summary['leases']} leases out"
    )
    workers = Table(
        "worker", "kind", "running tasks", "tags", "data", title="workers", title_justify="left"
    )
    silent_workers = {each["address"]: each for each in summary.get("silent_workers", ())}
    for w in summary["workers"]:
        kind = "tf.data service" if w["stock"] else "forebay"
        kind += ", draining" if w.get("draining") else ""
        if silent := silent_workers.get(w["address"]):
            kind += f", silent for {duration(silent['silent_s'])}"
        tags = label_value(",".join(w["tags"]))
        ways = [way for way in w.get("data_addresses", ()) if way.startswith("tcp ")]
        data = label_value(", ".join(ways))
        workers.add_row(label_value(w["address"]), kind, str(w["running_tasks"]), tags, data)
    jobs = Table(title="jobs", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    longest = max((len(_name(job)) for job in summary["jobs"]), default=0)
    jobs.add_column("job", overflow="fold", min_width=min(longest, NAME_WIDTH))
    jobs.add_column("dataset", overflow="fold")
    for column in ("sharding", "epoch", "readers", "tasks", "splits"):
        jobs.add_column(column, no_wrap=column in ("sharding", "tasks"))
    for job in summary["jobs"]:
        cached = ", cached" if job.get("cross_trainer_cache") else ""
        order = job.get("order")
        claimed = order and order.get("claimed")
        sharding = "ordered" if order else job["sharding"] + cached
        sharding = "at least once" if claimed else sharding
        of_job = (_name(job), job["dataset_id"], sharding)
        over = [it for it in job["iterations"] if it["finished"]]
        # Earlier versions do not report "summarized".
        if runs := [*job.get("summarized", []), *([it["epoch"]] * 2 for it in over)]:
            lost = sum(source["lost"] for it in over for source in it["sources"])
            lost += job.get("lost_splits", 0)
            skipped = sum(it.get("skipped", 0) for it in over) + job.get("skipped_splits", 0)
            counts = _nonzero(lost=lost, skipped=skipped)
            jobs.add_row(*of_job, _runs(sorted(runs)), "", "finished", ", ".join(counts))
        elif not job["iterations"]:
            counts = [_lengths(order)] if order else []
            counts += _nonzero(skipped=job.get("skipped_splits", 0))
            jobs.add_row(*of_job, "", "", job.get("state", NOT_READ), ", ".join(counts))
        state = f"{job['state']}, " if "state" in job else ""  # earlier versions do not report it
        for it in [it for it in job["iterations"] if not it["finished"]]:
            done, running = it["completed_tasks"], it["running_tasks"]
            what = _claims(it["claims"]) if claimed else _lengths(order) if order else ""
            what = what or " | ".join(map(_progress, it["sources"])) or "–"
            jobs.add_row(
                *of_job, "all" if order and not claimed else str(it["epoch"]), _readers(it),
                f"{state}{done} of {done + running}",
                ", ".join([what, *_nonzero(skipped=it.get("skipped", 0))]),
            )  # fmt: skip
    names = {job["job_id"]: _name(job) for job in summary["jobs"]}
    old = [
        f"{summary['storage']['url']} does not answer (see `forebay doctor`); all below is as of "
        f"{as_of(silent)}"
        for silent in (silent_s(summary),)
        if silent
    ]
    parts: list[Any] = [*old, head, *_loads(summary, names, sort), workers, jobs]
    parts += [f"warning: {job['warning']}" for job in summary["jobs"] if job.get("warning")]
    parts += [
        f"{_name(job)}: {lost_text(loss)} lost: {printable(loss['why'])}; see `forebay audit`"
        for job in summary["jobs"]
        for loss in job.get("losses", [])
    ]
    of_errors = "job", "ago", "worker", "times", "error"
    parts += _table("errors", of_errors, _errors(summary))
    parts += _table("skipped", ("job", "epoch", "split", "worker", "why"), _skips(summary))
    of_changes = "job", "from step", "what changed", "who", "why"
    parts += _table("changes of schedules", of_changes, _changes(summary, names))
    of_metrics = "job", "epoch", "namespace", "metric", "value"
    parts += _table("metrics of splits that have ended", of_metrics, _metrics(summary))
    of_saves = "save", "streams", "splits", "elements", "rate", "left", "waits for"
    parts += _table("saves", of_saves, _saves(summary))
    refused_peers = (
        (refused_peer["who"], refused_peer["journal_id"], str(refused_peer["sequence"]))
        for refused_peer in summary.get("strangers", ())
    )
    refused = "refused, since they claim another journal"
    parts += _table(refused, ("who", "knows journal", "up to event"), refused_peers)
    return Group(*parts)


Row = tuple[str, ...]


def _table(title: str, columns: Iterable[Any], rows: Iterable[Row]) -> list[Any]:
    """A table, unless it has no rows."""
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return [table] if table.row_count else []


def _errors(summary: dict[str, Any]) -> Iterator[Row]:
    for job in (*summary["jobs"], *summary.get("removed_jobs", [])):
        for error in job.get("errors", [])[::-1]:
            ago = duration(max(0.0, (summary.get("now_ms", 0) - error["time_ms"]) // 1000))
            worker = label_value(error["worker"] or "")
            yield _name(job), ago, worker, str(error["times"]), printable(error_text(error))


def _skips(summary: dict[str, Any]) -> Iterator[Row]:
    for job in summary["jobs"]:
        for it in job["iterations"]:
            for skip in it.get("skips", []):
                where = f"{skip['split']}, element {skip['element']}"
                if records := skip.get("records"):
                    where += f": {records} records" if records > 1 else " alone"
                yield _name(job), str(it["epoch"]), where, skip["worker_address"], skip["reason"]


def _metrics(summary: dict[str, Any]) -> Iterator[Row]:
    for job in summary["jobs"]:
        for it in job["iterations"]:
            metrics, of_iteration = it.get("metrics"), (_name(job), str(it["epoch"]))
            for metric in metrics["values"] if metrics else ():
                yield *of_iteration, metric["namespace"], metric["name"], _counted(metric)
            if metrics and metrics["more"]:
                yield *of_iteration, "…", "…", "others are not kept"


def _changes(summary: dict[str, Any], names: dict[int, str]) -> Iterator[Row]:
    for job in summary.get("schedules", ()):
        for change in job["changes"]:
            told = change_text(change), change["who"] or "", change["reason"] or ""
            yield names[job["job_id"]], str(change["from_step"]), *map(printable, told)


def _saves(summary: dict[str, Any]) -> Iterator[Row]:
    rates = {rate["path"]: rate for rate in summary.get("save_rates", [])}
    for save in summary.get("saves", []):
        if save["state"] == "being written":
            streams = f"{save['completed_streams']} of {save['streams']}"
            told = _save_progress(save, rates.get(save["path"], {}))
            yield save["path"], streams, *told, save.get("waits_for") or ""


def as_of(ago_s: float) -> str:
    """The time of day so long ago, and how long that is."""
    return f"{time.strftime('%X', time.localtime(time.time() - ago_s))} ({duration(ago_s)} ago)"


NOT_READ = "not being read"


def _name(job: dict[str, Any]) -> str:
    """The user's own name of a job, for people: cut, and without control characters."""
    return label_value(job_name(job))


def _runs(ranges: list[list[int]]) -> str:
    """Format ascending ranges [first, last], and join adjacent ones: 1–9, 11."""
    runs: list[list[int]] = []
    for first, last in ranges:
        if runs and first == runs[-1][1] + 1:
            runs[-1][1] = last
        else:
            runs.append([first, last])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


def _nonzero(**numbers: int) -> list[str]:
    return [f"{number} {what}" for what, number in numbers.items() if number]


def _counted(metric: dict[str, Any]) -> str:
    match metric:
        case {"counter": value} | {"gauge": {"value": value}}:
            return f"{value}"
        case {"distribution": found}:
            mean = found["sum"] / found["count"]
            said = (f"{name} {found[name]}" for name in ("count", "sum", "min", "max"))
            return ", ".join([*said, f"mean {mean:.6g}"])
    return "?"


def _readers(iteration: dict[str, Any]) -> str:
    if group := iteration.get("group"):  # earlier versions do not report it
        return f"{len(group)} of {group[0]['consumers']}"
    return str(iteration["consumers"])


def _lengths(order: dict[str, Any]) -> str:
    return f"lengths of {order['known_lengths']} of {order['bundles']} bundles"


def _claims(claims: dict[str, Any]) -> str:
    bundles, done, left = claims["bundles"], claims["done"], claims["unclaimed"]
    return f"{done} of {bundles} bundles done, {bundles - done - left} claimed, {left} not"


def _progress(source: dict[str, Any]) -> str:
    size = "∞" if source["splits"] is None else source["splits"]
    lost = f", {source['lost']} lost" if source["lost"] else ""
    # Earlier versions do not report it.
    waits = ", waits for its save" if source.get("waits_for") else ""
    return f"{source['begun']} of {size}, {source['leased']} out{lost}{waits}"


def _loads(summary: dict[str, Any], names: dict[int, str], sort: str) -> Iterator[Any]:
    """Wanted workers, waits of trainers, memory of workers: of the jobs in `names`. Dispatchers of
    earlier versions say nothing of it."""
    from rich.filesize import decimal
    from rich.table import Column

    if wanted := summary.get("wanted_workers"):
        ready = wanted["ready"]
        yield f"workers wanted: {wanted['workers']}, ready: {ready}; {wanted['reason']}"
    workers = summary.get("memory", [])
    memory = [(w, job) for w in workers for job in w["jobs"] if job["job_id"] in names]
    held = {job_id: sum(job["held_bytes"] for _, job in memory if job["job_id"] == job_id)
            for job_id in names}  # fmt: skip
    listed = [
        {**job, "held_bytes": held[job["job_id"]]}
        for job in summary.get("loads", [])
        if job["job_id"] in names
    ]
    listed.sort(key=SORTS[sort])
    rows = []
    for job in listed:
        measured = ("–", "–", "–")
        if "waits" in job:
            busy = f"{job['busy']:.1f} of {job['workers']}"
            measured = (f"{job['elements_per_s']:.1f}", f"{job['waits']:.0%}", busy)
        wanted, size = job["wanted"]["workers"], decimal(job["held_bytes"])
        rows.append((names[job["job_id"]], *measured, size, str(wanted)))
    columns = "job", "elements/s", "trainers wait", "busy workers", "memory", "wanted"
    yield from _table("loads", columns, rows)
    if len(rows) > 1 or not summary.get("wanted_workers"):
        yield from (f"{names[job['job_id']]}: {job['wanted']['reason']}" for job in listed)
    budgets = [
        (
            label_value(worker["address"]), names[job["job_id"]],
            decimal(job["held_bytes"]), decimal(worker["budget_bytes"]),
            str(job["parked_tasks"]), str(job["shed_elements"]),
        )
        for worker, job in memory
        if job["held_bytes"] or job["parked_tasks"] or job["shed_elements"]
    ]  # fmt: skip
    of_worker = Column("worker", overflow="fold", min_width=15)
    of_memory = of_worker, "job", "holds", "of", "tasks parked", "elements dropped"
    yield from _table("memory of workers", of_memory, budgets)
    told = [(label_value(w["address"]), w["cache"]) for w in workers if w.get("cache")]
    caches = [(at, *map(decimal, cache.values())) for at, cache in told]
    of_caches = "worker", "holds", "of", "read of it", "fetched"
    yield from _table("caches of workers on their disks", of_caches, caches)


def _save_progress(save: dict[str, Any], rate: dict[str, Any]) -> tuple[str, str, str, str]:
    """Splits, elements, rate and time to go, as far as they are known."""
    # TensorFlow's workers tell which splits they begin, and earlier versions do not report more.
    done, sizes = save.get("written"), [size for size in save.get("splits", []) if size is not None]
    done = save.get("assigned") if done is None else done
    splits = "" if done is None else f"{done} of {min(sizes)}" if sizes else str(done)
    per_s = f"{rate['elements_per_s']:,.1f}/s" if rate else ""
    left_s = rate.get("left_s")
    left = "" if left_s is None else duration(left_s)
    return splits, f"{save.get('elements', 0):,}", per_s, left
