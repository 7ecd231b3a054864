"""What test_checkpoints.py has PyTorch do: python torch_killed.py TARGET DATASET_ID FOLDER

Each life of a training is a fork of this process, which only imports. Elements are digits, with
their numbers; of each step there must be the same numbers whenever it is taken.
"""

from __future__ import annotations

import collections
import ctypes
import json
import os
import pathlib
import random
import signal
import sys
import time
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

GLOBAL_BATCH, STEPS = 12, 70
PR_SET_PDEATHSIG = 1
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
    path.touch()
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


# -- a job of torchrun that loses a node, and is joined by others ----------------------------------


never_ended: list[Any] = []


def rank(node: int, lost: int, lost_at: int, joined_at: int) -> None:
    """Begins at the newest whole checkpoint. One of the first four nodes is killed with its rank
    at the step `lost_at`; and no step after `joined_at` is taken by fewer than six ranks."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # and not torchrun's, which this fork has
    torch.distributed.init_process_group("gloo")
    world = torch.distributed.get_world_size()
    read = dataset(batch_size=GLOBAL_BATCH // world)
    state = {"model": MODEL, "data": read}
    whole = sorted(path.parent for path in FOLDER.glob("step */.metadata"))
    if whole:
        dcp.load(state, checkpoint_id=whole[-1])
    step = read.state_dict()["position"] // GLOBAL_BATCH
    model = DistributedDataParallel(MODEL)
    # Its end, with Python's lock held, joins a thread of Gloo's that may wait for that lock.
    never_ended.append(model)
    while step < STEPS:
        for batch in read:
            if world < 6 and (step >= joined_at or GLOBAL_BATCH % world):
                say("waiting", world=world)
                time.sleep(3600)  # until torchrun ends this process, as another node has come
            take(batch, model)
            step += 1
            say("ranks", step=step, world=world, numbers=batch["number"].tolist())
            if step % 4 == 0:
                dcp.save(state, checkpoint_id=FOLDER / f"step {step:03}")
            if world == 4 and node == lost and step >= lost_at:
                os.killpg(0, signal.SIGKILL)
            if step == STEPS:
                break
    torch.distributed.destroy_process_group()


def launch(port: int, *arguments: int) -> None:
    """What `torchrun --nnodes=3:6` does on one of the nodes."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # torchrun's own ranks die with it
    # Else all rounds share a store, where ranks find the addresses that those of the round before
    # wrote there, and wait for them in init_process_group: pytorch/pytorch#135712.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=3,
        max_nodes=6,
        nproc_per_node=1,
        run_id="training",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={
            "is_host": False,  # the caller is, and is not lost
            "last_call_timeout": 3,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 4,
        },
        local_addr="127.0.0.1",
        start_method="fork",
        monitor_interval=0.1,
        max_restarts=9,
    )
    elastic_launch(config, rank)(*arguments)


def keep_store() -> None:
    """In a process of its own: its thread must not be in one that forks."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    say("store", port=store.port)
    signal.pause()


def four_three_six(draw: Callable[[int, int], int], expected: dict[int, Any]) -> None:
    """Four nodes with a rank each; three, when one of them is killed; and six."""
    keeper = forked(keep_store)
    while not (stores := said("store")):
        time.sleep(0.1)
    port = stores[0]["port"]
    lost, lost_at = draw(0, 3), draw(6, 25)
    fate = lost, lost_at, lost_at + draw(6, 25)
    nodes = [forked(launch, port, node, *fate) for node in range(4)]
    assert code_of(nodes.pop(lost)) == -signal.SIGKILL
    while {"world": 3} not in said("waiting"):
        time.sleep(0.1)
    nodes += [forked(launch, port, node, *fate) for node in range(4, 7)]
    assert [code_of(node) for node in nodes] == [0] * 6
    os.kill(keeper, signal.SIGKILL)
    steps: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
    for each in said("ranks"):
        steps[each["world"], each["step"]] += each["numbers"]
    worlds = [*dict.fromkeys(world for world, _ in steps)]
    assert [world for world in worlds if world in (3, 4, 6)] == [4, 3, 6], worlds
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
    four_three_six(draw, expected)
    print("done")


if __name__ == "__main__":
    main()
