"""Reads at least once: nothing is missing, and what comes twice came first to one that died.

The books are kept by consumer and place, from the journal's events. A consumer is given the
elements of what it has claimed, from the claim's cursor on, one after the other; what it reports is
what it was given; and an element comes to a second consumer only if the first one was given up
before it had reported it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from forebay.journal.proto import events_pb2 as ev
from forebay.journal.reasons import GOODBYE
from forebay.service.blocks import Block
from forebay.service.client.options import ReadOptions
from forebay.service.client.positions import claimed_options
from forebay.service.client.reader import Reader
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.errors import NotFound
from forebay.service.order import permuted
from forebay.service.proto import forebay_pb2 as pb

from .kernel import Kernel, Violation
from .nodes import Job, Trainer
from .oracle import Element, Oracle
from .ordered import GlobalOrder
from .pipeline import Pipeline, elements_of
from .scenario import Asked, Scenario


@dataclass
class Claim:
    """One of a consumer: what it was given of the bundle is start … given - 1."""

    start: int
    given: int


class Claims:
    """What was claimed, given and reported, by the journal's events."""

    def __init__(self, oracle: Oracle, pipeline: Pipeline, asked: Asked) -> None:
        self._oracle, self._asked = oracle, asked
        self._lengths = GlobalOrder(pipeline, asked).lengths
        self._iteration_of: dict[int, int] = {}  # by consumer
        self._claims: dict[tuple[int, int], Claim] = {}  # by consumer and place
        self._cursors: defaultdict[tuple[int, int], int] = defaultdict(int)  # iteration and place
        self._done: defaultdict[int, set[int]] = defaultdict(set)  # places, by iteration
        self._had: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        """Consumers, by iteration, place and index."""

    # -- events --------------------------------------------------------------------------------

    def _consumer_joined(self, event: ev.ConsumerJoined) -> None:
        self._iteration_of[event.consumer_id] = event.iteration_id

    def _bundles_claimed(self, event: ev.BundlesClaimed) -> None:
        who = event.consumer_id
        iteration = self._iteration_of[who]
        for place in event.places:
            if place in self._done[iteration]:
                raise Violation(f"consumer {who} claims bundle {place}, which is done")
            for other, claimed in self._claims:
                same = claimed == place and self._iteration_of[other] == iteration
                if same and other not in self._oracle.books.left:
                    raise Violation(f"consumer {who} claims bundle {place}, which {other} has")
            cursor = self._cursors[iteration, place]
            self._claims[who, place] = Claim(cursor, cursor)

    def _claims_moved(self, event: ev.ClaimsMoved) -> None:
        who = event.consumer_id
        iteration = self._iteration_of[who]
        done = [(place, self._length(iteration, place)) for place in event.done]
        for place, cursor in (*zip(event.places, event.cursors, strict=True), *done):
            given = self._claims[who, place].given
            if cursor > given:
                raise Violation(
                    f"consumer {who} reported {cursor} elements of bundle {place}, and was given "
                    f"{given}"
                )
            if cursor < self._cursors[iteration, place]:
                raise Violation(f"the cursor of bundle {place} went back to {cursor}")
            self._cursors[iteration, place] = cursor
        self._done[iteration] |= {*event.done}

    def _iteration_finished(self, event: ev.IterationFinished) -> None:
        if (missing := {*range(len(self._lengths))} - self._done[event.iteration_id]) and (
            self._oracle.books.epochs[event.iteration_id] not in self._oracle.books.summarized
        ):
            raise Violation(f"iteration {event.iteration_id} finished without bundles {missing}")

    # -- elements ------------------------------------------------------------------------------

    def _epoch(self, iteration: int) -> int:
        return self._oracle.books.epochs[iteration][1]

    def _bundle(self, iteration: int, place: int) -> int:
        asked, count = self._asked, len(self._lengths)
        if not asked.shuffle:
            return place
        return permuted(place, count, asked.seed, self._epoch(iteration))

    def _length(self, iteration: int, place: int) -> int:
        return self._lengths[self._bundle(iteration, place)]

    def deliver(self, who: int, element: Element) -> None:
        """A consumer has got an element."""
        iteration, count = self._iteration_of[who], len(self._lengths)
        epoch, bundle = divmod(element.pass_number, count)
        mine = [p for c, p in self._claims if c == who and self._bundle(iteration, p) == bundle]
        if epoch != self._epoch(iteration) or not mine:
            raise Violation(
                f"consumer {who} got {element} of epoch {epoch}, and has not claimed it"
            )
        (place,) = mine
        claim = self._claims[who, place]
        if element.number != claim.given:
            raise Violation(f"consumer {who} got {element}, where element {claim.given} was due")
        claim.given += 1
        had = self._had[iteration, place, element.number]
        left = self._oracle.books.left
        for other in had:
            if left.get(other, GOODBYE) == GOODBYE and left.get(who, GOODBYE) == GOODBYE:
                raise Violation(f"{element} came to {other} and to {who}, and neither has died")
        had.append(who)
        self._oracle.element_count += 1

    def facts(self, name: str, response: Any) -> Iterator[tuple[str, bool]]:
        if name == "ClaimBundles":
            for place in response.places:
                known = any(claimed == place for _, claimed in self._claims)
                yield f"the claim of bundle {place}", known


