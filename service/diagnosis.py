"""What holds a job up, and what to do about it: conclusions from a dispatcher's status. Pure.

A status is as of `GetStatus`, decoded from JSON. An earlier version's lacks some of it: what is not
told is not concluded.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

WAITS = 0.05
"""Trainers that wait a smaller share of their time have what they need."""

LATELY_S = 900.0
"""So long a lost worker, or a new leader, is worth a word."""

FAILED_S = 86_400.0
"""So long a job that has failed is a problem, if nobody reads it again."""

SLOW = 0.5
"""A worker is slow if it makes less than this share of what the others make while they work."""

BUSY = 0.75
"""And if it is busy for at least this share of its time: else it has nothing to do."""

WAITS_FOR = {
    "workers": "elements of workers", "network": "a connection",
    "dispatcher": "the dispatcher", "no_task": "a worker with a task",
}  # fmt: skip
"""For what trainers wait (CAUSES in client/meters.py), in words."""

WORKERS_DO = {
    "working": "work", "backpressured": "wait for trainers", "no_split": "wait for splits",
}  # fmt: skip
"""What takes the time of workers: the fields of a status, in words."""

TELLING = 0.9
"""If trainers wait for longer, how much faster they would be is not to be told from the rest."""

FIRST_S = 30.0
"""So long a cause may come from a job's beginning, and a job may be without a measured worker."""

DISK = "see its disk or mount (df, dmesg, and whether a file can be written and synced there)"
SEE = dict.fromkeys(
    ("redis", "postgres"),
    "see whether its server runs, has room, and is reachable from the dispatcher's host",
)
"""What to look at, by the scheme of a storage's URL."""

MOST_SAID = 400
"""Characters of an error, in a finding."""

Severity = Literal["problem", "slow", "note"]
SEVERITIES: tuple[Severity, ...] = ("problem", "slow", "note")

PROFILE = (
    "to find its slow step, profile it in a process of its own (get_model_proto or TensorFlow's "
    "Profiler for tf.data, cProfile for a Python function)"
)

Status = Mapping[str, Any]


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


def findings(status: Status) -> list[Finding]:
    """What a status gives reason to say, the gravest first. While the storage hangs, all wait for
    it: what was measured of others is old, and says nothing of them."""
    found = [*_storage(status), *_dispatcher(status), *_workers(status), *_failures(status)]
    if silent_s(status):
        return sorted(found, key=lambda one: SEVERITIES.index(one.severity))
    jobs = {job["job_id"]: job for job in status["jobs"]}
    for load in status.get("loads", []):
        if (job := jobs.get(load["job_id"])) is not None:
            found += _OfJob(status, job, load).findings()
    if "loads" not in status:
        what = "it tells nothing of the time of trainers and workers: it is of an earlier version"
        found.append(Finding("note", "dispatcher", what, "upgrade it"))
    return sorted(found, key=lambda one: (SEVERITIES.index(one.severity), -(one.gain or 1.0)))


def job_name(job: Mapping[str, Any]) -> str:
    """The user's own name of a job: tf.data service's clients prefix it with the dataset."""
    name: str = job["name"] or str(job["job_id"])
    return name.removeprefix(f"dataset_id=/{job['dataset_id']}/")


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
        yield Finding(
            "problem", subject,
            f"it does not answer{error}; nothing is decided until it does, all wait for it, and "
            "other figures are of before",
            f"{see}; all go on by themselves once it answers, and further workers bring nothing",
            since_s=silent,
        )  # fmt: skip
    elif storage["answers_s"] is not None and storage["answers_s"] < LATELY_S:
        was = f"it answers again, and did not for {duration(round(storage['was_silent_s']))}"
        yield Finding("note", subject, was, "loads are measured anew", since_s=storage["answers_s"])


def _dispatcher(status: Status) -> Iterator[Finding]:
    if strangers := status.get("strangers"):
        names = ", ".join(stranger["who"] for stranger in strangers[:3])
        what = f"it refuses {len(strangers)} peers that know another journal, such as {names}"
        advice = "bring their storage back, or restart them: `forebay status` lists their journals"
        yield Finding("problem", "dispatcher", what, advice)
    leads_s = status.get("leads_s")
    if leads_s is not None and leads_s < LATELY_S and status["term"] > 1:
        what = f"it leads in term {status['term']}: the one before ended, or was cut off"
        advice = "the log of the one before says why, if nobody restarted it; loads begin anew"
        yield Finding("note", "dispatcher", what, advice, since_s=leads_s)


