"""Shared memory: large payloads between processes of one host, without the socket.

The worker's `Lender` copies a payload into a *slab*, a memory file (memfd_create(2)). It sends the
slab's descriptor over the Unix socket once; each frame names its slab. The consumer's `Borrower`
maps the slab as an array. When nothing refers to that array or a view of it any more, the next
credit returns the slab's number. So a payload is copied once, where the socket would copy it twice,
and a slab's pages are faulted in once.

Slabs have no name in the file system, so a killed process leaves none behind. They are sealed and
cannot shrink, so a worker cannot make its consumer's reads fail. If no slab is free, the payload
goes over the socket, so nobody waits for a consumer that keeps its arrays. A child that the
consumer's process forked may refer to a slab for an unknown time; such a slab is never reused.

A worker itself borrows slabs from processes that run a dataset's functions. It may pass such a
payload on to a consumer without a copy, as a `Loan`. The consumer maps the same memory, under a
number that the worker assigns for this one time, and returns it the same way. If the consumer
vanishes without a goodbye, it may still map the slab, so the slab is never reused either.
"""

from __future__ import annotations

import collections
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .block_limits import padding
from .blocks import PassableMemory, Picked
from .errors import ProtocolError
from .platforms import at_fork

Bytes = npt.NDArray[np.uint8]
MapMemory = Callable[[int, int], mmap.mmap]

_log = logging.getLogger(__name__)

SHARED_BYTES = 256 << 10  # smaller payloads go over the socket as fast
MAX_SLABS = 32  # each holds a descriptor, on both sides
POOL_BYTES = 64 << 20
"""Of slabs that a worker holds for one consumer: twice its credit, as it also keeps what it was
given. LEAST_SLABS are allowed however large."""

LEAST_SLABS = 3
LEAST_BYTES = POOL_BYTES // MAX_SLABS
"""Of a slab for a large payload: what was never written takes no memory."""

MOST_TIMES = 4
"""A payload gets a free slab of more than so many times its size only if none may be added."""

MAPPED_BYTES = 3 * POOL_BYTES
"""How much a consumer keeps mapped of what one worker has passed on, besides the slabs that are
lent now; in MAX_SLABS mappings at most, as each holds a descriptor. To map a slab anew takes as
long as to copy it: each 4 KB are a page fault."""

MAX_PASSED = 4
"""How many slabs of one process may be passed on at a time. Further payloads are copied, so that
the process has slabs left even if consumers keep their arrays."""


class Lent(NamedTuple):
    """The slab of a payload."""

    slab: int
    descriptor: int | None  # if the slab is new to the consumer: the caller sends and closes it
    keep_mapped: bool = False  # the same memory will be lent again, under another number


