"""A trainer's process, which reads through either service on request.

python -m forebay.benchmarks.reader (forebay|tensorflow) DISPATCHER COMPRESSION DIRECTORY

It prints "ready" after its imports. Then each input line is a question in JSON, and each output
line a `Reading`. The two sides differ in one import. The time begins after a first element and the
warm-up, and ends with an element (or, where elements are batched, a batch).
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import itertools
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from .cases import CASES, Case, Into
from .consume import consume, size_of
from .file_pipelines import PIPELINES
from .machine import forget_peak, memory_mb, process_cpu_s
from .results import Reading

ALL = {**CASES, **PIPELINES}
SERVICES = {
    "forebay": "forebay.service",
    "tensorflow": "tensorflow.data.experimental.service",
}
COMPRESSIONS = {"AUTO": "AUTO", "none": None}
SAMPLE = 256  # elements to measure the mean size,
SAMPLE_BYTES = 50e6  # or as many as have these bytes


class Trainer:
    """Reads any of the cases."""

    def __init__(
        self, service: str, dispatcher: str, compression: str, directory: pathlib.Path
    ) -> None:
        self._service = importlib.import_module(SERVICES[service])
        self._ours = service == "forebay"
        self._target = f"grpc://{dispatcher}"
        self._compression = COMPRESSIONS[compression]
        self._directory = directory
        self._registered: dict[tuple[str, int], tuple[Any, float]] = {}

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
        cached: bool,
    ) -> Reading:
        """Read for so long, or a dataset of this size to its end if that comes first.

        `workers` are the process ids of those that are read from. Who reads together with others,
        as the one of this number, takes `size` elements, as all of them do.
        """
        dataset_id, element_bytes = self._register(case, size)
        for process in (os.getpid(), *workers):
            forget_peak(process)
        begun = time.perf_counter()
        elements = self._open(ALL[case], dataset_id, job_name, reader, readers, cached)
        if ALL[case].coordinated:
            elements, seconds = itertools.islice(elements, size), math.inf
        next(elements)
        first_s = time.perf_counter() - begun
        consume(elements, warm_up_s)
        cpu_s, worker_cpu_s = time.process_time(), sum(map(process_cpu_s, workers))
        count, elapsed_s, ended = consume(elements, seconds)
        cpu_s, worker_cpu_s = (
            time.process_time() - cpu_s,
            sum(map(process_cpu_s, workers)) - worker_cpu_s,
        )
        reading = Reading(
            elements=count * ALL[case].batch,
            bytes=count * ALL[case].batch * element_bytes,
            seconds=elapsed_s,
            client_cpu_s=cpu_s,
            worker_cpu_s=worker_cpu_s,
            client_peak_mb=memory_mb(os.getpid(), "VmHWM"),
            worker_peak_mb=sum(memory_mb(worker, "VmHWM") for worker in workers),
            first_s=first_s,
            ended=ended,
        )
        del elements
        gc.collect()  # ends the iteration, before the other side's turn
        return reading

    def _register(self, case: str, size: int) -> tuple[Any, float]:
        """The dataset's id, and the mean bytes of an element."""
        if (case, size) not in self._registered:
            dataset = ALL[case].dataset(self._directory, size)
            dataset_id = self._service.register_dataset(
                self._target,
                dataset,
                compression=self._compression,
                dataset_id=case if ALL[case].coordinated else None,  # all have to name the same
            )
            self._registered[case, size] = dataset_id, mean_bytes(dataset)
        return self._registered[case, size]

    def _open(
        self,
        case: Case,
        dataset_id: Any,
        job_name: str | None,
        reader: int,
        readers: int,
        cached: bool,
    ) -> Iterator[Any]:
        mode = getattr(self._service.ShardingPolicy, case.mode)
        how: dict[str, Any] = {"job_name": job_name, "data_transfer_protocol": case.protocol}
        if case.coordinated or case.ordered:
            how |= {"consumer_index": reader, "num_consumers": readers}
        if case.ordered:
            return iter(self._service.read(self._target, dataset_id, ordered=True, **how))
        if case.claimed:
            how["delivery"] = "at_least_once"
            return iter(self._service.read(self._target, dataset_id, **how))
        if cached:
            how["cross_trainer_cache"] = self._service.CrossTrainerCache(str(os.getpid()))
        if case.into is Into.JAX:
            return _global_arrays(self._target, dataset_id, processing_mode=mode)
        if case.into is Into.NUMPY and self._ours:
            return iter(self._service.read(self._target, dataset_id, processing_mode=mode, **how))
        dataset = self._service.from_dataset_id(mode, self._target, dataset_id, **how)
        if case.gather is not None:
            dataset = case.gather(dataset)
        if case.into is Into.NUMPY:
            return iter(dataset.as_numpy_iterator())
        return iter(dataset) if case.step is None else map(case.step(), dataset)


def _global_arrays(target: str, dataset_id: str, **how: Any) -> Iterator[Any]:
    import jax

    from ..jax import ServiceDataset

    jax.config.update("jax_num_cpu_devices", 2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")
    return iter(ServiceDataset(target, dataset_id, sharding=mesh, **how))


def mean_bytes(dataset: Any) -> float:
    """The mean bytes of the first elements, without metadata."""
    total = count = 0
    for element in dataset.take(SAMPLE).as_numpy_iterator():
        parts = tf.nest.flatten(element)
        total += sum(map(size_of, parts))
        count += 1
        if total > SAMPLE_BYTES:
            break
    return total / count


def main(service: str, dispatcher: str, compression: str, directory: str) -> None:
    trainer = Trainer(service, dispatcher, compression, pathlib.Path(directory))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(dataclasses.asdict(trainer.measure(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
