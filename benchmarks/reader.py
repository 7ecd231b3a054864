"""A trainer's process, which reads through either service on request.

python -m forebay.benchmarks.reader (forebay|tensorflow) DISPATCHER COMPRESSION DIRECTORY

The two sides differ in one import. The time begins after a first element and the warm-up, and ends
with an element (or, where elements are batched, a batch).
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from .cases import CASES, Case
from .consume import measured, serve
from .machine import forget_peak
from .results import Reading

SERVICES = {"forebay": "forebay.service", "tensorflow": "tensorflow.data.experimental.service"}


class Trainer:
    """Reads any of the cases."""

    def __init__(self, service: str, dispatcher: str, compression: str, directory: str) -> None:
        self._service = importlib.import_module(SERVICES[service])
        self._ours = service == "forebay"
        self._target = f"grpc://{dispatcher}"
        self._compression = None if compression == "none" else compression
        self._directory = pathlib.Path(directory)
        self._registered: dict[tuple[str, int], Any] = {}

    def measure(
        self,
        case: str,
        size: int,
        warm_up_s: float,
        seconds: float,
        workers: list[int],
        job_name: str | None,
        reader: int,
        readers: int,
    ) -> Reading:
        """Read for so long, or a dataset of this size to its end if that comes first.

        `workers` are the process ids of those that are read from. Who reads together with others,
        as the one of this number, takes `size` elements, as all of them do.
        """
        dataset_id = self._register(case, size)
        for process in (os.getpid(), *workers):
            forget_peak(process)

        def begin() -> Iterator[Any]:
            elements = self._open(CASES[case], dataset_id, job_name, reader, readers)
            return itertools.islice(elements, size) if CASES[case].coordinated else elements

        seconds = math.inf if CASES[case].coordinated else seconds
        return measured(begin, workers, warm_up_s, seconds, CASES[case].batch)

    def _register(self, case: str, size: int) -> Any:
        if (case, size) not in self._registered:
            dataset = CASES[case].dataset(self._directory, size)
            next(dataset.take(1).as_numpy_iterator())  # TensorFlow's first iterator takes a while
            self._registered[case, size] = self._service.register_dataset(
                self._target,
                dataset,
                compression=self._compression,
                dataset_id=case if CASES[case].coordinated else None,  # all have to name the same
            )
        return self._registered[case, size]

    def _open(
        self, case: Case, dataset_id: Any, job_name: str | None, reader: int, readers: int
    ) -> Iterator[Any]:
        how: dict[str, Any] = {"job_name": job_name}
        if case.coordinated or case.ordered:
            how |= {"consumer_index": reader, "num_consumers": readers}
        if case.ordered:
            return iter(self._service.read(self._target, dataset_id, ordered=True, **how))
        if case.claimed:
            how["delivery"] = "at_least_once"
            return iter(self._service.read(self._target, dataset_id, **how))
        mode = getattr(self._service.ShardingPolicy, case.mode)
        if case.numpy and self._ours:
            return iter(self._service.read(self._target, dataset_id, processing_mode=mode, **how))
        dataset = self._service.from_dataset_id(mode, self._target, dataset_id, **how)
        if case.gather is not None:
            dataset = case.gather(dataset)
        return iter(dataset.as_numpy_iterator() if case.numpy else dataset)


if __name__ == "__main__":
    serve(Trainer(*sys.argv[1:]).measure)
