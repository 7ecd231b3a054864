"""What holds a job up, and what to do about it: conclusions from a dispatcher's status. Pure.

A status is as of `GetStatus`, decoded from JSON. An earlier version's lacks some of it: what is not
told is not concluded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .findings import (
    LATELY_S,
    SEVERITIES,
    SMALL_BUDGET,
    Finding,
    Severity,
    Status,
    after,
    is_small,
    job_name,
    part_findings,
    silent_s,
)

WAITS = 0.05
"""Trainers that wait a smaller share of their time have what they need."""

UNEVEN = 0.1
"""So much of their time they wait, too, if elements come as they come, with workers to spare."""

SLOW = 0.5
"""A worker is slow if it makes less than this share of what the others make while they work."""

BUSY = 0.75
"""And if it is busy for at least this share of its time: else it has nothing to do."""

WAITS_FOR = {
    "workers": "elements of workers", "network": "a connection",
    "dispatcher": "the dispatcher", "no_task": "a worker with a task",
}  # fmt: skip
"""For what trainers wait (CAUSES in client/metrics.py), in words."""

WORKERS_DO = {
    "working": "work", "backpressured": "wait for trainers", "no_split": "wait for splits",
}  # fmt: skip
"""What takes the time of workers: the fields of a status, in words."""

TELLING = 0.9
"""If trainers wait for longer, how much faster they would be is not to be told from the rest."""

MOST_NAMED = 8
"""Trainers that a finding names by their addresses."""

FIRST_S = 30.0
"""So long a cause may come from a job's beginning, and a job may be without a measured worker."""

PROFILE = (
    "to find its slow step, profile it in a process of its own (get_model_proto or TensorFlow's "
    "Profiler for tf.data, cProfile for a Python function)"
)


def findings(status: Status) -> list[Finding]:
    """What a status gives reason to say, the gravest first. While the storage hangs, all wait for
    it: what was measured of others is old, and says nothing of them."""
    found = [*part_findings(status)]
    if silent_s(status):
        return sorted(found, key=lambda one: SEVERITIES.index(one.severity))
    jobs = {job["job_id"]: job for job in status["jobs"]}
    for load in status.get("loads", []):
        job = jobs.get(load["job_id"])
        if job is not None and job.get("state") not in ("failed", "finished"):
            found += _OfJob(status, job, load).findings()
    if "loads" not in status:
        what = "it tells nothing of the time of trainers and workers: it is of an earlier version"
        found.append(Finding("note", "dispatcher", what, "upgrade it"))
    return sorted(found, key=_gravity)


def _gravity(one: Finding) -> tuple[int, bool, float]:
    """The gravest first; what was long ago and is over, such as a read that failed, behind it."""
    is_old = one.since_s is not None and one.since_s > LATELY_S and "read failed" in one.what
    return SEVERITIES.index(one.severity), is_old, -(one.gain or 1.0)


