"""Folds the journal into a history of each epoch, and checks it for contradictions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..journal.proto import events_pb2 as ev
from ..journal.reasons import SILENT


@dataclass
class LeasedSplits:
    """A lease of splits to a task; the task owns those that it did not return."""

    task_id: int
    in_pass: int  # the pass over the source, from 0
    first: int
    count: int
    at_ms: int


@dataclass
class Epoch:
    """An iteration of a job.

    `lease_of` is by (pass, split), without returned splits. `paused_ms` is, by task, when the
    dispatcher stopped it because nobody read the epoch.
    """

    number: int
    finished: bool = False
    lease_of: dict[tuple[int, int], LeasedSplits] = field(default_factory=dict)
    tasks: set[int] = field(default_factory=set)
    paused_ms: dict[int, int] = field(default_factory=dict)


@dataclass
class WorkerProcess:
    """A worker's process, as in the journal."""

    name: str
    given_up_ms: int | None = None  # when the failure detector removed it for its silence
    lost_ms: int | None = None  # when it was removed; None: not, or it said goodbye


@dataclass
class History:
    """The folded journal. `broken` lists its contradictions."""

    events: int = 0
    terms: int = 0
    broken: list[str] = field(default_factory=list)
    leaders: list[tuple[int, str]] = field(default_factory=list)  # (since when, ms; address)
    jobs: dict[str, dict[int, Epoch]] = field(default_factory=dict)  # by name and number
    workers: dict[int, WorkerProcess] = field(default_factory=dict)  # by id
    worker_of: dict[int, int] = field(default_factory=dict)  # by task
    no_worker_ms: list[tuple[int, float]] = field(default_factory=list)  # from when until when
    left: dict[int, str] = field(default_factory=dict)  # why, by consumer
    given_up_ms: dict[int, int] = field(default_factory=dict)
    """When the failure detector removed a consumer for its silence, by consumer."""
    claims: dict[int, dict[int, int]] = field(default_factory=dict)
    """The first element of each claim, by consumer and place."""
    members: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The index in the group, and when it joined, ms: by consumer of an ordered read."""

    def leader_at(self, time_ms: int) -> str:
        """The leader's address at that time; "" before the first leader."""
        return next((who for since_ms, who in reversed(self.leaders) if since_ms <= time_ms), "")


def read_history(records: Iterable[tuple[int, int, ev.Event]]) -> History:
    """Fold a whole journal, given as (sequence, term, event) from the first event on."""
    return _Fold().fold(records)


class _Fold:
    """The fold's state after the events so far."""

    def __init__(self) -> None:
        self._history = History()
        self._present: set[int] = set()  # workers
        self._jobs: dict[int, dict[int, Epoch]] = {}
        self._iterations: dict[int, Epoch] = {}
        self._leases: dict[int, tuple[Epoch, LeasedSplits]] = {}
        self._iteration_of: dict[int, int] = {}  # by consumer
        self._cursors: dict[tuple[int, int], int] = {}  # by iteration and place

    def fold(self, records: Iterable[tuple[int, int, ev.Event]]) -> History:
        history, term = self._history, 0
        for sequence, record_term, event in records:
            history.events += 1
            if sequence != history.events:
                self._broken(f"event {history.events} of the journal has the sequence {sequence}")
            kind = event.WhichOneof("event")
            if kind == "leader_elected":
                elected = event.leader_elected
                if elected.term <= term:
                    self._broken(f"event {sequence}: term {elected.term} follows term {term}")
                term = elected.term
                history.terms += 1
                history.leaders.append((event.time_ms, elected.address))
            if record_term != term:
                self._broken(f"event {sequence} of term {record_term} was written in term {term}")
            self._apply(sequence, kind or "", event)
        return history

    def _apply(self, sequence: int, kind: str, event: ev.Event) -> None:
        history = self._history
        match kind:
            case "job_created":
                created_job = event.job_created
                self._jobs[created_job.job_id] = history.jobs[created_job.name] = {}
            case "iteration_created":
                begun = event.iteration_created
                epoch = Epoch(begun.epoch)
                self._iterations[begun.iteration_id] = epoch
                self._jobs[begun.job_id][begun.epoch] = epoch
            case "iteration_finished":
                self._iterations[event.iteration_finished.iteration_id].finished = True
            case "iteration_paused":
                epoch = self._iterations[event.iteration_paused.iteration_id]
                for task_id in epoch.tasks:
                    epoch.paused_ms.setdefault(task_id, event.time_ms)
            case "consumer_joined":
                joined = event.consumer_joined
                self._iteration_of[joined.consumer_id] = joined.iteration_id
                if joined.HasField("member"):
                    history.members[joined.consumer_id] = joined.member.index, event.time_ms
            case "consumer_left":
                gone = event.consumer_left
                history.left[gone.consumer_id] = gone.reason
                if gone.reason == SILENT:
                    history.given_up_ms[gone.consumer_id] = event.time_ms
            case "bundles_claimed":
                who = event.bundles_claimed.consumer_id
                iteration, claims = self._iteration_of[who], history.claims.setdefault(who, {})
                for place in event.bundles_claimed.places:
                    claims[place] = self._cursors.get((iteration, place), 0)
            case "claims_moved":
                moved = event.claims_moved
                iteration = self._iteration_of[moved.consumer_id]
                for place, cursor in zip(moved.places, moved.cursors, strict=True):
                    self._cursors[iteration, place] = cursor
            case "worker_registered":
                registered = event.worker_registered
                history.workers[registered.worker_id] = WorkerProcess(",".join(registered.tags))
                if not self._present and history.no_worker_ms:
                    history.no_worker_ms[-1] = history.no_worker_ms[-1][0], event.time_ms
                self._present.add(registered.worker_id)
            case "worker_lost":
                self._present.discard(event.worker_lost.worker_id)
                if not self._present:
                    history.no_worker_ms.append((event.time_ms, math.inf))
                lost = history.workers[event.worker_lost.worker_id]
                if not event.worker_lost.left:
                    lost.lost_ms = event.time_ms
                if event.worker_lost.reason == SILENT:
                    lost.given_up_ms = event.time_ms
            case "task_created":
                created = event.task_created
                history.worker_of[created.task_id] = created.worker_id
                self._iterations[created.iteration_id].tasks.add(created.task_id)
            case "splits_leased":
                self._lease(sequence, event)
            case "lease_returned":
                epoch, lease = self._leases[event.lease_returned.lease_id]
                stop = lease.first + lease.count
                for split in range(stop - event.lease_returned.count, stop):
                    epoch.lease_of.pop((lease.in_pass, split), None)

    def _lease(self, sequence: int, event: ev.Event) -> None:
        leased = event.splits_leased
        epoch = self._iterations[leased.iteration_id]
        in_pass = leased.pass_number
        lease = LeasedSplits(leased.task_id, in_pass, leased.first, leased.count, event.time_ms)
        self._leases[leased.lease_id] = epoch, lease
        splits = range(leased.first, leased.first + leased.count)
        if again := [split for split in splits if (in_pass, split) in epoch.lease_of]:
            self._broken(
                f"epoch {epoch.number}: {listed(again)} of pass {in_pass} leased again by "
                f"event {sequence}, without having been handed back"
            )
        epoch.lease_of.update(dict.fromkeys(((in_pass, split) for split in splits), lease))

    def _broken(self, promise: str) -> None:
        self._history.broken.append(promise)


def listed(numbers: list[int]) -> str:
    """Numbers as text for people: the count, and the first few."""
    few = ", ".join(map(str, numbers[:5]))
    return f"{len(numbers)} elements ({few}{', …' if len(numbers) > 5 else ''})"
