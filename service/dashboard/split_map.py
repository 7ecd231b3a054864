"""The splits of an iteration as a picture of at most MOST_CELLS cells, each a mix of states. Pure.

The work follows the number of ranges and cells, not of splits: a million splits are as cheap as a
thousand. `mapped` yields None now and then, where the caller may let others run.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...journal.splits import ENDLESS
from ..core.state import Iteration, Lease, State
from ..order import Ints
from ..ranges import Ranges

COLUMNS = 64
MOST_CELLS = COLUMNS * 16
STATES = ("done", "begun", "leased", "lost", "waiting")
"""In the order in which a cell shows them. Elements of begun splits may have been seen. Bundles are
done, and splits of a finished iteration."""

MOST_NAMED = 20
"""Ranges of lost splits, and workers, that are listed."""

MOST_MAPPED = 4
"""Iterations of a job that are shown."""

_AT_ONCE = 500
CELL = 8
"""Width and height of a cell in a picture's units; it is divided by whole ones."""


class _Layer(NamedTuple):
    """What the ledger of a source, or the claims of an iteration, say."""

    title: str
    unit: str
    size: int | None  # None: without an end
    next: int  # from here on all wait
    given_up: Ranges  # below it, these wait again
    begun: Ranges
    done: Ranges
    lost: Ranges
    source: int = 0


def mapped(state: State, iteration: Iteration, worker: str = "") -> Iterator[dict[str, Any] | None]:
    """A JSON-ready map of each source of the iteration, or of its claimed bundles.

    `worker` is an address: its cells are in `of_worker`. What changes meanwhile is partly seen.
    """
    leases = _leases(state, iteration)
    for layer in _layers(iteration):
        yield from _mapped(state, layer, leases, worker)


def shown_iterations(state: State, job_id: int) -> list[Iteration]:
    """Of which there is a picture: a job's newest unfinished iterations, or its last one."""
    job = state.jobs.get(job_id)
    numbers = [] if job is None else sorted(job.iterations.values())
    there = [i for number in numbers if (i := state.iterations.get(number)) is not None]
    return [i for i in there if not i.finished][-MOST_MAPPED:] or there[-1:]


def _layers(iteration: Iteration) -> Iterator[_Layer]:
    if (claims := iteration.claims) is not None:
        again = sorted((place, place + 1) for place in claims.returned)
        yield _Layer("Bundles", "bundles", claims.bundles, claims.next, again, [],
                     [*claims.done], [])  # fmt: skip
    for number, ledger in enumerate(iteration.ledgers):
        if not iteration.counts(ledger):
            continue
        size = iteration.size_of(ledger)
        begun = [*ledger.begun]
        finished = iteration.finished
        title = f"Source {number}" if len(iteration.ledgers) > 1 else "Splits"
        title += f", pass {ledger.pass_number + 1}" if ledger.pass_number else ""
        yield _Layer(
            title, "splits", None if size == ENDLESS else size, ledger.next, [*ledger.returned],
            [] if finished else begun, begun if finished else [], [*ledger.lost], number,
        )  # fmt: skip


def _leases(state: State, iteration: Iteration) -> list[Lease]:
    tasks = (state.tasks.get(number) for number in [*iteration.all_tasks])
    numbers = [number for task in tasks if task is not None for number in task.leases]
    return [lease for n in numbers if (lease := state.leases.get(n)) is not None]


