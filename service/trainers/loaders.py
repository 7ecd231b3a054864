"""Shared state of a process and its DataLoader workers: the epoch, and whether to stop.

PyTorch tells a dataset in a worker neither, so the state lies in shared memory. A worker polls it
(`follow`). To stop, it does what a process does on SIGTERM: it hands back the elements that it
received and did not give, and its iteration ends. The DataLoader gives the loop what the worker had
made until then, and ends too.

SIGTERM may come to all processes of a group. With PyTorch, a worker dies of it, and the trainer
raises an error. If the trainer catches SIGTERM, a worker waits for the trainer's word instead.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Generator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from ..blocks import Block
from ..client.open_iterations import Taker, open_consumers, stopping
from ..client.positions import StartingPoint
from ..client.progress import EpochIterator
from ..client.reader import Reader
from ..errors import InvalidArgument
from ..platforms import at_fork

MOST_LOADERS = 1023
PLACES = 1 + MOST_LOADERS  # the process itself is the first
MARK = (1 << 31) - 1

CAUGHT, STOPS = 1, 2  # flags in the last word

LOOK_S = 0.05
"""How often a worker polls whether to stop."""

SAID_S = 2.0
"""How long a worker that got SIGTERM waits for its trainer to get it too. A DataLoader that is
dropped ends its workers one by one, and gives each 5 s (torch's MP_STATUS_CHECK_INTERVAL)."""


class SharedLoaderState:
    """Words in memory that a process shares with the workers of its DataLoaders.

    Each process has one word for its epoch, and one for its process id while it reads. A new epoch
    is one more than any that has begun. But workers of the same DataLoader iteration, which share
    a seed, read the same epoch. A lock could not be pickled, so each process writes only its own
    words, epoch << 32 | mark of the seed. If two processes begin the iteration at the same time,
    both compute the same number. All workers read the last word: CAUGHT, while SIGTERM does not end
    the trainer, and STOPS. Where the next iteration of an ordered read begins is shared, too.

    Any other process that gets the object, such as a rank from its launcher, has an epoch of its
    own: it copies the words before it reads or passes the object on.
    """

    def __init__(self, epochs_over: int) -> None:
        self._words = torch.zeros(2 * PLACES + 1, dtype=torch.int64).share_memory_()
        self._start = torch.zeros(4, dtype=torch.int64).share_memory_()
        self._owner = os.getpid()
        self.epochs_over: int  # in this process
        self._poller: tuple[int, _TrainerPoller] | None = None  # with the process id of its worker
        self.set(epochs_over)
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        self.own()
        return self.__dict__ | {"_poller": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._words.share_memory_()  # a no-op if the process that has the object started this one
        self._start.share_memory_()
        self._begin()

    def _begin(self) -> None:
        _all.append(weakref.ref(self, _all.remove))
        self.tell()

    def own(self) -> None:
        """Stop sharing with the parent process, unless this is a DataLoader's worker."""
        if self._owner != os.getpid() and get_worker_info() is None:
            self._words = self._words.clone().share_memory_()
            self._words.numpy()[PLACES:] = 0
            self._start = self._start.clone().share_memory_()
            self._owner = os.getpid()
            self.tell()

    # -- epochs -------------------------------------------------------------------------------

    def set(self, epochs_over: int) -> None:
        self.own()
        self.epochs_over = epochs_over
        epochs = self._words.numpy()[:PLACES]
        epochs[:] = 0
        epochs[0] = epochs_over << 32

    def next(self) -> int:
        """The epoch, from 1, that this process reads now."""
        self.own()
        place = mark = 0
        loader = get_worker_info()
        if loader is not None:
            place, mark = 1 + loader.id, 1 + (loader.seed - loader.id) % MARK
        if place > MOST_LOADERS:
            raise InvalidArgument(f"num_workers={loader.num_workers} is above {MOST_LOADERS}")
        words = self._words.numpy()
        seen = words[:PLACES].copy()
        epochs, marks = seen >> 32, seen & 0xFFFFFFFF
        begun = int(epochs[marks == mark].max(initial=0)) if mark else 0
        epoch = begun if begun > epochs[place] else int(epochs.max()) + 1
        words[place] = epoch << 32 | mark
        self.epochs_over = epoch - 1
        return epoch

    def end(self, epoch: int) -> None:
        """The epoch was read to its end in this process."""
        if not stopping.is_set():
            self.epochs_over = max(self.epochs_over, epoch)

    # -- ordered reads -------------------------------------------------------------------------

    @property
    def next_start(self) -> StartingPoint:
        """Where the next iteration begins, in this process or in a worker."""
        self.own()
        _, position, step, in_epoch = self._start.tolist()
        return StartingPoint(position, None if step < 0 else step, bool(in_epoch))

    @next_start.setter
    def next_start(self, start: StartingPoint) -> None:
        self.own()
        step = -1 if start.step is None else start.step
        self._start.numpy()[1:] = start.position, step, start.in_epoch

    @property
    def read_by_worker(self) -> bool:
        """Whether a worker has read since this process did."""
        return bool(self._start[0])

    @read_by_worker.setter
    def read_by_worker(self, by_worker: bool) -> None:
        self.own()
        self._start[0] = by_worker

    # -- stopping -----------------------------------------------------------------------------

    def tell(self) -> None:
        """Tell the workers the state of `stopping`. Repeats that until the state no longer changes.
        Does nothing if the words are another process's."""
        if self._owner == os.getpid():
            words = self._words.numpy()
            while words[-1] != (
                now := CAUGHT * stopping.is_sigterm_caught() | STOPS * stopping.is_set()
            ):
                words[-1] = now

    def readers(self) -> int:
        if self._owner != os.getpid():
            return 0
        reading = self._words.numpy()[PLACES:-1]
        return sum(_is_alive(int(process)) for process in reading[reading != 0])

    def read(self, reader: Reader, give: Any) -> EpochIterator:
        """The reader's next epoch. A DataLoader's worker leaves it when it must stop."""
        loader = get_worker_info()
        if loader is None or self._owner == os.getpid():
            return EpochIterator(lambda taker: reader.iterate(taker=taker), give)
        words = self._words.numpy()
        if self._poller is None or self._poller[0] != os.getpid():
            self._poller = os.getpid(), _TrainerPoller(words)
        self._poller[1].follow()
        self._poller[1].catch()

        def iterate(taker: Taker) -> Generator[Block, None, None]:
            words[PLACES + 1 + loader.id] = os.getpid()
            try:
                yield from reader.iterate(taker=taker)
            finally:
                words[PLACES + 1 + loader.id] = 0

        return _ClosableBetweenElements(iterate, give)


class _ClosableBetweenElements(EpochIterator):
    """An iterator that another thread can close between two elements: the loop may be in a long
    step, and not ask the worker for more."""

    def __init__(self, *how: Any) -> None:
        self._between = threading.Lock()
        super().__init__(*how)

    def __next__(self) -> Any:
        with self._between:
            return super().__next__()

    def leave(self) -> None:
        super().leave()
        threading.Thread(target=self._close_between, name="forebay-leaving", daemon=True).start()

    def _close_between(self) -> None:
        with self._between:
            self.close()


class _TrainerPoller:
    """In a worker: polls the trainer's state until the process ends."""

    def __init__(self, words: npt.NDArray[np.int64]) -> None:
        self._words = words
        self._stops = False
        self._lock = threading.Lock()
        self._die_s: float | None = None  # of the monotonic clock, once SIGTERM has come
        self._wakened, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        threading.Thread(target=self._look, name="forebay-loader-poller", daemon=True).start()

    def _look(self) -> None:
        polled = select.poll()
        polled.register(self._wakened, select.POLLIN)
        while True:
            woken = polled.poll(1000 * LOOK_S)
            if woken and signal.SIGTERM in os.read(self._wakened, 64) and self._die_s is None:
                self._die_s = time.monotonic() + SAID_S
            self.follow()
            if self._must_die():
                os._exit(128 + signal.SIGTERM)

    def follow(self) -> None:
        """Stop or continue, as the trainer says."""
        with self._lock:
            stops = bool(self._words[-1] & STOPS)
            if stops and self._words[-1] & CAUGHT:
                self._die_s = None  # the trainer got the SIGTERM too
            if stops == self._stops:
                return
            self._stops = stops
            (stopping.begin if stops else stopping.end)(self)
        if stops:
            for consumer in open_consumers():
                consumer.leave()

    def catch(self) -> None:
        """Catch SIGTERM if the trainer does. Otherwise PyTorch's C handler keeps it. The signal
        wakes the polling thread, because the main thread may hang in C."""
        if self._words[-1] & CAUGHT and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)

    def _must_die(self) -> bool:
        """Whether to die of a SIGTERM: it was for this worker alone, or the trainer ends too."""
        if self._die_s is None:
            return False
        return not self._words[-1] & CAUGHT or time.monotonic() > self._die_s


_all: list[weakref.ref[SharedLoaderState]] = []


def _shared_states() -> list[SharedLoaderState]:
    return [common for each in [*_all] if (common := each()) is not None]


def _is_alive(process: int) -> bool:
    """Whether the process lives. A killed one could not clear its word."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _tell_all() -> None:
    for common in _shared_states():
        common.tell()


stopping.tell = _tell_all
stopping.readers_elsewhere = lambda: sum(common.readers() for common in _shared_states())


def _own_all() -> None:
    """Before a fork: the child may be a DataLoader's worker."""
    for common in _shared_states():
        common.own()


at_fork(before=_own_all)
