"""Leases of a task's splits: prefetched from the dispatcher, and sized to the task's pace.

The feed requests the next lease while the pipeline works on the current one, so the pipeline
doesn't wait for the dispatcher. A lease aims at LEASE_S of work, measured on earlier leases: it has
thousands of small splits, or one large split. lease_reports.py says how far the pipeline may be
ahead of trainers, and when a lease is reported. A source that a pipeline may leave early is leased
one split at a time, without prefetch.

A pipeline that runs several processes gets each lease in parts. When the worker drains, the feed
returns the parts not yet given. It measures the pace only once each process has finished a part:
the first parts are given without delay.

A task without consumers leases nothing. Consumers may be unable to reach this worker, or be told
not to read it, and the epoch would lack the leased splits for ever.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ...journal.proto import events_pb2 as ev
from ...journal.splits import grows, source_size
from ...storage.thread_pool import ThreadPool
from ..connections.dispatcher_client import DispatcherClient
from ..errors import ForebayError, NotFound, ProtocolError, Unavailable
from ..pipelines import PARTS, SplitRange
from ..proto import forebay_pb2 as pb
from ..stopwatch import Stopwatch
from . import losses
from .lease_reports import LeaseReports

LEASE_S = 0.25
MAX_GROWTH = 8
MAX_WANT = 1 << 20
HAND_BACK_S = 5.0
UNREAD_S = 0.5
"""A task without consumers polls this often whether the pass is over. The interval grows with the
waiting time, up to MOST_UNREAD_S."""

MOST_UNREAD_S = 4.0


@dataclass
class _LeaseState:
    """State shared by the leases of all sources of a task."""

    task_id: int
    dispatcher: DispatcherClient
    processes: int
    span: Callable[[], AbstractContextManager[object]]
    reports: LeaseReports

    def __post_init__(self) -> None:
        self.closed, self.draining = threading.Event(), threading.Event()
        self.cut_short = threading.Event()
        # Set once the task has a consumer, or once the feed pauses or closes.
        self.may_lease = threading.Event()


class LeaseFeed:
    """Gives a task's pipeline its splits. One thread a source may call `next_range`."""

    def __init__(
        self,
        dispatcher: DispatcherClient,
        task_id: int,
        sources: Sequence[ev.SplitSource],
        processes: int = 0,
        when_opened: Callable[[Callable[[], None]], None] | None = None,
        requests: Sequence[int] = (),
        span: Callable[[], AbstractContextManager[object]] = nullcontext,
        reports: LeaseReports | None = None,
    ) -> None:
        """`processes` is how many parts of a lease the pipeline works on at a time; 0: a lease is
        given whole. `when_opened` registers a callback for the task's first consumer. Until then
        the feed leases nothing; without `when_opened` it leases at once. `requests` are the last
        request numbers of the task's earlier feed, by source. Leases are asked for within `span`.
        `reports` bounds how far the pipeline may be ahead of trainers.
        """
        self.sources = sources
        self.failed: ForebayError | None = None  # why `next_range` raised
        self.given_up = False  # the dispatcher answered NotFound
        sizes = [source_size(source) for source in sources]
        for source, size in zip(sources, sizes, strict=True):
            if source.HasField("leased_with"):
                sizes[source.leased_with] = min(sizes[source.leased_with], size)
        self._sizes = [
            sizes[source.leased_with] if source.HasField("leased_with") else size
            for source, size in zip(sources, sizes, strict=True)
        ]
        name = f"forebay-lease-{task_id}"
        self._pool = ThreadPool(max(1, len(sources)), name)
        reports = reports or LeaseReports()
        self._task = _LeaseState(task_id, dispatcher, processes, span, reports)
        if when_opened is None:
            self._task.may_lease.set()
        else:
            when_opened(self._task.may_lease.set)
        self._leases = [
            _SourceLeases(self._task, number, source, self._pool)
            for number, source in enumerate(sources)
        ]
        for leases, sent in zip(self._leases, requests, strict=False):
            leases.requests = sent

    def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
        """The next splits; None at the end of the opening (pipelines/splits.py), or when the
        dispatcher gave the task up. In that case begun splits may still be read.

        Raises Unavailable after `close`.
        """
        try:
            return self._leases[source].next_range(opening, endless)
        except NotFound:
            self.given_up = True
            return None
        except CancelledError as error:  # by `close`
            self.failed = Unavailable(f"source {source}'s task has been stopped")
            raise self.failed from error
        except ForebayError as error:
            self.failed = error
            raise

    def is_over(self, sources: Iterable[int]) -> bool:
        """Whether present and future openings of these sources have no splits."""
        if self._task.draining.is_set():
            self._task.cut_short.set()
            return True
        return self.given_up or not any(self._may_have_splits(source) for source in sources)

    def _may_have_splits(self, source: int) -> bool:
        """Whether a pass over the source can have splits, as far as is known."""
        if grows(self.sources[source]):
            return not self._leases[source].is_empty
        return self._sizes[source] > 0

    @property
    def requests(self) -> list[int]:
        """The last request number of each source."""
        return [leases.requests for leases in self._leases]

    @property
    def waited_s(self) -> tuple[float, float]:
        """How long the pipeline waited for splits, and for the task's first consumer."""
        leases = self._leases
        return sum(x.no_split.seconds for x in leases), sum(x.unread.seconds for x in leases)

    @property
    def held_back_s(self) -> float:
        """How long the pipeline waited for trainers to take what it had made."""
        return sum(x.held_back.seconds for x in self._leases)

    @property
    def cut_short(self) -> bool:
        """Whether `pause` or `drain` ended the splits before the pipeline had all of them."""
        return self._task.cut_short.is_set()

    def where(self) -> pb.LeaseSplitsRequest:
        """A query whether the first source's current pass is over."""
        return self._leases[0].query()

    def begun_last(self) -> list[str]:
        """The splits given last, for messages."""
        return [found for p in self._leases if (found := p.begun_last)]

    def pause(self) -> None:
        """Give no further splits. Unstarted ones are returned when the pipeline asks for more, or
        by `drain`. Never waits."""
        self._task.draining.set()
        self._task.may_lease.set()
        self._task.reports.wake()

    def drain(self, give_up_s: float) -> None:
        """Give no further splits, and return unstarted ones to the dispatcher.

        Tries until `give_up_s` (monotonic clock), but for at least LEASE_S.
        """
        self.pause()
        give_up_s = max(give_up_s, time.monotonic() + LEASE_S)
        for leases in self._leases:
            leases.hand_back(min(HAND_BACK_S, give_up_s - time.monotonic()))

    def close(self, *, wait: bool = True) -> None:
        """Stop leasing, and wake threads that wait for a lease. Idempotent.

        `wait` waits for calls in flight; a call to a silent dispatcher ends with its timeout.
        """
        self._task.closed.set()
        self._task.may_lease.set()
        self._task.reports.wake()
        self._pool.shutdown(wait=wait, cancel_futures=True)


