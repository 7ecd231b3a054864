"""DashboardSource: what the dashboard shows of a dispatcher."""

from __future__ import annotations

from typing import Any

import msgspec

from ...journal.words import fold, summary
from ..dashboard.split_map import mapped, shown_iterations
from ..slicing import in_slices
from .candidate import Candidate
from .metrics import DispatcherMetrics
from .samples import LoadSampler


class DashboardSource:
    """Implements `DispatcherView` (service/dashboard/pages.py), on the dispatcher's event loop."""

    def __init__(self, metrics: DispatcherMetrics, candidate: Candidate) -> None:
        self.samples = LoadSampler(metrics)
        self._metrics = metrics
        self._candidate = candidate

    def role(self) -> dict[str, Any]:
        """Who leads, and how far the journal is."""
        dispatcher = self._metrics.dispatcher
        state = self._candidate.state if dispatcher is None else dispatcher.state
        return {
            "leads": dispatcher is not None and not dispatcher.stopped.is_set(),
            "why_not": self._metrics.unready(),
            "leader": self._candidate.leader() if dispatcher is None else state.leader,
            "dashboard": state.dashboard,
            "term": state.term,
            "sequence": self.durable() or state.sequence,
        }

    def durable(self) -> int:
        """The newest event that may be shown; 0 if that is not known here."""
        dispatcher = self._metrics.dispatcher
        return 0 if dispatcher is None else dispatcher.journal.durable_sequence

    async def status(self) -> dict[str, Any]:
        """The status, and what this dispatcher knows besides; {} if it does not lead."""
        if (dispatcher := self._metrics.dispatcher) is None:
            return {}
        pieces = await in_slices(dispatcher.encoded_status())
        found: dict[str, Any] = msgspec.json.decode(b"".join(pieces))
        memory = {each["address"]: each for each in found["memory"]}
        for worker in found["workers"]:
            held = memory.get(worker["address"])
            worker["silent_s"] = dispatcher.failure_detector.silent_s(worker["worker_id"])
            worker["host"] = held and held["host"]
            worker["budget_bytes"] = held and held["budget_bytes"]
            worker["held_bytes"] = held and sum(job["held_bytes"] for job in held["jobs"])
        for job in found["jobs"]:
            job["splits_per_s"] = self.samples.splits_per_s(job["job_id"])
        sequence, time_ms = self._metrics.newest_snapshot(dispatcher)
        found["journal"] = {
            "undurable": dispatcher.journal.sequence - dispatcher.journal.durable_sequence,
            "replay": dispatcher.state.sequence - sequence,
            "snapshot": sequence,
            "snapshot_age_s": max(0, found["time_ms"] - time_ms) / 1000 if sequence else None,
        }
        return found

    def consumers(self, job_id: int) -> dict[int, dict[str, float | None]]:
        """What consumers of a job told, by id."""
        dispatcher = self._metrics.dispatcher
        return {} if dispatcher is None else dispatcher.loads.consumers(job_id)

    async def maps(self, job_id: int, worker: str) -> dict[int, list[dict[str, Any]]]:
        """The maps of `shown_iterations`, by their ids."""
        dispatcher = self._metrics.dispatcher
        if dispatcher is None:
            return {}
        state, found = dispatcher.state, {}
        for iteration in shown_iterations(state, job_id):
            made = await in_slices(mapped(state, iteration, worker))
            found[iteration.iteration_id] = [each for each in made if each is not None]
        return found

    def recent(
        self, after: int, most: int, folded: dict[str, Any] | None
    ) -> tuple[list[dict[str, Any]], int]:
        """The newest events behind `after` that are durable, the latest last; and how many older
        ones are left out. Quiet ones are folded (words.fold), first of all into `folded`, which may
        be empty; None: they are not."""
        dispatcher = self._metrics.dispatcher
        if dispatcher is None:
            return [], 0
        durable = dispatcher.journal.durable_sequence
        new = [each for each in dispatcher.state.recent if after < each[0] <= durable]
        missed = durable - after - len(new)
        if folded is None:
            found = [summary(*each) for each in new[-most:]]
            return found, missed + len(new) - len(found)
        found = [folded] if folded else []
        for each in new:
            fold(found, *each)
        return found if new else [], missed
