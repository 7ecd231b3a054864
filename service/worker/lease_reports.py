"""LeaseReports: what became of a task's leases, for the dispatcher; and whether it may have more.

A lease is *taken* once its pipeline has made all elements of its splits and trainers have taken
them. If one was dropped, the lease is lost. Pipelines that mix the elements of splits can't tell;
their leases are only reported as begun.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from functools import partial

from ..delivery import TaskOutput
from ..delivery.in_flight import InFlightElements
from ..pipelines import Run, SplitRange
from ..proto import forebay_pb2 as pb

STARVED_S = 0.05
"""If trainers were given everything and nothing new was made for so long, the pipeline needs more
splits for its next element, to fill a batch or a buffer; or a trainer has none."""

LOOK_S = 0.5

ROOM = 4
"""A lease fills this part of the bound at least, so that there are about four in a second."""


@dataclass
class _OpenLease:
    unmade: int  # splits of which elements may still be made
    first: int  # position of its first element, or before
    stop: int = 0  # behind its last element, once all are made


class LeaseReports:
    """The leases of one task, in all of its pipeline's runs. Thread-safe."""

    def __init__(self, output: TaskOutput | None = None) -> None:
        """Without an output whose takes are counted, leases are only reported as begun."""
        self._output = output
        in_flight = None if output is None else output.in_flight
        self._are_counted, self._in_flight = in_flight is not None, in_flight or InFlightElements()
        if not self._are_counted:
            self._in_flight.bound = 1 << 62
        self._changed = threading.Condition() if output is None else output.changed
        self._run: Run | None = None
        self._open: dict[int, _OpenLease] = {}  # by id
        self._reported = 0  # elements that were dropped
        self._unsent = pb.LeaseSplitsRequest()  # of reports that did not arrive
        self._given = self._made = 0  # splits, in this run
        self._put_before = 0  # elements, before this run
        self._give_up_s = 0.0  # when `wait` returns, monotonic clock

    @property
    def are_exact(self) -> bool:
        """Whether the pipeline tells when it has made all elements of a split."""
        return self._are_counted and self._run is not None and self._run.needs > 0

    def begin_run(self, run: Run) -> None:
        with self._changed:
            self._run, self._given, self._made = run, 0, 0
            self._put_before = self._in_flight.put

    def end_run(self) -> None:
        """Keep nothing of it, as it is freed."""
        self._run = None

    def begin(self, lease_id: int, count: int) -> None:
        """The pipeline will be given these splits."""
        if self.are_exact:
            with self._changed:
                self._open[lease_id] = _OpenLease(count, self._in_flight.put)

    def replace(self, lease_id: int, kept_id: int, unstarted: int) -> None:
        """Its unstarted splits were returned. The others are leased as `kept_id`, or, if that is 0,
        only known to be begun."""
        with self._changed:
            lease = self._open.pop(lease_id, None)
            if lease is not None and kept_id:
                self._open[kept_id] = lease
                self._end_splits(lease, unstarted)

    def given(self, lease_id: int, splits: SplitRange) -> SplitRange:
        """The splits as the pipeline gets them."""
        with self._changed:
            self._given += splits.count
            lease = self._open.get(lease_id)
        if lease is None:
            return splits
        return replace(splits, made=partial(self._are_made, lease))

    def _are_made(self, lease: _OpenLease, count: int) -> None:
        with self._changed:
            self._made += count
            self._end_splits(lease, count)

    def _end_splits(self, lease: _OpenLease, count: int) -> None:
        lease.unmade -= count
        if not lease.unmade:
            lease.stop = self._in_flight.put

    def add_to(self, request: pb.LeaseSplitsRequest) -> None:
        """Report what is new with this request."""
        in_flight = self._in_flight
        with self._changed:
            request.MergeFrom(self._unsent)
            self._unsent.Clear()
            for lease_id, lease in list(self._open.items()):
                if lease.unmade or not in_flight.are_settled(lease.first, lease.stop):
                    continue
                is_lost = in_flight.any_dropped(lease.first, lease.stop)
                (request.lost if is_lost else request.taken).append(lease_id)
                del self._open[lease_id]
            request.dropped, self._reported = in_flight.dropped - self._reported, in_flight.dropped

    def restore(self, request: pb.LeaseSplitsRequest) -> None:
        """This report did not arrive, as far as is known: the next one says the same."""
        with self._changed:
            self._unsent.taken.extend(request.taken)
            self._unsent.lost.extend(request.lost)
            self._reported -= request.dropped

    def all_delivered(self, request: pb.LeaseSplitsRequest) -> None:
        """Report that consumers have received everything that was made, and is not dropped."""
        self.add_to(request)
        with self._changed:
            request.taken.extend(i for i, lease in self._open.items() if not lease.unmade)
            self._open.clear()
        request.all_taken = True

    # -- how far the pipeline may be ahead -----------------------------------------------------

    def most_splits(self) -> int:
        """How many splits it is worth to lease now, before trainers take more."""
        in_flight = self._in_flight
        with self._changed:
            room = in_flight.bound - self._ahead()
            worth = int(room / self._per_split()) if room > in_flight.bound / ROOM else 0
            return max(self._lacking(1, in_flight.bound * (1 - 1 / ROOM)), worth)

    def lacking(self) -> int:
        """How many splits the pipeline lacks to make anything, if it may."""
        with self._changed:
            return self._lacking(1, self._in_flight.bound * (1 - 1 / ROOM))

    def wait(self, processes: int, *, leased: bool = False) -> bool:
        """Wait until the pipeline may have further splits, or for LOOK_S; whether it may. It waits
        until a lease is worth a message, unless the splits are `leased`."""
        in_flight = self._in_flight
        with self._changed:
            put, since_s = in_flight.put, time.monotonic()
            self._give_up_s = since_s + LOOK_S
            while self._ahead() >= (most := in_flight.bound * (1 if leased else 1 - 1 / ROOM)):
                if self._lacking(processes, most):
                    return True
                now_s = time.monotonic()
                # Trainers in lockstep may hold all that was made, and wait for one that has none.
                idle = self._output is None or not self._output.waiting_elements
                if not idle or in_flight.put != put:
                    put, since_s = in_flight.put, now_s
                elif now_s >= since_s + STARVED_S:
                    in_flight.grow()
                    return True
                if now_s >= self._give_up_s:
                    return False
                self._changed.wait(min(STARVED_S if idle else LOOK_S, self._give_up_s - now_s))
            return True

    def wake(self) -> None:
        """Have `wait` return."""
        with self._changed:
            self._give_up_s = 0.0
            self._changed.notify_all()

    def _lacking(self, processes: int, enough: float) -> int:
        """How many splits it lacks to make anything, or to give each process one, if what was made
        is not enough. As soon as each has one, they will make enough if splits are large."""
        if self._run is None or not self.are_exact or self._untaken() >= enough:
            return 0
        return max(0, max(processes, self._run.needs) - (self._given - self._made))

    def _untaken(self) -> int:
        """Elements that were made, and that trainers have not taken."""
        return self._in_flight.untaken + (0 if self._run is None else self._run.waiting)

    def _per_split(self) -> float:
        """How many elements a split has, as far as is known."""
        splits = self._made if self.are_exact else self._given
        return max((self._in_flight.put - self._put_before) / splits, 1e-3) if splits else 1.0

    def _ahead(self) -> float:
        """How many elements trainers have not taken of the splits given so far, or about that."""
        made = self._untaken()
        if not self.are_exact:
            return made
        return max(made, self._in_flight.untaken + (self._given - self._made) * self._per_split())
