"""Maps of splits and plots, beside what they are made of, and the pass of a browser."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.service.connections.admission import Admission
from forebay.service.connections.credentials import Credentials
from forebay.service.dashboard.series import HEIGHT, WIDTH, Series, line
from forebay.service.dashboard.split_map import (
    CELL,
    COLUMNS,
    MOST_CELLS,
    STATES,
    bounds_of,
    counts_of,
    marks,
    paths,
)
from forebay.service.dashboard.views import MARKS, job_plots
from forebay.service.dispatcher.samples import JOB_FIELDS
from forebay.service.errors import Unauthenticated

from ..certificates import Authority, token

SIZES = st.integers(1, 3 * MOST_CELLS)


@given(
    SIZES,
    st.lists(
        st.tuples(st.integers(-5, 4 * MOST_CELLS), st.integers(0, 5000)), min_size=1, max_size=5
    ),
)
def test_a_cell_counts_what_lies_in_it(size: int, ranges: list[tuple[int, int]]) -> None:
    bounds = bounds_of(size)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, size, min(size, MOST_CELLS) + 1)
    pairs = [(start, start + count) for start, count in ranges]
    assert counts_of(pairs, bounds).tolist() == [
        sum(max(0, min(to, stop) - max(begin, start)) for start, stop in pairs)
        for begin, to in pairwise(bounds.tolist())
    ]


def area(path: str) -> dict[int, float]:
    """By cell, the share of it that the path covers."""
    found: dict[int, float] = {}
    for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v", path):
        for unit in range(int(x), int(x) + int(width)):
            cell = unit // CELL + COLUMNS * (int(y) // CELL)
            found[cell] = found.get(cell, 0.0) + 1 / CELL
    return found


@given(st.lists(st.tuples(*[st.integers(0, 999)] * len(STATES)), max_size=150))
def test_a_cell_shows_each_of_its_states(cells: list[tuple[int, ...]]) -> None:
    shown = {state: area(path) for state, path in paths(cells).items()}
    for number, counts in enumerate(cells):
        parts = [shown.get(state, {}).get(number, 0.0) for state in STATES]
        assert [part > 0 for part in parts] == [count > 0 for count in counts]
        if any(counts):
            assert sum(parts) == pytest.approx(1)
            wanted = [count / sum(counts) for count in counts]
            assert parts == pytest.approx(wanted, abs=len(STATES) / CELL)


def test_the_worst_picture_is_less_than_a_page_may_have() -> None:
    cells = [[1 + (cell * state) % 9 for state in range(len(STATES))] for cell in range(MOST_CELLS)]
    assert sum(len(path) for path in paths(cells).values()) < 85_000


def test_only_the_marked_cells_are_marked() -> None:
    counts = [0] * 130
    counts[3] = counts[64] = 1
    assert marks(counts) == "M24 0h8v7h-8zM0 8h8v7h-8z"


def test_a_series_keeps_the_whole_run_in_bounded_memory() -> None:
    series = Series(("x", "y"), most=8)
    for second in range(1000):
        series.add(second, (float(second), None if second < 500 else 1.0))
        assert len(series.points) < 8
    times = [time_s for time_s, _ in series.points]
    assert times[0] == 0 and times[-1] > 750
    assert [v for _, v in series.of("x")] == pytest.approx([t + 63.5 for t in times], abs=64)
    assert {v for _, v in series.of("y")} <= {None, 1.0}
    assert series.last("x") == 999
    assert line(series.of("y"), 2.0).count(f" {HEIGHT // 2}") == sum(t >= 500 - 127 for t in times)
    assert line([(0, 1.0), (1, None), (2, 1.0)], 1.0).count("M") == 2  # a gap is no line


def test_a_plot_has_a_scale_of_short_numbers_and_marks_what_happened() -> None:
    series = Series(JOB_FIELDS)
    for second in range(100, 201):
        series.add(second, (6.33 * (second - 100), None, 0.0, 3.0))
    happened = (("lost", 150), ("lost", 150), ("", 160), ("change", 50), ("leader", 99))
    notes = [
        {"mark": mark, "time_ms": 1000 * second, "text": f"{mark} at {second}"}
        for mark, second in happened
    ]
    failed = {"time_ms": 175_000, "code": "NOT_FOUND", "message": "/data/7", "worker": None}
    plots = job_plots(series, notes, [failed])
    rate, workers = plots.all  # nobody has told how long trainers wait
    assert rate.scale == ("800", "400", "0") and workers.scale == ("4", "2", "0")
    assert rate.marks == [
        ("leader", 0, "leader at 99"),
        ("lost", WIDTH // 2, "lost at 150 and 1 more"),
        ("error", 3 * WIDTH // 4, "NOT_FOUND: /data/7"),
    ]
    assert plots.marks == {"leader", "lost", "error"} <= MARKS.keys()
    assert job_plots(None, notes, []).all == []


def test_a_pass_lasts_until_its_time_and_as_long_as_its_token(tmp_path: Path) -> None:
    path = token(tmp_path / "viewer", "a-secret")
    issued = Authority(tmp_path / "ca").issue("server").files()
    admission = Admission(Credentials(**{**issued, "token_file": path}))
    shown = admission.issue_pass("a-secret", until_s=1000)
    assert admission.of_pass(shown, now_s=999) == admission.of_token("a-secret")
    until, _, proof = shown.partition(".")
    wrong = ["", ".", f"9999.{proof}", f"{until}.{proof[:-1]}", f"{until}.", f"{until}.\xe4", "²."]
    for each in wrong:
        with pytest.raises(Unauthenticated, match="sign in"):
            admission.of_pass(each, now_s=999)
    with pytest.raises(Unauthenticated, match="no longer valid"):
        admission.of_pass(shown, now_s=1000)
    with pytest.raises(Unauthenticated):
        admission.issue_pass("another", until_s=1000)
    other = Admission(Credentials(**{**issued, "token_file": token(tmp_path / "new", "a-new-one")}))
    with pytest.raises(Unauthenticated):
        other.of_pass(shown, now_s=999)
