"""Python datasets without a service: pipelines of functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from forebay.journal.proto import events_pb2 as ev
from forebay.service.pipelines.python.pipeline import PythonPipeline, python_version
from forebay.service.proto.python_pb2 import PythonDataset

INT = '{"tensor":"int64","shape":[]}'


def pipeline_of(
    function: Callable[..., Any],
    splits: Sequence[Any],
    structure: str = INT,
    *,
    processes: int = 1,
    **fields: Any,
) -> PythonPipeline:
    """As a worker has it of what was registered."""
    cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
    stored = PythonDataset(
        function=cloudpickle.dumps(function),
        splits=cloudpickle.dumps(splits),
        **{"python": python_version(), **fields},
    )
    return PythonPipeline(
        stored.SerializeToString(), [ev.SplitSource(count=len(splits))], structure,
        processes=processes, where="w:1",
    )  # fmt: skip
