"""The cluster: starts real processes of each role, and keeps them running.

Everybody reaches a dispatcher through its proxy, and a dispatcher announces its proxy's address.
Dispatchers reach Redis or PostgreSQL through a proxy, too. Workers with an even number restart on
the same port, as on a machine of their own, and offer every transfer protocol. The others restart
on any port, as in a new container, and offer only TCP. faults.py disturbs them.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from ..service.blocks import BLOCK_BYTES
from ..service.errors import ForebayError
from ..service.processes import forebay, free_port, redis_program, tail
from . import postgres
from .authority import Authority
from .dataset import ELEMENT_BYTES
from .hosts import LOOPBACK, Host, Network
from .members import TRAINERS, Life, Member
from .ordered import FIRST_GROUP, MOST_CONSUMERS, OrderedTask, next_group
from .partitions import Partition
from .plan import host_names
from .proxy import Proxies
from .records import RecordFiles
from .trainer import TrainerTask

CLAIMERS = 2
"""Trainers that read at least once, beside the others."""

ELEMENT_S = 0.004
"""How long a worker takes to compute an element."""

SLOW = 1.3
"""How many times slower than the workers the slow trainers are."""

IN_HAND = -(-BLOCK_BYTES // ELEMENT_BYTES)
"""Elements that a trainer can have taken, and not recorded: a block."""

TICK_S = 0.02
START_S = 180.0
SETTLE_S = 120.0
"""How long the last epoch may take after the faults, and workers to stop."""

LEADS = "leads journal"
"""A line of a leader's log."""

SERVES = {
    "redis": "Ready to accept connections",  # and Valkey
    "postgres": "database system is ready to accept connections",
}
"""A line of a storage server's log."""

DISPATCHER_OPTIONS = [
    "--snapshot-events=200",  # so that recovery uses snapshots
    # Longer than any pause, but short enough that a lost worker does not delay an epoch long.
    "--worker-timeout-ms=10000",
    "--client-timeout-ms=10000",
]


class Options(msgspec.Struct, frozen=True):
    """The options of a run. Times are in seconds."""

    seed: int
    duration_s: float
    kill_every_s: float
    storage: str  # "files", "redis", "postgres", or a URL
    dispatchers: int
    workers: int
    trainers: int
    elements: int  # in a pass; an epoch has several
    only: tuple[str, ...] = ()  # kinds of faults, such as "kill worker"; none: all
    hosts: bool = False  # each member has a host of its own
    tls: bool = False  # all connections have TLS, and certificates are replaced again and again

    @property
    def members(self) -> dict[str, int]:
        """The number of members of each role."""
        counts = {
            "dispatcher": self.dispatchers,
            "worker": self.workers,
            "trainer": self.trainers,
            "claimer": CLAIMERS,
            "ordered": MOST_CONSUMERS,
        }
        own = {role: {role: 1} for role in SERVES}
        network = {"network": 1} if self.hosts else {}
        return counts | own.get(self.storage, {}) | network


