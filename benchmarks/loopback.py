"""Row `loopback`: 4.8 MB batches beside the maximum rate of one TCP connection.

The maximum is the rate of two processes that only send one buffer and receive into another:

python -m forebay.benchmarks.loopback send BYTES
python -m forebay.benchmarks.loopback receive ADDRESS BYTES
"""

from __future__ import annotations

import functools
import json
import socket
import sys
import time

from .cluster import BenchmarkCluster, shared_clusters
from .results import Better, Finding, Result
from .servers import Responder, Server
from .setting import Setting

BATCH_BYTES = 32 * 224 * 224 * 3
BESIDE = "a bare TCP connection"
REQUIRED = 0.7
CASES = {
    "batches over TCP": "into NumPy, over TCP",
    "batches into NumPy": "into NumPy, by default",
    "batches": "eager, by default",
}


def loopback(setting: Setting) -> list[Finding]:
    """Our side over its default protocol, and over TCP."""
    module = "forebay.benchmarks.loopback"
    ours = shared_clusters(setting)["ours"]
    with (
        Server(module, "send", BATCH_BYTES) as sender,
        Responder(module, "receive", sender.address, BATCH_BYTES) as receiver,
    ):
        figures = setting.alternate(
            bare=functools.partial(_bare_mb_per_s, receiver, setting),
            **{case: functools.partial(_mb_per_s, ours, case) for case in CASES},
        )
    return [
        Result(
            row="loopback",
            what=f"4.8 MB batches, {how}; beside {BESIDE}",
            unit="MB/s",
            better=Better.MORE,
            ours=figures[case],
            peer=figures["bare"],
            required_ratio=REQUIRED,
        )
        for case, how in CASES.items()
    ]


def _mb_per_s(cluster: BenchmarkCluster, case: str) -> float:
    return cluster.measure(case).mb_per_s


def _bare_mb_per_s(receiver: Responder, setting: Setting) -> float:
    receiver.ask({"seconds": setting.seconds})
    return float(receiver.answer())


def send(size: int) -> None:
    """Print an address; send a buffer repeatedly over each connection, until it closes."""
    data = memoryview(bytes(size))
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(f"127.0.0.1:{server.getsockname()[1]}", flush=True)
        while True:
            connection, _ = server.accept()
            try:
                with connection:
                    while True:
                        connection.sendall(data)
            except OSError:
                pass  # the receiver has had enough


def receive(address: str, size: int) -> None:
    """For each line of input, connect, receive for so long, and print MB a second."""
    host, _, port = address.rpartition(":")
    target = memoryview(bytearray(size))
    for line in sys.stdin:
        seconds = json.loads(line)["seconds"]
        with socket.create_connection((host, int(port))) as connection:
            connection.recv_into(target, 0, socket.MSG_WAITALL)
            begun = now = time.perf_counter()
            received = 0
            while now < begun + seconds:
                received += connection.recv_into(target, 0, socket.MSG_WAITALL)
                now = time.perf_counter()
        print(received / (now - begun) / 1e6, flush=True)


if __name__ == "__main__":
    _, role, *arguments = sys.argv
    if role == "send":
        send(int(arguments[0]))
    else:
        receive(arguments[0], int(arguments[1]))
