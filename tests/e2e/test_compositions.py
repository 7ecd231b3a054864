"""Made-up pipelines under DYNAMIC: all workers together give the elements of the pipeline here.

tests/pipelines/test_split_compositions.py tries more of them, without processes.
`FOREBAY_PIPELINES=500` tries so many here, and `FOREBAY_SEED` others.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections import Counter

import pytest

from forebay import service

from ..cluster import WorkerProcess
from ..pipelines.compositions import Compositions, build, write_files
from ..stock import DispatcherProcess

SEED = int(os.environ.get("FOREBAY_SEED", "2"))
PIPELINES = int(os.environ.get("FOREBAY_PIPELINES", "6"))


@pytest.mark.parametrize("workers", [1, 2])
def test_each_element_comes_once(tmp_path: pathlib.Path, workers: int) -> None:
    write_files(tmp_path)
    made_up = Compositions(SEED, tmp_path)
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(DispatcherProcess(tmp_path / "journal")).target
        address = target.removeprefix("grpc://")
        started = [WorkerProcess(address) for _ in range(workers)]
        for worker in started:
            stack.enter_context(worker)
        for number in range(PIPELINES):
            expression = made_up.exact(2 + number % 2)
            dataset = build(expression)
            dataset_id = service.register_dataset(target, dataset)
            with service.read(
                target, dataset_id, processing_mode=service.ShardingPolicy.DYNAMIC
            ) as elements:
                got = Counter(map(int, elements))
            assert got == Counter(map(int, dataset)), expression
