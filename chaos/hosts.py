"""Hosts of a run: network namespaces of Linux on one bridge, and partitions between them.

`enter_private_network` moves this process into a network namespace of its own, which gets the
bridge, so that nothing of the machine's network changes. The hosts are further namespaces. Only
this process and its children hold them, so Linux removes all of it however the run ends.

A partition makes packets vanish: each host sends packets for the other side to a hardware address
that no host has. No host gets an error, connections stay open, and third hosts may still reach both
sides.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..service.errors import ForebayError
from ..service.processes import ChildProcess
from .partitions import Partition
from .plan import Sides

OWN_ADDRESS = "192.0.2.254"
"""The address of this process on the bridge, in a network that is reserved for documentation."""

_ADDRESS = "192.0.2.{}"
_UNUSED = "02:00:00:00:00:00"
"""A hardware address that no host has: theirs are random, so 1 in 2^46 would be the same."""

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # os has them from Python 3.12 on

REMEDY = (
    "--hosts needs Linux, the program ip (iproute2), and the right to make network namespaces. "
    "Run it as root, in a container with --privileged; or allow user namespaces, as root: sysctl "
    "-w user.max_user_namespaces=10000, on Ubuntu sysctl -w "
    "kernel.apparmor_restrict_unprivileged_userns=0 as well. Without --hosts, all processes share "
    "this machine's network"
)


@dataclass(frozen=True)
class Host:
    """Where a member runs. `namespace` is a descriptor; None: in the namespace of this process."""

    address: str = "127.0.0.1"
    namespace: int | None = None

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets and processes that this thread makes within this context are on the host."""
        if self.namespace is None:
            yield
            return
        outside = _namespace_of_this_thread()
        try:
            _enter(self.namespace)
            try:
                yield
            finally:
                _enter(outside)
        finally:
            os.close(outside)

    def socket(self) -> socket.socket:
        """A TCP socket on the host."""
        with self.inside():
            return socket.socket()


LOOPBACK = Host()


class Network:
    """The hosts of these names. Use from the main thread, after `enter_private_network`.

    Raises ForebayError, with what to do, if the system refuses.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.hosts: dict[str, Host] = {}  # by name
        self.partitions: list[Partition] = []  # those that are over, too
        self._present: list[Partition] = []  # those that are not
        self._cut_off: dict[str, frozenset[str]] = dict.fromkeys(names, frozenset())
        """To whom what this host sends vanishes."""
        for number, name in enumerate(names, start=1):
            self.hosts[name] = Host(_ADDRESS.format(number), _make_namespace())
        lines = [
            "link set lo up",
            "link add bridge type bridge",
            f"addr add {OWN_ADDRESS}/24 dev bridge",
            "link set bridge up",
        ]
        for number, host in enumerate(self.hosts.values(), start=1):
            there = f"/proc/{os.getpid()}/fd/{host.namespace}"
            lines += [
                f"link add port{number} type veth peer name eth0 netns {there}",
                f"link set port{number} master bridge up",
            ]
        _ip_on({"": LOOPBACK}, {"": lines})
        of_hosts = {
            name: ["link set lo up", f"addr add {host.address}/24 dev eth0", "link set eth0 up"]
            for name, host in self.hosts.items()
        }
        _ip_on(self.hosts, of_hosts)

    def cut(self, sides: Sides, seconds: float, *, one_way: bool = False) -> None:
        """Cut the two sides off from each other; `poll` heals it in time.

        `one_way`: only what the second side sends to the first one vanishes.
        """
        now = time.monotonic()
        partition = Partition(sides, now, now + seconds, one_way)
        self.partitions.append(partition)
        self._present.append(partition)
        self._arrange()

    def poll(self) -> None:
        """Heal what is due. Poll this often."""
        now = time.monotonic()
        self._heal([p for p in self._present if p.until_s <= now])

    def heal(self) -> None:
        """End all partitions."""
        self._heal([*self._present])

    def _heal(self, ending: list[Partition]) -> None:
        if ending:
            self._present = [p for p in self._present if p not in ending]
            self._arrange()
            for partition in ending:
                partition.until_s = time.monotonic()

    def close(self) -> None:
        """Leave the hosts, which end with their last process."""
        for host in self.hosts.values():
            assert host.namespace is not None
            os.close(host.namespace)
        self.hosts.clear()

    def _arrange(self) -> None:
        """Have each host reach exactly those that no present partition keeps it from."""
        wanted: dict[str, set[str]] = {name: set() for name in self._cut_off}
        for partition in self._present:
            one, other = partition.sides
            for name in other:
                wanted[name].update(one)
            for name in () if partition.one_way else one:
                wanted[name].update(other)
        changes = {}
        for name, before in self._cut_off.items():
            after = frozenset(wanted[name])
            lines = [
                f"neigh replace {self.hosts[other].address} lladdr {_UNUSED} dev eth0 nud permanent"
                for other in after - before
            ]
            lines += [f"neigh del {self.hosts[other].address} dev eth0" for other in before - after]
            if lines:
                changes[name] = lines
            self._cut_off[name] = after
        _ip_on(self.hosts, changes)


def enter_private_network() -> None:
    """Move this process into a network namespace of its own.

    Without the right to make one, this makes a user namespace, too, in which it has the right. That
    needs a process with one thread. Raises ForebayError, with what to do, if the system refuses.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        try:
            _unshare(_CLONE_NEWNET)
        except PermissionError:
            _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
            for name, text in (
                ("uid_map", f"0 {user} 1"),
                ("setgroups", "deny"),
                ("gid_map", f"0 {group} 1"),
            ):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
    except (OSError, AttributeError) as error:  # of a system without `unshare`
        raise ForebayError(f"no network namespace can be made here: {error}. {REMEDY}") from None


def _unshare(flags: int) -> None:
    _require_no_error(ctypes.CDLL(None, use_errno=True).unshare(flags))


def _enter(namespace: int) -> None:
    """Move this thread."""
    _require_no_error(ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET))


def _require_no_error(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _namespace_of_this_thread() -> int:
    return os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)


def _make_namespace() -> int:
    """The descriptor of a new network namespace."""
    outside = _namespace_of_this_thread()
    try:
        _unshare(_CLONE_NEWNET)
        made = _namespace_of_this_thread()
        _enter(outside)
        return made
    except OSError as error:
        raise ForebayError(f"no network namespace can be made here: {error}. {REMEDY}") from None
    finally:
        os.close(outside)


def _ip_on(hosts: Mapping[str, Host], lines: Mapping[str, Sequence[str]]) -> None:
    """Run these commands of the program ip on each host, on all at once."""
    running = []
    for name, of_host in lines.items():
        with hosts[name].inside():
            process = ChildProcess(["ip", "-batch", "-"], subprocess.STDOUT, piped=True)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it says why
            process.stdin.write("\n".join([*of_host, ""]))
            process.stdin.close()
        running.append((process, of_host))
    for process, of_host in running:
        assert process.stdout is not None
        said = process.stdout.read().strip()
        if process.finish():
            raise ForebayError(f"ip {'; ip '.join(of_host)}: {said}. {REMEDY}")