def _mapped(
    state: State, layer: _Layer, leases: Sequence[Lease], worker: str
) -> Iterator[dict[str, Any] | None]:
    size = max(layer.next, 1) if layer.size is None else layer.size
    bounds = bounds_of(size)
    counts = {}
    for name in ("begun", "done", "lost"):
        counts[name] = yield from _counted(getattr(layer, name), bounds)
    handed_out = yield from _counted([(0, layer.next)], bounds)
    again = yield from _counted(layer.given_up, bounds)
    counts["waiting"] = np.diff(bounds) - handed_out + again
    counts["leased"] = np.maximum(0, np.diff(bounds) - sum(counts.values()))
    of_worker: list[tuple[int, int]] = []
    by_worker: dict[str, int] = {}
    for number, lease in enumerate(leases, 1):
        if number % _AT_ONCE == 0:
            yield None
        task = state.tasks.get(lease.task_id)
        owner = None if task is None else state.workers.get(task.worker_id)
        if lease.source == layer.source and owner is not None:
            by_worker[owner.address] = by_worker.get(owner.address, 0) + lease.count
            if owner.address == worker:
                of_worker.append((lease.first, lease.stop))
    marked = yield from _counted(of_worker, bounds)
    cells = np.stack([counts[name] for name in STATES], axis=1)
    yield {
        "title": layer.title,
        "unit": layer.unit,
        "size": layer.size,
        "per_cell": -(-size // len(cells)) if size else 0,
        "totals": dict(zip(STATES, cells.sum(axis=0).tolist(), strict=True)),
        "cells": cells.tolist(),
        "lost": layer.lost[:MOST_NAMED],
        "more_lost": max(0, len(layer.lost) - MOST_NAMED),
        "by_worker": sorted(by_worker.items(), key=lambda item: -item[1])[:MOST_NAMED],
        "workers": len(by_worker),
        "of_worker": marked.tolist() if worker else [],
    }


def bounds_of(size: int) -> Ints:
    """Where cells of equal shares of `size` begin; and where the last one ends."""
    cells = min(size, MOST_CELLS)
    return np.array([cell * size // max(cells, 1) for cell in range(cells + 1)], np.int64)


def _counted(ranges: Ranges, bounds: Ints) -> Generator[None, None, Ints]:
    """How many integers of the ranges are in each cell."""
    found = np.zeros(len(bounds) - 1, np.int64)
    for first in range(0, len(ranges), _AT_ONCE):
        found += counts_of(ranges[first : first + _AT_ONCE], bounds)
        yield None
    return found


def counts_of(ranges: Ranges, bounds: Ints) -> Ints:
    """The same of some ranges, at once."""
    starts, stops = np.array(ranges, np.int64).T
    counts: Ints = np.diff(_distances(starts, bounds) - _distances(stops, bounds))
    return counts


def _distances(points: Ints, bounds: Ints) -> Ints:
    """Of each bound, the sum of its distances from the points below it."""
    points = np.sort(points)
    numbers = np.searchsorted(points, bounds)
    distances: Ints = numbers * bounds - np.concatenate([[0], np.cumsum(points)])[numbers]
    return distances


def paths(cells: Iterable[Sequence[int]]) -> dict[str, str]:
    """By state, the outline of what it has of a picture, for SVG's `path`.

    A state that a cell has at all is seen in it. Neighbours of a state are one rectangle.
    """
    runs: dict[str, list[list[int]]] = {name: [] for name in STATES}  # [row, from, to]
    for number, counts in enumerate(cells):
        row, column = divmod(number, COLUMNS)
        whole, begin, stop = sum(counts), CELL * column, CELL * (column + 1)
        there = [(name, count) for name, count in zip(STATES, counts, strict=True) if count]
        for place, (name, count) in enumerate(there, 1):
            behind = len(there) - place  # each of which needs a unit
            width = max(1, round(CELL * count / whole))
            end = min(begin + width, stop - behind) if behind else stop
            its = runs[name]
            if its and its[-1][0] == row and its[-1][2] == begin:
                its[-1][2] = end
            else:
                its.append([row, begin, end])
            begin = end
    return {
        name: "".join(_rectangle(row, begin, end) for row, begin, end in its)
        for name, its in runs.items()
        if its
    }


def marks(counts: Iterable[int]) -> str:
    """The outline of all cells in which something is counted."""
    there = [divmod(number, COLUMNS) for number, count in enumerate(counts) if count]
    return "".join(_rectangle(row, CELL * column, CELL * (column + 1)) for row, column in there)


def _rectangle(row: int, begin: int, end: int) -> str:
    return f"M{begin} {CELL * row}h{end - begin}v{CELL - 1}h{begin - end}z"
