"""Train on handwritten digits in two processes, with PyTorch's DistributedDataParallel.

python examples/digits_pytorch.py
"""

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.distributed.algorithms.join import Join
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from forebay import service
from forebay.torch import ServiceDataset

EPOCHS, TESTED, BATCH, PARTS = 5, 300, 32, 20

PIXELS, LABELS = load_digits(return_X_y=True)
PIXELS = (PIXELS / 16).astype(np.float32)

MODEL = torch.nn.Linear(64, 10)
OPTIMIZER = torch.optim.Adam(MODEL.parameters(), 0.02)


def examples(part: int) -> Iterator[dict[str, Any]]:
    """One of the parts, all but what is tested."""
    for number in range(TESTED + part, len(LABELS), PARTS):
        yield {"pixels": PIXELS[number], "label": LABELS[number]}


def train(rank: int, port: int, target: str, dataset_id: str) -> None:
    """What each of the processes runs; torchrun would set these variables, too."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port)
    )
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(MODEL)
    batches = ServiceDataset(target, dataset_id, job_name="training", batch_size=BATCH)
    for _ in range(EPOCHS):
        with Join([model]):  # one of them may have a batch more
            for batch in batches:
                OPTIMIZER.zero_grad()
                cross_entropy(model(batch["pixels"]), batch["label"]).backward()
                OPTIMIZER.step()
    if rank == 0:
        pixels, labels = torch.from_numpy(PIXELS[:TESTED]), torch.from_numpy(LABELS[:TESTED])
        accuracy = float((MODEL(pixels).argmax(1) == labels).float().mean())
        assert accuracy > 0.7, accuracy
        print(f"learned: {accuracy:.0%} of {TESTED} digits that it had not seen are right")
    torch.distributed.destroy_process_group()


def main() -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("localhost", 0))) for _ in range(2)]
        port, rendezvous = [server.getsockname()[1] for server in servers]
    target, dataset_id = f"localhost:{port}", "digits"
    processes = multiprocessing.get_context("fork")  # while there are no threads
    registered = processes.Event()

    def begin(rank: int) -> None:
        registered.wait()
        train(rank, rendezvous, target, dataset_id)

    trainers = [processes.Process(target=begin, args=(rank,)) for rank in range(2)]
    for trainer in trainers:
        trainer.start()
    with (
        service.DispatchServer(service.DispatcherConfig(port=port)),
        service.WorkerServer(service.WorkerConfig(target)),
    ):
        service.register_dataset(target, examples, dataset_id=dataset_id, splits=range(PARTS))
        registered.set()
        for trainer in trainers:
            trainer.join()
    assert [trainer.exitcode for trainer in trainers] == [0, 0]


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
