"""Row `pytorch`: batches of tensors from a Python dataset, through `ServiceDataset` and a worker of
two processes, beside a PyTorch DataLoader of two workers that run the same function.

Who uses the DataLoader packs nothing, which is two things: elements come one by one, and the
trainer batches them, or the DataLoader collates them (`batch_size=32`); or it puts them together in
its workers by hand, in NumPy. The trainer is a process of
its own, which is asked for elements/s, a line of JSON at a time:

python -m forebay.benchmarks.pytorch ADDRESS
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .consume import consume
from .machine import require
from .python import SPLITS, arrays
from .results import Better, Finding, Result
from .servers import Responder, our_dispatcher, our_worker
from .setting import Setting

BATCH = 32


def tokens(split: int) -> Iterator[Any]:
    """int64, 50 to 2,000 of them."""
    lengths = np.random.default_rng(split).integers(50, 2001, 1000).tolist()
    numbers = np.arange(2000)
    for length in lengths:
        yield numbers[:length] + split


def _stacked(elements: tuple[Any, ...]) -> Any:
    return np.stack(elements)


def _filled(elements: tuple[Any, ...]) -> Any:
    found = np.zeros((len(elements), max(map(len, elements))), np.int64)
    for row, element in zip(found, elements, strict=True):
        row[: len(element)] = element
    return found


CONTENTS: dict[str, tuple[Callable[[int], Iterator[Any]], Callable[[Any], Any], str]] = {
    "images": (arrays, _stacked, "150 KB uint8 images"),
    "tokens": (tokens, _filled, "padded sequences of 50–2,000 int64 tokens"),
}
WAYS: dict[str, tuple[float, str]] = {  # with what is required
    "single": (3.0, "from which elements come one by one"),
    "collated": (3.0, "which collates"),
    "packed": (1.0, "whose user puts them together"),
}


def pytorch(setting: Setting) -> list[Finding]:
    """Raises ForebayError if PyTorch is not installed."""
    require("torch")
    with contextlib.ExitStack() as stack:
        dispatcher = stack.enter_context(our_dispatcher(setting.directory("pytorch")))
        worker = stack.enter_context(our_worker(dispatcher, "--processes", 2))
        worker.wait_until_serving()
        trainer = stack.enter_context(Responder("forebay.benchmarks.pytorch", dispatcher.address))
        trainer.answer()

        def measured(content: str, way: str) -> Callable[[], float]:
            question = {"content": content, "way": way, "seconds": setting.seconds}
            return functools.partial(_ask, trainer, question)

        figures = setting.alternate(
            **{
                f"{content} {way}": measured(content, way)
                for content in CONTENTS
                for way in ("service", *WAYS)
            }
        )
    return [
        Result(
            row="pytorch",
            what=f"batches of {BATCH} {what} as tensors; peer: a DataLoader of two workers, {said}",
            unit="elements/s",
            better=Better.MORE,
            ours=figures[f"{content} service"],
            peer=figures[f"{content} {way}"],
            required_ratio=ratio,
        )
        for content, (_, _, what) in CONTENTS.items()
        for way, (ratio, said) in WAYS.items()
    ]


def _ask(trainer: Responder, question: dict[str, Any]) -> float:
    trainer.ask(question)
    return float(trainer.answer())


def _batches(address: str, content: str, way: str) -> Iterator[Any]:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    from ..service import register_dataset
    from ..torch import ServiceDataset

    function, together, _ = CONTENTS[content]
    if way == "service":
        dataset_id = register_dataset(address, function, splits=SPLITS)
        return iter(ServiceDataset(address, dataset_id, batch_size=BATCH, pad_value=0))

    class Elements(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            worker = get_worker_info()
            mine = range(worker.id, len(SPLITS), worker.num_workers)
            return itertools.chain.from_iterable(map(function, mine))

    class Batches(Elements):
        def __iter__(self) -> Iterator[Any]:
            return map(together, zip(*[super().__iter__()] * BATCH, strict=False))

    def padded(elements: list[Any]) -> Any:
        return torch.nn.utils.rnn.pad_sequence([*map(torch.as_tensor, elements)], True)

    if way == "packed":
        return iter(DataLoader(Batches(), batch_size=None, num_workers=2))
    collate = padded if content == "tokens" else torch.utils.data.default_collate
    if way == "single":
        elements = iter(DataLoader(Elements(), batch_size=None, num_workers=2))
        return (collate([*some]) for some in zip(*[elements] * BATCH, strict=False))
    return iter(DataLoader(Elements(), batch_size=BATCH, num_workers=2, collate_fn=collate))


def main(address: str) -> None:
    """Answer questions until the input ends."""
    print("ready", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        batches = _batches(address, question["content"], question["way"])
        next(batches)
        count, seconds, _ = consume(batches, question["seconds"])
        del batches  # ends its processes
        print(BATCH * count / seconds, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
