"""How fast one GPU is fed with PyTorch and JAX: no row, as it needs one, and no TensorFlow.

python -m forebay.benchmarks.gpu SECONDS ROUNDS

Batches of 4.8 MB come from one Python function, in two workers of four processes each, or in the
eight processes of a DataLoader. Each batch has one value throughout, which is checked on the GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ..service import ShardingPolicy, read, register_dataset
from .machine import require
from .servers import our_dispatcher, our_worker

SHAPE = (32, 224, 224, 3)
SPLITS = range(10**6)
WORKERS, PROCESSES = 2, 4
VALUES = 251


def batches(split: int) -> Iterator[Any]:
    """uint8 [32, 224, 224, 3]: 100 batches, whose values follow one another."""
    for number in range(100):
        yield np.full(SHAPE, (100 * split + number) % VALUES, np.uint8)


def main(seconds: float, rounds: int) -> None:
    require("torch")
    with contextlib.ExitStack() as stack:
        directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        dispatcher = stack.enter_context(our_dispatcher(directory))
        for _ in range(WORKERS):
            worker = stack.enter_context(our_worker(dispatcher, "--processes", PROCESSES))
            worker.wait_until_serving()
        address = dispatcher.address
        dataset_id = register_dataset(address, batches, splits=SPLITS)
        rates: dict[str, list[float]] = {}
        for _ in range(rounds):
            for what, start in (
                _torch_ways(address, dataset_id) | _jax_ways(address, dataset_id)
            ).items():
                rates.setdefault(what, []).append(_rate(start, seconds))
    for what, found in rates.items():
        low, middle, high = min(found), statistics.median(found), max(found)
        gb = middle * np.prod(SHAPE) / 1e9
        print(
            f"{what}: {32 * middle:,.0f} images/s ({32 * low:,.0f}–{32 * high:,.0f}), {gb:.1f} GB/s"
        )


Way = Callable[[], tuple[Iterable[Any], Callable[[Any], None], Callable[[], None]]]
"""Begins: what to take from, what to do with each batch, and what to do at the end of the time."""


def _rate(start: Way, seconds: float) -> float:
    """Batches a second, after a warm-up."""
    taken, use, finish = start()
    items = iter(taken)
    for until in (seconds / 2, seconds):
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < until:
            use(next(items))
            count += 1
        finish()
        took_s = time.perf_counter() - begun
    close = getattr(items, "close", None)
    if close is not None:
        close()
    return count / took_s


def _torch_ways(address: str, dataset_id: str) -> dict[str, Way]:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    from forebay.torch import ServiceDataset

    class Splits(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            loader = get_worker_info()
            for split in SPLITS[loader.id :: loader.num_workers]:
                yield from map(torch.from_numpy, batches(split))

    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def check(batch: Any) -> None:
        wrong.add_((batch != batch[0, 0, 0, 0]).any())

    def finish() -> None:
        torch.cuda.synchronize()
        if found := int(wrong):
            raise SystemExit(f"{found} batches had the values of several")

    def again(pin: bool) -> Way:
        batch = torch.zeros(SHAPE, dtype=torch.uint8)
        batch = batch.pin_memory() if pin else batch
        use = lambda one: check(one.to("cuda", non_blocking=True))  # noqa: E731
        return lambda: (itertools.repeat(batch), use, finish)

    def dataset(**options: Any) -> Any:
        return ServiceDataset(address, dataset_id, **options)

    def loaded(batch: Any) -> None:
        check(batch.to("cuda", non_blocking=True))

    def loader() -> Any:
        return DataLoader(
            Splits(), batch_size=None, num_workers=WORKERS * PROCESSES, pin_memory=True
        )

    copied = lambda batch: check(batch.to("cuda"))  # noqa: E731
    return {
        "PyTorch: one pinned batch again and again": again(True),
        "one pageable batch again and again": again(False),
        "ServiceDataset, on the CPU only": lambda: (dataset(), lambda _: None, finish),
        'ServiceDataset, then .to("cuda")': lambda: (dataset(), copied, finish),
        'ServiceDataset(device="cuda")': lambda: (dataset(device="cuda"), check, finish),
        "the same in order": lambda: (dataset(device="cuda", ordered=True), check, finish),
        "a DataLoader of 8 processes, pinned": lambda: (loader(), loaded, finish),
    }


def _jax_ways(address: str, dataset_id: str) -> dict[str, Way]:
    import jax

    from forebay.jax import ServiceDataset

    first: list[Any] = []
    unequal = jax.jit(lambda batch: (batch != batch[0, 0, 0, 0]).any())

    def check(batch: Any) -> None:
        first[:] = [unequal(batch)]

    def finish() -> None:
        if first[0]:
            raise SystemExit("a batch had the values of several")

    def through_read() -> Any:
        return read(address, dataset_id, processing_mode=ShardingPolicy.DYNAMIC)

    put = lambda batch: check(jax.device_put(batch))  # noqa: E731
    batch = np.zeros(SHAPE, np.uint8)
    return {
        "JAX: device_put again and again": lambda: (itertools.repeat(batch), put, finish),
        "forebay.jax.ServiceDataset": lambda: (ServiceDataset(address, dataset_id), check, finish),
        "read, then device_put": lambda: (through_read(), put, finish),
    }


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
