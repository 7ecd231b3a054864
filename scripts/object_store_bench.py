"""Reads 1 GB of Parquet in 64 objects, beside the same files on the local disk.

    .venv/bin/python -m scripts.object_store_bench --json FILE

In a clone only, as one server is that of the tests: moto's S3 behind a proxy with 30 ms a request.
The same is read of nginx (Debian's), which takes little, without and with 30 ms.

The servers have a process and a core of their own. Dispatcher, workers and reader have the other
cores, also while they read local files. With --shared all have all cores. Processor time is counted
of the servers, and of workers and reader.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import getpass
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from forebay import service
from forebay.benchmarks.servers import Responder, our_dispatcher, our_worker
from tests.object_store import BUCKET, Faults, object_store

ROWS, GROUP, WIDTH = 4000, 1000, 500
COUNTS = ("lists", "sent_bytes", "failed")
LATENCY_S = 0.03
SOME_FAULTS = Faults(LATENCY_S, unavailable=0.05, cut=0.01, reset=0.001)
WAYS: dict[str, dict[str, Any]] = {
    "once": {"processing_mode": "distributed_epoch"},
    "ordered": {"ordered": True, "seed": 1},
}


def write(directory: pathlib.Path, files: int) -> int:
    """Returns their bytes."""
    random = np.random.default_rng(0)
    for number in range(files):
        ids = np.arange(number * ROWS, (number + 1) * ROWS)
        values = pa.FixedSizeListArray.from_arrays(random.random(ROWS * WIDTH), WIDTH)
        table = pa.table({"id": ids, "x": values})
        path = directory / f"{number:03}.parquet"
        pq.write_table(table, path, row_group_size=GROUP, compression=None, use_dictionary=False)
    return sum(path.stat().st_size for path in directory.iterdir())


def serve(directory: pathlib.Path) -> None:
    """In a process of its own: answers questions about the servers until its input ends."""
    port, _ = nginx(directory.parent, f"server {{ listen 127.0.0.1:PORT; root {directory}; }}")
    with object_store() as store:
        for path in sorted(directory.iterdir()):
            store.client.upload_file(str(path), BUCKET, f"train/{path.name}")
        ports = {"http": port, "far": delayed(port)}
        print(json.dumps({"environment": store.environment, "ports": ports}), flush=True)
        for line in sys.stdin:
            store.proxy.faults = Faults(**json.loads(line)["faults"])
            counts = {name: getattr(store.proxy, name) for name in COUNTS}
            store.proxy.forget()
            print(json.dumps(counts), flush=True)


def delayed(port: int) -> int:
    """Returns a port that passes on to another one, each request LATENCY_S later. The kernel moves
    the answers."""
    listener = socket.create_server(("127.0.0.1", 0))

    def requests(client: socket.socket, server: socket.socket) -> None:
        while data := client.recv(1 << 16):
            time.sleep(LATENCY_S)
            server.sendall(data)
        server.shutdown(socket.SHUT_WR)

    def answers(client: socket.socket, server: socket.socket) -> None:
        out, into = os.pipe()
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 1 << 20)
        while there := os.splice(server.fileno(), into, 1 << 20):
            while there:
                there -= os.splice(out, client.fileno(), there)
        client.shutdown(socket.SHUT_WR)

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", port))
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for way in (requests, answers):
                threading.Thread(target=way, args=(client, server), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def nginx(directory: pathlib.Path, what: str) -> tuple[int, int]:
    """Serves until this process ends. Returns its port and process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    config = directory / "nginx.conf"
    config.write_text(
        f"user {getpass.getuser()}; worker_processes 1; daemon off; error_log stderr;\n"
        f"pid {directory}/nginx.pid; events {{ worker_connections 1024; }}\n"
        f"http {{ access_log off; sendfile on; {what.replace('PORT', str(port))} }}\n"
    )
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program, "nginx is needed: scripts/tool nginx-light nginx -v"
    started = subprocess.Popen(["setpriv", "--pdeathsig", "TERM", program, "-c", str(config)])
    give_up_s = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return port, started.pid
        except ConnectionRefusedError:
            assert time.monotonic() < give_up_s, "nginx does not listen"
            time.sleep(0.01)


def cpu_s(pid: int) -> float:
    """Of a process and all below it, also of those that have ended."""
    times, children = dict[int, float](), defaultdict[int, list[int]](list)
    for entry in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            one, ticks = int(entry.parent.name), sum(map(int, fields[11:15]))
            times[one] = ticks / os.sysconf("SC_CLK_TCK")
            children[int(fields[1])].append(one)
    left, found = [pid], 0.0
    while left:
        found += times.get(one := left.pop(), 0.0)
        left += children[one]
    return found


