"""Finding: a conclusion from a status, and how it is told. What a status gives reason to say of the
storage, the dispatcher, its clock, workers, and reads that failed. Pure.

What is not told, as by an earlier version, is not concluded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

Severity = Literal["problem", "slow", "note"]
SEVERITIES: tuple[Severity, ...] = ("problem", "slow", "note")

Status = Mapping[str, Any]
"""As of `GetStatus`, decoded from JSON. An earlier version's lacks some of it."""


class Finding(NamedTuple):
    """A conclusion."""

    severity: Severity
    """problem: something is lost or stands still. slow: trainers wait. note: nothing to do."""
    subject: str  # such as "job resnet", "worker 10.0.0.6:5051", "dispatcher"
    what: str
    advice: str  # "": none
    gain: float | None = None
    """By how much the job's elements a second would be multiplied, at most; None: not known."""
    since_s: float | None = None  # so many seconds ago it began; None: not known


LATELY_S = 900.0
"""So long a lost worker, or a new leader, is worth a word."""

FAILED_S = 86_400.0
"""So long a job that has failed is a problem, if nobody reads it again."""

SMALL_BUDGET = 64 << 20
"""A worker whose tasks may hold less waits for trainers between any two blocks."""

DISK = "see its disk or mount (df, dmesg, and whether a file can be written and synced there)"
SEE = dict.fromkeys(
    ("redis", "postgres"),
    "see whether its server runs, has room, and is reachable from the dispatcher's host",
)
"""What to look at, by the scheme of a storage's URL."""

UNTIL = " within a minute (retry_s in its URL): after that the dispatcher ends, so start it again"
"""What ends the wait for a server."""

MOST_NAMED = 3
"""Jobs that a finding names, if more have failed alike."""

MOST_SAID = 200
"""Characters of an error, in a finding."""


def job_name(job: Mapping[str, Any]) -> str:
    """The user's own name of a job: tf.data service's clients prefix it with the dataset."""
    name: str = job["name"] or str(job["job_id"])
    return name.removeprefix(f"dataset_id=/{job['dataset_id']}/")


def duration(seconds: float | None) -> str:
    """12 s; 3 min; 2 h 10 min; 3 d 4 h."""
    if seconds is None or math.isinf(seconds):
        return "–"
    if seconds < 10 and seconds != round(seconds):
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def part_findings(status: Status) -> Iterator[Finding]:
    """The storage's first."""
    yield from _storage(status)
    yield from _dispatcher(status)
    yield from _workers(status)
    yield from _failures(status)


def after(timeout_s: float | None) -> str:
    """When who is silent is given up, as a part of a sentence; "": not told, or never."""
    return "" if timeout_s is None else f" after {duration(timeout_s)}"


def is_small(budget_bytes: int) -> bool:
    """Whether a worker's memory budget holds its pipelines up."""
    return budget_bytes < SMALL_BUDGET


def silent_s(status: Status) -> float:
    """For how long the dispatcher's storage has not answered, and figures are old; 0: it answers,
    or it is not told, as by earlier versions."""
    found: float = (status.get("storage") or {}).get("silent_s", 0.0)
    return found


def _storage(status: Status) -> Iterator[Finding]:
    if (storage := status.get("storage")) is None:
        return
    subject = f"storage {storage['url']}"
    if silent := storage["silent_s"]:
        error = f" ({storage['error']})" if storage["error"] else ""
        see = next((how for scheme, how in SEE.items() if storage["url"].startswith(scheme)), DISK)
        until = "" if see is DISK else UNTIL
        yield Finding(
            "problem", subject,
            f"it does not answer{error}; nothing is decided until it does, all wait for it, and "
            "other figures are of before",
            f"{see}; all go on by themselves once it answers{until}; further workers bring nothing",
            since_s=silent,
        )  # fmt: skip
    elif storage["answers_s"] is not None and storage["answers_s"] < LATELY_S:
        was = f"it answers again, and did not for {duration(round(storage['was_silent_s']))}"
        yield Finding("note", subject, was, "loads are measured anew", since_s=storage["answers_s"])


