"""Rows `scalars` and `batches`: how fast elements reach a trainer's tf.data.Dataset."""

from __future__ import annotations

import functools
import subprocess
import sys

from .results import Better, Result, alternate
from .servers import Server, our_dispatcher, our_worker, peer_dispatcher, peer_worker
from .setting import Setting

TIMEOUT_S = 120


def scalars(setting: Setting) -> list[Result]:
    """Integers under OFF, batched in-graph after the read."""
    figures = _read(setting, "scalars", peer="AUTO", uncompressed="none")
    return [
        Result(
            row="scalars",
            what=f"scalars, OFF, batched in-graph; the peer {how}",
            unit="elements/s",
            better=Better.MORE,
            ours=figures["ours"],
            peer=figures[peer],
            required_ratio=50,
        )
        for peer, how in (("peer", "by default"), ("uncompressed", "uncompressed"))
    ]


def batches(setting: Setting) -> list[Result]:
    """Large elements, uncompressed on both sides, one by one into an eager loop."""
    figures = _read(setting, "batches", peer="none")
    return [
        Result(
            row="batches",
            what="4.8 MB uint8 batches, OFF, uncompressed, eager",
            unit="batches/s",
            better=Better.MORE,
            ours=figures["ours"],
            peer=figures["peer"],
            required_ratio=1,
        )
    ]


def _read(setting: Setting, case: str, **peers: str) -> dict[str, list[float]]:
    """The rates of ours, and of the peer with each of these compressions."""
    directory = setting.directory(case)
    with (
        our_dispatcher(directory) as ours,
        our_worker(ours) as ours_own,
        peer_dispatcher(directory) as peer,
        peer_worker(peer) as peers_own,
    ):
        for worker in ours_own, peers_own:
            worker.wait_until_serving()
        sides = {
            side: functools.partial(_rate, "tensorflow", case, peer, compression, setting)
            for side, compression in peers.items()
        }
        sides["ours"] = functools.partial(_rate, "forebay", case, ours, "AUTO", setting)
        return alternate(setting.rounds, **sides)


def _rate(side: str, case: str, dispatcher: Server, compression: str, setting: Setting) -> float:
    command = [sys.executable, "-m", "benchmarks.reader", side, case, dispatcher.address]
    command += [compression, str(setting.seconds)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if run.returncode:
        raise RuntimeError(f"a reader ended with exit code {run.returncode}:\n{run.stderr}")
    return float(run.stdout)
