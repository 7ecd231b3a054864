"""The state machine of a run's splits: assigns them to processes, and retries or skips failed ones.

Events, which are methods, return instructions; `PythonRun` (runs.py) carries these out. The module
has no process, thread or clock, so tests can try any order of events. A run has `width` slots,
numbered from 0. At most one process works in each. A range whose elements all came is `made`.

An idle slot asks for a range, which goes to one process as a whole. Asking implies that all earlier
ranges were begun. A process asks itself whether it may leave out what fails; one that has ended
cannot: its split is reported, and the rest of its range continues after the answer.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ....journal.splits import MAX_REASON
from ...errors import PipelineError
from ...proto.python_pb2 import RETRY, SKIP, OnError
from ..splits import SkipReport, SplitRange
from .child_blocks import no_more
from .child_connections import Died, ElementPlace, Failed

log = logging.getLogger(__name__)

SILENT_S = 60.0
"""An element that takes this long is logged."""

NOWHERE = ElementPlace(-1, 0)


@dataclass(frozen=True)
class FailureRules:
    """How a run handles failed splits."""

    on_error: OnError
    limit: int
    timeout_s: float  # for an element; 0: none
    where: str  # the worker, for people
    path: Callable[[int], str] = str  # of a file, by its number

    def describe(self, at: ElementPlace, first: ElementPlace) -> str:
        """The place in words, for people; `first` was to be run first."""
        if at.split < 0 and at.element < 0:
            return "its start"
        before, at = ("before ", first) if at.split < 0 else ("", at)
        return f"{before}split {at.split}, element {at.element}"


class Ask(NamedTuple):
    """Get the next range."""


class StartRun(NamedTuple):
    """Run these splits in the slot, without the first `start` elements of the first split, or of
    the bundle."""

    slot: int
    first: int
    splits: int
    start: int


class EndLate(NamedTuple):
    """End the slot's process: it takes too long."""

    slot: int


Instruction = Ask | StartRun | SkipReport | EndLate
"""`answered` follows a SkipReport, and `granted` an Ask."""


@dataclass
class _Given:
    """A range that was granted, and how many of its splits may still have elements."""

    splits: SplitRange
    left: int

    def end(self, splits: int) -> None:
        self.left -= splits
        if splits and not self.left:
            self.splits.made(self.splits.count)


@dataclass
class _Work:
    """Splits first … stop − 1, from element `start` of them on, and a process's progress."""

    given: _Given
    first: int
    stop: int
    start: int = 0
    behind: ElementPlace = NOWHERE  # behind the last element that came
    seen: ElementPlace = NOWHERE  # the process's last known place
    since_s: float = 0.0  # when it was first seen there
    warned: bool = False
    late: str = ""  # why its process was told to end


class _Skip(NamedTuple):
    """A split to skip, which waits for its answer."""

    rest: list[_Work]
    error: PipelineError


