"""From a status to what the templates show. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from markupsafe import Markup, escape
from rich.filesize import decimal

from ..diagnosis import WAITS_FOR, WORKERS_DO
from ..findings import change_text, duration, error_text, job_name, lost_text
from ..http.families import label_value, printable
from . import split_map
from .series import Series, line, round_up

MOST_ROWS = 50
"""Rows of a table on a page; links lead to the next ones."""

MOST_TITLE = 1_000
"""Characters of a long name that its title has."""

COLUMNS = {
    "worker": "address",
    "elements/s": "elements_per_s",
    "buffers": "held_bytes",
    "errors": "errors",
    "last heard": "silent_s",
    "tasks": "running_tasks",
}
"""By what workers can be sorted: numbers from the largest on."""


MARKS = {
    "lost": "a worker or trainer was given up",
    "change": "workers came, left or drain",
    "leader": "another dispatcher leads",
    "error": "a read failed, or something was left out",
}
"""What is marked in plots, by kind, in words."""


class Plot(NamedTuple):
    """A plot of one or more lines over the run."""

    title: str
    now: str
    scale: tuple[str, ...]  # at the upper edge, the middle and the lower edge
    lines: list[tuple[str, str, str]]  # name, newest value, SVG path
    marks: list[tuple[str, int, str]]  # kind, x, what happened
    from_ms: int
    said: str  # for those who do not see it


class Plots(NamedTuple):
    """Plots of the same time."""

    all: list[Plot]
    marks: set[str]  # their kinds


# -- texts ----------------------------------------------------------------------------------


def named(text: object) -> Markup:
    """A user's name as HTML, cut if it is long; its title has more."""
    short = label_value(str(text))
    if short == str(text):
        return escape(short)
    return Markup('<span title="{}">{}</span>').format(printable(str(text))[:MOST_TITLE], short)


def number(value: float | None) -> str:
    """1,234; 12.3; 0.12."""
    if value is None:
        return "–"
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def size(value: float | None) -> str:
    """Bytes: 12.3 MB."""
    return "–" if value is None else decimal(int(value))


def moment(time_ms: float | None) -> Markup:
    """A time as HTML, in UTC, as the logs and `forebay journal` have it."""
    if not time_ms:
        return Markup("–")
    at = datetime.fromtimestamp(time_ms / 1000, UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        at.isoformat(timespec="milliseconds"), f"{at:%H:%M:%S}"
    )


FILTERS = {
    "visible": lambda text: printable(str(text)), "named": named, "number": number,
    "percent": percent, "size": size, "duration": duration, "moment": moment,
    "error": error_text,
}  # fmt: skip


# -- jobs -----------------------------------------------------------------------------------


UNMEASURED = dict.fromkeys(("elements_per_s", "waits", "busy", "workers", "wanted"))


