"""EventCounts: how many events of each kind there were, and what became of splits and bundles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ...journal.proto import events_pb2 as ev
from ..core.state import State
from ..http.families import OTHER, Tallies
from .decider import Decider

MOST_LEASES = 100_000
"""How many leases are remembered until they end."""


class EventCounts:
    """The counts of this process, in all terms in which it leads."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.splits = Tallies()
        self.bundles = Tallies()
        self._state = State()
        self._leases: dict[int, tuple[str, int]] = {}  # the job, and how many splits
        self._consumers: dict[int, str] = {}  # the job, until it has left

    def follow(self, decider: Decider) -> None:
        """Count the events that it decides from now on."""
        state = self._state = decider.state
        self._leases = {}
        for lease in state.leases.values():
            self._remember(lease.lease_id, self._job(lease.iteration_id), lease.count)
        self._consumers = {i: self._job(c.iteration_id) for i, c in state.consumers.items()}
        decider.subscribe(self._count)

    def _count(self, event: ev.Event) -> None:
        """With each event, as a step of a decision: it must take next to no time."""
        kind = event.WhichOneof("event") or ""
        self.events[kind] += 1
        match kind:
            case "splits_leased":
                leased = event.splits_leased
                job, count = self._job(leased.iteration_id), leased.count
                if leased.lease_id:
                    self._remember(leased.lease_id, job, count)
                    self.splits.add(job, {"leased": count})
                else:  # by GetSplit: nobody will report its progress
                    self.splits.add(job, {"leased": count, "begun": count})
            case "lease_begun":
                self._end(event.lease_begun.lease_id, "begun")
            case "lease_lost":
                self._end(event.lease_lost.lease_id, "lost")
            case "lease_returned":
                returned = event.lease_returned
                self._end(returned.lease_id, "begun", returned=returned.count)
            case "split_skipped":
                skipped = event.split_skipped
                job, count = self._job(skipped.iteration_id), max(1, skipped.records)
                self.splits.add(job, {"skipped": count})
            case "consumer_joined":
                joined = event.consumer_joined
                self._consumers[joined.consumer_id] = self._job(joined.iteration_id)
            case "consumer_left":
                self._consumers.pop(event.consumer_left.consumer_id, None)
            case "bundles_claimed":
                claimed = event.bundles_claimed
                self._of_consumer(claimed.consumer_id, {"claimed": len(claimed.places)})
            case "claims_moved":
                moved = event.claims_moved
                self._of_consumer(moved.consumer_id, {"done": len(moved.done)})

    def _remember(self, lease_id: int, job: str, count: int) -> None:
        self._leases[lease_id] = job, count
        if len(self._leases) > MOST_LEASES:
            del self._leases[next(iter(self._leases))]

    def _end(self, lease_id: int, became: str, *, returned: int = 0) -> None:
        # A lost lease is not forgotten, as its worker may come back with it.
        job, count = self._leases.get(lease_id, (OTHER, returned))
        if became != "lost":
            self._leases.pop(lease_id, None)
        self.splits.add(job, {became: count - returned, "returned": returned})

    def _of_consumer(self, consumer_id: int, amounts: Mapping[str, float]) -> None:
        self.bundles.add(self._consumers.get(consumer_id, OTHER), amounts)

    def _job(self, iteration_id: int) -> str:
        iteration = self._state.iterations.get(iteration_id)
        return OTHER if iteration is None else str(iteration.job_id)
