"""What test_checkpoints.py has PyTorch do: python torch_killed.py TARGET DATASET_ID FOLDER

Each life of a training is a fork of this process, which only imports. Elements are digits, with
their numbers; of each step there must be the same numbers whenever it is taken.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

from forebay import service
from forebay.torch import ServiceDataset

GLOBAL_BATCH, EPOCH_STEPS, STEPS = 12, 40, 70
TARGET, DATASET_ID = sys.argv[1:3]
FOLDER = pathlib.Path(sys.argv[3])
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
        TARGET, DATASET_ID, **{"ordered": True, "seed": 1, "batch_size": GLOBAL_BATCH, **how}
    )


def say(name: str, **what: Any) -> None:
    with (FOLDER / name).open("a", buffering=1) as file:
        file.write(json.dumps(what) + "\n")


def said(name: str) -> list[dict[str, Any]]:
    path = FOLDER / name
    return [json.loads(x) for x in path.read_text().splitlines(True) if x.endswith("\n")]


def take(batch: Any, model: Any = MODEL) -> float:
    OPTIMIZER.zero_grad()
    loss = cross_entropy(model(batch["pixels"]), batch["label"])
    loss.backward()
    OPTIMIZER.step()
    return float(loss.detach())


# -- alone -----------------------------------------------------------------------------------------


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


def killed_alone(draw: Callable[[int, int], int]) -> dict[int, Any]:
    """With the bits of the losses. Returns what each step sees."""
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
    return {step: each["numbers"] for step, each in undisturbed.items()}


# -- ranks, of which torchrun begins others --------------------------------------------------------


def rank(killed_at: int) -> None:
    """One of them, which begins at the newest whole checkpoint."""
    torch.distributed.init_process_group("gloo")
    me, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    read = dataset(batch_size=GLOBAL_BATCH // world)
    state = {"model": MODEL, "data": read}
    whole = sorted(path.parent for path in FOLDER.glob("step */.metadata"))
    if whole:
        dcp.load(state, checkpoint_id=whole[-1])
    step = read.state_dict()["position"] // GLOBAL_BATCH
    model = DistributedDataParallel(MODEL)
    while step < STEPS:
        for batch in read:
            take(batch, model)
            step += 1
            say("ranks", step=step, world=world, numbers=batch["number"].tolist())
            if step % 4 == 0:
                dcp.save(state, checkpoint_id=FOLDER / f"step {step:03}")
            if step == killed_at and me == 0:
                os.killpg(0, signal.SIGKILL)
            if step == STEPS:
                break
    torch.distributed.destroy_process_group()


def launch(ranks: int, killed_at: int) -> None:
    """What torchrun does."""
    os.setsid()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="training",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        start_method="fork",
        monitor_interval=0.1,
        max_restarts=0,
    )
    elastic_launch(config, rank)(killed_at)


def killed_ranks(draw: Callable[[int, int], int], expected: dict[int, Any]) -> None:
    """Four ranks, three and six, of which each time all are killed."""
    for number, ranks in enumerate((4, 3, 6)):
        last = ranks == 6
        killed_at = 0 if last else 20 * number + draw(6, 20)
        code = code_of(forked(launch, ranks, killed_at))
        assert code == (0 if last else -signal.SIGKILL), (ranks, code)
    steps: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
    for each in said("ranks"):
        steps[each["world"], each["step"]] += each["numbers"]
    assert [*dict.fromkeys(world for world, _ in steps)] == [4, 3, 6]
    for (_, step), numbers in steps.items():  # of the last step, not all ranks may have said it
        assert {*numbers} <= {*expected[step]}, (step, numbers, expected[step])
    whole = {step for (_, step), numbers in steps.items() if {*numbers} == {*expected[step]}}
    assert whole == {*range(1, STEPS + 1)}


def main() -> None:
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # which torchdata calls
    torch.set_num_threads(1)
    seed = random.randrange(1 << 32)
    print("seed", seed, flush=True)
    draw = random.Random(seed).randint
    expected = killed_alone(draw)
    print("alone", flush=True)
    killed_ranks(draw, expected)
    print("done")


if __name__ == "__main__":
    main()
