"""The journal of a run, as its audits need it: what `forebay audit` knows of each job, and who had
which splits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..journal.proto import events_pb2 as ev
from ..service.core.job_history import ConsumerStay, JobHistories, JobHistory
from ..service.core.machine import apply
from ..service.core.state import State
from ..service.errors import ForebayError


@dataclass
class History:
    """The folded journal. `broken` lists its contradictions."""

    broken: list[str] = field(default_factory=list)
    jobs: dict[str, JobHistory] = field(default_factory=dict)  # by name
    stays: dict[int, ConsumerStay] = field(default_factory=dict)  # of all consumers, by id
    leased: defaultdict[int, Counter[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    """By iteration: how often a task has a split, in all passes. Not those that it returned."""
    iterations: dict[tuple[int, int], int] = field(default_factory=dict)  # by job and epoch
    worker_of: dict[int, int] = field(default_factory=dict)  # by task
    workers: dict[int, str] = field(default_factory=dict)  # the names of processes, by id
    leaders: list[tuple[int, str]] = field(default_factory=list)  # (since when, ms; address)
    events: int = 0

    def leader_at(self, time_ms: int) -> str:
        """The leader's address at that time; "" before the first leader."""
        return next((who for since_ms, who in reversed(self.leaders) if since_ms <= time_ms), "")


def read_history(records: Iterable[tuple[int, int, ev.Event]]) -> History:
    """Fold a whole journal, given as (sequence, term, event) from the first event on."""
    history, state, term = History(), State(), 0
    jobs = JobHistories(state)
    leases: dict[int, ev.SplitsLeased] = {}
    try:
        for sequence, record_term, event in records:
            history.events += 1
            if sequence != history.events:
                history.broken.append(f"event {history.events} has the sequence {sequence}")
            if event.WhichOneof("event") == "leader_elected":
                if event.leader_elected.term <= term:
                    history.broken.append(
                        f"event {sequence}: term {event.leader_elected.term} follows term {term}"
                    )
                term = event.leader_elected.term
            if record_term != term:
                history.broken.append(
                    f"event {sequence} of term {record_term} was written in term {term}"
                )
            _note(history, leases, event)
            jobs.observe(state, event)
            apply(state, event)
    except (ForebayError, LookupError) as error:  # of what cannot follow
        history.broken.append(f"event {history.events} cannot be applied: {error}")
    history.jobs = {job.job.name: job for job in jobs.jobs.values()}
    for job in history.jobs.values():
        history.stays |= {stay.consumer_id: stay for stay in job.stays}
        for leased in job.leased_twice:
            splits = range(leased.first, leased.first + leased.count)
            history.broken.append(
                f"{listed([*splits])} of pass {leased.pass_number} leased again, and some of them "
                "had not been returned"
            )
    return history


def _note(history: History, leases: dict[int, ev.SplitsLeased], event: ev.Event) -> None:
    """What the histories of jobs do not keep."""
    match event.WhichOneof("event"):
        case "leader_elected":
            history.leaders.append((event.time_ms, event.leader_elected.address))
        case "iteration_created":
            begun = event.iteration_created
            history.iterations[begun.job_id, begun.epoch] = begun.iteration_id
        case "worker_registered":
            registered = event.worker_registered
            history.workers[registered.worker_id] = ",".join(registered.tags)
        case "task_created":
            history.worker_of[event.task_created.task_id] = event.task_created.worker_id
        case "splits_leased":
            leased = leases[event.splits_leased.lease_id] = event.splits_leased
            for split in range(leased.first, leased.first + leased.count):
                history.leased[leased.iteration_id][leased.task_id, split] += 1
        case "lease_returned":
            leased = leases[event.lease_returned.lease_id]
            stop = leased.first + leased.count
            for split in range(stop - event.lease_returned.count, stop):
                history.leased[leased.iteration_id][leased.task_id, split] -= 1


def listed(numbers: list[int]) -> str:
    """Numbers as text for people: the count, and the first few."""
    few = ", ".join(map(str, numbers[:5]))
    return f"{len(numbers)} elements ({few}{', …' if len(numbers) > 5 else ''})"