class Cluster:
    """Starts the members, and restarts them. Use from the main thread; close it."""

    def __init__(self, options: Options, directory: pathlib.Path) -> None:
        self._options = options
        self._directory = directory
        self._stop = directory / "stop"
        names = host_names(options.members) if options.hosts else []
        self.network = Network(names) if names else None
        self.proxies = Proxies()
        self._authority = Authority(directory, self._addresses()) if options.tls else None
        self.members: dict[str, list[Member]] = {}
        self.records = RecordFiles(directory, self.members)
        self.storage = self._make_storage()
        self.group = FIRST_GROUP
        self._ports = [free_port() for _ in range(options.dispatchers)]
        self.addresses = [self._proxy(f"dispatcher{n}", port) for n, port in enumerate(self._ports)]
        self.service = ",".join(self.addresses)
        # Workers without a fixed port share the places with "%port%".
        self._worker_ports = [0 if n % 2 else free_port() for n in range(options.workers)]
        self._add("dispatcher", options.dispatchers, self._dispatcher)
        self._add("worker", options.workers, self._worker)

    def close(self) -> None:
        """End every process at once. Idempotent."""
        for member in self._all():
            member.retired = True
            member.kill()
        self.proxies.close()
        if self.network is not None:
            self.network.close()

    # -- what runs -----------------------------------------------------------------------------

    def _add(
        self,
        role: str,
        count: int,
        command: Callable[[int, str], list[str]],
        kind: type[Member] = Member,
    ) -> None:
        """Add members, of which each process gets the command for its number and its name."""
        environment = {} if self._authority is None else self._authority.credentials.environment()
        self.members[role] = [
            kind(
                role, n, partial(command, n), self._directory, self._host(f"{role}{n}"), environment
            )
            for n in range(count)
        ]

    def _addresses(self) -> list[str]:
        """All that members are reached at."""
        hosts = [] if self.network is None else self.network.hosts.values()
        return [LOOPBACK.address, *(host.address for host in hosts)]

    def _host(self, name: str) -> Host:
        return LOOPBACK if self.network is None else self.network.hosts.get(name, LOOPBACK)

    def _proxy(self, name: str, port: int) -> str:
        """The address of a new proxy of that member."""
        host = self._host(name)
        return f"{host.address}:{self.proxies.add(name, port, host)}"

    def _all(self) -> Iterator[Member]:
        for members in self.members.values():
            yield from members

    @property
    def partitions(self) -> list[Partition]:
        """All partitions so far."""
        return [] if self.network is None else self.network.partitions

    @property
    def lives(self) -> dict[str, Life]:
        """All processes so far, by name."""
        return {life.name: life for member in self._all() for life in member.lives}

    def _make_storage(self) -> str:
        match self._options.storage:
            case "files":
                return f"file://{(self._directory / 'journal').absolute()}"
            case "redis":
                return self._make_redis()
            case "postgres":
                return self._make_postgres()
            case url:
                return url

    def _make_redis(self) -> str:
        server, data, port = redis_program(), self._directory / "redis", free_port()
        if server is None:
            raise ForebayError(
                "--storage redis needs a Redis server on this machine: install redis-server or "
                "valkey-server, or use --storage files, or name the URL of a Redis"
            )
        data.mkdir()
        command = [
            *(server, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(data)),
            *("--appendonly", "yes", "--appendfsync", "always", "--save", ""),
        ]
        self._add("redis", 1, lambda *_: command)
        return f"redis://{self._proxy('redis0', port)}?prefix=chaos"

    def _make_postgres(self) -> str:
        data, port = self._directory / "postgres", free_port()
        self._directory.chmod(0o711)  # PostgreSQL is not run as root
        postgres.make_cluster(data)
        command = postgres.server_command(data, port)
        self._add("postgres", 1, lambda *_: command, postgres.PostgresMember)
        server = self._proxy("postgres0", port)
        return f"postgresql://{postgres.USER}@{server}/postgres?prefix=chaos"

    def _dispatcher(self, number: int, _: str) -> list[str]:
        options = [
            *(f"--storage={self.storage}", f"--port={self._ports[number]}"),
            *(f"--address={self.addresses[number]}", *DISPATCHER_OPTIONS),
        ]
        places = ",".join(
            f"{self._host(f'worker{n}').address}:{port or '%port%'}"
            for n, port in enumerate(self._worker_ports)
        )
        options.append(f"--workers={places}")
        if self._options.dispatchers > 1:
            options.append("--standby")
        return forebay("service.cli", "dispatcher", *options)

    def _worker(self, number: int, name: str) -> list[str]:
        options = [
            f"--tags={name}",  # identifies the process in the journal
            *(f"--dispatcher={self.service}", f"--port={self._worker_ports[number]}"),
            f"--host={self._host(f'worker{number}').address}",
            *(["--insecure"] if self._authority is None else []),
        ]
        if number % 2:
            options.append("--data-transfer-protocol=tcp")
        return forebay("service.cli", "worker", *options)

    def _trainer(self, role: str, dataset_id: str, number: int, name: str) -> list[str]:
        options = self._options
        task = TrainerTask(
            name=name,
            service=self.service,
            dataset_id=dataset_id,
            records=str(self.records.path_of(role, number)),
            stop=str(self._stop),
            pace_s=SLOW * ELEMENT_S * options.trainers / options.workers,
            claims=role == "claimer",
        )
        return forebay("chaos.trainer", msgspec.json.encode(task).decode())

    def _ordered(self, dataset_id: str, number: int, name: str) -> list[str]:
        task = OrderedTask(
            name=name,
            service=self.service,
            dataset_id=dataset_id,
            records=str(self.records.path_of("ordered", number)),
            stop=str(self._stop),
            elements=self._options.elements,
            index=number,
            group=self.group,
        )
        return forebay("chaos.ordered", msgspec.json.encode(task).decode())

    # -- its life ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all members, and return once every trainer has received elements.

        Raises ForebayError, with the end of its log, if a process ends.
        """
        answer = self._directory / "dataset"
        arguments = [self.service, str(self._options.elements), str(ELEMENT_S), str(answer)]
        self._add("dataset", 1, lambda *_: forebay("chaos.dataset", *arguments))
        registering = self.members["dataset"][0]
        registering.retired = True
        for role, line in SERVES.items():
            for server in self.members.get(role, []):
                server.start()
                self.wait(lambda: line in server.said, START_S, starting=True)  # noqa: B023
        first = self.members["dispatcher"][0]  # so that a seed's faults hit the same roles
        first.start()
        self.wait(lambda: LEADS in first.said, START_S, starting=True)
        for member in self._all():
            if not member.running:
                member.start()
        self.wait(lambda: not registering.running, START_S, starting=True)
        dataset_id, claimed_id = answer.read_text().split()
        del self.members["dataset"]
        for role, read_id in (("trainer", dataset_id), ("claimer", claimed_id)):
            self._add(role, self._options.members[role], partial(self._trainer, role, read_id))
        self._add("ordered", MOST_CONSUMERS, partial(self._ordered, claimed_id))
        self._hold_others()
        for member in self.readers():
            member.start()
        self.wait(self._everybody_reads, START_S, starting=True)

    def _everybody_reads(self) -> bool:
        return all(b'"ids"' in self.records.content(member) for member in self.readers())

    def readers(self) -> list[Member]:
        """The trainers of all kinds; those that read in order as far as they are in the group."""
        return [m for role in TRAINERS for m in self.members[role] if not m.held]

    def begin_group(self, consumers: int) -> None:
        """End all trainers that read in order, and begin again with so many."""
        for member in self.members["ordered"]:
            member.kill()
        self.group = next_group(self.group, consumers, self.records.of_trainers("ordered"))
        self._hold_others()
        for member in self.readers():
            if not member.running and member.role == "ordered":
                member.start()

    def _hold_others(self) -> None:
        """Keep those that are not in the group from being started."""
        for member in self.members["ordered"]:
            member.held = member.number >= self.group.consumers

    def wait(
        self, condition: Callable[[], bool], timeout_s: float, *, starting: bool = False
    ) -> bool:
        """Keep all members running until the condition holds; return whether it did in time.

        With `starting`, before the faults, raises ForebayError if a member ends, or on a timeout.
        """
        give_up_s = time.monotonic() + timeout_s
        while not condition():
            if self.network is not None:
                self.network.poll()
            if self._authority is not None:
                self._authority.poll()
            for member in self._all():
                member.poll()
                if starting and member.lives and member.life.ended_by_itself:
                    raise ForebayError(
                        f"{member.life.name} ended with {member.life.code} before there were any "
                        f"faults; its log ends with:\n{tail(member.log)}"
                    )
            if time.monotonic() > give_up_s:
                if starting:
                    raise ForebayError(
                        f"no trainer got an element for {timeout_s:.0f} s; the logs in "
                        f"{self._directory} say more"
                    )
                return False
            time.sleep(TICK_S)
        return True

    def settle(self) -> bool:
        """End the faults, and let all readers finish; return whether they did."""
        self._stop.touch()
        if self.network is not None:
            self.network.heal()
        for member in self._all():
            member.resume()

        def ended() -> bool:
            for member in self.readers():
                finished = member.life.code == 0 and member.life.terminated_s is None
                member.retired = member.retired or finished
            return not any(m.running or not m.retired for m in self.readers())

        return self.wait(ended, SETTLE_S)

    def stop(self, role: str) -> None:
        """Send SIGTERM to all members of a role, and wait for their end."""
        members = self.members.get(role, [])
        for member in members:
            member.retired = True
            member.terminate()
        self.wait(lambda: not any(member.running for member in members), SETTLE_S)
