"""Preemption: on SIGTERM, a trainer hands back unused elements, saves its state, and exits.

SIGTERM may come while Python waits for a training step in C++, and a Python signal handler runs
only after that step. So the C part of Python's signal handling (signal.set_wakeup_fd) wakes another
thread. It hands back at once all elements that the loop was not given. The loop's thread does the
rest: its iterations end, and it saves its state between steps.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn, Self

from ..client import lockstep
from ..client.open_iterations import close_between_steps, open_consumers, stopping
from ..errors import InvalidArgument
from ..platforms import at_fork
from .group_preemption import StopAgreement, exit_with

log = logging.getLogger(__name__)

TERMINATED = 128 + signal.SIGTERM
"""The exit code that shells give a program ended by SIGTERM."""

HAND_BACK_S = 5.0
"""The most time for handing back. The rest of the grace period is for saving."""

LOOK_AGAIN_S = 0.01
"""How often to poll whether processes that read for this one have handed back."""

CLOSING_S = 1.0
"""This long before the grace period ends, iterations that are still open are closed by force."""


class PreemptionHandler:
    """Catches SIGTERM, for a training loop in its `with` block.

        with service.PreemptionHandler(save, grace_period_s=25) as preemption:
            for batch in dataset:
                train_step(batch)

    On SIGTERM, all iterations of this process over the service end. Iterations that start later are
    empty, also in `save_fn`. Elements that they received and did not give to the loop go to the
    other trainers of their jobs at once. This holds for jobs with a name under `DYNAMIC` or `OFF`,
    but not for coordinated reads and cross-trainer caches. TensorFlow and JAX hold a few elements
    ahead of the loop, which still trains on them. So at the end of the block, all elements were
    used or handed back. Then the handler calls `save_fn`, and the process exits.

    `check()` does this at once, between two steps, for loops that would go on for long, such as
    over epochs or behind a large shuffle. Elements that TensorFlow or JAX still hold are lost then.
    It ignores all arguments, so that it can be a callback, as of Keras:
    `LambdaCallback(on_epoch_end=preemption.check)` loses nothing.

    The handler also tells the worker processes of a PyTorch DataLoader. They hand back too, and the
    loop gets the elements that they had made for it, and ends. A SIGTERM to all processes of the
    group, as from torchrun, does not end them inside this block. The handler does not tell other
    child processes.

    Under `MultiWorkerMirroredStrategy`, make the strategy first, and enter a handler in all
    processes. If one process is told to stop, all are. All loops end after the same step, also one
    that starts later, or leave in the same call of `check()`, which all must call in the same
    places. No process exits before
    all have saved. Elements that TensorFlow was not given are handed back when the loops end.
    Elsewhere, trainers that step together must leave together: a loop that ends while others wait
    for it in a collective operation blocks them, as with any dataset.
    """

    def __init__(
        self,
        save_fn: Callable[[float], object] | None = None,
        *,
        grace_period_s: float = 25.0,
        exit_code: int | None = TERMINATED,
    ) -> None:
        """The loop's thread calls `save_fn` with the seconds that are left; not if an exception
        other than SystemExit ends the block.

        The process has `grace_period_s` from the signal on. If it is still running then, in the
        block or after it, it exits at once with 143. Otherwise it exits with `exit_code`. With
        None, the program continues after the block, where it may read again. The previous SIGTERM
        handler is called too, when Python gets to run it. Raises ValueError for an invalid period.
        """
        if save_fn is not None and not callable(save_fn):
            raise InvalidArgument(
                f"save_fn={save_fn!r} cannot be called: give the function that saves, or None"
            )
        if not grace_period_s > 0:
            raise InvalidArgument(
                f"grace_period_s={grace_period_s} must be above 0: the seconds from SIGTERM to the "
                "moment when the process is killed"
            )
        self._save_fn = save_fn
        self._grace_s = grace_period_s
        self._exit_code = exit_code
        self._lock = threading.RLock()  # of the next two; the signal handler may re-enter it
        self._give_up_s: float | None = None  # of the monotonic clock, once preempted
        self._over = threading.Event()  # the program continues
        self.handed_back = threading.Event()
        self._finished = False
        self._before: Any = None
        self._wakeup_before = -1
        self.agreement: StopAgreement | None = None

    @property
    def preempted(self) -> bool:
        """Whether SIGTERM has come."""
        return self._give_up_s is not None

    @property
    def remaining_s(self) -> float:
        """The rest of the grace period; all of it before SIGTERM has come."""
        if self._give_up_s is None:
            return self._grace_s
        return max(0.0, self._give_up_s - time.monotonic())

    def __enter__(self) -> Self:
        """Raises ValueError outside the main thread, which gets the signals."""
        others = lockstep.find_peers()
        self._wakened, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        try:
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
            self._wakeup_before = signal.set_wakeup_fd(
                self._waker.fileno(), warn_on_full_buffer=False
            )
        except ValueError as error:
            self._wakened.close()
            self._waker.close()
            raise InvalidArgument(
                f"{error}: enter a PreemptionHandler in the main thread, which gets the signals"
            ) from None
        _active.append(self)
        if others is not None:
            self.agreement = StopAgreement(others, self._wake)
        stopping.catch_sigterm(self)
        threading.Thread(target=self._watch, name="forebay-preemption", daemon=True).start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        fails = not (error is None or isinstance(error, SystemExit))
        try:
            if self.preempted and not fails:
                self._finish()
        finally:
            stopping.release_sigterm(self)
            goes_on = not self.preempted or self._exit_code is None
            if goes_on:
                self._give_back_signals()
                with self._lock:
                    self._over.set()
                    stopping.end(self)
                with suppress(OSError):  # it is full, or closed: it was woken
                    self._waker.send(b"\0")
            if (fails or goes_on) and self.agreement is not None:
                self.agreement.close()
        if self.preempted and error is None and self._exit_code is not None:
            self._exit()

    def check(self, *_: Any, **__: Any) -> bool:
        """Between two steps: if SIGTERM has come, hand back, save, and exit.

        If the process does not exit, returns whether SIGTERM has come. Ignores all arguments.
        """
        if self.agreement is not None:
            if not self.agreement.check():
                return False
        elif not self.preempted:
            return False
        self._finish()
        if self._exit_code is not None:
            self._exit()
        return True

    def _give_back_signals(self) -> None:
        _active.remove(self)
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
        now = signal.set_wakeup_fd(-1)
        _wake_up(self._wakeup_before if now == self._waker.fileno() else now)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._begin()
        self._wake()  # in case another library has set the wakeup fd
        if callable(self._before):
            self._before(number, frame)

    def _wake(self) -> None:
        with suppress(OSError):  # it is full, or closed: it was woken
            self._waker.send(bytes([signal.SIGTERM]))

    def _give_back_in_child(self) -> None:
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
        _wake_up(self._wakeup_before)

    def _begin(self) -> None:
        with self._lock:
            if self._give_up_s is None and not self._over.is_set():
                self._give_up_s = time.monotonic() + self._grace_s
                stopping.begin(self)

    def _finish(self) -> None:
        """Hands back the rest and saves, in the loop's thread."""
        if self._finished:
            return
        self._finished = True
        if self.agreement is not None:
            self.agreement.end_reading()
        for reading in open_consumers():
            lockstep.stop(reading)
        self.handed_back.wait(min(HAND_BACK_S, self.remaining_s))
        for reading in open_consumers():
            close_between_steps(reading)
        try:
            if self._save_fn is not None:
                self._save_fn(self.remaining_s)
        except BaseException:
            if self.agreement is not None:
                self.agreement.close()  # the others must not wait for this process
            raise
        if self.agreement is not None:
            self.agreement.wait_until_all_have_saved(max(0.0, self.remaining_s - CLOSING_S))

    def _exit(self) -> NoReturn:
        assert self._exit_code is not None
        if self.agreement is not None:
            exit_with(self._exit_code)
        sys.exit(self._exit_code)

    def _watch(self) -> None:
        while signal.SIGTERM not in (woken := self._wakened.recv(64)):
            if self._over.is_set() or not woken:
                self._close()
                return
            self._pass_on(woken)
        self._begin()
        threading.Thread(target=self._limit, name="forebay-grace", daemon=True).start()
        self._pass_on(woken)
        if not self.preempted:  # the block was left before the signal counted
            return
        log.warning("preempted: %g s are left to save and to end", self.remaining_s)
        begun_s = time.monotonic()
        give_up_s = begun_s + min(HAND_BACK_S, self.remaining_s)
        if self.agreement is not None:
            self.agreement.agree(give_up_s - begun_s)
        until_closed_s = max(0.0, self.remaining_s - CLOSING_S)  # other processes may be in a step
        threads = [
            _in_thread(partial(lockstep.leave, reading, until_closed_s))
            for reading in open_consumers()
        ]
        if not (threads or stopping.readers_elsewhere()):
            log.warning("nothing is being read in this process: have the loop call check()")
        for thread in threads:
            thread.join(max(0.0, give_up_s - time.monotonic()))
        while (readers := stopping.readers_elsewhere()) and time.monotonic() < give_up_s:
            time.sleep(LOOK_AGAIN_S)
        self.handed_back.set()
        if readers or any(thread.is_alive() for thread in threads):
            log.warning("not everything was handed back within %.1f s", give_up_s - begun_s)
        else:
            log.info("what was not used was handed back in %.2f s", time.monotonic() - begun_s)

    def _limit(self) -> None:
        """Ends the process when the grace period is over."""
        if not self._over.wait(max(0.0, self.remaining_s - CLOSING_S)):
            for reading in open_consumers():  # their loops no longer ask for elements
                _in_thread(reading.close)
            if not self._over.wait(self.remaining_s):
                log.error("the grace of %g s is over: the process exits", self._grace_s)
                os._exit(TERMINATED)
        self._close()

    def _pass_on(self, woken: bytes) -> None:
        """Passes the wake-up on to the previous wakeup fd."""
        if self._wakeup_before >= 0:
            try:
                os.write(self._wakeup_before, woken)
            except OSError as error:  # it is full, or closed
                log.debug("could not wake up who was woken by signals before: %s", error)

    def _close(self) -> None:
        self._wakened.close()
        self._waker.close()


def _in_thread(close: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=close, name="forebay-leaving", daemon=True)
    thread.start()
    return thread


def _wake_up(descriptor: int) -> None:
    """Makes this descriptor the wakeup fd of signals, unless it was closed meanwhile."""
    with suppress(OSError, ValueError):
        signal.set_wakeup_fd(descriptor)


_active: list[PreemptionHandler] = []  # the innermost last


def preempt() -> bool:
    """Raises SIGTERM here, because others that train in lockstep must stop. Returns False, without
    a signal, if no handler would catch it."""
    if _active:
        signal.raise_signal(signal.SIGTERM)
    return bool(_active)


def _forget_in_child() -> None:
    """Removes the handlers: a signal to a child, such as a data loader, is not its parent's."""
    while _active:
        handler = _active.pop()
        handler._give_back_in_child()
        stopping.release_sigterm(handler)
        stopping.end(handler)


at_fork(after_in_child=_forget_in_child)
