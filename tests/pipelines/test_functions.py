"""Python datasets: the contract of pipelines, elements that fit or not, and processes that end."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from forebay.service.pipelines import Pipeline

from .contract import SPLITS, PipelineContract, Step, drawn
from .functions import INT, pipeline_of
from .test_python import _done


class TestContract(PipelineContract):
    """A shuffle's buffer, and a batch, are within a split of one element, and so do nothing."""

    def make(self, steps: Sequence[Step]) -> Pipeline:
        def function(split: int) -> Iterator[object]:
            elements: Iterator[object] = iter([split])
            for step in steps:
                elements = _done(step, elements, random)  # type: ignore[arg-type]
            return elements

        arrays = any(step.kind in ("batch", "wide") for step in steps)
        structure = {"tensor": "int64", "shape": [None] if arrays else []}
        return pipeline_of(function, range(SPLITS), json.dumps(structure))

    @pytest.mark.parametrize("step", [drawn()])
    def test_what_is_random_differs_by_bundle_and_by_seed(self, step: Step) -> None:
        super().test_what_is_random_differs_by_bundle_and_by_seed(step)
