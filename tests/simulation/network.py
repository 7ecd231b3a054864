"""The network of the simulation: hosts, and what happens to what they send each other.

Between two hosts a message takes its time, may come late, and may not come at all; hosts can be
cut off from one another for a while. Byte streams (sockets.py) and calls (calls.py) are made of
this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .kernel import Kernel

DEAD_PEER_S = 30.0
"""After so long without a word from the other host, TCP gives a connection up."""

KEEPALIVE_S = 2.0
"""The same for a call's connection, which pings (grpc_server.py)."""


@dataclass
class Weather:
    """What the network does to messages, once the run's seed has chosen it."""

    delay_s: float = 0.001  # typical, one way
    late: float = 0.0  # how likely one comes much later
    lost: float = 0.0  # how likely a call's message is lost
    doubled: float = 0.0  # how likely a call's request comes twice
    pipe_bytes: int = 64 << 10  # what a connection holds, one way


@dataclass
class Network:
    """All hosts and ports. `cut` and `heal` part hosts and join them again."""

    kernel: Kernel
    weather: Weather = field(default_factory=Weather)
    rejects: bool = False  # a cut refuses connections to dispatchers, as a firewall does
    ports: dict[tuple[str, int], Any] = field(default_factory=dict)  # who listens, by address
    names: dict[str, Any] = field(default_factory=dict)  # the same for Unix sockets
    streams: dict[Any, None] = field(default_factory=dict)  # connections that can be cut
    _cuts: set[frozenset[str]] = field(default_factory=set)
    _held: list[tuple[frozenset[str], Callable[[], None]]] = field(default_factory=list)
    _next_port: int = 40_000

    def free_port(self) -> int:
        self._next_port += 1
        return self._next_port

    def delay(self, source: str, target: str) -> float:
        """How long this message takes, in seconds."""
        rng, weather = self.kernel.rng, self.weather
        if source == target:
            return weather.delay_s * 0.01 * rng.random()
        if weather.late and rng.random() < weather.late:
            return weather.delay_s * rng.uniform(10, 1000)
        return weather.delay_s * rng.uniform(0.2, 2)

    def is_cut(self, a: str, b: str) -> bool:
        return frozenset((a, b)) in self._cuts

    def when_joined(self, a: str, b: str, act: Callable[[], None]) -> None:
        """Call `act` now, or once the two hosts are no longer cut off from one another."""
        pair = frozenset((a, b))
        if pair in self._cuts:
            self._held.append((pair, act))
        else:
            act()

    def cut(self, a: str, b: str) -> None:
        pair = frozenset((a, b))
        if len(pair) < 2 or pair in self._cuts:
            return
        self.kernel.trace("partition", a, b)
        self._cuts.add(pair)
        for stream in self.streams:
            if {stream.host, stream.peer_host} == pair:
                self.kernel.at(DEAD_PEER_S, self._give_up, pair, stream)

    def _give_up(self, pair: frozenset[str], stream: Any) -> None:
        if pair in self._cuts and stream in self.streams:
            stream.reset()

    def heal(self) -> None:
        if not self._cuts:
            return
        self.kernel.trace("joined")
        self._cuts.clear()
        held, self._held = self._held, []
        for _, act in held:
            act()