class _PipelineLease:
    """The lease that the pipeline has, in parts, and how large the next one should be."""

    def __init__(self, processes: int, reports: LeaseReports, clock: Callable[[], float]) -> None:
        """`clock` has the seconds in which the pipeline may work."""
        self.left = 0  # splits not yet given to the pipeline
        self._reports = reports
        self._clock = clock
        self.next_size = 1
        self._lease: pb.LeaseSplitsResponse | None = None
        self._processes = max(1, processes)
        self._parts = max(1, PARTS * processes)
        self._given: deque[tuple[float, int]] = deque(maxlen=self._parts)  # when, how many splits

    def begin(self, lease: pb.LeaseSplitsResponse, left: int) -> None:
        self._lease, self.left = lease, left
        if left:
            self._reports.begin(lease.lease_id, left)

    def next_part(self) -> SplitRange:
        lease = self._lease
        assert lease is not None
        count = min(self.left, -(-lease.count // self._parts))
        begins = lease.count - self.left
        self.left -= count
        self._given.append((self._clock(), count))
        names = tuple(lease.names[begins : begins + count])
        splits = SplitRange(lease.first + begins, count, lease.pass_number, names)
        return self._reports.given(lease.lease_id, splits)

    def finish(self) -> list[int]:
        """End a lease whose splits were all given; its id, or nothing."""
        if self._lease is None or self.left:
            return []
        self.next_size = max(self.next_size, self._lease.count)
        finished, self._lease = [self._lease.lease_id], None
        self._adapt()
        return [] if self._reports.are_exact else finished

    def take_unstarted(self) -> list[pb.ReturnedLease]:
        """End a lease that has unstarted splits; these."""
        if self._lease is None or not self.left:
            return []
        unstarted = [pb.ReturnedLease(lease_id=self._lease.lease_id, count=self.left)]
        self._lease, self.left = None, 0
        return unstarted

    def size(self) -> int:
        """How many splits to lease next."""
        wanted = min(self.next_size, self._reports.most_splits())
        return max(1, wanted, self._reports.lacking())

    def _adapt(self) -> None:
        """Aim at LEASE_S of work; grow by at most MAX_GROWTH a lease."""
        if len(self._given) < self._processes:
            return
        seconds = self._clock() - self._given[0][0]  # for as many parts as `_given` has
        ideal = sum(count for _, count in self._given) * LEASE_S / max(seconds, 1e-6)
        self.next_size = int(max(1, min(ideal, self.next_size * MAX_GROWTH, MAX_WANT)))


class _SourceLeases:
    def __init__(
        self, task: _LeaseState, number: int, source: ev.SplitSource, pool: ThreadPool
    ) -> None:
        self._task = task
        self._pool = pool
        self._number = number
        self._singly = source.singly
        self._grows = grows(source)
        self._lock = threading.Lock()
        self._opening = -1
        self._endless = False
        self._pass = -1  # the pass of this opening
        self._current_pass = 0  # earlier ones are over
        self.is_empty = False  # no pass will have a split
        self.requests = 0
        self.no_split = Stopwatch()  # while the pipeline waits for a lease
        self.unread = Stopwatch()  # while it waits for the task's first consumer
        self.held_back = Stopwatch()  # while it is ahead of trainers
        self._lease = _PipelineLease(
            task.processes, task.reports, lambda: time.monotonic() - self.held_back.seconds
        )
        self.begun_last = ""
        self._begun: list[int] = []  # lease ids to report as begun
        self._ahead: Future[pb.LeaseSplitsResponse] | None = None

    def next_range(self, opening: int, endless: bool) -> SplitRange | None:
        self._wait_for_trainers()
        with self._lock:
            if self._lease.left and not self._task.draining.is_set():
                return self._next_part()
            self._begun += self._lease.finish()
            self._enter(opening, endless)
            if self._pass < self._current_pass and not self._task.draining.is_set():
                return None  # the pass was over before this task read it
        over = self._wait_until_read()
        with self._lock:
            return self._begin(over or self._next_lease())

    def _enter(self, opening: int, endless: bool) -> None:
        if opening == self._opening or self._task.draining.is_set():
            return
        if self._ahead is not None:
            # The pipeline left the opening early, so the prefetched lease counts as begun.
            self._begun.extend(filter(None, [self._ahead.result().lease_id]))
            self._ahead = None
        self._opening, self._endless = opening, endless
        self._pass = self._pass + 1 if endless else opening

    def _next_lease(self) -> pb.LeaseSplitsResponse | None:
        """None when the worker drains."""
        while not self._task.draining.is_set():
            asked = self._ahead or self._ask()
            with self.no_split:
                lease = asked.result()
            self._ahead = None
            if not lease.not_yet:
                return lease
        return None

    def _begin(self, lease: pb.LeaseSplitsResponse | None) -> SplitRange | None:
        """The first part of the lease; None at the end of a pass, or if the feed drains by now."""
        if lease is not None and lease.end_of_splits:
            if lease.pass_number < self._pass:
                self.is_empty = True  # that pass could not begin
            if self._endless:
                self._pass = max(self._pass, lease.pass_number)
            else:
                self._current_pass = lease.pass_number
            return None
        if lease is None or self._task.draining.is_set():
            self._task.cut_short.set()
            self._ahead = self._ahead if lease is None else _completed(lease)
            self._return_unbegun()
            return None
        if self._endless:
            self._pass = max(self._pass, lease.pass_number)
        if self._grows and len(lease.names) != lease.count:
            raise ProtocolError(
                f"the dispatcher leased {lease.count} splits of source {self._number} to task "
                f"{self._task.task_id}, from {lease.first} on, with {len(lease.names)} names, and "
                "without theirs they cannot be read: run a dispatcher of this version"
            )
        self._lease.begin(lease, lease.count)
        part = self._next_part()
        if not self._singly and self._task.reports.most_splits():
            self._ahead = self._ask()
        return part

    def _next_part(self) -> SplitRange:
        part = self._lease.next_part()
        last = part.first + part.count - 1
        self.begun_last = f"{part.first}–{last} of source {self._number}"
        return part

    def hand_back(self, within_s: float) -> None:
        """Return unstarted splits. They are lost if no dispatcher answers within `within_s`."""
        # A pipeline that waits for a lease holds the lock, and returns that lease itself.
        if within_s > 0 and self._lock.acquire(timeout=within_s):
            try:
                self._return_unbegun(within_s, keep=True)
            finally:
                self._lock.release()

    def _return_unbegun(self, within_s: float = HAND_BACK_S, *, keep: bool = False) -> None:
        """Return unstarted splits and the prefetched lease. Splits that the pipeline has are
        reported as begun, or with `keep` leased again until they are."""
        give_up_s = time.monotonic() + within_s
        request = pb.LeaseSplitsRequest()
        unstarted = self._lease.take_unstarted()
        request.returned.extend(unstarted)
        keep = keep and bool(unstarted)
        try:
            ahead = None if self._ahead is None else self._ahead.result(within_s)
            self._ahead = None
            if ahead is not None and ahead.count:
                request.returned.add(lease_id=ahead.lease_id, count=ahead.count)
        except (TimeoutError, CancelledError, ForebayError) as error:
            # The lease may still arrive while the pipeline works on begun splits.
            losses.not_handed_back(self._task.task_id, self._number, error)
            keep = False  # a higher request number would invalidate the one in flight
        request.begun.extend(self._begun)
        self._begun = []
        self._task.reports.add_to(request)
        if not request.ByteSize():
            return
        request.task_id, request.source = self._task.task_id, self._number
        if keep:
            self.requests += 1
            request.request.number = self.requests
        patience_s = max(0.0, give_up_s - time.monotonic())
        try:
            kept = self._task.dispatcher.call(
                request, pb.LeaseSplitsResponse, timeout_s=HAND_BACK_S / 3, patience_s=patience_s
            )
        except ForebayError as error:
            self._task.reports.restore(request)
            losses.not_handed_back(self._task.task_id, self._number, error)
        else:
            for each in unstarted:
                self._task.reports.replace(each.lease_id, kept.lease_id, each.count)
            if kept.lease_id:
                self._lease.begin(kept, 0)

    def _wait_for_trainers(self) -> None:
        """Wait while the pipeline is far ahead of them. Needs no lock, as in `_wait_until_read`."""
        task = self._task
        with self.held_back:
            while not (task.draining.is_set() or task.closed.is_set()):
                if task.reports.wait(max(1, task.processes), leased=self._lease.left > 0):
                    return

    def _wait_until_read(self) -> pb.LeaseSplitsResponse | None:
        """Wait until the task has a consumer or drains. Returns the answer that ends the pass, if
        the pass ends first. Needs no lock, as nothing is leased yet.
        """
        request = self.query()
        waits_s, begun_s = UNREAD_S, time.monotonic()
        with self.unread:
            while not self._task.may_lease.wait(waits_s):
                answer = self._call(request)
                if answer.end_of_splits:
                    return answer
                waits_s = min(max(UNREAD_S, (time.monotonic() - begun_s) / 8), MOST_UNREAD_S)
        return None

    def query(self) -> pb.LeaseSplitsRequest:
        """A query whether the current pass is over."""
        return pb.LeaseSplitsRequest(
            task_id=self._task.task_id,
            source=self._number,
            pass_number=max(0, self._pass),
            or_later=self._endless,
        )

    def _ask(self) -> Future[pb.LeaseSplitsResponse]:
        if self._task.closed.is_set():
            raise Unavailable(f"task {self._task.task_id} has been stopped")
        self.requests += 1
        begun, self._begun = self._begun, []
        request = pb.LeaseSplitsRequest(
            request=ev.Request(number=self.requests),
            task_id=self._task.task_id,
            source=self._number,
            pass_number=self._pass,
            or_later=self._endless,
            want=1 if self._singly else self._lease.size(),
            begun=begun,
        )
        self._task.reports.add_to(request)
        try:
            return self._pool.submit(self._call, request)
        except RuntimeError as error:  # `close` has come in between
            raise Unavailable(f"task {self._task.task_id} has been stopped") from error

    def _call(self, request: pb.LeaseSplitsRequest) -> pb.LeaseSplitsResponse:
        closed = self._task.closed
        with self._task.span():
            return self._task.dispatcher.call(request, pb.LeaseSplitsResponse, closed=closed)


def _completed(lease: pb.LeaseSplitsResponse) -> Future[pb.LeaseSplitsResponse]:
    found: Future[pb.LeaseSplitsResponse] = Future()
    found.set_result(lease)
    return found