class _OfJob:
    """One job that is read."""

    def __init__(self, status: Status, job: Mapping[str, Any], load: Mapping[str, Any]) -> None:
        self._status = status
        self._job = job
        self._load = load
        self._subject = f"job {job_name(job)}"
        self._read = [i for i in job["iterations"] if i["consumers"] and not i["finished"]]
        self._waits: float = load.get("waits", 0.0)
        self._slow: list[Finding] = []  # workers

    def findings(self) -> Iterator[Finding]:
        yield from self._gone()
        gone = self._job.get("gone")
        if gone and len(gone) >= sum(i["consumers"] for i in self._read):
            return  # nobody reads it: what was measured is of before
        outside = [*self._outside()]
        yield from outside
        if self._awaits("network") > TELLING:
            return  # whatever workers do
        self._slow = [*self._slow_workers()]
        yield from self._slow
        match self._load["wanted"]["cause"]:
            case "no worker":
                yield self._no_worker()
            case "measuring":
                if self._load.get("since_s", 0.0) < FIRST_S:
                    yield self._say("note", "it is being measured", "ask again in half a minute")
                elif not self._load.get("tells"):
                    what = "its trainers tell too little: TensorFlow's own clients tell nothing"
                    yield self._say("note", what, "")
            case "stalled":
                yield self._stalled()
            case "trainers wait":
                yield self._too_few()
            case "no splits" if self._load["wanted"]["workers"] > self._load["workers"]:
                yield self._too_few()  # for these there are splits
            case "no splits":
                yield self._no_splits()
            case "source" if self._awaits("dispatcher") <= WAITS:  # else nobody leases splits
                yield self._source()
            case "not the workers" if not (self._slow and self._is_in_order):
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

    def _gone(self) -> Iterator[Finding]:
        """Trainers that were killed or stopped, or are cut off."""
        if not (gone := self._job.get("gone")):
            return
        readers = sum(i["consumers"] for i in self._read)
        some = f"{len(gone)} of its {readers} trainers" if readers > 1 else "its trainer"
        peers = [one["peer"] for one in gone if one.get("peer")]
        at = f", which called from {', '.join(peers[:MOST_NAMED])}" if peers else ""
        longest = max(gone, key=lambda one: float(one["silent_s"]))
        is_old = not longest.get("heard", True)  # it was silent before this dispatcher led
        yield Finding(
            "problem", self._subject,
            f"{some} {'say' if len(gone) > 1 else 'says'} nothing any more: killed, stopped or cut "
            f"off, without leaving{', at least since this dispatcher leads' if is_old else ''}",
            f"see its process{at}, and the dispatcher's log for calls that it refuses; who says "
            "nothing is given up"
            f"{after(self._status.get('client_timeout_s'))}{' of its lead' if is_old else ''}",
            since_s=longest["silent_s"],
        )  # fmt: skip

    def _stalled(self) -> Finding:
        load, since_s = self._load, self._load.get("since_s", 0.0)
        return self._say(
            "problem" if since_s >= FIRST_S else "slow",
            f"trainers wait {self._waits:.0%} of the time, and {_busy(load)}, but none makes an "
            "element: what they read does not answer, or one element takes very long",
            "see on the workers' hosts whether the source answers (a dead mount: ls, df; a server "
            "or bucket: its own client), and where a worker stands (py-spy dump); further workers "
            "bring nothing",
        )  # fmt: skip

    def _outside(self) -> Iterator[Finding]:
        """Waits that no worker's pipeline is the cause of."""
        for cause, what, advice in (
            (
                "network", "a connection to any of its workers",
                (
                    "let trainers reach the workers' --address and ports: `forebay status` lists "
                    "them; with TLS, the logs of both say what it refuses. A trainer's log says if "
                    "its target_workers or data_transfer_protocol leave it no worker"
                ),
            ),
            (
                "dispatcher", "the dispatcher, which does not answer",
                "see the dispatcher's log and its storage; a standby takes over when it ends",
            ),
            (
                "no_task", "a worker to get a task of it",
                (
                    "workers are there, so a read waits as it begins, or as workers come and go: "
                    "see their logs if it lasts; further workers bring nothing"
                ),
            ),
        ):  # fmt: skip
            is_told = cause == "no_task" and self._load["wanted"]["cause"] == "no worker"
            if (share := self._awaits(cause)) > WAITS and not is_told:
                what = f"trainers wait {share:.0%} of the time for {what}"
                since_s = self._load.get("stuck_s", {}).get(cause)
                if since_s is None and share > TELLING and self._load.get("elements_per_s") == 0:
                    since_s = self._load.get("since_s")  # it stands still
                severity: Severity = "slow" if since_s is None or since_s < FIRST_S else "problem"
                yield Finding(severity, self._subject, what, advice, _without(share), since_s)

    def _slow_workers(self) -> Iterator[Finding]:
        """Workers that make less than others while they work, if trainers wait."""
        if self._waits <= WAITS:
            return
        mute = self._mute()  # it makes only what its buffers hold
        told = [
            w for w in self._load.get("by_worker", [])
            if w["working"] > 0 and w["address"] not in mute
        ]  # fmt: skip
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

    def _mute(self) -> list[str]:
        """Workers that say nothing, or that trainers cannot reach."""
        keys = ("silent_workers", "unreachable_workers")
        return [worker["address"] for key in keys for worker in self._status.get(key, [])]

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
            what = "all workers drain" if self._status["workers"] else "no worker is registered"
            return self._say("problem", what, "start workers: forebay worker --dispatcher …")
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
        if mute := self._mute():
            return self._say("slow", what, f"see to worker {mute[0]} first")
        if there >= wanted:
            return self._say("note", f"{what}; others have come", "ask again in half a minute")
        first = f"see to {self._slow[0].subject} first; then " if self._slow else ""
        return self._say(
            "slow", what,
            f"{first}start {_more(wanted - there)}; or make the pipeline do more at a time "
            f"(num_parallel_calls, processes=…): {PROFILE}",
            None if self._slow else self._at_most(wanted / workers),
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
        if mute := self._mute():
            return self._say("slow", what, f"see to worker {mute[0]} first")
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
        workers, job_id = self._status.get("memory", []), self._job["job_id"]
        its = [w["budget_bytes"] for w in workers if job_id in [job["job_id"] for job in w["jobs"]]]
        if is_small(small := min(its, default=SMALL_BUDGET)):
            return self._say(
                "slow", f"{what}: they wait for room in a --memory-budget of {small:,} bytes",
                "give workers a larger one, or leave the option out", self._demand,
            )  # fmt: skip
        if self._waits < UNEVEN:
            return self._say("note", f"{what}: elements come unevenly", "", self._demand)
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
