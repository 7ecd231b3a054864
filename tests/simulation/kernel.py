"""The kernel of the simulation: virtual time, and threads as greenlets in one real thread.

A simulated thread runs until it waits; then another one that can run is drawn at random. Time
stands still while anybody can run, and jumps to the next timer when nobody can. All chance
comes from one generator, so a seed is a whole run. Threads belong to processes, which can be
killed (none of their threads is ever resumed) and paused, between any two steps.
"""

from __future__ import annotations

import asyncio
import asyncio.events
import hashlib
import heapq
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

MAX_STEPS = 1_000_000
"""Of one run. A run takes some ten thousand; so many are a loop that gets nowhere."""


class Violation(AssertionError):
    """A promise was broken, or the run did not come to its end."""


class SimThread:
    """A thread of control. `run` is what it does."""

    def __init__(self, process: Process, name: str, run: Callable[[], object]) -> None:
        self.process = process
        self.name = name
        self.number = 0
        self.finished = False
        self.at_end: Callable[[], None] = lambda: None
        self.facade: Any = None  # the `threading.Thread` that the product sees
        self.parked = False
        self.woken = False
        self.waits = 0  # how often it has waited: tells a late timer from its own
        self._run = run
        self.greenlet = greenlet(self._main, process.kernel.hub)

    def where(self) -> str:
        """Its innermost calls, for people who wonder what it waits for."""
        frame = self.greenlet.gr_frame
        calls = []
        while frame is not None:
            code = frame.f_code
            if __package__.rpartition(".")[2] not in code.co_filename:
                calls.append(f"{code.co_name}:{frame.f_lineno}")
            frame = frame.f_back
        return " < ".join(calls[:6])

    def _main(self) -> None:
        kernel = self.process.kernel
        try:
            self._run()
        except GreenletExit:
            pass
        except Violation as violation:
            kernel.fail(str(violation))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is reported
            if not kernel.over:
                kernel.crashed(f"{self.process.name}/{self.name}", error)
        self.finished = True
        self.process.threads.pop(self, None)
        self.at_end()


class Process:
    """An operating-system process: threads that live, stop and die together."""

    def __init__(self, kernel: Kernel, name: str, host: str) -> None:
        self.kernel = kernel
        self.name = name
        self.host = host
        self.alive = True
        self.paused = False
        self.vanished = False  # killed together with its host: nobody tells its peers
        self.threads: dict[SimThread, None] = {}
        self.stalled: list[SimThread] = []  # could run, but the process is paused
        self.local: dict[str, Any] = {}  # of whoever needs something for each process
        self.at_kill: list[Callable[[], None]] = []  # what its operating system does then
        # No two processes' clocks agree.
        self.monotonic_offset_s = kernel.rng.uniform(1, 1e5)
        self.wall_offset_s = kernel.rng.uniform(-2, 2)

    def spawn(self, name: str, run: Callable[[], object]) -> SimThread:
        thread = SimThread(self, name, run)
        self.threads[thread] = None
        self.kernel.graves.append(thread)
        thread.number = len(self.kernel.graves)
        self.kernel.make_ready(thread)
        return thread

    def kill(self) -> None:
        """SIGKILL. None of its threads runs again; its memory is gone, its files are closed."""
        if self.alive:
            self.alive = False
            self.kernel.trace("kill", self.name)
            for act in self.at_kill:
                act()

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True
        self.kernel.trace("pause", self.name)

    def resume(self) -> None:
        """SIGCONT."""
        self.paused = False
        self.kernel.trace("resume", self.name)
        stalled, self.stalled = self.stalled, []
        for thread in stalled:
            self.kernel.make_ready(thread)


