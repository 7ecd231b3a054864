"""Row `python`: Python datasets into NumPy, whose functions run in one or two processes, or build
the dataset there.

The trainer is a separate process, which answers questions for elements/s, a line of JSON each:

python -m forebay.benchmarks.python ADDRESS [ADDRESS …]
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .consume import consume
from .results import Better, Finding, Result
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


def python(setting: Setting) -> list[Finding]:
    """Compare with one process of ours, and with a PyTorch DataLoader of two, if installed."""
    loader = importlib.util.find_spec("torch") is not None
    with contextlib.ExitStack() as stack:
        addresses = []
        for processes in (1, 2):
            directory = setting.directory(f"python-{processes}")
            dispatcher = stack.enter_context(our_dispatcher(directory))
            addresses.append(dispatcher.address)
            worker = stack.enter_context(our_worker(dispatcher, "--processes", processes))
            worker.wait_until_serving()
        trainer = stack.enter_context(Responder("forebay.benchmarks.python", *addresses))
        trainer.answer()

        def measured(function: str, processes: int, loader: int = 0) -> Callable[[], float]:
            question = {"function": function, "processes": processes, "loader": loader}
            return functools.partial(_ask, trainer, {**question, "seconds": setting.seconds})

        sides = {
            "trivial": measured("trivial", 1),
            "busy one": measured("busy", 1),
            "busy two": measured("busy", 2),
            "arrays": measured("arrays", 2),
            "built": measured("built", 1),
            "graph": measured("graph", 1),
        }
        if loader:
            sides["loader"] = measured("arrays", 2, loader=1)
            sides["batches"] = measured("arrays", 2, loader=BATCH)
        figures = setting.alternate(**sides)
    beside = "; peer: a PyTorch DataLoader with two workers" if loader else ""
    rows: list[tuple[str, str, str, dict[str, float]]] = [
        ("a trivial function, one process", "trivial", "", {"required": 100_000}),
        ("a CPU-bound one, two processes; peer: one", "busy two", "busy one", {"ratio": 1.8}),
        (f"150 KB uint8 images, two processes{beside}", "arrays", "loader" if loader else "",
         {"ratio": 2} if loader else {}),
        ("150 KB uint8 images of a tf.data.Dataset that a function builds; peer: it is registered",
         "built", "graph", {"ratio": 0.95}),
    ]  # fmt: skip
    if loader:
        rows.append((f"the same{beside}, in batches of {BATCH}", "arrays", "batches", {}))
    return [
        Result(
            row="python",
            what=f"Python dataset into NumPy: {what}",
            unit="elements/s",
            better=Better.MORE,
            ours=figures[ours],
            peer=figures[peer] if peer else [],
            required=wanted.get("required"),
            required_ratio=wanted.get("ratio"),
        )
        for what, ours, peer, wanted in rows
    ]


def _ask(trainer: Responder, question: dict[str, Any]) -> float:
    trainer.ask(question)
    return float(trainer.answer())


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


def main(*addresses: str) -> None:
    """Answer questions until the input ends."""
    print("ready", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        address, function = addresses[question["processes"] - 1], question["function"]
        with contextlib.ExitStack() as stack:
            if question["loader"]:
                elements = _torch_elements(function, question["loader"])
            else:
                elements = stack.enter_context(_elements(address, function))
            next(elements)
            count, seconds, _ = consume(elements, question["seconds"])
        print(count / seconds, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