def jobs(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each job: those that are read first, by their ids; then the others, by when they
    were read last. The newest come first."""
    loads = {load["job_id"]: load for load in status.get("loads", [])}
    changes = {each["job_id"]: each["changes"] for each in status.get("schedules", [])}
    now_ms = status.get("now_ms") or status["time_ms"]  # or as of an event
    rows = []
    for job in status["jobs"]:
        told = {**job, "changes": changes.get(job["job_id"], ())}
        rows.append(_job(told, {**UNMEASURED, **loads.get(job["job_id"], {})}, now_ms))
    return sorted(rows, key=lambda row: (row["age_s"] if row["is_dead"] else -math.inf, -row["id"]))


def _job(job: Mapping[str, Any], load: Mapping[str, Any], now_ms: int) -> dict[str, Any]:
    running = [it for it in job["iterations"] if not it["finished"]]
    order = job.get("order")
    kind = job["sharding"] if order is None else "ordered"
    if order is not None and order["claimed"]:
        kind = "at least once"
    state = job["state"]
    row = {
        "id": job["job_id"], "name": job_name(job), "dataset": job["dataset_id"], "kind": kind,
        "cached": job["cross_trainer_cache"], "load": load, "order": order,
        "state": state, "is_dead": state not in ("running", "waiting"),
        "age_s": _age_s(job, now_ms),
        "errors": sorted(job["errors"], key=lambda one: (one["worker"] or "", -one["time_ms"])),
        "losses": [{**x, "what": lost_text(x)} for x in job["losses"][::-1]],
        "changes": [
            {**x, "what": change_text(x), "bar": _bar(x.get("weights", {}))} for x in job["changes"]
        ],
        "gone": job["gone"], "left": job["left"], "iterations": job["iterations"],
        "running": running,
        "readers": sum(it["consumers"] for it in running) - len(job["gone"]),
        "epochs": ["all" if kind == "ordered" else it["epoch"] for it in running],
        "done": None, "of": None, "to_go_s": None,
        "lost": job["lost_splits"], "skipped": job["skipped_splits"], "warning": job["warning"],
        "no_task": next((it["no_task"] for it in running if it["no_task"]), None),
        "splits_per_s": job.get("splits_per_s") if state == "running" else None,
    }  # fmt: skip
    for it in job["iterations"]:
        row["lost"] += sum(source["lost"] for source in it["sources"])
        row["skipped"] += it["skipped"]
    done, of = 0, 0.0
    for it in running:
        if claims := it["claims"]:
            done, of = done + claims["done"], of + claims["bundles"]
        for source in it["sources"]:
            done = done + source["begun"] + source["lost"]
            of = math.inf if source["splits"] is None else of + source["splits"]
    if of:
        row["done"], row["of"] = done, None if of == math.inf else int(of)
        if row["of"] and row["splits_per_s"]:
            row["to_go_s"] = (of - done) / row["splits_per_s"]
    return row


def _bar(weights: Mapping[str, float]) -> list[tuple[float, float]]:
    """Where the weights begin in a bar of 100, and how long they are."""
    ends = itertools.accumulate(weights.values(), initial=0.0)
    return [(round(100 * end, 2), round(100 * w, 2)) for end, w in zip(ends, weights.values())]  # noqa: B905


def _age_s(job: Mapping[str, Any], now_ms: int) -> float:
    """How long ago it was joined or left last, or a consumer that seems to have ended was heard."""
    silent = (gone["silent_s"] for gone in job["gone"])
    since_s: float = min(silent, default=max(0, now_ms - job["used_ms"]) / 1000)
    return math.floor(since_s)


def consumers(
    iterations: Iterable[Mapping[str, Any]], told: Mapping[int, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A row for each consumer that has told of itself, or is of the group of an ordered read: where
    it is, by what it received since it began."""
    rows = {number: {"id": number, **load} for number, load in told.items()}
    for it in iterations:
        for member in it["group"]:
            row = rows.setdefault(member["consumer_id"], {"id": member["consumer_id"]})
            received, group = row.get("elements"), member["consumers"]
            row |= {"index": member["index"], "of": group, "start": member["start_position"]}
            if received is not None:
                row["position"] = member["start_position"] + received * group
    return sorted(rows.values(), key=lambda row: (row.get("index", 0), row["id"]))


# -- workers --------------------------------------------------------------------------------


HOLDS_NOTHING = {"held_bytes": 0, "parked_tasks": 0, "shed_elements": 0}


def of_job(load: Mapping[str, Any], memory: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each worker that runs a job, the slowest while they work first; with what the job
    holds of that worker's memory."""
    job_id = load.get("job_id")
    holds = {w["address"]: job for w in memory for job in w["jobs"] if job["job_id"] == job_id}
    rows = [
        {
            **one,
            "speed": one["elements_per_s"] / one["working"] if one["working"] else None,
            **holds.get(one["address"], HOLDS_NOTHING),
        }
        for one in load.get("by_worker", [])
    ]
    return sorted(rows, key=lambda row: math.inf if row["speed"] is None else row["speed"])


class Page(NamedTuple):
    """Some rows of a table."""

    rows: Sequence[Any]
    total: int  # rows of the table, without those that were filtered out
    number: int
    pages: int


def workers(status: Mapping[str, Any], sort: str, text: str, page: int) -> Page:
    """The workers whose address or tags have the text, sorted, MOST_ROWS a page."""
    text = text.lower()
    loads, errors = _loads_of_workers(status), _errors_of_workers(status)
    found = [
        {**worker, **loads.get(worker["address"], {}), "errors": errors.get(worker["address"], 0)}
        for worker in status["workers"]
        if text in worker["address"].lower() or any(text in tag.lower() for tag in worker["tags"])
    ]
    key = COLUMNS.get(sort, "address")
    if key == "address":
        found.sort(key=lambda worker: worker["address"])
    else:  # what is not known comes last
        found.sort(key=lambda worker: -math.inf if worker.get(key) is None else worker[key])
        found.reverse()
    pages = max(1, -(-len(found) // MOST_ROWS))
    page = min(max(1, page), pages)
    return Page(found[(page - 1) * MOST_ROWS : page * MOST_ROWS], len(found), page, pages)


def _errors_of_workers(status: Mapping[str, Any]) -> dict[str, int]:
    """How many errors each told lately, by address."""
    found: dict[str, int] = {}
    for job in (*status["jobs"], *status.get("removed_jobs", [])):
        for error in job["errors"]:
            if address := error["worker"]:
                found[address] = found.get(address, 0) + error["times"]
    return found


def _loads_of_workers(status: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """By address: elements a second of all jobs, and shares of the time of what runs them."""
    told: dict[str, list[Mapping[str, float]]] = {}
    for load in status.get("loads", []):
        for one in load.get("by_worker", []):
            told.setdefault(one["address"], []).append(one)
    found = {}
    for address, of in told.items():
        shares = {k: sum(w[k] for w in of) / len(of) for k in WORKERS_DO}
        found[address] = {"elements_per_s": sum(one["elements_per_s"] for one in of), **shares}
    return found


# -- pictures -------------------------------------------------------------------------------


Note = Mapping[str, Any]


def plots(series: Series, notes: Iterable[Note]) -> Plots:
    """Of the whole service."""
    waits = {f"for_{cause}": what for cause, what in WAITS_FOR.items()}
    return _plots(series, notes, [
        ("Rate", {"rate": "made"}, "elements/s", number, 0.0),
        ("Trainers wait for", waits, "", percent, 1.0),
        ("Workers' time: they", WORKERS_DO, "", percent, 1.0),
        ("Buffers", {"held": "held", "budget": "may be held"}, "", size, 0.0),
        ("Workers", {"workers": "there", "wanted": "wanted"}, "", number, 0.0),
        ("Consumers", {"consumers": "read"}, "", number, 0.0),
        ("Journal", {"events": "events"}, "events/s", number, 0.0),
    ])  # fmt: skip


def job_plots(series: Series | None, notes: Iterable[Note], errors: Iterable[Note]) -> Plots:
    """Of a job, with its errors."""
    told = ({"mark": "error", "text": error_text(one), **one} for one in errors)
    return _plots(series, [*notes, *told], [
        ("Rate", {"rate": "made"}, "elements/s", number, 0.0),
        ("Trainers wait", {"waits": "of their time"}, "", percent, 1.0),
        ("Workers", {"busy": "busy", "wanted": "wanted"}, "", number, 0.0),
    ])  # fmt: skip


def _plots(series: Series | None, notes: Iterable[Note], which: Iterable[Any]) -> Plots:
    if series is None:
        return Plots([], set())
    marks: dict[tuple[str, int], list[str]] = {}
    for note in sorted(notes, key=lambda note: note["time_ms"]):
        if note["mark"] and (x := series.x(note["time_ms"] / 1000)) is not None:
            marks.setdefault((note["mark"], x), []).append(note["text"])
    shown = [(kind, x, _told(texts)) for (kind, x), texts in marks.items()]
    known = [  # not what was nothing all the time
        each for each in which
        if any(v is not None and (v or each[-1]) for field in each[1] for _, v in series.of(field))
    ]  # fmt: skip
    return Plots([_plot(series, shown, *each) for each in known], {kind for kind, _ in marks})


def _brief(text: str) -> str:
    """A number without zeros behind the point."""
    return re.sub(r"\.(\d*?)0+(?!\d)", lambda found: f".{found[1]}" * bool(found[1]), text)


def _told(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - 1} more" * (len(texts) > 1)
    return printable(texts[0])[:MOST_TITLE] + more


def _plot(
    series: Series,
    marks: list[tuple[str, int, str]],
    title: str,
    lines: Mapping[str, str],
    unit: str,
    told: Any,
    most: float,
) -> Plot:
    of = {field: series.of(field) for field in lines}
    values = [v for points in of.values() for _, v in points if v is not None]
    top = most or round_up(max(values, default=0.0)) or 1.0
    newest = {field: told(series.last(field)) for field in lines}
    said = f"{title}: " + ", ".join(f"{name} {newest[field]}" for field, name in lines.items())
    if values and not most:
        said += f"; the most was {told(max(values))} {unit}"
    return Plot(
        title,
        f"{newest[next(iter(lines))]} {unit}" if len(lines) == 1 else "",
        (_brief(told(top)), _brief(told(top / 2)), "0"),
        [(name, newest[field], line(of[field], top)) for field, name in lines.items()],
        marks,
        int(series.points[0][0] * 1000) if series.points else 0,
        said,
    )


class Picture(NamedTuple):
    """A map of splits, as SVG's paths."""

    of: Mapping[str, Any]
    paths: dict[str, str]
    marks: str  # cells of one worker
    width: int
    height: int
    said: str


def picture(of: Mapping[str, Any]) -> Picture:
    """Of what split_map made."""
    cells = of["cells"]
    there = ", ".join(f"{count:,} {name}" for name, count in of["totals"].items() if count)
    columns = min(split_map.COLUMNS, max(len(cells), 1))
    rows = max(1, -(-len(cells) // split_map.COLUMNS))
    return Picture(
        of, split_map.paths(cells), split_map.marks(of["of_worker"]),
        split_map.CELL * columns, split_map.CELL * rows,
        f"{of['title']}: {there or 'none'}",
    )  # fmt: skip
