"""Cross-trainer caches: trainers that read through one, and what they are promised.

After the documentation of `CrossTrainerCache`: what a worker produces comes to every trainer, in
order, and to none of them twice, whatever is restarted, or reads under the same id. A trainer that
falls behind skips what has left the window, is told of how much, and nothing leaves that has room.
A new one begins with the oldest element there. One that is restarted may lack more than it was told
of: the credit of its last process may come late, and what that is sent is lost on its way.
"""

from __future__ import annotations

from contextlib import closing

from forebay.service.client.options import CrossTrainerCache, ReadOptions
from forebay.service.client.reader import Reader
from forebay.service.errors import NotFound

from .kernel import Kernel, Process, Violation
from .nodes import Job, Trainer
from .oracle import Element, Oracle
from .pipeline import elements_of


class Caches:
    """What the trainers of a run were given, held against the promises."""

    def __init__(self, oracle: Oracle, cache_bytes: int, dynamic: bool) -> None:
        self._oracle = oracle
        self._cache_bytes = cache_bytes
        self._dynamic = dynamic
        self._had: set[tuple[object, ...]] = set()  # by trainer
        self._furthest: dict[tuple[str, int], int] = {}  # by trainer and run: it is behind this

    def deliver(
        self, trainer_id: str, element: Element, at: dict[int, int], told: int, alone: bool,
        new: bool,
    ) -> None:  # fmt: skip
        """A trainer has taken the element. `at` is where this one of its readers is in each run,
        which was just told to have skipped as many as that; `alone`: it has no other; `new`: there
        was none before it, either, with whose end something was lost on its way.
        """
        source = 0 if self._dynamic else self._oracle.process_of(element.task_id)
        key = (trainer_id, source, *element.place)
        if key in self._had:
            raise Violation(f"{element} came to the trainer {trainer_id} twice")
        self._had.add(key)
        run, whose = element.run, (trainer_id, element.run)
        due = at.get(run)
        if due is not None and element.number < due:
            raise Violation(f"{element} came to {trainer_id} after element {due - 1} of its run")
        if alone:
            before = self._furthest.get(whose, 0)
            missed = element.number - (before if due is None else due)
            if told > missed or (new and due is not None and told != missed):
                raise Violation(
                    f"{trainer_id} got {element}, so it missed {missed}, and was told of {told}"
                )
            if told or (new and due is None and missed):
                self._check_had_left(trainer_id, element)
        at[run] = element.number + 1
        self._furthest[whose] = max(self._furthest.get(whose, 0), element.number + 1)

    def _check_had_left(self, trainer_id: str, oldest: Element) -> None:
        """With the element before this one, the window would not have had room for the newest."""
        size = sum(
            cost for stop, cost in self._oracle.runs[oldest.run].blocks if stop >= oldest.number
        )
        if size <= self._cache_bytes:
            raise Violation(
                f"{trainer_id} skipped what is before {oldest}, and the window has room for it: "
                f"{size} of {self._cache_bytes} bytes"
            )


class CachedTrainer(Trainer):
    """A training program that reads through the cache, until it has had enough."""

    def __init__(
        self, this: Kernel, name: str, host: str, job: Job, caches: Caches, steps: int,
        trainer_id: str, alone: bool,
    ) -> None:  # fmt: skip
        super().__init__(this, name, host, job)
        self._caches = caches
        self._steps = steps
        self._trainer_id = trainer_id
        self._alone = alone

    def main(self) -> None:
        job = self.job
        cache = CrossTrainerCache(self._trainer_id)
        reader = Reader(
            job.service, job.dataset_id(), job.name, ReadOptions(policy=job.policy, cache=cache),
            credit_bytes=job.credit_bytes,
        )  # fmt: skip
        self.reading = True
        try:
            self._take(reader, cache)
        except NotFound:
            return  # it was given up: it begins again
        self.done = True

    def _take(self, reader: Reader, cache: CrossTrainerCache) -> None:
        at: dict[int, int] = {}
        heard = 0
        rng = self.kernel.rng
        with closing(reader.iterate()) as blocks:
            while self._steps > 0:
                for element in elements_of(next(blocks)):
                    told, heard = cache.skipped - heard, cache.skipped
                    new = len(self.processes) == 1
                    self._caches.deliver(self._trainer_id, element, at, told, self._alone, new)
                    self._steps -= 1
                if self.job.step_s:
                    self.kernel.sleep(self.job.step_s * rng.uniform(0.1, 2))

    def killed(self, process: Process) -> None:
        """Where its next process goes on, nobody knows: it was on its way."""
