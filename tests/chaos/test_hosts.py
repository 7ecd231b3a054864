"""Hosts are namespaces that a run makes by itself, partitions cut them apart, and nothing stays.

Run as a program, this file is what happens in a network of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.chaos.hosts import REMEDY, Network, enter_private_network

ROOT = Path(__file__).resolve().parents[2]
CHAOS = (sys.executable, "-m", "forebay.service.cli", "chaos", "--hosts")
ONLY = tuple(f"--only={each}" for each in ("isolate worker", "sever network", "kill dispatcher"))
TIMEOUT_S = 280


def call(*command: str, **environment: str) -> tuple[int, str]:
    """The exit code, and all that it said."""
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S,
        env={**os.environ, "COLUMNS": "200", **environment},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def require_allowed_or_refused(code: int, said: str) -> bool:
    """Whether this machine allows namespaces; if not, the command said so, and what to do."""
    if "no network namespace can be made here" not in said:
        return True
    assert code != 0 and REMEDY in " ".join(said.split()), said
    return False


def test_partitions() -> None:
    before = interfaces()
    code, said = call(sys.executable, "-m", __name__)
    if require_allowed_or_refused(code, said):
        assert code == 0 and said.endswith("all of it\n"), said
    assert interfaces() == before


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S + 20)
def test_every_promise_is_kept_under_partitions(tmp_path: Path) -> None:
    before = interfaces()
    report_file = tmp_path / "report.json"
    code, said = call(
        *CHAOS, "--minutes", "0.1", "--seed", "2", "--kill-every", "0.7", "--elements", "100",
        "--dispatchers", "1", "--workers", "1", "--trainers", "1", *ONLY,
        "--json", str(report_file), TMPDIR=str(tmp_path),
        PYTHONDONTWRITEBYTECODE="1",  # as in tests/cli/test_chaos.py
    )  # fmt: skip
    if require_allowed_or_refused(code, said):
        assert code == 0 and "every promise was kept" in said, said
        report = json.loads(report_file.read_bytes())
        assert report["partitions"] and report["verdict"]["delivered"] > 0
        assert list(tmp_path.iterdir()) == [report_file]
    assert interfaces() == before


class TestErrors:
    def test_no_namespaces(self) -> None:
        """Where the system allows none: here, because of a limit that a namespace of users sets."""
        limited = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
        code, said = call("unshare", "--map-root-user", "sh", "-c", limited, "sh", *CHAOS)
        if "unshare: " in said:  # there are no namespaces of users either
            code, said = call(*CHAOS, "--minutes", "0.05")
        assert not require_allowed_or_refused(code, said), said

    def test_no_program(self, tmp_path: Path) -> None:
        code, said = call(*CHAOS, PATH=str(tmp_path), TMPDIR=str(tmp_path))
        if require_allowed_or_refused(code, said):
            assert code != 0 and "cannot run ip: " in said and "iproute2" in said

    def test_a_storage_elsewhere(self, tmp_path: Path) -> None:
        code, said = call(*CHAOS, "--storage", "redis://127.0.0.1:1", TMPDIR=str(tmp_path))
        if require_allowed_or_refused(code, said):
            assert code != 0 and "use --storage redis" in said


def interfaces() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


# -- in a network of its own -------------------------------------------------------------------

NAMES = ("a", "b", "c")
SOON_S = 0.3


def main() -> None:
    enter_private_network()
    network = Network(NAMES)
    try:
        try_partitions(network)
    finally:
        network.close()
    print("all of it", flush=True)


def try_partitions(network: Network) -> None:
    listening = {}
    for name in NAMES:
        host = network.hosts[name]
        listening[name] = host.socket()
        listening[name].bind((host.address, 0))
        listening[name].listen()

    def connect(one: str, other: str, timeout_s: float = TIMEOUT_S) -> socket.socket:
        connection = network.hosts[one].socket()
        connection.settimeout(timeout_s)
        connection.connect(listening[other].getsockname())
        return connection

    def require_cut(*cut: str) -> None:
        """That exactly these pairs are cut off from each other."""
        for one, other in itertools.product(NAMES, NAMES):
            if one + other in cut or other + one in cut:
                with pytest.raises(TimeoutError):
                    connect(one, other, SOON_S)
            else:
                connect(one, other).close()
                listening[other].accept()[0].close()

    require_cut()
    end = connect("a", "b")
    other_end = listening["b"].accept()[0]
    end.sendall(b"before")
    assert other_end.recv(6) == b"before"
    network.cut((("a",), ("b",)), 60)
    end.sendall(b"meanwhile")
    other_end.settimeout(SOON_S)
    with pytest.raises(TimeoutError):
        other_end.recv(1)
    require_cut("ab")  # c reaches both
    network.cut((("a", "b"), ("c",)), 60)
    require_cut("ab", "ac", "bc")
    network.partitions[0].until_s = 0.0
    network.poll()
    require_cut("ac", "bc")
    other_end.settimeout(TIMEOUT_S)
    assert other_end.recv(9) == b"meanwhile"  # it was on its way, and is sent again
    network.heal()
    require_cut()
    network.cut((("a",), ("b", "c")), 60, one_way=True)
    other_end.sendall(b"lost")
    end.sendall(b"heard")
    assert other_end.recv(5) == b"heard"
    end.settimeout(SOON_S)
    with pytest.raises(TimeoutError):
        end.recv(1)
    require_cut("ab", "ac")  # a connection needs both ways
    network.heal()
    end.settimeout(TIMEOUT_S)
    assert end.recv(4) == b"lost"
    assert network.partitions[1].until_s < network.partitions[1].since_s + 60


if __name__ == "__main__":
    main()