def read(target: str, dataset_id: str, how: dict[str, Any]) -> tuple[set[int], float]:
    """The ids, and how long it took."""
    begun, found = time.perf_counter(), set[int]()
    with service.read(target, dataset_id, batch_size=100, **how) as batches:
        for batch in batches:
            found.update(batch["id"].tolist())
    return found, time.perf_counter() - begun


def told(server: Responder, faults: Faults) -> dict[str, int]:
    """What the proxy has counted until now. From now on it has these faults."""
    server.ask(faults=dataclasses.asdict(faults))
    counts: dict[str, int] = server.answer_json()
    return counts


def measure(directory: pathlib.Path, files: int, rounds: int, *, shared: bool) -> dict[str, Any]:
    (directory / "files").mkdir()
    size, everything = write(directory / "files", files), {*range(files * ROWS)}
    cores, far = sorted(os.sched_getaffinity(0)), Faults(LATENCY_S)
    figures: dict[str, Any] = {"bytes": size, "cores": len(cores), "shared": shared}
    with contextlib.ExitStack() as running:
        if not shared:
            os.sched_setaffinity(0, cores[-1:])
        server = running.enter_context(Responder(__spec__.name, "--serve", directory / "files"))
        if not shared:
            os.sched_setaffinity(0, cores[:-1])
        greeting = json.loads(server.greeting)
        os.environ.update(greeting["environment"])
        dispatcher = running.enter_context(our_dispatcher(directory))
        target = dispatcher.address

        def workers(*options: object) -> list[Any]:
            started = [running.enter_context(our_worker(dispatcher, *options)) for _ in range(2)]
            for one in started:
                one.wait_until_ready()
            return started

        reading = workers()
        told(server, far)
        begun = time.perf_counter()
        sources = {"s3": service.register_files(target, f"s3://{BUCKET}/train/*.parquet")}
        figures["register_s"] = time.perf_counter() - begun
        figures["lists"] = told(server, far)["lists"]
        sources["local"] = service.register_files(target, f"{directory}/files/*.parquet")
        names = f"{{000..{files - 1:03}}}.parquet"
        for name, port in greeting["ports"].items():
            sources[name] = service.register_files(target, f"http://127.0.0.1:{port}/{names}")
        for way, how in WAYS.items():
            rates = {name: list[float]() for name in sources}
            ours, theirs = ({name: list[float]() for name in sources} for _ in range(2))
            for number in range(rounds + 1):
                for name, dataset_id in sources.items():
                    told(server, far)
                    used = cpu_s(os.getpid()), cpu_s(server.pid)
                    found, took_s = read(target, dataset_id, how)
                    now = cpu_s(os.getpid()), cpu_s(server.pid)
                    assert found == everything
                    if number:  # the first round warms up
                        rates[name].append(size / took_s / 1e6)
                        theirs[name].append((now[1] - used[1]) / size * 1e9)
                        ours[name].append((now[0] - used[0] - now[1] + used[1]) / size * 1e9)
                    if name == "s3":
                        figures[f"{way}_fetched"] = told(server, far)["sent_bytes"] / size
            figures[f"{way}_mb_per_s"] = rates
            figures[f"{way}_cpu_ms_per_mb"] = ours
            figures[f"{way}_servers_cpu_ms_per_mb"] = theirs
            for name in sources:
                pairs = zip(rates[name], rates["local"], strict=True)
                figures[f"{way}_{name}_to_local"] = statistics.median(a / b for a, b in pairs)
        told(server, SOME_FAULTS)
        found, _ = read(target, sources["s3"], WAYS["once"])
        figures |= {
            "faults": told(server, far)["failed"],
            "all_despite_faults": found == everything,
        }
        half = WAYS["ordered"] | {"start_step": files * ROWS // 200, "cycle_length": 1}
        with service.read(target, sources["s3"], batch_size=100, **half) as some:
            next(iter(some))
            figures["bytes_before_first_at_half"] = told(server, far)["sent_bytes"]
        for one in reading:
            one.close()
        reading = workers("--cache-directory", directory / "cache")
        for epoch in ("first", "second"):
            told(server, far)
            assert read(target, sources["s3"], WAYS["ordered"])[0] == everything
            fetched = told(server, far)["sent_bytes"] / size
            figures[f"cache_{epoch}_epoch_fetched"] = fetched
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--files", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--serve", type=pathlib.Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        return
    with tempfile.TemporaryDirectory() as name:
        figures = measure(pathlib.Path(name), given.files, given.rounds, shared=given.shared)
    given.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(given.json.read_text())


if __name__ == "__main__":
    main()
