"""Python datasets without a service: pipelines of functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from forebay.service.blocks import Block
from forebay.service.client.functions import python_dataset, request_of
from forebay.service.pipelines.python.pipeline import PythonPipeline
from forebay.service.structure import assemble

from .contract import PipelineContract, Step, drawn

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
    """A shuffle's buffer, and a batch, are within a split of one element, and so do nothing."""

    @pytest.mark.parametrize("step", [drawn()])
    def test_what_is_random_differs_by_bundle_and_by_seed(self, step: Step) -> None:
        super().test_what_is_random_differs_by_bundle_and_by_seed(step)


def structure_of(steps: Sequence[Step]) -> str:
    """Of the contract's elements."""
    arrays = any(step.kind in ("batch", "wide") for step in steps)
    return json.dumps({"tensor": "int64", "shape": [None] if arrays else []})