class Lender:
    """The slabs of one connection to a consumer, in the worker. Thread-safe."""

    def __init__(self, most: int = MAX_SLABS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._slabs: dict[int, Bytes] = {}
        self._free: list[int] = []  # the first one is the most likely to be in the caches
        self._passed: dict[int, PassableMemory] = {}  # by their slab numbers at the consumer
        self._able = True

    def lend(self, size: int, parts: Sequence[memoryview | Picked]) -> Lent | None:
        """Copy a payload of `size` bytes, the parts each padded; None if no slab is free. Elements
        that were only chosen lie there from then on: who needs them again has no other copy."""
        reserved = self.reserve(size)
        if reserved is None:
            return None
        lent, target = reserved
        start = 0
        for part in parts:
            place = target[start : start + part.nbytes]
            if isinstance(part, Picked):
                part.copy_to(place)
            else:
                np.copyto(place, np.frombuffer(part, np.uint8))
            start += part.nbytes + padding(part.nbytes)
        return lent

    def reserve(self, size: int) -> tuple[Lent, Bytes] | None:
        """Reserve a slab of at least `size` bytes; write its memory before you send its number."""
        with self._lock:
            try:
                lent = self._choose(size) if self._able else None
            except OSError as error:
                _log.warning("no memory can be shared with consumers, sockets are used: %s", error)
                self._able = False
                return None
            return None if lent is None else (lent, self._slabs[lent.slab])

    def pass_on(self, loan: PassableMemory) -> Lent | None:
        """Lend a payload that we borrowed ourselves; None if it must be copied. No other consumer
        may get the same payload."""
        with self._lock:
            number = self._number()
            if number is None or not loan.is_spare():
                return None
            try:
                descriptor = os.dup(loan.descriptor)
            except OSError:
                return None
            loan.pass_on()
            self._passed[number] = loan
            return Lent(number, descriptor, keep_mapped=True)

    def take_back(self, slabs: Iterable[int], abandoned: Iterable[int] = ()) -> None:
        """The consumer has released these slabs; other processes may still map the abandoned ones.

        Raises ProtocolError.
        """
        with self._lock:
            for slab in slabs:
                if self._passed.pop(slab, None) is None:
                    self._check_lent(slab)
                    self._free.insert(0, slab)
            for slab in abandoned:
                if (loan := self._passed.pop(slab, None)) is not None:
                    loan.abandon()
                else:
                    self._check_lent(slab)
                    del self._slabs[slab]

    def close(self) -> None:
        """The connection has ended; the consumer may still map all that was lent. Lend nothing
        afterwards."""
        with self._lock:
            for loan in self._passed.values():
                loan.abandon()
            self._passed.clear()
            self._slabs.clear()

    def _number(self) -> int | None:
        """A free number for a new slab."""
        numbers = range(self._most)
        return next((n for n in numbers if n not in self._slabs and n not in self._passed), None)

    def _check_lent(self, slab: int) -> None:
        if slab not in self._slabs or slab in self._free:
            raise ProtocolError(f"slab {slab} was given back, and had not been lent")

    def _choose(self, size: int) -> Lent | None:
        slabs = self._slabs
        free = sorted(self._free, key=lambda slab: slabs[slab].size)
        fit = next((slab for slab in free if slabs[slab].size >= size), None)
        if fit is None or slabs[fit].size > MOST_TIMES * size:
            unit = 1 << max(0, size.bit_length() - 4)  # one for sizes that differ a little
            room = size if size < SHARED_BYTES else max(LEAST_BYTES, -(-size // unit) * unit)
            new = self._number_for(room)
            if fit is None and self._number_for(room, without=free) is not None:
                while new is None:  # in place of those that are too small
                    self._free.remove(slab := free.pop(0))
                    del slabs[slab]
                    new = self._number_for(room)
            if new is not None:
                descriptor, slabs[new] = new_slab(room)
                return Lent(new, descriptor)
        if fit is None:
            return None
        self._free.remove(fit)
        return Lent(fit, None)

    def _number_for(self, size: int, without: Sequence[int] = ()) -> int | None:
        """A free number for a new slab of this size; None if the pool has no room, also `without`
        these slabs."""
        others = [slab.size for number, slab in self._slabs.items() if number not in without]
        if sum(others) + size > POOL_BYTES and len(others) >= LEAST_SLABS:
            return None
        return without[0] if without else self._number()


class Borrower:
    """The slabs of one connection to a worker, in the consumer."""

    def __init__(
        self, peer: str, *, passes_on: bool = False, map_memory: MapMemory | None = None
    ) -> None:
        """`passes_on` allows loans of large payloads; their slabs take two descriptors.
        `map_memory(descriptor, size)` maps a memory file."""
        self._peer = peer
        self._map_memory = map_memory or _map
        self._passes_on = passes_on
        self._descriptors: dict[int, int] = {}  # of slabs that may be passed on
        self._passed: set[int] = set()  # slabs that are passed on now
        self._slabs: dict[int, mmap.mmap] = {}
        self._once: set[int] = set()  # of them: their numbers are for one time
        # The memory of those, which is lent again; by file, the latest last.
        self._mappings: dict[tuple[int, int], mmap.mmap] = {}
        self._borrowed: dict[int, weakref.ref[Bytes]] = {}
        self._shared_with_children: set[int] = set()
        # Any thread may append: the one that drops the last reference to an array.
        self._released: collections.deque[int] = collections.deque()
        _borrowers.add(self)

    def learn(self, slab: int, descriptor: int, *, keep_mapped: bool = False) -> None:
        """Map a new slab; it replaces an earlier one of its number.

        With `keep_mapped` its memory is kept for the next time that it is lent, under another
        number. The caller keeps `descriptor`. Raises ProtocolError, OSError.
        """
        if slab >= MAX_SLABS:
            raise ProtocolError(f"{self._peer} lends slab {slab}; there are {MAX_SLABS} at most")
        import fcntl

        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0  # no memory file
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ProtocolError(f"{self._peer} lends a slab that might shrink")
        file = os.fstat(descriptor)
        size = file.st_size
        if not size:
            raise ProtocolError(f"{self._peer} lends a slab of no bytes")
        self._descriptors.pop(slab, None)
        self._once.discard(slab)
        if keep_mapped:
            assert not self._passes_on, "nobody passes on to a worker"
            self._once.add(slab)
            memory = self._mapping((file.st_dev, file.st_ino), descriptor, size)
        else:
            memory = self._map_memory(descriptor, size)
        if self._passes_on and size >= SHARED_BYTES:
            self._descriptors[slab] = kept = os.dup(descriptor)
            weakref.finalize(memory, os.close, kept).atexit = False
        self._slabs[slab] = memory

    def _mapping(self, file: tuple[int, int], descriptor: int, size: int) -> mmap.mmap:
        memory = self._mappings.pop(file, None) or self._map_memory(descriptor, size)
        kept = sum(map(len, self._mappings.values()))
        for oldest in list(self._mappings):
            if kept + len(memory) <= MAPPED_BYTES and len(self._mappings) < MAX_SLABS:
                break
            kept -= len(self._mappings.pop(oldest))
        self._mappings[file] = memory
        return memory

    def borrow(self, slab: int, size: int) -> Bytes:
        """The payload in a slab, lent as long as anything refers to the array or a view of it."""
        known = self._slabs.get(slab)
        if known is None or size > len(known):
            raise ProtocolError(
                f"{self._peer} put {size} bytes into slab {slab}, which is "
                f"{'unknown' if known is None else f'one of {len(known)}'}"
            )
        payload: Bytes = np.frombuffer(known, np.uint8, size)
        released = self._released  # not `self`, which holds the weak reference: that is a cycle
        self._borrowed[slab] = weakref.ref(payload, lambda _: released.append(slab))
        return payload

    def loan(self, slab: int, payload: Bytes) -> Loan | None:
        """A loan of the borrowed payload; None if it may not be passed on."""
        descriptor = self._descriptors.get(slab)
        return None if descriptor is None else Loan(self, slab, payload, descriptor)

    def released(self) -> tuple[list[int], list[int]]:
        """The slabs released since the last call: those free again, and those to abandon."""
        slabs = {self._released.popleft() for _ in range(len(self._released))}
        abandoned = slabs & self._shared_with_children
        for slab in slabs:
            del self._borrowed[slab]
            if slab in self._once:
                self._once.remove(slab)
                del self._slabs[slab]
        self._shared_with_children -= slabs
        self._passed -= slabs
        return list(slabs - abandoned), list(abandoned)

    def share_with_child(self) -> None:
        """Mark all borrowed slabs: the process is about to fork."""
        self._shared_with_children |= self._borrowed.keys()


@dataclass(eq=False)
class Loan:
    """A borrowed payload that may be passed on; it keeps the payload borrowed. Not thread-safe: a
    loan has one owner, who passes it on."""

    _borrower: Borrower
    _slab: int
    _payload: Bytes
    descriptor: int  # of the slab; valid as long as the loan exists

    def is_spare(self) -> bool:
        """Whether its lender can spare another slab."""
        return len(self._borrower._passed) < MAX_PASSED

    def pass_on(self) -> None:
        self._borrower._passed.add(self._slab)

    def abandon(self) -> None:
        """Never reuse the slab: other processes may map it for an unknown time."""
        self._borrower._shared_with_children.add(self._slab)


_borrowers: weakref.WeakSet[Borrower] = weakref.WeakSet()


def _share_with_child() -> None:
    for borrower in list(_borrowers):
        borrower.share_with_child()


at_fork(before=_share_with_child)


def new_slab(size: int) -> tuple[int, Bytes]:
    import fcntl

    descriptor = os.memfd_create("forebay-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return descriptor, np.frombuffer(_map(descriptor, size), np.uint8)
    except OSError:
        os.close(descriptor)
        raise


def sealed_file(parts: Iterable[bytes]) -> int:
    """A descriptor of a file in memory that nobody can change any more. Raises OSError."""
    import fcntl

    descriptor = os.memfd_create("forebay-dataset", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.writelines(parts)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return descriptor
    except OSError:
        os.close(descriptor)
        raise


def _map(descriptor: int, size: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size)  # shared, and writable: a trainer's arrays are its own
