"""How many workers a job's trainers could use: a judgement of measured loads. Pure.

If trainers wait a share w of their time, the demand is the present rate / (1 − w). If no trainer
waits, it is the present rate. The rate of a busy worker, remembered for an hour, converts it into
workers. A pipeline that prefetches seems idle before it is: so until a rate is known, a few workers
are let go at a time.

If the source is slow for all workers together, a further one changes nothing. Only trying tells, so
the judge remembers what growth has brought.

More workers are wanted at once; fewer only after all judgements of `hold_s` have said so.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ..diagnosis import BUSY, WAITS

SPARE = 0.1
"""The share of its time that a worker should be idle when others are let go: fewer workers than
this leaves would wait for each other's luck, and be called back at once."""

TOLERANCE = 0.04
"""A demand that exceeds a whole number of workers by less is rounded down."""

MOST_GROWTH = 2.0
"""Trainers that read ahead seem to want everything until they have it: so growth goes in steps."""

TELLING_GROWTH = 1.25
"""Only growth of so much tells whether further workers bring anything."""

SPEED_S = 3600.0
"""How long it counts how much a busy worker has made."""

PAYS = 0.5
"""Growth pays off if it brings more than this share of what its workers would bring alone."""

LIMIT_S, MOST_LIMIT_S = 900.0, 4 * 3600.0
"""How long growth that did not pay off is not tried again: at first, and doubled up to this."""


class Load(NamedTuple):
    """What was measured of a job while the same workers ran it."""

    workers: int  # that run it
    busy: float  # sum over workers of the share of time in which their pipelines worked, at least
    no_split: float  # the same of the time in which they waited for splits
    waits: float  # the share of their time in which consumers waited for elements of workers
    rate: float  # elements a second that the workers made
    room: float = math.inf  # further workers that would get a split
    stalls: bool = False  # they have made no element for longer than theirs take


class Wanted(NamedTuple):
    """How many workers, and why."""

    workers: int
    cause: str  # one of few, for programs
    reason: str  # a sentence


NOBODY = Wanted(0, "nobody reads", "nobody reads")


class Plateau(NamedTuple):
    """Beyond so many workers, growth has brought nothing."""

    workers: int
    is_least: bool  # fewer bring less
    rate: float  # that there was
    tried: int  # workers
    until_s: float


WAIT = "trainers wait"
LASTS = ", if this lasts"


