"""What test_checkpoints.py has PyTorch do: python torch_killed.py TARGET DATASET_ID FOLDER

Each life of a training is a fork of this process, which only imports. Elements are digits, with
their numbers; of each step there must be the same numbers whenever it is taken.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torchdata.stateful_dataloader import StatefulDataLoader

from forebay import service
from forebay.torch import ServiceDataset

BATCH, STEPS = 12, 70
TARGET, DATASET_ID = sys.argv[1:3]
FOLDER = Path(sys.argv[3])
MODEL = torch.nn.Linear(64, 10)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), 0.1)


def forked(live: Callable[..., None], *arguments: Any) -> int:
    """The id of a process that calls this."""
    process = os.fork()
    if not process:
        code: Any = 1
        try:
            live(*arguments)
            code = 0
        except SystemExit as error:
            code = error.code
        except BaseException:  # noqa: BLE001 - whatever it is, it is said
            traceback.print_exc()
        os._exit(code)
    return process


def code_of(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def dataset(**how: Any) -> ServiceDataset:
    return ServiceDataset(
        TARGET, DATASET_ID, **{"ordered": True, "seed": 1, "batch_size": BATCH, **how}
    )


def say(name: str, **what: Any) -> None:
    with (FOLDER / name).open("a", buffering=1) as file:
        file.write(json.dumps(what) + "\n")


def said(name: str) -> list[dict[str, Any]]:
    path = FOLDER / name
    path.touch()
    return [json.loads(x) for x in path.read_text().splitlines(True) if x.endswith("\n")]


def take(batch: Any) -> float:
    OPTIMIZER.zero_grad()
    loss = cross_entropy(MODEL(batch["pixels"]), batch["label"])
    loss.backward()
    OPTIMIZER.step()
    return float(loss.detach())


def alone(name: str, workers: int | None, killed_at: int | None, told_at: int | None) -> None:
    """Trains on from the newest checkpoint, behind torchdata's StatefulDataLoader with so many
    workers; without one if that is None. Under a PreemptionHandler that saves."""
    read = dataset()
    loader: Any = read
    if workers is not None:
        loader = StatefulDataLoader(read, batch_size=None, num_workers=workers)
    checkpoint, step = FOLDER / f"{name}.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        MODEL.load_state_dict(state["model"])
        loader.load_state_dict(state["data"])
        step = state["step"]

    def save(_: float = 0) -> None:
        new = {"model": MODEL.state_dict(), "data": loader.state_dict(), "step": step}
        torch.save(new, f"{checkpoint}.new")
        os.replace(f"{checkpoint}.new", checkpoint)

    with service.PreemptionHandler(save, grace_period_s=60) as preemption:
        while step < STEPS:
            for batch in loader:
                loss = take(batch)
                step += 1
                say(name, step=step, numbers=batch["number"].tolist(), loss=loss)
                if step == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == told_at:
                    os.kill(os.getpid(), signal.SIGTERM)
                preemption.check()
                if step % 5 == 0:
                    save()
                if step == STEPS:
                    break


def killed_alone(draw: Callable[[int, int], int]) -> None:
    """With the bits of the losses."""
    assert code_of(forked(alone, "undisturbed", None, None, None)) == 0
    undisturbed = {each["step"]: each for each in said("undisturbed")}
    for name, workers in (("dataset", None), ("no worker", 0), ("a worker", 1)):
        first, told = draw(6, 25), draw(26, 45)
        for killed_at, told_at in ((first, None), (None, told), (draw(46, STEPS - 1), None)):
            code = code_of(forked(alone, name, workers, killed_at, told_at))
            assert code == (-signal.SIGKILL if told_at is None else 143), (name, code)
        taken = [each["step"] for each in said(name)]
        assert taken.count(told + 1) == 1, "it was saved when the process was told to stop"
        assert code_of(forked(alone, name, workers, None, None)) == 0
        for each in said(name):
            assert each == undisturbed[each["step"]], (name, each)
        assert {each["step"] for each in said(name)} == {*range(1, STEPS + 1)}


def main() -> None:
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # which torchdata calls
    torch.set_num_threads(1)
    seed = random.randrange(1 << 32)
    print("seed", seed, flush=True)
    draw = random.Random(seed).randint
    killed_alone(draw)
    print("done")


if __name__ == "__main__":
    main()
