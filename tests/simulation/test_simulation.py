"""A thousand seeds of the simulation, the seeds that found something, and proof that it can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .broken import BROKEN
from .kernel import Violation
from .patches import simulated
from .run import simulate
from .scenario import draw

SEEDS = 1000
CHUNK = 25
ROOT = Path(__file__).resolve().parents[2]

FOUND: dict[str, tuple[int, tuple[str, ...]]] = {
    # What was wrong: the seed, and the faults it was drawn with (none: its own). All are mended.
    "a drained worker asked for one more lease, and kept it, because its pipeline was waiting for "
    "one when it was told to stop": (416, ()),
    "a worker that was drained before its task had begun leased splits for it all the same": (
        174,
        (),
    ),
    "a worker's `stop` left the thread of a task behind that its heartbeat was just cancelling": (
        16,
        (),
    ),
    "a storage's directory whose maker had been killed before it synced the one above it was lost "
    "whole in a power failure": (
        708,
        ("power failure", "pause dispatcher"),
    ),
}


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_promise_is_broken(first: int) -> None:
    with simulated():
        for seed in range(first, first + CHUNK):
            check(seed)


def check(seed: int, faults: tuple[str, ...] = ()) -> None:
    try:
        simulate(seed, scenario=draw(seed, faults))
    except Violation as violation:
        only = f" --faults '{','.join(faults)}'" if faults else ""
        pytest.fail(
            f"seed {seed}: {violation}\n"
            f"replay it with: python -m tests.simulation --seed {seed}{only} --trace"
        )


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_stays_mended(what: str) -> None:
    with simulated():
        check(*FOUND[what])


@pytest.mark.parametrize("name", BROKEN)
def test_a_bug_is_found(name: str) -> None:
    """The simulation's own test: with this bug in the product, one of some seeds must fail."""
    variant = BROKEN[name]
    with variant.put_in(), simulated():
        for seed in range(variant.seeds):
            try:
                simulate(seed, scenario=draw(seed, variant.faults))
            except Violation as violation:
                assert variant.shows_as in str(violation)
                return
    pytest.fail(f"{variant.seeds} seeds did not find: {variant.put_in.__doc__}")


DIGESTS = """
import sys
from tests.simulation.patches import simulated
from tests.simulation.run import simulate
with simulated():
    for seed in map(int, sys.argv[1:]):
        print(simulate(seed).digest)
"""


def test_a_seed_is_a_run() -> None:
    """In every process, whatever ran before, and whatever order its hashes give to sets."""
    seeds = [3, 12, 47, 99, 121]

    def digests(order: list[int], hash_seed: int) -> dict[int, str]:
        printed = subprocess.check_output(
            [sys.executable, "-c", DIGESTS, *map(str, order)],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            cwd=ROOT,
            text=True,
            timeout=100,
        )
        return dict(zip(order, printed.split(), strict=True))

    first = digests(seeds, 1)
    assert first == digests(seeds[::-1], 2)
    assert len(set(first.values())) == len(seeds)


def test_tensorflow_is_not_needed() -> None:
    code = "import sys, tests.simulation.run, tests.simulation.patches; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=100)
    assert not {"tensorflow", "apache_beam"} & set(loaded.split())