class WindowedMaximum:
    """The largest number that was wanted lately."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._wanted: deque[tuple[float, Wanted]] = deque()  # within `hold_s`, and fewer later on

    def hold(self, wanted: Wanted, now_s: float) -> Wanted:
        """`wanted`, with a larger number of the last `hold_s`."""
        lately = self._wanted
        while lately and lately[-1][1].workers <= wanted.workers:
            lately.pop()
        lately.append((now_s, wanted))
        while lately[0][0] < now_s - self._hold_s:
            lately.popleft()
        most = lately[0][1].workers
        reason = wanted.reason
        if wanted.cause == WAIT:  # for what is missing, one number
            reason = reason.removesuffix(_would_do(wanted.workers)) + _would_do(most)
            return wanted._replace(workers=most, reason=reason)
        if most > wanted.workers and not reason.endswith(LASTS):
            would_do = _would_do(wanted.workers)
            reason = (reason if reason.endswith(would_do) else f"{reason}: {would_do}") + LASTS
        return wanted._replace(workers=most, reason=reason)


class Judge:
    """Judges the loads of one job, in the order of their times."""

    def __init__(self, hold_s: float) -> None:
        self._maximum = WindowedMaximum(hold_s)
        self._before: tuple[Load, float] | None = None  # what growth is compared with, and when
        self._speed: tuple[float, float] | None = None  # of a busy worker, and when it was busy
        self._enough = 0, 0.0  # workers for whom no trainer waited, and when
        self._plateau: Plateau | None = None
        self._limit_s = LIMIT_S

    def judge(self, load: Load, now_s: float) -> Wanted:
        """How many workers are wanted: the most of what the last `hold_s` said."""
        return self._maximum.hold(self._now(load, now_s), now_s)

    def hold(self, wanted: Wanted, now_s: float) -> Wanted:
        """The most of it and what was wanted within `hold_s`."""
        return self._maximum.hold(wanted, now_s)

    def _now(self, load: Load, now_s: float) -> Wanted:
        n = load.workers
        if load.stalls and load.waits > WAITS:
            why = f"they make no element, and {load.busy:.1f} of {_workers(n)} work at one"
            return Wanted(n, "stalled", f"trainers wait {load.waits:.0%} of the time: {why}")
        if load.busy >= (1 - SPARE) * n:
            self._speed = load.rate / load.busy, now_s
        waits = f"trainers wait {load.waits:.0%} of the time"
        if load.waits <= WAITS:
            self._before, self._enough = None, (n, now_s)
            speed, at_s = self._speed or (load.rate, -math.inf)
            is_known = now_s - at_s <= SPEED_S
            need = max(load.busy, load.rate / max(speed, 1e-9) if is_known else 0)
            some = max(1, min(math.ceil(need / (1 - SPARE)), _whole(need) + 1))
            if is_known:
                why = f"{waits}, and {need:.1f} busy workers could make what {n} make"
            else:  # they may be busier than they seem
                some = max(some, int(BUSY * n))
                why = f"{waits}, and {load.busy:.1f} of {_workers(n)} seem busy"
            return Wanted(some, "workers idle", why) if some < n else Wanted(n, "enough", why)
        if load.no_split > load.busy:
            some = max(1, min(n, math.ceil(load.busy + load.no_split * TOLERANCE)))
            return Wanted(some, "source", f"{waits}, as workers wait for splits of the source")
        demand = n * MOST_GROWTH
        if load.waits < 1:
            demand = min(demand, load.busy / (1 - load.waits))
        if load.busy < BUSY * n or demand <= n:
            why = f"{waits}, but only {load.busy:.1f} of {_workers(n)} are busy"
            return Wanted(n, "not the workers", f"{why}: no further one would help")
        if plateau := self._try(load, now_s):
            some = plateau.workers if plateau.is_least else max(1, int(plateau.workers * BUSY))
            tried = f"{_workers(plateau.tried)} brought no more than {plateau.workers}"
            return Wanted(some, "source", f"{waits}, but {tried}: the source is slow")
        more = max(n + 1, _whole(demand))
        enough, at_s = self._enough
        if enough > n and now_s - at_s <= LIMIT_S:
            more = min(more, enough)
        if more > n + load.room:
            more = n + int(load.room)
            why = f"{waits}, but no further worker would get a split"
            return Wanted(more, "no splits", why if more == n else f"{waits}: {_would_do(more)}")
        return Wanted(more, WAIT, f"{waits}, and {_all(n)} busy: {_would_do(more)}")

    def _try(self, load: Load, now_s: float) -> Plateau | None:
        """The plateau that growth has shown, if there is one; then fewer workers are tried, too."""
        plateau, n = self._plateau, load.workers
        before, since_s = self._before or (load, now_s)
        if plateau and (now_s > plateau.until_s or load.rate > plateau.rate * (1 + SPARE)):
            plateau = None  # it is another by now
        if plateau is None:
            if n >= TELLING_GROWTH * before.workers and now_s - since_s <= LIMIT_S:
                plateau = self._compare(before, load, now_s)
        elif n < plateau.workers:
            suffices = load.rate >= plateau.rate * (1 - SPARE)
            until_s = now_s + self._limit_s
            plateau = plateau._replace(workers=n) if suffices else plateau._replace(is_least=True)
            plateau = plateau._replace(until_s=until_s)
        if n <= before.workers or n >= TELLING_GROWTH * before.workers or since_s < now_s - LIMIT_S:
            self._before = load, now_s
        self._plateau = plateau
        return plateau

    def _compare(self, before: Load, load: Load, now_s: float) -> Plateau | None:
        """The plateau, if the growth in between did not pay off."""
        alone = before.rate * load.workers / before.workers
        if load.rate >= before.rate + PAYS * (alone - before.rate):
            self._limit_s = LIMIT_S
            return None
        gain = load.rate / max(before.rate, 1e-9)
        is_least = gain > 1 + SPARE  # those before have brought less
        useful = before.workers
        if is_least:
            useful = min(math.ceil(useful * gain * (1 - TOLERANCE)), load.workers)
        until_s = now_s + self._limit_s
        self._limit_s = min(2 * self._limit_s, MOST_LIMIT_S)
        return Plateau(useful, is_least, load.rate, load.workers, until_s)


def all_jobs(jobs: Sequence[tuple[str, Wanted]], saves: Wanted) -> Wanted:
    """Of all jobs together, and of saves, which the same workers run: what the neediest wants."""
    name, most = max(jobs, key=lambda job: job[1].workers, default=("", NOBODY))
    if saves.workers and saves.workers >= most.workers:
        return saves
    return most._replace(reason=f"job {name}: {most.reason}") if jobs else NOBODY


def _whole(need: float) -> int:
    return math.ceil(need * (1 - TOLERANCE))


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def _all(number: int) -> str:
    return "the only worker is" if number == 1 else f"all {number} workers are"


def _would_do(number: int) -> str:
    return f"{number} would do"
