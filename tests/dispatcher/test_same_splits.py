"""Splits of made-up pipelines, byte by byte what TensorFlow's dispatcher gives out for them.

Both dispatchers get the same graphs and the same calls. `FOREBAY_PIPELINES=5000` tries so many
instead of a few, and `FOREBAY_SEED` others.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import grpc
import pytest
from tensorflow.data.experimental import service

from forebay.service.connections.grpc_server import CHANNEL_OPTIONS, bind
from forebay.service.dispatcher.candidate import Candidate
from forebay.service.dispatcher.options import DispatcherOptions
from forebay.service.dispatcher.tf_data_dispatcher_servicer import TfDataDispatcherServicer
from forebay.service.pipelines.tf_data.evaluate import evaluate
from forebay.service.pipelines.tf_data.imports import graph_of
from forebay.service.proto import tf_service_pb2 as pb
from forebay.storage import MemoryStorage

from ..pipelines import compositions
from ..pipelines.compositions import Compositions, build, write_chunk, write_files, write_save

SEED = int(os.environ.get("FOREBAY_SEED", "1"))
PIPELINES = int(os.environ.get("FOREBAY_PIPELINES", "40"))

WORKER = "127.0.0.1:9"  # where nobody listens
MOST = 12
"""Splits that are taken of a provider in one go: sources may be endless."""

DYNAMIC = pb.ProcessingModeDef(sharding_policy=pb.ProcessingModeDef.DYNAMIC)


class OurDispatcher:
    """TensorFlow's protocol on a thread of this process, which evaluates without another one."""

    def __init__(self) -> None:
        self.address = ""
        self._serving = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="dispatcher")
        self._thread.start()
        assert self._serving.wait(60)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        dispatcher = await Candidate(MemoryStorage(), DispatcherOptions(), "").take_over()
        servicer = TfDataDispatcherServicer(dispatcher, evaluate)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((servicer.handlers(),))
        self.address = bind(server, "127.0.0.1", 0)
        await server.start()
        self._serving.set()
        await self._stopped.wait()
        await server.stop(None)
        await servicer.close()
        await dispatcher.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(60)


class Answer(NamedTuple):
    """What a dispatcher says of a pipeline's splits."""

    refused: str = ""  # status, and the dataset that it is about
    providers: int = 0
    splits: tuple[list[bytes], ...] = ()  # GetSplit's answers, of each provider


class Client:
    """Calls a dispatcher as TensorFlow's clients and workers do, without them."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
        self._tasks: list[int] = []
        self._heartbeat()

    def _call(self, method: str, **fields: Any) -> Any:
        request = getattr(pb, f"{method}Request")(**fields)
        answer = self._raw(method, request.SerializeToString())
        return getattr(pb, f"{method}Response").FromString(answer)

    def _raw(self, method: str, request: bytes) -> bytes:
        path = f"/tensorflow.data.DispatcherService/{method}"
        send = self._channel.unary_unary(path, None, None)
        return send(request, timeout=60, wait_for_ready=True)

    def _heartbeat(self) -> list[Any]:
        answer = self._call("WorkerHeartbeat", worker_address=WORKER, current_tasks=self._tasks)
        self._tasks += [task.task_id for task in answer.new_tasks]
        return list(answer.new_tasks)

    def splits(self, graph: bytes) -> Answer:
        """Register a dataset, and take splits of it."""
        try:
            task = self.begin(graph)
        except grpc.RpcError as error:
            said = error.details() or ""
            about = re.search(r"for (snapshot) datasets", said) or re.search(r"of type (\w+)", said)
            return Answer(f"{error.code().name}: {about[1] if about else said}")
        providers = range(task.num_split_providers)
        taken = tuple(self._taken(task.iteration_id, provider) for provider in providers)
        return Answer("", task.num_split_providers, taken)

    def begin(self, graph: bytes) -> Any:
        """Register a dataset; the task of a new iteration over it."""
        dataset_id = self._call(
            "GetOrRegisterDataset",
            dataset=pb.DatasetDef(graph=graph),
            metadata=pb.DataServiceMetadata(cardinality=-2).SerializeToString(),
        ).dataset_id
        job = self._call("GetOrCreateJob", dataset_id=dataset_id, processing_mode_def=DYNAMIC)
        self._call("GetOrCreateIteration", job_id=job.job_id)
        (task,) = self._heartbeat()
        return task

    def _taken(self, iteration_id: int, provider: int) -> list[bytes]:
        """A whole repetition, part of the next, one is skipped, an earlier one."""
        taken: list[bytes] = []
        for repetition, most in ((0, MOST), (0, 1), (1, 2), (3, MOST), (2, 1), (4, 2)):
            taken += self.take(iteration_id, repetition, most, provider)
        return taken

    def take(self, iteration_id: int, repetition: int, most: int, provider: int = 0) -> list[bytes]:
        """So many answers, or up to the end of the repetition."""
        taken: list[bytes] = []
        request = pb.GetSplitRequest(
            iteration_id=iteration_id, repetition=repetition, split_provider_index=provider
        ).SerializeToString()
        for _ in range(most):
            taken.append(self._raw("GetSplit", request))
            if pb.GetSplitResponse.FromString(taken[-1]).end_of_splits:
                break
        return taken

    def close(self) -> None:
        self._channel.close()


class Dispatchers:
    """TensorFlow's and ours."""

    def __init__(self) -> None:
        config = service.DispatcherConfig(fault_tolerant_mode=False)
        self._theirs = service.DispatchServer(config)
        self._ours = OurDispatcher()
        addresses = self._theirs.target.removeprefix("grpc://"), self._ours.address
        self.clients = [Client(address) for address in addresses]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()
        self._ours.stop()
        self._theirs._stop()

    def compare(self, expression: str) -> None:
        """What ours says of a pipeline is what TensorFlow's says."""
        theirs, ours = self.both(expression)
        assert ours == theirs, expression

    def both(self, expression: str) -> list[Answer]:
        """What each says, TensorFlow's first."""
        graph = graph_of(build(expression))
        return [client.splits(graph) for client in self.clients]