class RunStates:
    """The splits of one run. Not thread-safe."""

    def __init__(self, rules: FailureRules, width: int, bundle_start: int | None = None) -> None:
        """`bundle_start` is a bundle's first index; a bundle that fails runs again as a whole."""
        self._rules = rules
        self.patience_s = min(rules.timeout_s or SILENT_S, SILENT_S)  # callers check 4 × in that
        self._width = width
        self._is_bundle = bundle_start is not None
        self._index = bundle_start or 0
        self._asked = self._no_more = False
        self._waiting: collections.deque[_Work] = collections.deque()
        self._working: dict[int, _Work] = {}
        self._skips: collections.deque[_Skip] = collections.deque()
        self._failures: collections.Counter[int] = collections.Counter()  # by split

    @property
    def is_over(self) -> bool:
        return self._no_more and not (self._waiting or self._working or self._skips)

    def begun(self, now_s: float) -> list[Instruction]:
        """Somebody begins to read the run."""
        return self._hand_out(now_s)

    def granted(self, splits: SplitRange | None, now_s: float) -> list[Instruction]:
        """The answer to Ask; None: there are no more splits."""
        if splits is None:
            self._no_more = True
        else:
            self._asked = False
            start = self._index if self._is_bundle else 0
            given = _Given(splits, splits.count)
            self._again(given, splits.first, splits.first + splits.count, start)
        return self._hand_out(now_s)

    def received(self, slot: int, elements: int, behind: ElementPlace) -> None:
        """So many elements came, and `behind` is the place behind them."""
        self._working[slot].behind = behind
        self._index += elements

    def done(self, slot: int, now_s: float) -> list[Instruction]:
        """The slot's process has run its range."""
        work = self._working.pop(slot)
        work.given.end(work.stop - work.first)
        return self._hand_out(now_s)

    def failed(self, slot: int, failure: Failed | Died, now_s: float) -> list[Instruction]:
        """The slot's process has failed, or has died and is gone. Raises PipelineError, which ends
        the run."""
        return self._fail(self._working.pop(slot), failure) + self._hand_out(now_s)

    def answered(self, allowed: bool, now_s: float) -> list[Instruction]:
        """Whether the split of the oldest unanswered SkipReport may be skipped. Raises as
        `failed`."""
        skip = self._skips.popleft()
        if not allowed:
            raise skip.error
        self._waiting.extendleft(reversed(skip.rest))
        return self._hand_out(now_s)

    def polled(self, places: dict[int, ElementPlace], now_s: float) -> list[Instruction]:
        """The places of these slots' processes, which have no unread messages."""
        return [each for slot, place in places.items() for each in self._look(slot, place, now_s)]

    def stalled(self, seconds: float) -> None:
        """The consumer was slow for this long, so all processes may have waited for it."""
        for work in self._working.values():
            work.since_s += seconds

    def _hand_out(self, now_s: float) -> list[Instruction]:
        out: list[Instruction] = []
        for slot in range(self._width):
            if slot in self._working:
                continue
            if not self._waiting:
                if not (self._asked or self._no_more):
                    self._asked = True
                    out.append(Ask())
                break
            work = self._working[slot] = self._waiting.popleft()
            work.behind, work.since_s = ElementPlace(work.first, work.start), now_s
            out.append(StartRun(slot, work.first, work.stop - work.first, work.start))
        return out

    def _look(self, slot: int, place: ElementPlace, now_s: float) -> list[Instruction]:
        """Check whether a process takes too long for an element, or for its start."""
        work = self._working[slot]
        if place != work.seen:
            work.seen, work.since_s, work.warned = place, now_s, False
        silent_s, limit_s = now_s - work.since_s, self._rules.timeout_s
        where = self._rules.describe(place, work.behind)
        if place.split < 0 and limit_s:
            limit_s = max(limit_s, SILENT_S)  # imports and models take longer than an element
        out: list[Instruction] = []
        if not work.late:
            if 0 < limit_s <= silent_s:
                work.late = f"{where}: it has taken longer than {limit_s:g} s"
                out.append(EndLate(slot))  # its sent elements still come, and then its end
            if silent_s >= SILENT_S and not work.warned:
                log.warning("a Python dataset's function is in %s for %.0f s", where, silent_s)
                work.warned = True
        return out

    def _fail(self, work: _Work, failure: Failed | Died) -> list[Instruction]:
        """Give the rest of its range to another process, or raise PipelineError."""
        at, rules = failure.at, self._rules
        if isinstance(failure, Died):
            behind = max(work.behind, failure.sent)
            code = "ABORTED"
            text = f"{rules.describe(at, behind)}: the process that ran it ended: {failure.how}"
            if failure.file >= 0:
                text += f", after it read {rules.path(failure.file)}"
            if work.late:
                code, text = "DEADLINE_EXCEEDED", work.late
        else:
            behind = max(work.behind, at)
            code, text = failure.code, failure.text
        reason, text = text, f"worker {rules.where}: {text}"
        tried = at.split if at.split >= 0 else behind.split  # where it was to begin
        self._failures[tried] += 1
        if at.split < 0 and isinstance(failure, Failed):  # the next process would fail too
            raise PipelineError(code, text)
        starts_again = rules.on_error == RETRY or (rules.on_error == SKIP and at.split < 0)
        if starts_again and self._failures[tried] <= rules.limit:
            log.warning("tried again: %s", text)
            if self._is_bundle:  # again from its start, with the same random numbers
                self._again(work.given, work.first, work.stop, self._index)
            else:
                self._again(work.given, behind.split, work.stop, behind.element)
                work.given.end(behind.split - work.first)
            return []
        can_skip = isinstance(failure, Died) and not self._is_bundle  # it would be shorter
        if can_skip and rules.on_error == SKIP and rules.limit and at.split >= 0:
            rest = [
                _Work(work.given, behind.split, at.split, behind.element),
                _Work(work.given, at.split + 1, work.stop),
            ]
            error = PipelineError(code, f"{text}\n{no_more(rules.limit)}")
            self._skips.append(_Skip([w for w in rest if w.first < w.stop], error))
            reason = reason.partition("\n")[0][:MAX_REASON]
            came = behind.element if behind.split == at.split else 0  # retries repeat the others
            work.given.end(behind.split - work.first + 1)  # and the one that is skipped
            log.warning("its rest is skipped, if it may be: %s", text)
            return [SkipReport(at.split, came, reason, rules.limit)]
        raise PipelineError(code, text)

    def _again(self, given: _Given, first: int, stop: int, start: int = 0) -> None:
        if first < stop:
            self._waiting.appendleft(_Work(given, first, stop, start))
