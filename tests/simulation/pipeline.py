"""The simulated computation: splits become elements that say where they come from."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from forebay.journal.proto import events_pb2 as ev
from forebay.service.block_limits import cost
from forebay.service.blocks import Block, Component
from forebay.service.checksums import Checksum
from forebay.service.errors import ForebayError, PipelineError
from forebay.service.pipelines import MaySkip, SkipReport, SplitFeed, SplitRange, definitions
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto import graph_pb2
from forebay.service.proto.python_pb2 import PythonDataset
from forebay.service.user_metrics import Totals
from forebay.service.worker.task_pipeline import Pipelines

from .kernel import kernel
from .oracle import SKIPPED_MOST, Element
from .threads import Event

PYTHON = PythonDataset(splits=b"of a function").SerializeToString()
FAILING = 3
"""Splits that fail of a Python dataset's task that has all of them, on average. Once SKIPPED_MOST
of an iteration have, the next one ends its task."""


@dataclass(frozen=True)
class Pipeline:
    """What the dataset of a run is."""

    splits: int  # of each provider, in each pass_number
    providers: int
    passes: int
    split_s: float  # of work, typically
    block_elements: int  # at most
    alternate: bool  # between providers, rather than one after the other
    endless: bool = False  # passes go on and on
    python: bool = False  # a Python dataset, of which some splits fail behind their element
    uneven: int = 0  # in bundles, a filter of this seed is behind it; 0: none
    shares: tuple[int, ...] = ()  # of a mixture's sources; each has a split more than the last one

    def places(self) -> list[tuple[int, int, int]]:
        """(provider, pass_number, split) of every element."""
        return [
            (provider, pass_number, split)
            for pass_number in range(self.passes)
            for provider in range(self.providers)
            for split in range(self.splits)
        ]

    def kept(self, split: int) -> int:
        """How many elements a bundle has of this split."""
        if not self.uneven:
            return 1
        return random.Random(f"kept {self.uneven} {split}").choice((0, 0, 0, 1, 1, 2, 3, 20))

    def sources(self, number: int = 0) -> list[ev.SplitSource]:
        """Of a mixture's source of this number."""
        return [ev.SplitSource(count=self.splits + number) for _ in range(self.providers)]


class Computed:
    """service.pipelines.Run for a Pipeline."""

    needs = 1
    most = 0
    waiting = 0

    def __init__(
        self, pipeline: Pipeline, task: pb.Task, may_skip: MaySkip, feed: SplitFeed | None
    ) -> None:
        self._pipeline = pipeline
        self._may_skip = may_skip
        self._mine = _shard(task)
        self._feed = feed
        self._ended: list[SplitRange] = []  # all of their elements came, perhaps in no block yet
        self._cancelled = Event()
        self._task_id = task.task_id
        self._iteration_id = task.iteration_id
        self._run = kernel().oracle.began_run(task.task_id)

    def cancel(self) -> None:
        self._cancelled.set()

    def blocks(self) -> Iterator[Block]:
        rng, pipeline = kernel().rng, self._pipeline
        waiting: list[Element] = []
        try:
            for element in self._elements():
                if self._cancelled.wait(pipeline.split_s * rng.uniform(0.1, 2)):
                    return
                waiting.append(element)
                if len(waiting) >= rng.randint(1, pipeline.block_elements):
                    yield self._made(waiting)
                    waiting = []
                    self._tell_ended()
                if pipeline.python and self._fails(element):
                    report = SkipReport(element.split, 1, "why", SKIPPED_MOST)
                    if not self._may_skip(report):
                        kernel().oracle.failed.add(self._task_id)
                        raise PipelineError("ABORTED", "no more splits are skipped")
        except ForebayError as error:  # as TensorFlow passes on what a feed raises
            if pipeline.python:
                raise
            raise PipelineError("UNKNOWN", str(error)) from error
        if waiting:
            yield self._made(waiting)
        self._tell_ended()

    def _tell_ended(self) -> None:
        while self._ended:
            ended = self._ended.pop()
            ended.made(ended.count)

    def _fails(self, element: Element) -> bool:
        return random.Random(f"{element}").random() * self._pipeline.splits < FAILING

    def _made(self, elements: list[Element]) -> Block:
        block = block_of(elements)
        kernel().oracle.made(self._run, elements[-1].number + 1, cost(block))
        return block

    def _elements(self) -> Iterator[Element]:
        for number, place in enumerate(self._places()):
            yield Element(self._task_id, self._iteration_id, *place, number, self._run)

    def _places(self) -> Iterator[tuple[int, int, int]]:
        for opening in self._openings():
            open_ends = list(range(self._pipeline.providers))
            while open_ends:
                provider = open_ends[0]
                found = self._next_range(provider, opening)
                if found is None:
                    open_ends.remove(provider)
                    continue
                if self._pipeline.alternate:
                    open_ends.append(open_ends.pop(0))
                for split in filter(self._mine, range(found.first, found.first + found.count)):
                    yield provider, found.pass_number, split
                self._ended.append(found)

    def _openings(self) -> Iterator[int]:
        if not self._pipeline.endless:
            yield from range(self._pipeline.passes)
            return
        for opening in itertools.count():
            if self._feed is not None and self._feed.is_over(range(self._pipeline.providers)):
                return
            yield opening

    def _next_range(self, provider: int, opening: int) -> SplitRange | None:
        if self._feed is not None:
            return self._feed.next_range(provider, opening, self._pipeline.endless)
        done: set[tuple[int, int]] = self.__dict__.setdefault("_done", set())
        if (provider, opening) in done:
            return None
        done.add((provider, opening))
        return SplitRange(0, self._pipeline.splits, opening)