def _workers(status: Status) -> Iterator[Finding]:
    for lost in status.get("lost_workers", []):
        if lost["ago_s"] < LATELY_S:
            is_back = lost["back"]
            what = f"it was given up, {'and is back' if is_back else 'as'}: {lost['reason']}"
            yield Finding(
                "note" if is_back else "problem", f"worker {lost['address']}", what,
                "see its log" if is_back else "see its log, and start it or another one",
                since_s=lost["ago_s"],
            )  # fmt: skip
    names = {job["job_id"]: job_name(job) for job in status["jobs"]}
    for worker in status.get("memory", []):
        for job in worker["jobs"]:
            if job["shed_elements"] and job["job_id"] in names:
                yield Finding(
                    "note", f"worker {worker['address']}",
                    f"it dropped {job['shed_elements']} elements of job {names[job['job_id']]} "
                    "that nobody read, as others needed the memory",
                    "end jobs that nobody reads, or give workers a larger --memory-budget",
                )  # fmt: skip


def _failures(status: Status) -> Iterator[Finding]:
    """Reads that ended with an error, and saves."""
    now_ms = status.get("now_ms", 0)
    for job in (*status["jobs"], *status.get("removed_jobs", [])):
        if not (errors := job.get("errors")):
            continue
        error, state = errors[-1], job.get("state", "failed")
        ago_s = max(0.0, (now_ms - error["time_ms"]) / 1000)
        if ago_s > (FAILED_S if job.get("state") == "failed" else LATELY_S):
            continue
        more = f" ({error['times']} times)" if error["times"] > 1 else ""
        at = f" at worker {error['worker']}" if error["worker"] else ""
        what = f"its read failed{at}{more}: {error_text(error)}"
        if len(errors) > 1:
            what += f"; and {len(errors) - 1} other {'error' if len(errors) == 2 else 'errors'}"
        subject = f"job {job_name(job)}"
        if state == "failed":
            yield Finding("problem", subject, what, _mend(job, error), since_s=ago_s)
        else:
            yield Finding("note", subject, f"{what}; it is {state} now", "", since_s=ago_s)
    for save in status.get("failed_saves", []):
        ago_s = max(0.0, (now_ms - save["time_ms"]) / 1000)
        if ago_s < LATELY_S:
            what, advice = (
                f"it failed: {_in_one_line(save['error'])}",
                "mend the cause, and save again",
            )
            yield Finding("problem", f"save {save['path']}", what, advice, since_s=ago_s)


def error_text(error: Mapping[str, Any]) -> str:
    """One line, such as NOT_FOUND: /data/7.tfrecord; No such file or directory."""
    text: str = error["message"]
    return _in_one_line(f"{error['code']}: {text}" if error["code"] else text)


def _in_one_line(text: str) -> str:
    return " ".join(text.split())[:MOST_SAID]


def _mend(job: Mapping[str, Any], error: Mapping[str, Any]) -> str:
    """What to do about an error that ended a read."""
    mend = "mend its cause (the message names file and record), or have what fails left out"
    again = "start its trainers again"
    if error["for_good"] and job.get("name"):
        again += " under another job_name: for this epoch, each worker stays with its error"
    return f'{mend} (on_error="skip", ignore_errors()); then {again}'


