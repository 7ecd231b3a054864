"""A thousand seeds of each way to read (150 but for `make test-nightly`), the seeds that found
something, and proof that it can."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from .broken import BROKEN
from .kernel import Kernel, Violation
from .patches import replaced, simulated
from .run import simulate
from .scenario import draw

SEEDS = 1000
ESSENTIAL_SEEDS = 150
CHUNK = 25
long = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]

DRAINS = ("drain worker", "pause dispatcher", "storage slow")
KILLS = ("drain worker", "kill dispatcher", "pause dispatcher")
EMPTIED = ("storage emptied", "drain worker", "power failure", "cut connections", *KILLS[1:])
ISOLATED = ("isolate dispatcher", "storage trouble", "partition", *KILLS[1:])
FOUND: dict[str, tuple[int, tuple[str, ...]]] = {
    # What was found, and is mended: the seed that found it, and its faults. Each failed before.
    "a drained worker whose pipeline was waiting for a lease worked on that and kept another": (
        3,
        ("drain worker", "kill dispatcher"),
    ),
    "a worker that was drained before its task had begun leased splits for it": (25, KILLS),
    "a drained worker did not wait for the blocks of tasks that had completed": (282, DRAINS),
    "an iteration ended with splits handed back, as no worker was left to lease them": (18, DRAINS),
    "a worker's stop left a task's thread behind that its heartbeat was just cancelling": (
        1136,
        (
            *("stop dispatcher", "pause dispatcher", "kill worker", "kill trainer"),
            *("partition", "cut connections", "storage trouble", "storage slow"),
        ),
    ),
    "a storage whose maker was killed before it synced the directory above was lost with the "
    "power": (708, ("power failure", "pause dispatcher")),
    "a dispatcher took over a log that had just been superseded, as who superseded it was killed "
    "before it said so in TERM": (253, KILLS),
}

FOUND_IN_ORDER = {
    # The same of ordered reads, with each seed's own faults.
    "a consumer never ended whose last elements are dropped, with some not put together yet": 4,
    "a consumer whose global batch was incomplete waited for lengths of bundles whose runs waited "
    "for it": 1,
    "a consumer gave an empty epoch if all behind its start is dropped, unless it knew that": 17,
    "a consumer could plan no round, as a bundle's run waited for others to ask for more": 7,
    "the memory of a bundle that is read was taken by one that is read later": 18,
    "a worker dropped what a slice lacked, as its reader had once only counted the bundle": 30,
    "an answer that steps are left out failed, as the job was removed meanwhile": 1103,
    "a trainer whose last report was answered late did not say goodbye": 756,
}


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[] if first < ESSENTIAL_SEEDS else long)
        for first in range(0, SEEDS, CHUNK)
    ],
)
@pytest.mark.parametrize("mode", ["", "shared", "ordered", "claimed"])  # "": the seed draws one
def test_no_promise_is_broken(mode: str, first: int) -> None:
    with simulated():
        for seed in range(first, first + CHUNK):
            check(seed, mode=mode)


@pytest.mark.parametrize("mode", ["rounds", "static", "cached", "save"])
def test_no_promise_is_broken_in_what_few_seeds_draw(mode: str) -> None:
    with simulated():
        for seed in range(CHUNK):
            check(seed, mode=mode)


@long
@pytest.mark.parametrize("first", range(0, 2 * CHUNK, CHUNK))
def test_nobody_begins_anew_on_an_emptied_storage(first: int) -> None:
    with simulated():
        for seed in range(first, first + CHUNK):
            check(seed, EMPTIED)


@long
def test_a_run_leaves_nothing_in_its_process() -> None:
    """Not what a garbage collection would find: the next run freezes that. Nor if it fails."""
    kernels: list[weakref.ref[Kernel]] = []
    begin = Kernel.__init__

    def noted(this: Kernel, *arguments: Any, **options: Any) -> None:
        kernels.append(weakref.ref(this))
        begin(this, *arguments, **options)

    variant = next(iter(BROKEN.values()))
    with replaced(Kernel, __init__=noted), simulated():
        for seed in range(6):
            check(seed)
        with variant.put_in(), contextlib.suppress(Violation):
            for seed in range(variant.first, variant.first + variant.seeds):
                simulate(seed, scenario=draw(seed, variant.faults, variant.mode))
            pytest.fail("no seed failed")
    assert len(kernels) > 6 and not any(kernel() for kernel in kernels)


@long
def test_no_dispatcher_that_lives_is_taken_for_dead() -> None:
    with simulated():
        for seed in range(2 * CHUNK):
            check(seed, ISOLATED, "shared")


def check(seed: int, faults: tuple[str, ...] = (), mode: str = "") -> None:
    scenario = draw(seed, faults, mode)
    try:
        simulate(seed, scenario=scenario)
    except Violation as violation:
        only = f" --mode {scenario.mode}"
        if faults:
            only += f" --faults '{','.join(faults)}'"
        pytest.fail(
            f"seed {seed}: {violation}\n"
            f"replay it with: python -m tests.simulation --seed {seed}{only} --trace"
        )


def test_what_a_dead_process_of_a_trainer_is_sent_late_is_lost() -> None:
    """By its credit, which came when the next process was reading: so the docs of the cache say."""
    with simulated():
        check(9016, mode="cached")


def test_who_read_on_with_one_that_had_died_does_not_wait_for_ever() -> None:
    """That one's index came back while it waited for it, and read nothing."""
    with simulated():
        check(648, mode="rounds")


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_stays_mended(what: str) -> None:
    with simulated():
        check(*FOUND[what], mode="shared")


@pytest.mark.parametrize("what", FOUND_IN_ORDER)
def test_what_was_found_in_order_stays_mended(what: str) -> None:
    with simulated():
        check(FOUND_IN_ORDER[what], mode="ordered")


@long
@pytest.mark.parametrize("name", BROKEN)
def test_a_bug_is_found(name: str) -> None:
    """The simulation's own test: with this bug in the product, one of some seeds must fail, and
    show it; others may fail in other ways."""
    variant = BROKEN[name]
    others = []
    with variant.put_in(), simulated():
        for seed in range(variant.first, variant.first + variant.seeds):
            scenario = draw(seed, variant.faults, variant.mode)
            if not variant.fits(scenario):
                continue
            try:
                simulate(seed, scenario=scenario)
            except Violation as violation:
                if variant.shows_as in str(violation):
                    return
                others.append(str(violation))
    pytest.fail(f"{variant.seeds} seeds did not find: {variant.put_in.__doc__}, but {others}")


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
