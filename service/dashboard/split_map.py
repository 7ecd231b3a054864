"""The splits of an iteration as a picture of at most MOST_CELLS cells, each a mix of states. Pure.

The work follows the number of ranges and cells, not of splits: a million splits are as cheap as a
thousand. `mapped` yields None now and then, where the caller may let others run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ...journal.splits import ENDLESS
from ..core.state import Iteration, Lease, State
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


class Grid:
    """Counts integers of ranges by cell, of which all have the same share of `size`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.cells = min(size, MOST_CELLS)
        self._steps = [0] * (self.cells + 1)  # the growth, from cell to cell, of whole ones
        self._parts = [0] * (self.cells + 1)

    def bound(self, cell: int) -> int:
        """The first integer of a cell."""
        return cell * self.size // self.cells

    def add(self, start: int, stop: int) -> None:
        """Count [start, stop)."""
        start, stop = max(start, 0), min(stop, self.size)
        if start >= stop:
            return
        first, last = self._cell(start), self._cell(stop - 1)
        if first == last:
            self._parts[first] += stop - start
            return
        self._parts[first] += self.bound(first + 1) - start
        self._parts[last] += stop - self.bound(last)
        self._steps[first + 1] += 1
        self._steps[last] -= 1

    def counts(self) -> list[int]:
        """Of each cell."""
        found, whole = [], 0
        for cell in range(self.cells):
            whole += self._steps[cell]
            width = self.bound(cell + 1) - self.bound(cell)
            found.append(self._parts[cell] + (whole * width))
        return found

    def _cell(self, number: int) -> int:
        cell = number * self.cells // self.size
        return cell + 1 if self.bound(cell + 1) <= number else cell


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
    known = {"begun": layer.begun, "done": layer.done, "lost": layer.lost}
    counts = {}
    for name, ranges in {**known, "again": layer.given_up, "": [(0, layer.next)]}.items():
        grid = Grid(size)
        yield from _add(grid, ranges)
        counts[name] = grid.counts()
        yield None
    handed_out, again = counts.pop(""), counts.pop("again")
    widths = [grid.bound(n + 1) - grid.bound(n) for n in range(grid.cells)]
    counts["waiting"] = [
        width - out + back for width, out, back in zip(widths, handed_out, again, strict=True)
    ]
    yield None
    others = zip(widths, *counts.values(), strict=True)
    counts["leased"] = [max(0, width - sum(rest)) for width, *rest in others]
    yield None
    of_worker = Grid(size)
    by_worker: dict[str, int] = {}
    for number, lease in enumerate(leases, 1):
        if number % _AT_ONCE == 0:
            yield None
        task = state.tasks.get(lease.task_id)
        owner = None if task is None else state.workers.get(task.worker_id)
        if lease.source == layer.source and owner is not None:
            by_worker[owner.address] = by_worker.get(owner.address, 0) + lease.count
            if owner.address == worker:
                of_worker.add(lease.first, lease.stop)
    yield None
    yield {
        "title": layer.title,
        "unit": layer.unit,
        "size": layer.size,
        "per_cell": -(-size // grid.cells) if size else 0,
        "totals": {name: sum(counts[name]) for name in STATES},
        "cells": [[counts[name][cell] for name in STATES] for cell in range(grid.cells)],
        "lost": layer.lost[:MOST_NAMED],
        "more_lost": max(0, len(layer.lost) - MOST_NAMED),
        "by_worker": sorted(by_worker.items(), key=lambda item: -item[1])[:MOST_NAMED],
        "workers": len(by_worker),
        "of_worker": of_worker.counts() if worker else [],
    }


def _add(grid: Grid, ranges: Ranges) -> Iterator[None]:
    for number, (start, stop) in enumerate(ranges, 1):
        grid.add(start, stop)
        if number % _AT_ONCE == 0:
            yield None


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