class _OfJob:
    """One job that is read."""

    def __init__(self, status: Status, job: Mapping[str, Any], load: Mapping[str, Any]) -> None:
        self._status = status
        self._job = job
        self._load = load
        self._subject = f"job {job_name(job)}"
        self._read = [i for i in job["iterations"] if i["consumers"] and not i["finished"]]
        self._waits: float = load.get("waits", 0.0)

    def findings(self) -> Iterator[Finding]:
        outside = [*self._outside()]
        yield from outside
        slow = [*self._slow_workers()]
        yield from slow
        match self._load["wanted"]["cause"]:
            case "no worker":
                yield self._no_worker()
            case "measuring":
                if self._load.get("since_s", 0.0) < FIRST_S:
                    yield self._say("note", "it is being measured", "ask again in half a minute")
                else:
                    what = "its trainers tell too little: TensorFlow's own clients tell nothing"
                    yield self._say("note", what, "")
            case "trainers wait":
                yield self._too_few()
            case "no splits" if self._load["wanted"]["workers"] > self._load["workers"]:
                yield self._too_few()  # for these there are splits
            case "no splits":
                yield self._no_splits()
            case "source" if self._awaits("dispatcher") <= WAITS:  # else nobody leases splits
                yield self._source()
            case "not the workers" if not (slow and self._is_in_order):
                yield self._not_the_workers()
            case "enough" | "workers idle" if "waits" in self._load and not outside:
                yield self._trainer()

    def _say(
        self, severity: Severity, what: str, advice: str, gain: float | None = None
    ) -> Finding:
        since_s = self._load.get("since_s")
        if severity == "slow" and since_s is not None and since_s < FIRST_S:
            advice = f"look again in half a minute, as a job begins slowly; then {advice}"
        return Finding(severity, self._subject, what, advice, gain, since_s)

    @property
    def _demand(self) -> float | None:
        """By how much the rate would be multiplied if no trainer waited. None: a lot."""
        return _without(self._waits)

    def _at_most(self, factor: float) -> float:
        return factor if self._demand is None else min(factor, self._demand)

    def _awaits(self, cause: str) -> float:
        """The share of their time in which trainers wait for this, as far as they tell."""
        share: float = self._load.get("waits_for", {}).get(cause, 0.0)
        return share

    def _outside(self) -> Iterator[Finding]:
        """Waits that no worker's pipeline is the cause of."""
        for cause, what, advice in (
            (
                "network", "a connection to any of its workers",
                "let trainers reach the workers' --address and ports: `forebay status` lists them",
            ),
            (
                "dispatcher", "the dispatcher, which does not answer",
                "see the dispatcher's log and its storage; a standby takes over when it ends",
            ),
            (
                "no_task", "a worker to get a task of it",
                "start workers first (`forebay status --wait-workers`), or see why they ended",
            ),
        ):  # fmt: skip
            if (share := self._awaits(cause)) > WAITS:
                what = f"trainers wait {share:.0%} of the time for {what}"
                yield Finding("slow", self._subject, what, advice, _without(share))

    def _slow_workers(self) -> Iterator[Finding]:
        """Workers that make less than others while they work, if trainers wait."""
        if self._waits <= WAITS:
            return
        told = [w for w in self._load.get("by_worker", []) if w["working"] > 0]
        speeds = [w["elements_per_s"] / w["working"] for w in told]
        ordered = sorted(speeds)
        for worker, speed in zip(told, speeds, strict=True):
            usual = _median_without(ordered, speed)
            if worker["working"] < BUSY or speed >= SLOW * usual:
                continue
            waits = self._is_in_order and self._demand
            # In an order all wait for the slowest; else the others' elements come anyhow.
            more = usual * worker["working"] - worker["elements_per_s"]
            gain = waits or self._at_most(1 + more / max(self._load["elements_per_s"], 1e-9))
            yield Finding(
                "slow", f"worker {worker['address']}",
                f"of {self._subject} it makes {worker['elements_per_s']:.3g} elements/s, working "
                f"{worker['working']:.0%} of the time: others would make "
                f"{usual * worker['working']:.3g}",
                "see what else its host does, and whether it is like the others (processors, "
                "memory, disk, way to the source); or drain it (SIGTERM)",
                gain, self._load.get("since_s"),
            )  # fmt: skip

    @property
    def _is_in_order(self) -> bool:
        """Whether trainers may wait for one worker while others have elements."""
        order = self._job.get("order")
        claimed = order and order.get("claimed")
        return bool(order and not claimed) or self._job.get("num_consumers") is not None

    def _no_worker(self) -> Finding:
        workers = [w for w in self._status["workers"] if not w.get("draining")]
        if why := next((i["no_task"] for i in self._read if i.get("no_task")), None):
            return self._say("problem", why, "")
        if not workers:
            advice = "start workers: forebay worker --dispatcher …"
            return self._say("problem", "no worker is registered", advice)
        if all(worker["stock"] for worker in workers):
            what = "only tf.data service's own workers are there, which do not tell their times"
            return self._say("note", what, "start Forebay's workers")
        if self._load.get("since_s", 0.0) < FIRST_S:
            return self._say("note", "its workers have told nothing yet", "ask again in a while")
        return self._say(
            "problem", "workers are there, but none tells of a task of it", "see the workers' logs"
        )

    def _too_few(self) -> Finding:
        workers, wanted = self._load["workers"], self._load["wanted"]["workers"]
        there = sum(not (w["stock"] or w["draining"]) for w in self._status["workers"])
        what = f"trainers wait {self._waits:.0%} of the time, and {_busy(self._load)}"
        if there >= wanted:
            return self._say("note", f"{what}; others have come", "ask again in half a minute")
        return self._say(
            "slow", what,
            f"start {_more(wanted - there)}; or make the pipeline do more at a time "
            f"(num_parallel_calls, processes=…): {PROFILE}",
            self._at_most(wanted / workers),
        )  # fmt: skip

    def _no_splits(self) -> Finding:
        sizes = [x["splits"] for i in self._read for x in i["sources"] if x["splits"] is not None]
        what = f"trainers wait {self._waits:.0%} of the time, but no further worker would get "
        if min(sizes, default=0) >= 2 * self._load["workers"]:
            return self._say("note", f"{what}a split: the epoch is about to end", "")
        return self._say(
            "slow", f"{what}a split: the source has too few",
            f"divide the source into more splits (files, ranges), then start workers; {PROFILE}",
            self._demand,
        )  # fmt: skip

    def _source(self) -> Finding:
        load, what = self._load, f"trainers wait {self._waits:.0%} of the time"
        paths = [x["waits_for"] for i in self._read for x in i["sources"] if x.get("waits_for")]
        if paths:
            return self._say(
                "slow", f"{what}, as workers wait for the save {paths[0]}, which is being written",
                "make the save faster: its pipeline and its workers are what is slow; further "
                "workers for this job bring nothing",
                self._demand,
            )  # fmt: skip
        if load.get("no_split", 0.0) > load["busy"]:
            took = self._status.get("append_s")
            appends = "" if took is None else f": an append takes {1000 * took:.3g} ms on average"
            return self._say(
                "slow", f"{what}, as workers wait for splits of the source",
                "make splits larger (more elements each), so that fewer are leased; or give the "
                f"journal a faster storage{appends}",
                self._demand,
            )  # fmt: skip
        return self._say(
            "slow", load["wanted"]["reason"],
            "make what the pipeline reads faster (bandwidth of the storage, a cache, larger "
            "reads): further workers bring nothing",
            self._demand,
        )  # fmt: skip

    def _not_the_workers(self) -> Finding:
        what = f"trainers wait {self._waits:.0%} of the time, but only {_busy(self._load)}"
        if self._is_in_order:
            order = self._job.get("order") or {}
            wide = order.get("cycle_length", self._load["workers"])
            advice = "the order makes them wait for one worker after the other"
            if wide < self._load["workers"]:
                advice += f": read more bundles side by side (cycle_length, now {wide})"
            return self._say("slow", what, f"{advice}; elements of like cost help", self._demand)
        rate = self._load.get("bytes_per_s")
        amount = "" if rate is None else f", which carries {rate / 1e6:.3g} MB/s"
        return self._say(
            "slow", f"{what}: the network holds them up{amount}",
            "make elements smaller (smaller dtypes such as uint8, cast and decode at the trainer); "
            "let data connections compress them; or use a faster network between workers and "
            "trainers",
            self._demand,
        )  # fmt: skip

    def _trainer(self) -> Finding:
        workers, wanted = self._load["workers"], self._load["wanted"]["workers"]
        what = f"trainers wait {self._waits:.0%} of the time: they are what is slow, not the data"
        spare = f"{wanted} of {workers} workers would do" if wanted < workers else ""
        return self._say("note", what, spare)


def _without(waits: float) -> float | None:
    """By how much the rate would be multiplied without these waits."""
    return 1 / (1 - waits) if waits <= TELLING else None


def _median_without(ordered: Sequence[float], one: float) -> float:
    """The median of the others; 0 if there are none."""
    others = len(ordered) - 1
    if not others:
        return 0.0
    at = bisect_left(ordered, one)
    low, high = (i + (i >= at) for i in ((others - 1) // 2, others // 2))
    return (ordered[low] + ordered[high]) / 2


def _busy(load: Mapping[str, Any]) -> str:
    are = "worker is" if load["workers"] == 1 else "workers are"
    return f"{load['busy']:.1f} of {load['workers']} {are} busy"


def _more(workers: int) -> str:
    return "1 more worker" if workers == 1 else f"{workers} more workers"


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
