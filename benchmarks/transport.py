"""The data connection between two processes, beside a bare socket loop of the same sizes.

python -m benchmarks.transport [--seconds S]
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import time
from multiprocessing.connection import Connection

import numpy as np
from rich.console import Console
from rich.table import Table

from forebay.service.blocks import Block, Component
from forebay.service.transport import BlockClient, BlockServer, End, TaskOutput

SIZES = (8_000, 150_000, 1_000_000, 4_800_000, 19_000_000)
WORKER = 1


def serve(sizes: tuple[int, ...], counts: list[int], pipe: Connection) -> None:
    """The worker's process: a task for each size, its blocks always the same one."""
    server = BlockServer(WORKER)
    outputs = [TaskOutput() for _ in sizes]
    for task_id, output in enumerate(outputs):
        server.add_task(task_id, output)
    server.start()
    pipe.send(server.addresses)
    while (task_id := pipe.recv()) is not None:
        block = Block(1, (Component(np.zeros((1, sizes[task_id]), np.uint8)),))
        for _ in range(counts[task_id]):
            outputs[task_id].put(block)
        outputs[task_id].finish()
    server.stop()


def serve_bare(sizes: tuple[int, ...], counts: list[int], pipe: Connection) -> None:
    """The same without Forebay: `sendmsg` in a loop."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("")  # the kernel chooses an abstract name
        unix.listen()
        pipe.send({"tcp": tcp.getsockname(), "unix": unix.getsockname()})
        while (order := pipe.recv()) is not None:
            protocol, case = order
            connection, _ = (tcp if protocol == "tcp" else unix).accept()
            data = memoryview(bytes(sizes[case]))
            with connection:
                for _ in range(counts[case]):
                    connection.sendall(data)


def measure(protocol: str, counts: list[int]) -> list[float]:
    """Seconds for each size, block by block through the transport."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(SIZES, counts, theirs)
    )
    process.start()
    addresses = [a for a in ours.recv() if a[0] == protocol]
    ended = multiprocessing.Event()

    def deliver(task_id: int, item: Block | End) -> None:
        if isinstance(item, Block):
            client.taken(task_id, item)
        else:
            ended.set()

    client = BlockClient(
        addresses, worker_uid=WORKER, consumer_id=1, deliver=deliver, lost=lambda reason: None
    )
    client.start()
    seconds = []
    for task_id in range(len(SIZES)):
        client.read(task_id)
        started_at = time.perf_counter()
        ours.send(task_id)
        ended.wait()
        ended.clear()
        seconds.append(time.perf_counter() - started_at)
    client.close()
    ours.send(None)
    process.join()
    return seconds


def measure_bare(protocol: str, counts: list[int]) -> list[float]:
    """Seconds for each size, `recv_into` one buffer over and over."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve_bare, args=(SIZES, counts, theirs)
    )
    process.start()
    address = ours.recv()[protocol]
    seconds = []
    for case, size in enumerate(SIZES):
        target = memoryview(bytearray(size))
        started_at = time.perf_counter()
        ours.send((protocol, case))
        family = socket.AF_INET if protocol == "tcp" else socket.AF_UNIX
        with socket.socket(family) as sock:
            sock.connect(address)
            for _ in range(counts[case]):
                if sock.recv_into(target, 0, socket.MSG_WAITALL) != size:
                    raise RuntimeError("the bare loop's connection ended early")
        seconds.append(time.perf_counter() - started_at)
    ours.send(None)
    process.join()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="about, for each figure")
    parser.add_argument("--repeat", type=int, default=3, help="the best of so many counts")
    arguments = parser.parse_args()
    counts = [max(20, int(arguments.seconds * min(40_000, 3e9 / size))) for size in SIZES]
    table = Table("transport", "block bytes", "blocks/s", "GB/s", "bare GB/s", "ratio")
    for protocol in ("unix", "tcp"):
        runs = [
            (measure(protocol, counts), measure_bare(protocol, counts))
            for _ in range(arguments.repeat)
        ]
        for case, size in enumerate(SIZES):
            seconds, bare = (min(run[kind][case] for run in runs) for kind in (0, 1))
            total = counts[case] * size / 1e9
            table.add_row(
                protocol,
                f"{size:,}",
                f"{counts[case] / seconds:,.0f}",
                f"{total / seconds:.2f}",
                f"{total / bare:.2f}",
                f"{bare / seconds:.2f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
