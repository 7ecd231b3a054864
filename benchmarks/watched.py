"""Row `watched`: what it costs to be scraped by a Prometheus, ten times a minute."""

from __future__ import annotations

import contextlib
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from ..service.processes import free_port
from .cluster import ReaderProcess
from .machine import process_cpu_s
from .results import Better, Result
from .servers import Server, our_dispatcher, our_worker
from .setting import Setting

SCRAPES_A_MINUTE = 10
WINDOW_S = 60 / SCRAPES_A_MINUTE  # with one scrape
SCRAPES = 100
MOST_SHARE = 0.01
CASE = "scalars"


@dataclass(frozen=True)
class _Cluster:
    """A dispatcher, a worker and a trainer; scraped, if there are ports."""

    servers: Sequence[Server]
    reader: ReaderProcess
    http_ports: Sequence[int]

    def scrape(self) -> None:
        for port in self.http_ports:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
                page.read()

    def servers_cpu_s(self) -> float:
        return sum(process_cpu_s(server.pid) for server in self.servers)

    def cpu_us_per_element(self, setting: Setting) -> float:
        """Of all three processes, in a window in whose middle it is scraped."""
        seconds = setting.seconds if setting.quick else WINDOW_S
        begun, before_s = time.monotonic(), self.servers_cpu_s()
        self.reader.ask(
            {
                "case": CASE, "size": 0, "warm_up_s": 0, "seconds": seconds, "workers": [],
                "job_name": None, "reader": 0, "readers": 1, "cached": False,
            }
        )  # fmt: skip
        time.sleep(max(0.0, begun + seconds / 2 - time.monotonic()))
        self.scrape()
        reading = self.reader.reading()
        spent_s = self.servers_cpu_s() - before_s + reading.client_cpu_s
        return 1e6 * spent_s / reading.elements


def watched(setting: Setting) -> list[Result]:
    """Only our side. The pairs show no more than the machine's noise; so a scrape's own cost
    is measured, too: that of servers which nobody reads from."""
    with contextlib.ExitStack() as stack:
        clusters = {
            name: _start(setting, stack, http_ports)
            for name, http_ports in (("plain", ()), ("watched", (free_port(), free_port())))
        }
        for cluster in clusters.values():
            cluster.cpu_us_per_element(setting)  # it knows the dataset from here on
        sides = {
            name: lambda cluster=cluster: cluster.cpu_us_per_element(setting)
            for name, cluster in clusters.items()
        }
        found = setting.alternate(**sides)
        shares = [_share(clusters["watched"], setting.quick) for _ in range(setting.rounds)]
    return [
        Result(
            row="watched",
            what=f"scalars, scraped {SCRAPES_A_MINUTE} times a minute; peer: Forebay, not scraped",
            unit="CPU µs an element",
            better=Better.LESS,
            ours=found["watched"],
            peer=found["plain"],
        ),
        Result(
            row="watched",
            what=f"{SCRAPES_A_MINUTE} scrapes a minute of dispatcher and worker",
            unit="of a core",
            better=Better.LESS,
            ours=shares,
            required=MOST_SHARE,
        ),
    ]


def _share(cluster: _Cluster, quick: bool) -> float:
    """The share of a core that scrapes take of the servers, beyond what they do anyway."""
    scrapes = 2 if quick else SCRAPES
    begun, before_s = time.monotonic(), cluster.servers_cpu_s()
    for _ in range(scrapes):
        cluster.scrape()
    spent_s, took_s = cluster.servers_cpu_s() - before_s, time.monotonic() - begun
    before_s = cluster.servers_cpu_s()
    time.sleep(took_s)
    anyway_s = cluster.servers_cpu_s() - before_s
    return max(0.0, spent_s - anyway_s) / scrapes * SCRAPES_A_MINUTE / 60


def _start(setting: Setting, stack: contextlib.ExitStack, http_ports: Sequence[int]) -> _Cluster:
    def http(index: int) -> tuple[object, ...]:
        return ("--http-port", http_ports[index]) if http_ports else ()

    directory = setting.directory("watched")
    dispatcher = stack.enter_context(our_dispatcher(directory, 0, *http(0)))
    worker = stack.enter_context(our_worker(dispatcher, *http(1)))
    reader = stack.enter_context(
        ReaderProcess("reader", "forebay", dispatcher.address, "AUTO", setting.files)
    )
    worker.wait_until_serving()
    reader.wait_until_ready()
    return _Cluster([dispatcher, worker], reader, http_ports)