def _dispatcher(status: Status) -> Iterator[Finding]:
    if refused_peers := status.get("strangers"):
        # A trainer may claim what it likes: if the storage came back empty, workers say so, too.
        workers = [one for one in refused_peers if one["who"].startswith("worker ")]
        names = ", ".join(refused_peer["who"] for refused_peer in (workers or refused_peers)[:3])
        what = f"it refuses {len(refused_peers)} peers that claim another journal, such as {names}"
        advice = "bring their storage back, or restart them: `forebay status` lists their journals"
        yield Finding("problem" if workers else "note", "dispatcher", what, advice)
    leads_s = status.get("leads_s")
    lost = [one for one in status.get("lost_workers", []) if not one["back"]]
    is_new = leads_s is not None and status["term"] > 1
    if is_new and not status.get("workers") and any(one["ago_s"] < leads_s for one in lost):
        yield Finding(
            "problem", "dispatcher",
            "no worker has come to it since it leads: they may know only the address of the "
            "dispatcher before",
            "give workers and trainers the addresses of all dispatchers (--dispatcher A,B)",
            since_s=leads_s,
        )  # fmt: skip
    if leads_s is not None and leads_s < LATELY_S and status["term"] > 1:
        what = f"it leads in term {status['term']}: the one before ended, or was cut off"
        advice = "the log of the one before says why, unless it was killed; loads begin anew"
        yield Finding("note", "dispatcher", what, advice, since_s=leads_s)


def _workers(status: Status) -> Iterator[Finding]:
    for lost in status.get("lost_workers", []):
        is_back, is_repaired = lost["back"], lost.get("repaired", False)
        if lost["ago_s"] >= LATELY_S or (is_repaired and is_back):
            continue
        if is_repaired:
            yield Finding(
                "note", f"worker {lost['address']}",
                "it has not registered since the journal was repaired or restored",
                "start it, unless it had left since the backup",
                since_s=lost["ago_s"],
            )  # fmt: skip
        else:
            what = f"it was given up, {'and is back' if is_back else 'as'}: {lost['reason']}"
            yield Finding(
                "note" if is_back else "problem", f"worker {lost['address']}", what,
                "see its log" if is_back else "see its log, and start it or another one",
                since_s=lost["ago_s"],
            )  # fmt: skip
    for silent in [] if silent_s(status) else status.get("silent_workers", []):
        yield Finding(
            "problem", f"worker {silent['address']}",
            "it says nothing, though it should every few seconds: it is stopped, has no processor "
            "time, or is cut off",
            "see its process, its host and the network; what it has begun waits for it, until it "
            f"is given up{after(status.get('worker_timeout_s'))}",
            since_s=silent["silent_s"],
        )  # fmt: skip
    data = {w["address"]: ", ".join(w.get("data_addresses", ())) for w in status.get("workers", ())}
    for worker in status.get("unreachable_workers", []):
        if worker["address"] not in {
            silent["address"] for silent in status.get("silent_workers", ())
        }:
            yield Finding(
                "problem", f"worker {worker['address']}",
                f"trainers cannot connect to its data address ({data[worker['address']]})",
                "see its --data-address, and the firewall between trainers and it",
                since_s=worker["since_s"],
            )  # fmt: skip
    names = {job["job_id"]: job_name(job) for job in status["jobs"]}
    for worker in status.get("memory", []):
        if is_small(worker["budget_bytes"]):
            yield Finding(
                "note", f"worker {worker['address']}",
                f"its --memory-budget is {worker['budget_bytes']:,} bytes, for the elements of all "
                "of its tasks: each has to wait until trainers have taken what it made",
                f"give it {SMALL_BUDGET >> 20} MB at least, or leave the option out",
            )  # fmt: skip
        cache = worker.get("cache")
        if cache and cache["missed_bytes"] > max(cache["hit_bytes"], cache["limit_bytes"]):
            yield Finding(
                "note", f"worker {worker['address']}",
                f"its --cache-directory holds {cache['held_bytes']:,} of {cache['limit_bytes']:,} "
                f"bytes and helps little: {cache['hit_bytes']:,} were read of it, and "
                f"{cache['missed_bytes']:,} fetched",
                "give it more --cache-bytes than an epoch reads; if it holds little, see the "
                "worker's log: its disk is full, or read-only",
            )  # fmt: skip
        for job in worker["jobs"]:
            if job["shed_elements"] and job["job_id"] in names:
                yield Finding(
                    "note", f"worker {worker['address']}",
                    f"it dropped {job['shed_elements']} elements of job {names[job['job_id']]} "
                    "that nobody read, as others needed the memory",
                    "end jobs that nobody reads, or give workers a larger --memory-budget",
                )  # fmt: skip