class Bundle:
    """service.pipelines.Run for a bundle of an ordered read: its elements have the bundle's number
    as their pass_number, and count from the bundle's first one.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        task: pb.Task,
        source: int,
        splits: SplitRange,
        *,
        number: int,
        seed: int,
        start: int = 0,
    ) -> None:
        if seed != task.order.seed:
            kernel().fail(f"bundle {number} was run with the seed {seed} of another order")
        self._pipeline = pipeline
        self._task = task
        self._source = source
        self._splits = range(splits.first, splits.first + splits.count)
        self._number = number
        self._start = start
        self._cancelled = Event()
        self._run = kernel().oracle.began_run(task.task_id)

    def cancel(self) -> None:
        self._cancelled.set()

    def blocks(self) -> Iterator[Block]:
        rng, pipeline = kernel().rng, self._pipeline
        index, waiting = 0, []
        for split in self._splits:
            if self._cancelled.wait(pipeline.split_s * rng.uniform(0.1, 2)):
                return
            for _ in range(pipeline.kept(split)):
                if index >= self._start:
                    waiting.append(self._element(split, index))
                index += 1
                if len(waiting) >= rng.randint(1, pipeline.block_elements):
                    yield self._made(waiting)
                    waiting = []
        if waiting:
            yield self._made(waiting)

    def _element(self, split: int, index: int) -> Element:
        name = self._source, self._number, split, index
        return Element(self._task.task_id, self._task.iteration_id, *name, self._run)

    def _made(self, elements: list[Element]) -> Block:
        return replace(block_of(elements, elements[0].number), bundle=self._number)


class Computation(Pipelines):
    """What the workers of a run compute."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def load(self, op_libraries: Sequence[str]) -> None: ...

    def open(
        self,
        task: pb.Task,
        definition: ev.DatasetDefinition,
        graph: bytes,
        may_skip: MaySkip,
        totals: Totals,
    ) -> Any:
        if graph != (PYTHON if self._pipeline.python else SANITIZED):
            kernel().fail("a worker got another graph than was registered")
        run = partial(Computed, self._pipeline, task, may_skip)
        source = definition.sources[0].count - self._pipeline.splits
        bundle = partial(Bundle, self._pipeline, task, source)
        return SimpleNamespace(run=run, bundle=bundle, close=lambda: None)


def _shard(task: pb.Task) -> Callable[[int], bool]:
    """Which splits are the task's."""
    of, shard = task.num_shards or 1, task.shard
    return lambda split: split % of == shard % of


def block_of(elements: list[Element], index: int = 0) -> Block:
    rows = [
        (e.task_id, e.iteration_id, e.provider + (e.run << 8), e.pass_number,
         e.split + (e.number << 32))
        for e in elements
    ]  # fmt: skip
    return Block(len(elements), (Component(np.array(rows, np.int64)),), None, index)


def elements_of(block: Block) -> list[Element]:
    values = block.components[0].values
    assert isinstance(values, np.ndarray)
    return elements_in(values)


def elements_in(rows: np.ndarray[Any, Any]) -> list[Element]:
    """Of an array of shape (n, 5)."""
    return [
        Element(task, iteration, provider & 255, pass_number, split & 0xFFFFFFFF, split >> 32,
                provider >> 8)
        for task, iteration, provider, pass_number, split in rows.tolist()
    ]  # fmt: skip


class ChecksumOfSplits(Checksum):
    """It knows neither tasks nor runs, which real elements have not."""

    def add(self, block: Block) -> None:
        (component,) = block.components
        assert isinstance(component.values, np.ndarray)
        super().add(Block(block.count, (Component(component.values[:, 3:]),)))


STRUCTURE = json.dumps({"tensor": "int64", "shape": [5]})
"""Of an element, as it is registered."""


def _graph() -> bytes:
    graph = graph_pb2.GraphDef()
    graph.node.add(name="source", op="RangeDataset")
    graph.node.add(name="result", op="_Retval", input=["source:0"])
    return graph.SerializeToString()


GRAPH = _graph()
SANITIZED = definitions.sanitize(GRAPH)
"""What a dispatcher makes of it."""
