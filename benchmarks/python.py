"""Row `python`: Python datasets into NumPy, whose functions run in one or two processes.

The trainer is a separate process, which answers questions for elements/s:

python -m forebay.benchmarks.python ADDRESS [ADDRESS …]
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from .consume import consume, serve
from .results import Result
from .servers import Responder, our_dispatcher, our_worker
from .setting import Setting

SPLITS = range(10**6)  # none ends before the measurement
LOOPS = 20_000  # of Python, some ms


def trivial(split: int) -> Iterator[int]:
    """Numbers."""
    return iter(range(1000 * split, 1000 * (split + 1)))


def busy(split: int) -> Iterator[int]:
    """Numbers that take Python long to compute."""
    for number in range(10):
        yield sum(number * i for i in range(LOOPS)) + split


def arrays(split: int) -> Iterator[Any]:
    """uint8 [224, 224, 3], 150 KB."""
    pixels = np.random.default_rng(split).integers(0, 256, (224, 224, 3), np.uint8)
    for number in range(100):
        yield pixels + np.uint8(number)


FUNCTIONS = {each.__name__: each for each in (trivial, busy, arrays)}
Side = tuple[str, int]
"""A function, and the processes of its worker."""
PAIRS: tuple[tuple[str, Side, Side | None, dict[str, Any]], ...] = (
    ("a trivial function, one process", ("trivial", 1), None, {"required": 100_000}),
    ("a CPU-bound one, two processes; peer: one", ("busy", 2), ("busy", 1),
     {"required_ratio": 1.8}),
    ("150 KB uint8 images, two processes", ("arrays", 2), None, {}),
)  # fmt: skip


def python(setting: Setting) -> list[Result]:
    """Compare two processes of ours with one."""
    with contextlib.ExitStack() as stack:
        addresses = []
        for processes in (1, 2):
            directory = setting.directory(f"python-{processes}")
            dispatcher = stack.enter_context(our_dispatcher(directory))
            addresses.append(dispatcher.address)
            worker = stack.enter_context(our_worker(dispatcher, "--processes", processes))
            worker.wait_until_ready()
        trainer = stack.enter_context(Responder("forebay.benchmarks.python", *addresses))
        trainer.wait_until_ready()

        def rate_of(side: Side) -> float:
            trainer.ask(side=side, seconds=setting.seconds)
            return float(trainer.answer_json())

        sides = {str(side): side for _, *both, _ in PAIRS for side in both if side}
        found = setting.alternate(
            **{name: functools.partial(rate_of, side) for name, side in sides.items()}
        )
    return [
        Result(
            row="python",
            what=f"Python dataset into NumPy: {what}",
            unit="elements/s",
            ours=found[str(ours)],
            peer=found[str(peer)] if peer else [],
            **required,
        )
        for what, ours, peer, required in PAIRS
    ]


def _elements(address: str, function: str) -> contextlib.AbstractContextManager[Iterator[Any]]:
    from ..service import read, register_dataset

    dataset_id = register_dataset(address, FUNCTIONS[function], splits=SPLITS)
    return read(address, dataset_id, processing_mode="distributed_epoch")


def rate(addresses: list[str], side: Side, seconds: float) -> float:
    """Elements a second."""
    function, processes = side
    with _elements(addresses[processes - 1], function) as elements:
        next(elements)
        count, elapsed_s = consume(elements, seconds)
    return count / elapsed_s


if __name__ == "__main__":
    serve(functools.partial(rate, sys.argv[1:]))