def _failures(status: Status) -> Iterator[Finding]:
    """Reads that ended with an error, those with one cause together; and saves."""
    now_ms = status.get("now_ms", 0)
    alike: dict[tuple[str, str, str, str], list[tuple[str, float, int]]] = {}
    for job in (*status["jobs"], *status.get("removed_jobs", [])):
        if not (errors := job.get("errors")):
            continue
        error, state = errors[-1], job.get("state", "failed")
        ago_s = max(0.0, (now_ms - error["time_ms"]) / 1000)
        if ago_s > (FAILED_S if job.get("state") == "failed" else LATELY_S):
            continue
        worker = error["worker"]
        at = f" at worker {worker}" if worker and worker not in error["message"] else ""
        how = "its trainer was dismissed" if error.get("dismissed") else "its read failed"
        text = error_text(error)
        if len(errors) > 1:
            text += f"; and {len(errors) - 1} other {'error' if len(errors) == 2 else 'errors'}"
        key = f"{how}{at}", text, "" if state == "failed" else state, _mend(job, error)
        alike.setdefault(key, []).append((job_name(job), ago_s, error["times"]))
    for (how, text, state, mend), failed in alike.items():
        names, ago, times = zip(*failed, strict=True)
        what = f"{how} ({sum(times)} times): {text}" if sum(times) > 1 else f"{how}: {text}"
        named = ", ".join(names[:MOST_NAMED])
        named += f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        subject = f"job{'s' if len(names) > 1 else ''} {named}"
        if state:
            what = f"{what}; {'they are' if len(names) > 1 else 'it is'} {state} now"
            yield Finding("note", subject, what, "", since_s=min(ago))
        else:
            yield Finding("problem", subject, what, mend, since_s=min(ago))
    for job in status["jobs"]:
        if losses := [x for x in job.get("losses", []) if now_ms - x["time_ms"] < 1000 * LATELY_S]:
            is_unread = all(loss.get("unread") for loss in losses)
            yield Finding(
                "note" if is_unread else "problem", f"job {job_name(job)}",
                f"{lost_text(*losses)} lost: {_in_one_line(losses[-1]['why'])}",
                'forebay audit names them; delivery="at_least_once" loses none',
                since_s=max(0.0, (now_ms - losses[-1]["time_ms"]) / 1000),
            )  # fmt: skip
    for save in status.get("failed_saves", []):
        ago_s = max(0.0, (now_ms - save["time_ms"]) / 1000)
        if ago_s < LATELY_S:
            what = f"it failed: {_in_one_line(save['error'])}"
            yield Finding(
                "problem", f"save {save['path']}", what, "mend the cause, and save again",
                since_s=ago_s,
            )  # fmt: skip


def change_text(change: Mapping[str, Any]) -> str:
    """What a change of a schedule says."""
    if weights := change.get("weights"):
        return ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
    if "fork_of" in change:
        return f"no longer as job {change['fork_of']}, of which it is a fork"
    return f"{change['skipped_steps']} steps left out"


def lost_text(*losses: Mapping[str, Any]) -> str:
    """Such as 1 split and 30 elements that workers had made were."""
    splits, elements = (sum(x.get(each, 0) for x in losses) for each in ("splits", "elements"))
    parts = [f"{splits} split{'' if splits == 1 else 's'}"] if splits or not elements else []
    if elements:
        parts.append(f"{elements} element{'' if elements == 1 else 's'} that workers had made")
    return f"{' and '.join(parts)} {'was' if splits + elements == 1 else 'were'}"


def error_text(error: Mapping[str, Any]) -> str:
    """One line, such as NOT_FOUND: /data/7.tfrecord; No such file or directory. Of a traceback only
    its last line."""
    text: str = error["message"]
    head, is_traced, trace = text.partition("Traceback (most recent call last)")
    if is_traced:
        last = trace.strip().rpartition("\n")[2]
        name, _, said = last.partition(": ")
        text = head if f"{name}({said!r})" in head else f"{head} {last}"
    return _in_one_line(f"{error['code']}: {text}" if error["code"] else text)


def _in_one_line(text: str) -> str:
    return " ".join(text.split())[:MOST_SAID]


def _mend(job: Mapping[str, Any], error: Mapping[str, Any]) -> str:
    """What to do about an error that ended a read."""
    again = "start its trainers again"
    if error.get("dismissed"):
        return f"{again}, unless they had ended"
    mend = "mend its cause (the message names file and record), or have what fails left out"
    if error["for_good"] and job.get("name"):
        again += " under another job_name: for this epoch, each worker stays with its error"
    return f'{mend} (on_error="skip", ignore_errors()); then {again}'
