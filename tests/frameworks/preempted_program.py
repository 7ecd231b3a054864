"""What test_preempted.py has each of three processes do, two of which are told to stop.

python preempted_program.py FRAMEWORK ME TARGET DATASET_ID FOLDER

Elements are [50,000] times their number. In each case, processes 0 and 1 are told to stop once they
have been given some elements, and process 2 waits for that; with each it says in JSON which numbers
it was given.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from forebay import service
from forebay.service.client.open_iterations import stopping

FRAMEWORK, ME, TARGET, DATASET_ID, FOLDER = sys.argv[1:6]
STAYS = ME == "2"
BATCH = 3


def files(case: str) -> list[Path]:
    return [*Path(FOLDER).glob(f"{case}-*")]


class Told:
    """Batches, under a PreemptionHandler: the process is told to stop as it goes through them."""

    def __init__(
        self, case: str, batches: Iterable[Any], *, after: int = 6, group: bool = False
    ) -> None:
        """After so many elements; it alone, or all processes of its `group`."""
        self.case = case
        self.saved: list[float] = []
        self.preemption = service.PreemptionHandler(
            self.saved.append, grace_period_s=100, exit_code=None
        )
        self.used: list[int] = []
        self.steps = 0
        self._batches = batches
        self._after, self._group = after, group

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self.used += np.asarray(batch).reshape(-1, 50_000)[:, 0].tolist()
            self.steps += 1
            if not STAYS and len(self.used) >= self._after and not self.preemption.preempted:
                if self._group:
                    os.killpg(0, signal.SIGTERM)
                else:
                    os.kill(os.getpid(), signal.SIGTERM)
                assert self.preemption.handed_back.wait(60)
                self._leave()
            while STAYS and len(files(self.case)) < 2:
                time.sleep(0.05)  # the others have as much as they can
            yield batch

    def _leave(self) -> None:
        Path(FOLDER, f"{self.case}-{ME}").touch()

    def __enter__(self) -> Told:
        self.preemption.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.preemption.__exit__(*error)
        self._leave()
        if not error[0]:
            assert self.preemption.preempted != STAYS, (self.case, len(self.used))
            assert len(self.saved) == (not STAYS), "save_fn is called once"
            say(self.used)


def say(numbers: list[int]) -> None:
    sys.stdout.write(json.dumps(numbers) + "\n")
    sys.stdout.flush()


def dataset(case: str, **how: Any) -> Any:
    """Of which little is ahead, lest one process has all."""
    how = {"batch_size": BATCH, "max_outstanding_requests": 8} | how
    return import_module(f"forebay.{FRAMEWORK}").ServiceDataset(
        TARGET, DATASET_ID, job_name=f"{FRAMEWORK} {case}", **how
    )


def loop(case: str, batches: Any, step: Callable[[Any], None] = lambda _: None, **how: Any) -> None:
    with Told(case, batches, **how) as told:
        for batch in told:
            step(batch)


def fit() -> None:
    """Keras, whose steps are as many as the batches it was given."""
    import keras

    import forebay.keras

    warnings.filterwarnings("ignore", "Your input ran out of data")
    warnings.filterwarnings("ignore", "__array__ implementation")  # Keras's own, on PyTorch

    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(np.zeros([2, 1]), np.zeros([2, 1]), verbose=0)  # builds it
    steps: list[int] = []
    with Told("keras", dataset("keras")) as told:

        class Pairs:
            def __iter__(self) -> Iterator[Any]:
                for batch in told:
                    numbers = np.asarray(batch)[:, :1].astype(np.float32)
                    yield numbers, numbers

        callback = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: steps.append(batch),
            on_epoch_end=told.preemption.check,
        )
        model.fit(forebay.keras.Epochs(Pairs()), callbacks=[callback], verbose=0)
    assert len(steps) == told.steps, (steps, told.steps)


def torch_cases() -> None:
    import torch
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    loop("elements", dataset("elements", batch_size=None))
    loop("batches", dataset("batches"), after=8)

    loader = DataLoader(
        dataset("loader"),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="spawn" if ME == "0" else "fork",
        persistent_workers=True,
    )
    loop("loader", loader, group=True)
    again: list[int] = []  # the next epoch, behind the block
    for batch in loader:
        again += batch[:, 0].tolist()
    say(again)

    store = f"file://{FOLDER}.store"
    torch.distributed.init_process_group("gloo", store, rank=int(ME), world_size=3)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))

    def step(batch: Any) -> None:
        model(batch[:, :1].float()).sum().backward()

    with Told("ddp", dataset("ddp"), after=1) as told, Join([model]):
        for batch in told:
            step(batch)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    fit()
    if ME == "1":
        lose_a_worker()


def lose_a_worker() -> None:
    """Which is waited for no more."""
    from torch.utils.data import DataLoader

    loader = DataLoader(
        dataset("killed"), batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    batches: Any = iter(loader)
    next(batches)
    assert stopping.readers_elsewhere() == 1
    with contextlib.suppress(RuntimeError, OSError, EOFError):  # what PyTorch was just doing
        os.kill(batches._workers[0].pid, signal.SIGKILL)
        list(batches)
    del batches
    assert stopping.readers_elsewhere() == 0


def jax_cases() -> None:
    loop("batches", dataset("batches"))
    fit()


if __name__ == "__main__":
    {"torch": torch_cases, "jax": jax_cases}[FRAMEWORK]()