class Kernel:
    """One run of the simulation."""

    def __init__(self, seed: int, *, verbose: bool = False) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.over = False  # the verdict is known, and threads are only being taken apart
        self.current: SimThread | None = None
        self.failure: str | None = None
        self.graves: list[SimThread] = []  # every thread there was
        self.preemption = 0.0  # how likely a thread yields where it need not
        self._step_acts: list[
            tuple[int, int, Callable[[], None]]
        ] = []  # heap: (step, _, what then)
        self.network: Any = None  # what the product's replaced modules reach through the kernel
        self.disk: Any = None
        self.shared: Any = None  # a file system that all hosts see, if there is one
        self.oracle: Any = None
        self.hub = getcurrent()
        self._ready: list[SimThread] = []
        self._timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._timer_count = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self.verbose = verbose

    # -- for everybody -----------------------------------------------------------------------

    def at(self, delay_s: float, act: Callable[..., None], *args: object) -> None:
        """Have `act` called, by nobody's thread, after some time."""
        self.at_moment(self.now + max(0.0, delay_s), act, *args)

    def at_moment(self, moment_s: float, act: Callable[..., None], *args: object) -> None:
        """The same at a point in time. Of what has the same moment, the first comes first."""
        self._timer_count += 1
        heapq.heappush(self._timers, (moment_s, self._timer_count, act, args))

    def after_steps(self, steps: int, act: Callable[[], None]) -> None:
        """Have `act` called between two steps of threads, so many from now."""
        self._timer_count += 1
        heapq.heappush(self._step_acts, (self.steps + steps, self._timer_count, act))

    def trace(self, kind: str, *what: object) -> None:
        """Note something that must be the same in every run of the seed."""
        line = f"{self.now:12.6f} {kind} {' '.join(map(str, what))}"
        self._digest.update(line.encode())
        if self.verbose:
            print(line)

    def note(self, what: object) -> None:
        """Something for people only, and only if they want to read it."""
        if self.verbose:
            print(f"{self.now:12.6f}   {' '.join(str(what).split())}")

    def digest(self) -> str:
        """Of everything traced so far."""
        return self._digest.hexdigest()

    def fail(self, what: str) -> None:
        """A promise was broken: the run ends here."""
        if self.failure is None and not self.over:
            self.failure = f"at {self.now:.6f} s, step {self.steps}: {what}"
            self.trace("violation", what)

    def crashed(self, where: str, error: BaseException) -> None:
        import traceback

        text = "".join(traceback.format_exception(error))
        self.fail(f"{where} crashed: {error!r}\n{text}")

    # -- for threads -------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until somebody wakes this thread; whether that came before the timeout."""
        thread = self.current
        assert thread is not None, "only simulated threads can wait"
        if self.over:
            raise GreenletExit
        thread.waits += 1
        thread.parked, thread.woken = True, False
        if timeout_s is not None:
            self.at(timeout_s, self._time_out, thread, thread.waits)
        self._leave()
        return thread.woken

    def sleep(self, seconds: float) -> None:
        self.wait(seconds)

    def maybe_yield(self) -> None:
        """A point at which another thread may run, though this one need not wait."""
        if not self.preemption or self.current is None or self.over:
            return
        if self.rng.random() < self.preemption:
            self.make_ready(self.current)
            self._leave()

    def wake(self, thread: SimThread) -> None:
        if thread.parked:
            thread.parked, thread.woken = False, True
            self.make_ready(thread)

    def make_ready(self, thread: SimThread) -> None:
        self._ready.append(thread)

    def _leave(self) -> None:
        """Let others run until this thread is chosen again."""
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        self.hub.switch()
        asyncio._set_running_loop(loop)
        if self.over:
            raise GreenletExit

    def _time_out(self, thread: SimThread, waits: int) -> None:
        if thread.parked and thread.waits == waits:
            thread.parked = False
            self._ready.append(thread)

    # -- the loop ----------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Run until that holds; whether it does before so much time has passed.

        Raises Violation when a promise was broken meanwhile.
        """
        give_up = self.now + limit_s
        while True:
            if self.failure is not None:
                raise Violation(self.failure)
            while self._step_acts and self._step_acts[0][0] <= self.steps:
                heapq.heappop(self._step_acts)[2]()
            if self._ready:
                self._step()
            elif until():
                return True
            elif self._timers and self._timers[0][0] <= give_up:
                self.now, _, act, args = heapq.heappop(self._timers)
                act(*args)
            else:
                self.now = give_up
                return False

    def _step(self) -> None:
        ready = self._ready
        chosen = self.rng.randrange(len(ready)) if len(ready) > 1 else 0
        ready[chosen], ready[-1] = ready[-1], ready[chosen]
        thread = ready.pop()
        process = thread.process
        if not process.alive or thread.finished:
            return
        if process.paused:
            process.stalled.append(thread)
            return
        self.steps += 1
        if self.steps > MAX_STEPS:
            self.fail(f"{self.steps} steps lead nowhere; the last one is {thread.name}'s")
        self._digest.update(f"{self.now:.9f}{process.name}/{thread.name}".encode())
        self.current = thread
        thread.greenlet.switch()
        self.current = None

    def close(self) -> None:
        """Take every thread apart. What they do meanwhile has no meaning any more."""
        self.over = True
        for thread in self.graves:
            if thread.greenlet:  # begun, and not at its end
                self.current = thread
                asyncio._set_running_loop(None)
                thread.greenlet.throw(GreenletExit)
        self.current = None
        asyncio._set_running_loop(None)
        self.graves.clear()
        self._ready.clear()
        self._timers.clear()


_kernel: Kernel | None = None


def kernel() -> Kernel:
    """The run that is under way."""
    assert _kernel is not None, "no simulation is running"
    return _kernel


@contextmanager
def running(this: Kernel) -> Iterator[Kernel]:
    """Make `this` the run that is under way."""
    global _kernel
    _kernel = this
    try:
        yield this
    finally:
        try:
            this.close()
        finally:
            _kernel = None
