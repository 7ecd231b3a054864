"""Graphs on their way: in pieces to Forebay's clients, few at a time to TensorFlow's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.connections import dispatcher_client
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.core.state import Dataset
from forebay.service.dispatcher import graph_pieces
from forebay.service.dispatcher.dispatcher import Dispatcher
from forebay.service.dispatcher.dispatcher_servicer import DispatcherServicer
from forebay.service.dispatcher.graph_pieces import AT_A_TIME, LARGE_BYTES, GraphPieces
from forebay.service.errors import InvalidArgument, ProtocolError
from forebay.service.pipelines import definitions
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto import tf_service_pb2 as tf
from forebay.service.proto.python_pb2 import PythonDataset
from forebay.storage import MemoryStorage, StorageError

from ..stock import GRAPH, DispatcherProcess
from .leading import run_dispatcher, until


@pytest.fixture
def client(dispatcher: DispatcherProcess) -> Iterator[DispatcherClient]:
    with DispatcherClient(dispatcher.target) as opened:
        yield opened


def register(client: DispatcherClient, function: bytes, dataset_id: str) -> bytes:
    """What is stored of it."""
    stored = PythonDataset(function=function).SerializeToString()
    request = pb.RegisterDatasetRequest(python=stored, dataset_id=dataset_id)
    request.sources.add(count=3)
    client.call(request, pb.RegisterDatasetResponse)
    return stored


@pytest.mark.parametrize("size", [4, 5, 6, 12, 98])  # and two bytes of the field
def test_a_graph_comes_whole_whatever_its_pieces(
    client: DispatcherClient, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(dispatcher_client, "PIECE_BYTES", 7)
    function = register(client, bytes(range(size)), f"of {size}")
    found = client.get_dataset(f"of {size}", with_graph=True)
    assert found.graph == function
    assert found.definition.HasField("python_function")
    assert not client.get_dataset(f"of {size}", with_graph=False).graph
    whole = pb.GetDatasetRequest(dataset_id=f"of {size}", with_graph=True)  # nothing of pieces
    assert client.call(whole, pb.GetDatasetResponse).graph == function


def test_no_graph_is_of_two_that_had_one_id(
    client: DispatcherClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_client, "PIECE_BYTES", 7)
    register(client, b"z" * 30, "replaced")
    call, asked, replaced = client.call, 0, b""

    def replacing(request: Any, *arguments: Any, **how: Any) -> Any:
        nonlocal asked, replaced
        asked += isinstance(request, pb.GetDatasetRequest)
        if asked == 3:
            asked += 1
            remove = pb.RemoveDatasetRequest(dataset_id="replaced")
            client.call_numbered(remove, pb.RemoveDatasetResponse)
            replaced = register(client, b"b" * 40, "replaced")
        return call(request, *arguments, **how)

    monkeypatch.setattr(client, "call", replacing)
    found = client.get_dataset("replaced", with_graph=True)
    assert found.graph == replaced
    stored = client.get_dataset("replaced", with_graph=False).definition
    assert found.definition == stored


def test_a_piece_that_makes_no_sense_is_refused(client: DispatcherClient) -> None:
    register(client, b"z" * 30, "pieces")
    request = pb.GetDatasetRequest(dataset_id="pieces", with_graph=True, piece_bytes=7)
    digest = client.call(request, pb.GetDatasetResponse).digest
    for offset, piece_bytes in ((-1, 7), (0, -1), (99, 0)):
        wrong = pb.GetDatasetRequest(
            dataset_id="pieces", with_graph=True, piece_bytes=piece_bytes, offset=offset,
            digest=digest,
        )  # fmt: skip
        with pytest.raises(InvalidArgument, match=f"piece of {piece_bytes} bytes from {offset} on"):
            client.call(wrong, pb.GetDatasetResponse)


def test_a_dispatcher_that_gives_no_more_is_no_endless_loop(
    client: DispatcherClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = pb.GetDatasetResponse(graph=b"abc", graph_bytes=9)
    answer.definition.SetInParent()
    answers = iter([answer, pb.GetDatasetResponse(graph_bytes=9)])
    monkeypatch.setattr(client, "call", lambda *_, **__: next(answers))
    with pytest.raises(ProtocolError, match="gives 3 of 9 bytes of the graph of dataset d, and no"):
        client.get_dataset("d", with_graph=True)


def test_a_graph_of_200_mb_is_registered(client: DispatcherClient) -> None:
    function = register(client, bytes(200_000_000), "large")
    assert client.get_dataset("large", with_graph=True).graph == function


def test_what_is_too_large_is_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definitions, "MAX_BYTES", 10)

    async def scene(dispatcher: Dispatcher) -> None:
        servicer = DispatcherServicer(dispatcher)
        for request in (
            pb.RegisterDatasetRequest(python=bytes(11)),
            pb.RegisterDatasetRequest(graph=bytes(11)),
        ):
            with pytest.raises(InvalidArgument, match=r"has 11 bytes, above 10: arrays .* files"):
                await servicer.register_dataset(request)
        with pytest.raises(InvalidArgument, match="has 11 bytes, above 10"):
            await servicer.start_save(pb.StartSaveRequest(graph=bytes(11)))

    run_dispatcher(MemoryStorage(), scene)


def dataset_of(name: str) -> Dataset:
    definition = ev.DatasetDefinition()
    definition.tf_data_graph.blob = name
    return Dataset(name, definition.SerializeToString())


class Reading:
    """Of graphs, one byte for each time, which may have to wait, or fail."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.times = 0
        self.goes_on = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, dataset: Dataset) -> bytes:
        self.times += 1
        await self.goes_on.wait()
        if self.error is not None:
            raise self.error
        return bytes([self.times]) * self.size


