"""Memory budget: one bound in bytes for all outputs of a worker, so that no task starves another.

Half of the budget is first come, first served. The other half is divided evenly among the outputs
that hold memory or wait for it. Each output may hold its even share, and always one block however
large. Apart from such single blocks, the outputs together never exceed the budget. Shares shrink
as outputs join. A new output then gets one block at a time, until the others are within their
shares. A consumer may need several blocks to finish the first (a batch spans them). An output with
nothing to give therefore gets a block every STARVED_S in any case.

The lock is a leaf: outputs take it with their own lock held, and no callback runs under it. An
output that waits for others to release memory therefore polls every LOOK_S.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

LOOK_S = 0.02
"""How often a producer polls while it waits for other tasks to release memory."""

STARVED_S = 1.0
"""How long a producer waits for other tasks, at most, while its output has nothing to give."""

UNLIMITED = 1 << 62


class MemoryBudget:
    """The bound, in bytes, and how much of it is held. Thread-safe."""

    def __init__(
        self, max_bytes: int = UNLIMITED, on_need: Callable[[], None] = lambda: None
    ) -> None:
        """`on_need` is called when an output has to wait for others. It must not wait."""
        self.max_bytes = max_bytes
        self.held = 0
        self._on_need = on_need
        self.active = 0  # shares that hold something, or wait for room
        self._lock = threading.Lock()

    def share(self) -> OutputMemory:
        """A new output's part of the budget, which holds nothing yet."""
        return OutputMemory(self)


class OutputMemory:
    """One output's part of a MemoryBudget. Thread-safe."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._waits = False
        self._closed = False
        self.held = 0

    def take(self, size: int, *, force: bool = False) -> bool:
        """Reserve `size` bytes if there is room, or by `force`; return whether it did.

        An output that was refused counts as waiting until it gets memory or calls `wait_no_more`.
        """
        budget = self._budget
        with budget._lock:
            if self._closed:
                return True
            self._set(self.held, waits=True)
            room = force or not self.held or self._fits(size)
            if room:
                self._set(self.held + size, waits=False)
        if not room:
            budget._on_need()
        return room

    def release(self, size: int) -> None:
        with self._budget._lock:
            self._set(max(0, self.held - size), self._waits)

    def wait_no_more(self) -> None:
        with self._budget._lock:
            self._set(self.held, waits=False)

    def close(self) -> None:
        """Release everything; later takes succeed and don't count. Idempotent."""
        with self._budget._lock:
            self._set(0, waits=False)
            self._closed = True

    def _fits(self, size: int) -> bool:
        budget = self._budget
        half, after = budget.max_bytes // 2, budget.held + size
        is_within_share = self.held + size <= half // budget.active
        return after <= half or (is_within_share and after <= budget.max_bytes)

    def _set(self, held: int, waits: bool) -> None:
        if self._closed:
            return
        budget = self._budget
        before = self.held > 0 or self._waits
        budget.held += held - self.held
        self.held, self._waits = held, waits
        budget.active += (held > 0 or waits) - before
