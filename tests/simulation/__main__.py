"""`python -m tests.simulation`: run many seeds, or replay one."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from .kernel import Violation
from .patches import simulated
from .run import simulate
from .scenario import FAULTS, MODES, ON_DEMAND, Scenario, draw


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many to run (default: 1000)")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first one")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--seed", type=int, help="run only this one, and say what comes of it")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    parser.add_argument("--faults", default="", help="only these kinds, comma-separated")
    parser.add_argument("--mode", default="", choices=("", *MODES), help="how all of them read")
    given = parser.parse_args()
    faults = tuple(filter(None, given.faults.split(",")))
    if unknown := set(faults) - {*FAULTS, *ON_DEMAND}:
        parser.error(
            f"no such faults: {sorted(unknown)}; choose from: {', '.join((*FAULTS, *ON_DEMAND))}"
        )
    if given.seed is not None:
        return _replay(given.seed, draw(given.seed, faults, given.mode), given.trace)
    begun = time.monotonic()
    failed = 0
    attempt = partial(try_seed, faults=faults, mode=given.mode)
    seeds = range(given.first, given.first + given.seeds)
    with ProcessPoolExecutor(given.jobs) as pool:
        for seed, failure in pool.map(attempt, seeds, chunksize=10):
            if failure:
                failed += 1
                print(f"seed {seed}: {failure}", flush=True)
    print(f"{len(seeds)} seeds, {failed} violations, {time.monotonic() - begun:.0f} s")
    return 1 if failed else 0


def try_seed(seed: int, faults: tuple[str, ...], mode: str) -> tuple[int, str]:
    """The seed, and what was violated, if anything was."""
    with simulated():
        try:
            simulate(seed, scenario=draw(seed, faults, mode))
        except Violation as violation:
            return seed, str(violation)
        except Exception:  # noqa: BLE001 - the simulator's own fault; the other seeds go on
            return seed, traceback.format_exc()
    return seed, ""


def _replay(seed: int, scenario: Scenario, verbose: bool) -> int:
    print(scenario)
    with simulated():
        try:
            print(simulate(seed, scenario=scenario, verbose=verbose))
        except Violation as violation:
            print(f"seed {seed}: {violation}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
