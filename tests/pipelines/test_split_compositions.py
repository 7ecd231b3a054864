"""Made-up pipelines under DYNAMIC: all workers together give the elements of the pipeline here.

The core decides and each task leases as in a worker; what is between them are random pauses.
`FOREBAY_PIPELINES=500` tries so many pipelines instead of a few, and `FOREBAY_SEED` others.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.core import commands as c
from forebay.service.dispatcher.dispatcher_servicer import lease_command
from forebay.service.errors import Unimplemented
from forebay.service.pipelines.tf_data.evaluate import evaluate
from forebay.service.pipelines.tf_data.imports import graph_of
from forebay.service.pipelines.tf_data.pipeline import TfDataPipeline
from forebay.service.pipelines.tf_data.split_sources import require_splittable, split_sources
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.saved_chunks import look
from forebay.service.worker.leases import LeaseFeed

from ..core.given import Given
from .compositions import Compositions, build, write_files, write_save

SEED = int(os.environ.get("FOREBAY_SEED", "1"))
PIPELINES = int(os.environ.get("FOREBAY_PIPELINES", "10"))
PAUSE_S = 0.002
TOO_MANY = 2000
NOT_COMPARED = re.compile(r"shuffle(?!=False)|seed|unordered|repeat\((-1)?\)|counter|int64\.m")
"""What is random, and may be cut; what is endless, and may be filtered until nothing comes."""


class Cluster:
    """A dataset's tasks on so many workers. Raises NotSplittable."""

    def __init__(self, expression: str, workers: int, seed: int = SEED) -> None:
        self._dataset = build(expression)
        self._graph = graph_of(self._dataset)
        self._sources = split_sources(self._graph, evaluate)
        require_splittable(self._sources)
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._given = Given()
        members = [self._given.worker(number) for number in range(workers)]
        self._given.register("made up", *self._sources)
        self._iteration_id = self._given.iteration(dataset_id="made up").iteration_id
        self._ledgers = self._given.state.iterations[self._iteration_id].ledgers
        self._tasks = [self._given.task_of(worker) for worker in members]

    def call(self, request: pb.LeaseSplitsRequest, *_: Any, **__: Any) -> pb.LeaseSplitsResponse:
        """What a feed asks the dispatcher."""
        with self._lock:
            pause_s = self._random.uniform(0, PAUSE_S)
        time.sleep(pause_s)
        with self._lock:
            leased = self._given.when(lease_command(request))
            if leased is None and request.want:
                self._find(request.source)
                leased = self._given.when(lease_command(request))
        if leased is None:
            return pb.LeaseSplitsResponse()
        names = self._ledgers[request.source].names
        return pb.LeaseSplitsResponse(
            lease_id=leased.lease_id,
            first=leased.first,
            count=leased.count,
            end_of_splits=not leased.count,
            pass_number=leased.pass_number,
            names=names[leased.first : leased.first + leased.count],
        )

    def _find(self, source: int) -> None:
        path = self._sources[source].saved_chunks.path
        names, complete, _ = look(path, self._ledgers[source].names)
        self._given.when(
            c.FindSplits(
                iteration_id=self._iteration_id,
                source=source,
                names=tuple(names),
                complete=complete,
            )
        )

    def read(self, most: int | None = None) -> list[list[int]]:
        """What each of the workers has; of an endless pipeline, as many as they have in all when
        these are `most`."""
        total = [0]

        def run(task_id: int) -> list[int]:
            dispatcher = cast(DispatcherClient, self)
            feed = LeaseFeed(dispatcher, task_id, self._sources)
            pipeline = TfDataPipeline(self._graph, element_spec=self._dataset.element_spec)
            blocks = pipeline.run(feed).blocks()
            got: list[int] = []
            for block in blocks:
                values = [int(value) for value in block.components[0].elements()]
                got += values
                with self._lock:
                    total[0] += len(values)
                if most is not None and total[0] >= most:
                    break
            blocks.close()
            feed.close()
            return got

        with ThreadPoolExecutor(len(self._tasks)) as pool:
            return [f.result(timeout=90) for f in [pool.submit(run, t) for t in self._tasks]]


def counted(lists: list[list[int]]) -> Counter[int]:
    return Counter(value for values in lists for value in values)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    write_files(directory)
    return directory


def in_process(expression: str) -> Counter[int] | None:
    """The pipeline's elements here; None if they are too many."""
    here = Counter(map(int, build(expression).take(TOO_MANY)))
    return here if here.total() < TOO_MANY else None


def test_several_workers_give_each_element_once(files: Path) -> None:
    made_up = Compositions(SEED, files)
    for number in range(PIPELINES):
        expression = made_up.exact(2 + number % 3)
        if (here := in_process(expression)) is not None:
            got = Cluster(expression, 2 + number % 2).read()
            assert counted(got) == here, expression


def test_one_worker_gives_whatever_pipeline_there_is(files: Path) -> None:
    made_up = Compositions(SEED, files)
    for number in range(2 * PIPELINES):
        expression = made_up.any(2 + number % 3)
        if NOT_COMPARED.search(expression):
            continue
        with contextlib.suppress(Unimplemented):
            if (here := in_process(expression)) is not None:
                got = Cluster(expression, 1).read()
                assert counted(got) == here, expression


ENDLESS = [
    "count(5).repeat()",
    "count(5).repeat().map(lambda i: i, num_parallel_calls=2)",
    "count(5).batch(2).repeat().unbatch()",
    "count(5).repeat().interleave(once, num_parallel_calls=2)",
    "count(3).concatenate(count(3, 5)).repeat().repeat(2)",
    "data.sample_from_datasets([count(3), count(3, 5)]).repeat()",
    "data.choose_from_datasets([count(3).repeat(), count(3, 5).repeat()], count(2).repeat())",
    "data.random(seed=1).map(lambda i: i % 5)",
    "zipped((count(5), data.random(seed=1))).repeat().map(lambda i, _: i)",
    "loaded('{d}/save').concatenate(once(whole(4))).repeat()",
]


@pytest.mark.parametrize("expression", ENDLESS)
def test_endless_pipelines_go_on(files: Path, expression: str) -> None:
    filled = expression.format(d=files)
    assert set(counted(Cluster(filled, 2).read(most=200))) == set(range(5))


def test_an_empty_save_has_nothing_however_often_it_is_repeated(tmp_path: Path) -> None:
    write_save(tmp_path / "save", {})
    (tmp_path / "save" / "DONE").touch()
    assert Cluster(f"loaded('{tmp_path}/save').repeat()", 2).read() == [[], []]


@pytest.mark.parametrize("source", ["count(2, tf.int64.max)", "count(0, tf.int64.min, -3)"])
def test_numbers_of_an_endless_range_come_once(source: str) -> None:
    got = counted(Cluster(source, 3).read(most=200))
    assert got.total() >= 200
    assert set(got.values()) == {1}
