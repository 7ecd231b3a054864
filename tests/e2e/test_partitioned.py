"""Dispatchers and their Redis on hosts of their own, which are cut off from each other.

Run as a program, this file is what happens in the namespace that joins the hosts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import redis

from forebay.chaos.hosts import Network
from forebay.service.processes import ChildProcess, redis_program
from forebay.storage.server_log import QUERY_MS

from ..forks import DISPATCHER, Fork
from ..standbys import LONG_LEASE_MS, leader_of, leads, wait_until
from .test_across_hosts import ISOLATED, ROOT, THERE, require_namespaces

PORT = 6000
LEADER, STANDBY, REDIS = "leader", "standby", "redis"
CUTS = (((LEADER,), (STANDBY,)), ((LEADER,), (REDIS,)), ((LEADER,), (STANDBY, REDIS)))


def test_a_partition_does_not_make_a_leader_dead_and_kill_9_does(tmp_path: Path) -> None:
    """Its lease is ten minutes, so it is displaced only if it is taken for dead."""
    require_namespaces()
    command = [*ISOLATED, sys.executable, "-m", __name__, str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert said.stdout == "displaced\n", said.stdout + said.stderr


def main() -> None:
    network = Network([LEADER, STANDBY, REDIS])
    there = {name: f"/proc/{os.getpid()}/fd/{h.namespace}" for name, h in network.hosts.items()}
    address = network.hosts[REDIS].address
    server = f"--bind {address} --protected-mode no --appendonly yes --appendfsync always --save"
    with network.hosts[REDIS].inside():
        command = [str(redis_program()), *server.split(), ""]
        folder = Path(sys.argv[1])
        storage = ChildProcess([*command, "--dir", str(folder)], folder / "redis.log")
    client = redis.Redis(address)

    def names() -> set[str]:
        """The leader's connections have a name."""
        return {one["name"] for one in client.client_list() if one["name"]}

    def answers() -> bool:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False

    wait_until(answers)
    forks: list[Fork] = []
    dispatchers: list[Any] = []
    for name in (LEADER, STANDBY):
        options = [f"--storage=redis://{address}", f"--host={network.hosts[name].address}"]
        options += [f"--port={PORT}", f"--leader-lease-ms={LONG_LEASE_MS}", "--insecure"]
        forks.append(
            Fork(["-c", THERE, there[name], "dispatcher", "--standby", *options], DISPATCHER)
        )
        dispatchers.append(
            SimpleNamespace(address=forks[-1].line().strip().removeprefix("grpc://"))
        )
        wait_until(leads, dispatchers[0])
    leader, standby = dispatchers
    (connected,) = names()
    time.sleep(2 * QUERY_MS / 1000)  # the standby sees the leader
    for sides in CUTS:
        network.cut(sides, 60)
        if REDIS in sides[1]:
            for one in client.client_list():  # as if Redis had noticed
                if one["name"] == connected:
                    client.client_kill_filter(_id=one["id"])
            assert connected not in names()
        time.sleep(3 * QUERY_MS / 1000)  # long enough for a standby that would displace it
        network.heal()
        wait_until(lambda: connected in names())
        assert leader_of(leader) == 1, f"displaced when {sides} were cut off from each other"
    forks[0].kill()
    wait_until(leads, standby, 2)
    print("displaced", flush=True)
    forks[1].kill()
    storage.kill()
    storage.finish()
    network.close()


if __name__ == "__main__":
    main()
