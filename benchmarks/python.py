"""Row `python`: Python datasets into NumPy, whose functions run in one or two processes, or build
the dataset there.

The trainer is a separate process, which answers questions for elements/s:

python -m forebay.benchmarks.python ADDRESS [ADDRESS …]
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .consume import consume, serve
from .results import Result
from .servers import Responder, our_dispatcher, our_worker
from .setting import Setting

SPLITS = range(10**6)  # none ends before the measurement
LOOPS = 20_000  # of Python, some ms
BATCH = 32  # makes a DataLoader four times as fast as single elements


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


def built() -> Any:
    """A tf.data.Dataset of the elements of `arrays`."""
    import tensorflow as tf

    pixels = tf.constant(np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8))
    return tf.data.Dataset.range(10**9).map(lambda number: pixels + tf.cast(number, tf.uint8))


FUNCTIONS: dict[str, Callable[[int], Iterator[Any]]] = {
    "trivial": trivial,
    "busy": busy,
    "arrays": arrays,
}
IMAGES = "150 KB uint8 images"
LOADER = "a PyTorch DataLoader with two workers"
Side = tuple[str, int, int]
"""A function, the processes of its worker, and a DataLoader's batch if that reads."""
PAIRS: tuple[tuple[str, Side, Side | None, dict[str, Any]], ...] = (
    ("a trivial function, one process", ("trivial", 1, 0), None, {"required": 100_000}),
    ("a CPU-bound one, two processes; peer: one", ("busy", 2, 0), ("busy", 1, 0),
     {"required_ratio": 1.8}),
    (f"{IMAGES}, two processes; peer: {LOADER}", ("arrays", 2, 0), ("arrays", 2, 1),
     {"required_ratio": 2}),
    (f"{IMAGES} of a tf.data.Dataset that a function builds; peer: it is registered",
     ("built", 1, 0), ("graph", 1, 0), {"required_ratio": 0.95}),
    (f"the same images; peer: {LOADER}, in batches of {BATCH}", ("arrays", 2, 0),
     ("arrays", 2, BATCH), {}),
)  # fmt: skip


def python(setting: Setting) -> list[Result]:
    """Compare with one process of ours, and with a PyTorch DataLoader of two, if installed."""
    with_torch = importlib.util.find_spec("torch") is not None
    pairs = [pair for pair in PAIRS if with_torch or not (pair[2] and pair[2][2])]
    with contextlib.ExitStack() as stack:
        addresses = []
        for processes in (1, 2):
            directory = setting.directory(f"python-{processes}")
            dispatcher = stack.enter_context(our_dispatcher(directory))
            addresses.append(dispatcher.address)
            worker = stack.enter_context(our_worker(dispatcher, "--processes", processes))
            worker.wait_until_serving()
        trainer = stack.enter_context(Responder("forebay.benchmarks.python", *addresses))
        trainer.wait_until_ready()

        def rate_of(side: Side) -> float:
            trainer.ask(side=side, seconds=setting.seconds)
            return float(trainer.answer_json())

        sides = {str(side): side for _, *both, _ in pairs for side in both if side}
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
        for what, ours, peer, required in pairs
    ]


def _elements(address: str, function: str) -> contextlib.AbstractContextManager[Iterator[Any]]:
    from ..service import read, register_dataset

    if function in ("built", "graph"):
        dataset_id = register_dataset(address, built if function == "built" else built())
        return read(address, dataset_id, processing_mode="parallel_epochs")
    dataset_id = register_dataset(address, FUNCTIONS[function], splits=SPLITS)
    return read(address, dataset_id, processing_mode="distributed_epoch")


def _torch_elements(function: str, at_once: int) -> Iterator[Any]:
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Splits(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            worker = get_worker_info()
            mine = range(worker.id, len(SPLITS), worker.num_workers)
            return itertools.chain.from_iterable(map(FUNCTIONS[function], mine))

    if at_once == 1:
        return (tensor.numpy() for tensor in DataLoader(Splits(), batch_size=None, num_workers=2))
    batches = DataLoader(Splits(), batch_size=at_once, num_workers=2)
    return itertools.chain.from_iterable(batch.numpy() for batch in batches)


def rate(addresses: list[str], side: Side, seconds: float) -> float:
    """Elements a second."""
    function, processes, at_once = side
    with contextlib.ExitStack() as stack:
        if at_once:
            elements = _torch_elements(function, at_once)
        else:
            elements = stack.enter_context(_elements(addresses[processes - 1], function))
        next(elements)
        count, elapsed_s = consume(elements, seconds)
    return count / elapsed_s


if __name__ == "__main__":
    serve(functools.partial(rate, sys.argv[1:]))
