"""Python datasets without a service: pipelines of functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forebay.service.client.functions import python_dataset, request_of
from forebay.service.pipelines.python.pipeline import PythonPipeline

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
