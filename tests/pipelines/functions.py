"""Python datasets without a service: pipelines of functions."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from forebay.service.blocks import Block
from forebay.service.pipelines import SplitRange
from forebay.service.pipelines.kinds.functions import python_dataset, request_of
from forebay.service.pipelines.python.pipeline import PythonPipeline
from forebay.service.structure import assemble

from .contract import PipelineContract, Ranges, Step, batch, elements_of, shuffle, spread

Function = Callable[[Any], Any]

INT = '{"tensor":"int64","shape":[]}'


def pipeline_of(
    function: Callable[..., Any],
    splits: Sequence[Any],
    structure: str = INT,
    *,
    processes: int = 1,
    **how: Any,
) -> PythonPipeline:
    """As a worker has it of what was registered."""
    request = request_of(python_dataset(splits, **how)(function), splits, structure)
    return PythonPipeline(
        request.python, request.sources, structure, processes=processes, where="w:1"
    )


def numbers(blocks: Iterator[Block]) -> list[int]:
    return [int(x) for block in blocks for x in block.components[0].elements()]


def read(function: Function, splits: Sequence[Any], structure: str = INT, **how: Any) -> list[Any]:
    """Its elements, by one process."""
    pipeline = pipeline_of(function, splits, structure, **how)
    make = assemble(structure)
    try:
        return [
            element
            for block in pipeline.run(None).blocks()
            for element in make([c.elements() for c in block.components], block.count)
        ]
    finally:
        pipeline.close()


class FunctionContract(PipelineContract):
    def test_a_batch_is_of_a_split(self) -> None:
        with self.opened(spread(5), batch(3)) as pipeline:
            found = self.bundle(pipeline, SplitRange(7, 2, 0))
            assert found == [(35, 36, 37), (38, 39), (40, 41, 42), (43, 44)]
            run = pipeline.run(Ranges([SplitRange(7, 2, 0)]))
            assert elements_of(run.blocks()) == found

    def test_a_shuffle_is_of_a_split(self) -> None:
        with self.opened(spread(30), shuffle(30)) as pipeline:
            found = [x for (x,) in self.bundle(pipeline, SplitRange(7, 2, 0))]
            for mixed, split in ((found[:30], 7), (found[30:], 8)):
                assert sorted(mixed) == [*range(30 * split, 30 * (split + 1))] != mixed


def structure_of(steps: Sequence[Step]) -> str:
    """Of the contract's elements."""
    arrays = any(step.kind in ("batch", "wide") for step in steps)
    return json.dumps({"tensor": "int64", "shape": [None] if arrays else []})


def done(step: Step, elements: Iterator[object], source: random.Random) -> Iterator[object]:
    """What a step of the contract does, in Python."""
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
