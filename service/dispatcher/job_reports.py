"""What became of jobs: errors that ended their reads, who left, and why splits were lost.

Nothing of it is state, as no decision depends on it. Why a consumer left is in the journal. A new
leader has that from its recent events, and the errors of workers from their next heartbeats, which
tell them again.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ...journal.proto import events_pb2 as ev
from ...journal.reasons import GOODBYE, READ_FAILED, REPAIRED, SILENT, UNREAD
from ..core.iterations import lost_splits
from ..errors import MOST_TOLD
from ..proto import forebay_pb2 as pb
from .decider import Decider

MOST_ERRORS = 10
"""The last ones of a job."""

MOST_GONE = 100
"""Jobs remembered that were removed, as one without a name is when its reader leaves: a worker may
tell of it later."""

SAME = 100
"""Characters of a worker's error by which a consumer's is known to be the same."""

Error = dict[str, Any]


@dataclass
class _JobReport:
    name: str
    dataset_id: str
    joined_ms: int = 0  # when somebody joined it last
    lost: int = 0  # splits
    errors: dict[tuple[Any, ...], Error] = field(default_factory=dict)  # by who tells it, and text
    losses: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_ERRORS))
    left: dict[str, Any] | None = None

    def add(self, key: tuple[Any, ...], error: Error) -> None:
        """An error, or that it has come again."""
        self.errors[key] = error
        if len(self.errors) > MOST_ERRORS:
            del self.errors[min(self.errors, key=lambda one: self.errors[one]["time_ms"])]

    def lose(self, why: str, time_ms: int, *, splits: int = 0, elements: int = 0) -> None:
        """What was lost for the same reason is told as one."""
        if self.losses and self.losses[-1]["why"] == why:
            before = self.losses.pop()
            splits, elements = splits + before["splits"], elements + before["elements"]
        self.losses.append({
            "splits": splits, "elements": elements, "why": why, "unread": why == UNREAD,
            "time_ms": time_ms,
        })  # fmt: skip


class JobReports:
    """Runs on the dispatcher's event loop."""

    def __init__(self, decider: Decider) -> None:
        state = self._state = decider.state
        self._jobs = {i: _JobReport(job.name, job.dataset_id) for i, job in state.jobs.items()}
        self._gone: deque[int] = deque()  # jobs in `_jobs` that were removed
        self._job_of = {i: of.job_id for i, of in state.iterations.items()}
        self._read = {i: self._job_of[c.iteration_id] for i, c in state.consumers.items()}
        self._addresses = {i: worker.address for i, worker in state.workers.items()}
        self._losing = ""  # why splits are being lost
        self._failed_saves: deque[tuple[int, int]] = deque(maxlen=MOST_ERRORS)  # and when
        for job_id, job in self._jobs.items():
            job.lost = self._lost(job_id)
        for _, event in state.recent:
            self._see(event)
        self._losing = ""
        decider.subscribe(self._see)

    # -- what is told --------------------------------------------------------------------------

    def worker_told(self, address: str, uid: int, told: pb.WorkerHeartbeatRequest) -> None:
        """The errors of a worker, which repeats them."""
        now_ms = time.time_ns() // 1_000_000
        worker = self._state.workers.get(self._state.worker_at.get(address, 0))
        if not told.errors or worker is None or worker.uid != uid:
            return
        for error in told.errors[:MOST_ERRORS]:
            if (job := self._jobs.get(error.job_id)) is not None:
                key = uid, error.code, error.message[:SAME]
                before = job.errors.get(key, {"times": 0})
                if before["times"] < error.times:  # else it is the same report again
                    job.add(key, {
                        "time_ms": max(0, now_ms - error.ago_ms), "worker": address,
                        "code": error.code[:SAME], "message": error.message[:MOST_TOLD],
                        "times": error.times, "task_id": error.task_id, "for_good": error.for_good,
                    })  # fmt: skip

    def _see(self, event: ev.Event) -> None:
        """With each event, as a step of a decision: it must take next to no time."""
        kind = event.WhichOneof("event") or ""
        if self._losing and kind != "lease_lost":
            self._explain_losses(kind, event)
        about = getattr(event, kind)
        match kind:
            case "job_created" | "job_forked":
                self._jobs.setdefault(about.job_id, _JobReport(about.name, about.dataset_id))
            case "iteration_created":
                self._job_of[about.iteration_id] = about.job_id
            case "consumer_joined":
                self._joined(about, event.time_ms)
            case "consumer_left":
                self._left(about, event.time_ms)
            case "worker_registered":
                self._addresses[about.worker_id] = about.address
            case "worker_lost":
                self._addresses.pop(about.worker_id, None)
            case "lease_lost":
                self._losing = about.reason or "its worker has ended them"
            case "delivery_reported":
                self._dropped(about, event.time_ms)
            case "iteration_collected" | "iteration_summarized":
                self._forget_removed(self._job_of.pop(about.iteration_id, 0))
            case "job_removed":
                self._forget_removed(about.job_id)
            case "save_failed":
                self._failed_saves.append((about.save_id, event.time_ms))

    def _joined(self, event: ev.ConsumerJoined, time_ms: int) -> None:
        job_id = self._job_of.get(event.iteration_id)
        if job_id is not None and (job := self._jobs.get(job_id)) is not None:
            self._read[event.consumer_id] = job_id
            job.joined_ms, job.left = time_ms, None

    def _left(self, event: ev.ConsumerLeft, time_ms: int) -> None:
        if (job := self._jobs.get(self._read.pop(event.consumer_id, 0))) is None:
            return
        job.left = {"reason": event.reason[:MOST_TOLD], "time_ms": time_ms}
        if event.reason not in (GOODBYE, SILENT, ""):
            text = event.reason.removeprefix(READ_FAILED)
            times = job.errors.get((text,), {"times": 0})["times"] + 1
            job.add((text,), {
                "time_ms": time_ms, "worker": None, "code": "", "message": text[:MOST_TOLD],
                "times": times, "task_id": None, "for_good": False,
                "dismissed": not event.reason.startswith(READ_FAILED),
            })  # fmt: skip

    def _forget_removed(self, job_id: int) -> None:
        if job_id in self._jobs and job_id not in self._gone and job_id not in self._state.jobs:
            self._gone.append(job_id)
            if len(self._gone) > MOST_GONE:
                del self._jobs[self._gone.popleft()]

    # -- lost splits ---------------------------------------------------------------------------

    def _dropped(self, event: ev.DeliveryReported, time_ms: int) -> None:
        """Of pipelines that mix splits, nothing else tells of a loss."""
        task = self._state.tasks.get(event.task_id)
        job = self._jobs.get(self._job_of.get(task.iteration_id, 0)) if task is not None else None
        if event.dropped and job is not None:
            job.lose(event.reason, time_ms, elements=event.dropped)

    def _explain_losses(self, kind: str, event: ev.Event) -> None:
        """Leases were lost, and the next event has the reason."""
        if getattr(getattr(event, kind), "reason", "") == REPAIRED:
            self._losing = REPAIRED
        elif kind == "worker_lost":
            lost = event.worker_lost
            address = self._addresses.get(lost.worker_id, "")
            self._losing = (
                f"worker {address} ended before trainers had all (see --drain-timeout-ms)"
                if lost.left
                else f"worker {address} was given up: {lost.reason}"
            )
        elif kind in ("iteration_collected", "iteration_paused"):
            self._losing = UNREAD
        self._note_losses(event.time_ms)

    def _note_losses(self, time_ms: int) -> None:
        why, self._losing = self._losing, ""
        known = self._jobs.keys() & self._state.jobs.keys()  # else it is being created
        for job_id, job in ((i, self._jobs[i]) for i in known):
            now = self._lost(job_id)
            if now > job.lost:
                job.lose(why, time_ms, splits=now - job.lost)
            job.lost = now  # less: a worker has come back with them

    def _lost(self, job_id: int) -> int:
        job = self._state.jobs[job_id]
        its = (self._state.iterations[i] for i in job.iterations.values())
        return job.lost_splits + sum(map(lost_splits, its))

    # -- what is shown -------------------------------------------------------------------------

    def of(self, job_id: int) -> dict[str, Any]:
        """The fields of `JobObservations` (service/core/job_states.py) that are known here."""
        if (job := self._jobs.get(job_id)) is None:
            return {}
        if self._losing:
            self._note_losses(time.time_ns() // 1_000_000)
        errors = _shown(job)
        failed = bool(errors) and (
            errors[-1]["time_ms"] >= job.joined_ms
            or any(error["for_good"] and self._is_listed(error["task_id"]) for error in errors)
        )
        return {"failed": failed, "errors": errors, "left": job.left, "losses": [*job.losses]}

    def _is_listed(self, task_id: int) -> bool:
        """Whether whoever reads the epoch gets the error of this task."""
        task = self._state.tasks.get(task_id)
        return task is not None and not task.completed

    def removed(self) -> list[dict[str, Any]]:
        """Jobs that failed and are no more, the latest last."""
        return [
            {
                "job_id": i, "name": job.name or None, "dataset_id": job.dataset_id,
                "errors": _shown(job),
            }
            for i in self._gone if (job := self._jobs[i]).errors
        ]  # fmt: skip

    def failed_saves(self) -> list[dict[str, Any]]:
        """Saves that failed lately, the latest last."""
        found = ((self._state.ended_saves.get(i), time_ms) for i, time_ms in self._failed_saves)
        return [
            {"path": of.path, "error": f"{of.failed}: {of.message[:MOST_TOLD]}", "time_ms": at_ms}
            for of, at_ms in found if of is not None
        ]  # fmt: skip


def _shown(job: _JobReport) -> list[Error]:
    """Its errors, the latest last. What a consumer tells after a worker is the same one, later."""
    shown = {key: error.copy() for key, error in job.errors.items() if error["worker"]}
    for key, error in job.errors.items():
        if not error["worker"]:
            same = [one for one in shown.values() if one["message"][:SAME] in error["message"]]
            for one in same:
                one["time_ms"] = max(one["time_ms"], error["time_ms"])
            if not same:
                shown[key] = error
    return sorted(shown.values(), key=lambda error: error["time_ms"])