def test_a_graph_is_read_once_for_all_who_ask_at_a_time() -> None:
    async def scene() -> None:
        reading = Reading()
        pieces = GraphPieces(reading)
        asked = [asyncio.create_task(pieces.of(dataset_of("a"), plain=False)) for _ in range(9)]
        asked[0].cancel()  # who asks first may be gone
        await asyncio.sleep(0)
        asked[1].cancel()
        reading.goes_on.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(each, BaseException) for each in found] == [True] * 2 + [False] * 7
        assert reading.times == 1
        assert (await pieces.of(dataset_of("a"), plain=False)).graph == b"\1"
        assert (await pieces.of(dataset_of("b"), plain=False)).graph == b"\2"
        pieces.close()
        assert (await pieces.of(dataset_of("a"), plain=False)).graph == b"\3"
        pieces.close()

    asyncio.run(scene())


def test_a_graph_that_could_not_be_read_is_read_again() -> None:
    async def scene() -> None:
        reading = Reading()
        reading.goes_on.set()
        reading.error = StorageError("away")
        pieces = GraphPieces(reading)
        with pytest.raises(StorageError, match="away"):
            await pieces.of(dataset_of("a"), plain=False)
        reading.error = None
        assert (await pieces.of(dataset_of("a"), plain=False)).graph == b"\2"
        pieces.close()

    asyncio.run(scene())


def test_graphs_stay_for_a_while_and_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_pieces, "KEPT_BYTES", 10)
    monkeypatch.setattr(graph_pieces, "KEPT_S", 0.01)

    async def scene() -> None:
        reading = Reading(size=6)
        reading.goes_on.set()
        pieces = GraphPieces(reading)
        for name in ("a", "b", "b"):
            await pieces.of(dataset_of(name), plain=False)
        assert [blob for blob, _ in pieces._kept] == ["b"]
        await until(lambda: not pieces._kept)
        assert not pieces._timers

    asyncio.run(scene())


def test_few_large_graphs_are_on_their_way_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[Any] = []
    monkeypatch.setattr(graph_pieces, "when_answered", answered.append)

    async def scene() -> None:
        pieces = GraphPieces(Reading())
        made = 0

        async def answer(graph_bytes: int, fails: bool = False) -> None:
            nonlocal made
            async with pieces.turn(graph_bytes):
                made += 1
                if fails:
                    raise StorageError("away")

        for _ in range(5):
            await answer(LARGE_BYTES)  # is none
        for _ in range(5):  # one that fails has left
            with pytest.raises(StorageError):
                await answer(LARGE_BYTES + 1, fails=True)
        tasks = [asyncio.create_task(answer(LARGE_BYTES + 1)) for _ in range(AT_A_TIME + 3)]
        await until(lambda: made == 10 + AT_A_TIME)
        for done in range(3):
            await asyncio.sleep(0)
            assert made == 10 + AT_A_TIME + done
            answered.pop(0)()
            await until(lambda done=done: made == 11 + AT_A_TIME + done)  # type: ignore[misc]
        for each in answered:
            each()
            each()  # as if it were late as well
        await asyncio.gather(*tasks)
        monkeypatch.setattr(graph_pieces, "ON_ITS_WAY_S", 0.01)
        for _ in range(3 * AT_A_TIME):  # clients that never take theirs
            await answer(LARGE_BYTES + 1)

    asyncio.run(scene())


def test_tensorflows_clients_get_large_graphs(dispatcher: DispatcherProcess) -> None:
    """More of them than may be on their way at a time."""
    with DispatcherClient(dispatcher.target) as client:
        graph = pb_graph_of(LARGE_BYTES)
        answer = client.call(pb.RegisterDatasetRequest(graph=graph), pb.RegisterDatasetResponse)
        for _ in range(2 * AT_A_TIME + 1):
            request = tf.GetDatasetDefRequest(dataset_id=answer.dataset_id)
            service = "tensorflow.data.DispatcherService"
            found = client.call(request, tf.GetDatasetDefResponse, service=service)
            assert len(found.dataset_def.graph) > LARGE_BYTES


def pb_graph_of(size: int) -> bytes:
    """One with so many bytes that mean nothing."""
    from forebay.service.proto import graph_pb2

    graph = graph_pb2.GraphDef.FromString(GRAPH)
    graph.node[0].attr["_for_nothing"].s = bytes(size)
    return graph.SerializeToString()
