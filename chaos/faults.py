"""The faults of a run, each of one member of the cluster: docs/chaos.md says what they do."""

from __future__ import annotations

import signal
import time

import msgspec

from .cluster import Cluster
from .members import Member
from .plan import PARTED, Fault


class DoneFault(msgspec.Struct, frozen=True):
    """A fault that was due. `name` is the process that it hit; None: it hit none."""

    fault: Fault
    at_s: float  # CLOCK_MONOTONIC
    at_ms: int  # Unix epoch
    name: str | None


class Faults:
    """Injects faults into a cluster, and knows which hit whom. Use from the main thread."""

    def __init__(self, cluster: Cluster) -> None:
        self.done: list[DoneFault] = []
        self._cluster = cluster
        self._members = cluster.members
        self._proxies = cluster.proxies

    def hit(self, fault: Fault) -> None:
        """Inject the fault, if its member is in a state for it."""
        if fault.action in PARTED:
            self._cut_network(fault)
            return
        member = self._members[fault.role][fault.number]
        proxy = f"{fault.role}{fault.number}"
        able = {"kill": member.running, "re-form": True}.get(fault.action, member.undisturbed)
        at_s, at_ms = time.monotonic(), time.time_ns() // 1_000_000
        match fault.role, fault.action:
            case _ if not able:
                pass
            case _, "kill":
                member.kill()
            case _, "terminate":
                member.terminate()
            case _, "pause":
                member.pause(fault.lasts_s)
            case "ordered", "re-form":
                self._cluster.begin_group(fault.number + 1)
            case "trainer" | "claimer" | "ordered", "cut":
                able = self._cut_own(member)
            case _:
                self._proxies.disturb(proxy, fault.action, fault.lasts_s)
        name = member.life.name if able else None
        self.done.append(DoneFault(fault, at_s, at_ms, name))

    def _cut_network(self, fault: Fault) -> None:
        """Also where the member is down or disturbed: its next process is cut off, too."""
        at_s, at_ms = time.monotonic(), time.time_ns() // 1_000_000
        network = self._cluster.network
        assert network is not None, "a plan without hosts has no partitions"
        network.cut(fault.sides, fault.lasts_s, one_way=fault.action == "deafen")
        name: str | None
        if fault.role == "network":
            name = " | ".join(", ".join(side) for side in fault.sides)
        else:
            lives = self._members[fault.role][fault.number].lives
            name = lives[-1].name if lives else None  # its process has not started yet
        self.done.append(DoneFault(fault, at_s, at_ms, name))

    def _cut_own(self, trainer: Member) -> bool:
        # The signal would kill a trainer that has not set its handlers yet.
        ready = f'"{trainer.life.name}"'.encode() in self._cluster.records.content(trainer)
        if ready:
            trainer.send(signal.SIGUSR1)
        return ready
