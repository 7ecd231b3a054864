"""The addresses of a worker: which one to connect to, and which refuse connections."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..connections.protocols import GRPC, TCP, UNIX

Opened = TypeVar("Opened")


class ConnectionRefused(enum.Enum):
    """A worker's address refuses connections."""

    ONCE_CONNECTED = enum.auto()  # so its process has ended
    NEVER_CONNECTED = enum.auto()  # a firewall or another host may refuse


class WorkerAddresses:
    """The addresses of one worker, the best first. For one thread at a time."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, str]],
        *,
        with_grpc: bool,
        refused: Callable[[ConnectionRefused | None], None],
    ) -> None:
        """`addresses` are pairs of a protocol and an address; unknown protocols are skipped.

        Calls `refused` when nobody listens at the worker's address, and with None once a process
        listens there again. Raises ValueError if no address is left.
        """
        usable = (UNIX, TCP, GRPC) if with_grpc else (UNIX, TCP)
        self._addresses = [a for a in addresses if a[0] in usable]
        if not self._addresses:
            raise ValueError(f"none of the worker's addresses can be used here: {addresses}")
        self.answered: tuple[str, str] | None = None  # the address where the worker last did
        self.refuse = False  # whether the last attempt to connect was refused
        self._report = refused
        self._reported: ConnectionRefused | None = None

    def connect(self, connect_to: Callable[[str, str], Opened]) -> Opened:
        """What `connect_to(protocol, address)` returns for the first address that answers.

        Raises ConnectionError if all raise OSError.
        """
        errors, refusals = [], []
        for protocol, address in self._addresses:
            try:
                connection = connect_to(protocol, address)
            except OSError as error:
                errors.append(f"{protocol} {address}: {error}")
                refused = isinstance(error, ConnectionRefusedError)
                if refused and (protocol, address) == self.answered:
                    # Report it now: the other addresses may take long to fail.
                    self._report_change(ConnectionRefused.ONCE_CONNECTED)
                if protocol != UNIX or len(self._addresses) == 1:  # Unix names are local to a host
                    refusals.append(refused)
            else:
                self.answered = protocol, address
                self.refuse = False
                self._report_change(None)
                return connection
        self.refuse = refusals[:1] == [True]
        if self.refuse and self.answered is None:
            self._report_change(ConnectionRefused.NEVER_CONNECTED)
        raise ConnectionError("; ".join(errors))

    def _report_change(self, refused: ConnectionRefused | None) -> None:
        if refused != self._reported:
            self._reported = refused
            self._report(refused)
