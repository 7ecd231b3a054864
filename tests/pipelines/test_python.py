"""The contract holds for more than tf.data: a pipeline of generators."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from forebay.service.blocks import BLOCK_BYTES, Block, Component
from forebay.service.errors import PipelineError
from forebay.service.pipelines import Pipeline, Run, SplitFeed, SplitRange

from .contract import PipelineContract, Step, numbers_of

Element = "int | np.ndarray"


class GeneratorRun:
    needs, most, waiting = 0, 0, 0

    def __init__(
        self, elements: Iterator[object], start: int = 0, bundle: int | None = None
    ) -> None:
        self._elements = itertools.islice(elements, start, None)
        self._start = start
        self._bundle = bundle
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def blocks(self) -> Iterator[Block]:
        index = self._start
        try:
            while not self._cancelled.is_set():
                if (block := self._block(index)) is None:
                    return
                yield block
                index += block.count
        except ValueError as error:
            raise PipelineError("UNKNOWN", str(error)) from error

    def _block(self, index: int) -> Block | None:
        """Of one element if it is an array."""
        first = next(self._elements, None)
        if first is None:
            return None
        rest: Iterable[object] = ()
        if isinstance(first, int):
            rest = itertools.islice(self._elements, BLOCK_BYTES // 8 - 1)
        values = np.array([first, *rest], np.int64)
        where = (None, 0) if self._bundle is None else (self._bundle, index)
        return Block(len(values), (Component(values),), *where)


class GeneratorPipeline:
    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps

    def run(self, feed: SplitFeed | None) -> Run:
        assert feed is not None
        ranges = iter(lambda: feed.next_range(0, 0, False), None)
        splits = (number for found in ranges for number in numbers_of(found))
        return GeneratorRun(self._elements(splits, random.Random()))

    def bundle(self, splits: SplitRange, *, number: int, seed: int, start: int = 0) -> Run:
        elements = self._elements(iter(numbers_of(splits)), random.Random(f"{seed} {number}"))
        return GeneratorRun(elements, start, number)

    def close(self) -> None: ...

    def _elements(self, splits: Iterator[int], source: random.Random) -> Iterator[object]:
        elements: Iterator[object] = splits
        for step in self._steps:
            elements = _done(step, elements, random.Random(source.random()))
        return elements


def _done(step: Step, elements: Iterator[object], source: random.Random) -> Iterator[object]:
    kind, n = step
    if kind == "batch":
        for values in iter(lambda: [*itertools.islice(elements, n)], []):
            yield np.array(values)
        return
    if kind == "shuffle":
        for values in iter(lambda: [*itertools.islice(elements, n)], []):
            source.shuffle(values)
            yield from values
        return
    for x in elements:
        assert isinstance(x, int)
        match kind:
            case "times":
                yield n * x
            case "without":
                if x % n:
                    yield x
            case "spread":
                yield from range(n * x, n * (x + 1))
            case "interleave":
                yield from (x, x + 1)
            case "wide":
                yield np.full(n, x)
            case "drawn":
                yield x + 1_000_000 * source.randrange(1000)
            case "failing":
                if x == n:
                    raise ValueError(f"no such element: {x}")
                yield x


class TestGenerators(PipelineContract):
    def make(self, steps: Sequence[Step]) -> Pipeline:
        return GeneratorPipeline(steps)
