"""Train with torchrun and DDP. Two ranks are killed, and three go on at their checkpoint; then one.

python examples/digits_torchrun.py
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from forebay import service
from forebay.torch import ServiceDataset

EPOCHS, TESTED, GLOBAL_BATCH, SPLITS = 4, 297, 30, 8
EPOCH_STEPS = 50

PIXELS, LABELS = load_digits(return_X_y=True)
PIXELS = (PIXELS / 16).astype(np.float32)


def digits(split: int):
    for number in range(TESTED + split, len(LABELS), SPLITS):
        yield {"pixels": PIXELS[number], "label": LABELS[number], "number": np.int64(number)}


def train(target: str, dataset_id: str, folder: pathlib.Path, killed_at: int) -> None:
    """In each rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    world = torch.distributed.get_world_size()
    dataset = ServiceDataset(target, dataset_id, ordered=True, batch_size=GLOBAL_BATCH // world)
    model = torch.nn.Linear(64, 10)
    state = {"model": model, "data": dataset}
    whole = sorted(path.parent for path in folder.glob("step */.metadata"))
    if whole:
        dcp.load(state, checkpoint_id=whole[-1])
    step = dataset.state_dict()["position"] // GLOBAL_BATCH
    in_step = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    while step < EPOCHS * EPOCH_STEPS:
        for batch in dataset:
            with (folder / "seen").open("a") as seen:
                seen.write(json.dumps([step, batch["number"].tolist()]) + "\n")
            optimizer.zero_grad()
            cross_entropy(in_step(batch["pixels"]), batch["label"]).backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                dcp.save(state, checkpoint_id=folder / f"step {step:03}")
            if step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
    if torch.distributed.get_rank() == 0:
        found = model(torch.from_numpy(PIXELS[:TESTED])).argmax(1).numpy()
        accuracy = float(np.mean(found == LABELS[:TESTED]))
        assert accuracy > 0.7, accuracy
        print(f"learned: {accuracy:.0%} of {TESTED} digits that it had not seen are right")
    torch.distributed.destroy_process_group()


def main() -> None:
    with (
        service.DispatchServer() as dispatcher,
        service.WorkerServer(service.WorkerConfig(dispatcher.target, allow_python=True)),
        tempfile.TemporaryDirectory() as folder,
    ):
        dataset_id = service.register_dataset(dispatcher.target, digits, splits=range(SPLITS))
        for ranks, killed_at in (2, 37), (3, 111), (1, 0):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            arguments = [dispatcher.target, dataset_id, folder, str(killed_at)]
            ended = subprocess.run(
                [*torchrun, f"--nproc-per-node={ranks}", __file__, *arguments],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=not killed_at,
            )
            assert bool(ended.returncode) == bool(killed_at)
        steps = [{} for _ in range(EPOCHS * EPOCH_STEPS)]
        for line in pathlib.Path(folder, "seen").read_text().splitlines():
            step, numbers = json.loads(line)
            steps[step] |= dict.fromkeys(numbers)
    for epoch in range(EPOCHS):
        seen = steps[epoch * EPOCH_STEPS : (epoch + 1) * EPOCH_STEPS]
        assert all(len(numbers) == GLOBAL_BATCH for numbers in seen), f"epoch {epoch}"
        assert len({number for numbers in seen for number in numbers}) == len(LABELS) - TESTED


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