class ClaimingReader(Reader):
    """It knows which consumer it is."""

    consumer_id = 0

    def _joined(
        self, dispatcher: DispatcherClient, asked: Any
    ) -> Generator[Block, None, pb.JoinIterationResponse]:
        joined = yield from super()._joined(dispatcher, asked)
        self.consumer_id = joined.consumer_id
        return joined


class Taker:
    """Knows how much of its last block the trainer has not taken."""

    unused = 0
    begun = 0  # it does not count blocks
    failed = is_left = False

    def left(self) -> int:
        return self.unused

    def leave(self) -> None: ...

    def close(self) -> None: ...


class ClaimingTrainer(Trainer):
    """A training program that reads the job's epochs at least once; sometimes it leaves one."""

    def __init__(
        self, this: Kernel, name: str, host: str, job: Job, claims: Claims, scenario: Scenario
    ) -> None:
        super().__init__(this, name, host, job)
        assert scenario.asked is not None
        self._claims, self._asked = claims, scenario.asked

    def main(self) -> None:
        job, asked = self.job, self._asked
        given = {"seed": asked.seed, "shuffle": asked.shuffle}
        read = claimed_options(given | {"bundle_splits": asked.bundle_splits or None})
        reader = ClaimingReader(
            job.service, job.dataset_id(), job.name,
            ReadOptions(claimed=read, initial_epoch=self.epoch - 1),
            credit_bytes=job.credit_bytes,
        )  # fmt: skip
        self.reading = True
        while self.epoch <= job.epochs:
            try:
                ended = self._read_epoch(reader)
            except NotFound:
                return  # it was given up: it begins again
            if not ended:
                return  # it left, and is started again
            self.kernel.trace("epoch", self.name, self.epoch)
            self.epoch += 1
        self.done = True

    def _read_epoch(self, reader: ClaimingReader) -> bool:
        """Whether it came to the epoch's end."""
        rng = self.kernel.rng
        taker = Taker()
        with closing(reader.iterate(taker=taker)) as blocks:
            for block in blocks:
                elements = elements_of(block)
                leaves = bool(self.job.leaves) and rng.random() < self.job.leaves
                taken = elements[: rng.randint(0, len(elements))] if leaves else elements
                for element in taken:
                    self._claims.deliver(reader.consumer_id, element)
                taker.unused = len(elements) - len(taken)
                if leaves:
                    return False
                if self.job.step_s:
                    self.kernel.sleep(self.job.step_s * rng.uniform(0.1, 2))
        return True