@pytest.fixture(scope="module")
def dispatchers() -> Iterator[Dispatchers]:
    with Dispatchers() as both:
        yield both


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    write_files(directory)
    return directory


SOURCES = [
    *compositions.SOURCES,
    *compositions.CUT_SOURCES,
    *compositions.REFUSED_SOURCES,
    *compositions.ENDLESS_SOURCES,
]
STEPS = [
    *compositions.PARTICULAR_STEPS,
    *compositions.EXACT_STEPS,
    *compositions.OTHER_STEPS,
    *compositions.ENDLESS_STEPS,
]
JOINS = [*compositions.EXACT_JOINS, *compositions.OTHER_JOINS]


@pytest.mark.parametrize("source", SOURCES)
def test_every_source(dispatchers: Dispatchers, files: Path, source: str) -> None:
    dispatchers.compare(Compositions(SEED, files).filled(source))


@pytest.mark.parametrize("step", STEPS)
def test_every_step(dispatchers: Dispatchers, files: Path, step: str) -> None:
    dispatchers.compare("count(5)." + Compositions(SEED, files).filled(step))


@pytest.mark.parametrize("join", JOINS)
def test_every_join(dispatchers: Dispatchers, files: Path, join: str) -> None:
    filled = Compositions(SEED, files).filled(join, a="count(3)", b="slices(whole([4, 5]))")
    dispatchers.compare(filled)


def test_compositions(dispatchers: Dispatchers, files: Path) -> None:
    made_up = Compositions(SEED, files)
    for number in range(PIPELINES):
        dispatchers.compare(made_up.any(2 + number % 3))


def test_a_save_that_is_being_written(dispatchers: Dispatchers, tmp_path: Path) -> None:
    """What is there is given out before it is looked for more; the end, when it is said."""
    path = tmp_path / "save"
    write_save(path, {"chunk_1_0_1": [2], "chunk_0_0_1": [1]})
    graph = graph_of(build(f"loaded('{path}')"))
    tasks = [client.begin(graph).iteration_id for client in dispatchers.clients]

    def take(repetition: int, most: int) -> list[bytes]:
        theirs, ours = (
            client.take(task, repetition, most)
            for client, task in zip(dispatchers.clients, tasks, strict=True)
        )
        assert ours == theirs
        return ours

    taken = take(0, 1)
    for name in ("chunk_10_1_1", "chunk_9_1_1", "chunk_0_1_1"):
        write_chunk(path, name, [3])
    taken += take(0, 4)
    write_chunk(path, "chunk_0_2_1", [4])
    (path / "DONE").touch()
    taken += take(0, 3)
    assert len(set(taken)) == 7
    assert take(1, 9) == taken
