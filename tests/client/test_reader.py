"""Which epochs a reader asks for while its dispatcher is away and comes back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from google.protobuf.message import Message

from forebay.service.blocks import Block
from forebay.service.client import reader as reader_module
from forebay.service.client.open_iterations import stopping
from forebay.service.client.options import CrossTrainerCache, read_options
from forebay.service.client.progress import EpochIterator
from forebay.service.client.reader import Reader
from forebay.service.client.tf_elements import NOTHING
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.errors import InvalidArgument, Unavailable
from forebay.service.proto import forebay_pb2 as pb

from ..standbys import wait_until


class Dispatcher:
    """Ends each iteration at once. It does not answer requests of the type `away`."""

    def __init__(self) -> None:
        self.away: type[Message] | None = None
        self.asked: list[Any] = []
        self.dataset_id = ""  # of the job, if it is another's
        self.finished = True  # when it is joined

    def numbers(self, kind: type[Any]) -> list[tuple[str, int]]:
        asked = (request.request for request in self.asked if isinstance(request, kind))
        return [(request.caller, request.number) for request in asked]

    def epochs(self) -> list[int]:
        return [r.epoch for r in self.asked if isinstance(r, pb.JoinIterationRequest)]

    def answer(self, request: Any, closed: threading.Event | None) -> Message:
        copy = type(request)()
        copy.CopyFrom(request)
        self.asked.append(copy)
        if isinstance(request, self.away or ()):
            raise Unavailable("it is away")
        if isinstance(request, pb.JoinIterationRequest):
            if self.dataset_id and not request.job_id:
                return pb.JoinIterationResponse(job_id=1, dataset_id=self.dataset_id)
            news = pb.ConsumerHeartbeatResponse(version=1, finished=self.finished)
            return pb.JoinIterationResponse(iteration_id=1, consumer_id=1, news=news)
        if isinstance(request, pb.ConsumerHeartbeatRequest):
            if request.version and closed is not None:
                closed.wait()
            return pb.ConsumerHeartbeatResponse(version=1, finished=True)
        return getattr(pb, type(request).__name__.replace("Request", "Response"))()


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    found = Dispatcher()

    def call(
        self: DispatcherClient,
        request: Message,
        response: Any,
        *,
        timeout_s: float = 0.0,
        patience_s: float | None = None,
        closed: threading.Event | None = None,
    ) -> Message:
        return found.answer(request, closed)

    monkeypatch.setattr(DispatcherClient, "call", call)
    return found


def named(cache: CrossTrainerCache | None = None) -> Reader:
    how = read_options(job_name="job", cross_trainer_cache=cache, target_workers="ANY")
    return Reader("127.0.0.1:1", "dataset", "job", how)


def test_names_of_jobs_are_not_kept_for_ever() -> None:
    for number in range(2000):
        reader = Reader("localhost:1", "numbers", f"job {number}")
        assert reader._is_of_one_dataset()
    assert reader_module._read_by_name.cache_info().currsize < 2000


def drop_while_it_waits(reader: Reader) -> None:
    iteration = reader.iterate(NOTHING)
    assert [next(iteration), next(iteration)] == [NOTHING, NOTHING]
    iteration.close()


def test_a_reader_joins_with_one_request_and_then_sends_heartbeats(dispatcher: Dispatcher) -> None:
    dispatcher.finished = False
    iteration = named().iterate(NOTHING)
    assert next(iteration) is NOTHING
    iteration.close()
    joining, waiting, *_ = dispatcher.asked
    assert joining.job.dataset_id == "dataset"
    assert (waiting.consumer_id, waiting.version) == (1, 1)


def test_an_iteration_dropped_before_it_joined_does_not_count_as_an_epoch(
    dispatcher: Dispatcher,
) -> None:
    reader = named()
    dispatcher.away = pb.JoinIterationRequest
    drop_while_it_waits(reader)
    dispatcher.away = None
    dispatcher.asked.clear()
    assert [*reader.iterate(NOTHING), *reader.iterate(NOTHING)] == []
    assert dispatcher.epochs() == [1, 2]


@pytest.mark.parametrize("nothing", [None, NOTHING])
def test_stopping_ends_the_wait_for_a_dispatcher(
    dispatcher: Dispatcher, nothing: Block | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch is read next, if the program goes on."""
    reader = named()
    dispatcher.away = pb.JoinIterationRequest
    answer = dispatcher.answer

    def answer_and_stop(request: Any, closed: threading.Event | None) -> Message:
        if len(dispatcher.epochs()) == 2:
            stopping.begin(dispatcher)
        return answer(request, closed)

    monkeypatch.setattr(dispatcher, "answer", answer_and_stop)
    try:
        assert {*reader.iterate(nothing)} <= {nothing}
    finally:
        stopping.end(dispatcher)
    assert dispatcher.epochs() == [1, 1, 1]
    dispatcher.away = None
    assert list(reader.iterate()) == []
    assert dispatcher.epochs()[3:] == [1]


def test_a_cached_read_can_begin_after_an_iteration_dropped_before_it_joined(
    dispatcher: Dispatcher,
) -> None:
    reader = named(CrossTrainerCache("trainer"))
    dispatcher.away = pb.JoinIterationRequest
    drop_while_it_waits(reader)
    dispatcher.away = None
    assert list(reader.iterate(NOTHING)) == []
    with pytest.raises(InvalidArgument, match="Got repetition 2"):
        list(reader.iterate(NOTHING))


def test_an_iteration_can_be_dropped_while_it_compares_datasets(dispatcher: Dispatcher) -> None:
    dispatcher.dataset_id = "other"
    dispatcher.away = pb.GetDatasetRequest
    drop_while_it_waits(named())


def test_a_job_of_another_dataset_with_the_same_elements_is_joined_by_id(
    dispatcher: Dispatcher,
) -> None:
    dispatcher.dataset_id = "other"
    assert list(named().iterate()) == []
    asked = [r for r in dispatcher.asked if isinstance(r, pb.JoinIterationRequest)]
    assert [(r.job.dataset_id, r.job_id, r.epoch) for r in asked] == [
        ("dataset", 0, 1), ("", 1, 1)
    ]  # fmt: skip


def test_a_retry_has_the_number_of_the_first_request(dispatcher: Dispatcher) -> None:
    """Perhaps only the answer was lost."""
    dispatcher.away = pb.JoinIterationRequest
    drop_while_it_waits(named())
    first, second = dispatcher.numbers(pb.JoinIterationRequest)
    assert first == second and first[1]


def test_a_reused_message_is_a_new_request(dispatcher: Dispatcher) -> None:
    with DispatcherClient("127.0.0.1:1") as client:
        request = pb.JoinIterationRequest(job_id=1)
        for again in (False, False, True):
            client.call_numbered(request, pb.JoinIterationResponse, again=again)
    assert [number for _, number in dispatcher.numbers(pb.JoinIterationRequest)] == [1, 2, 2]


@pytest.mark.parametrize("away", [None, pb.JoinIterationRequest])
def test_another_thread_closes_a_read_that_waits(
    dispatcher: Dispatcher, away: type[Message] | None
) -> None:
    """For an element, or for a dispatcher."""
    dispatcher.finished, dispatcher.away = False, away
    reader = named()
    taking = EpochIterator(lambda taker: reader.iterate(taker=taker), lambda blocks, _: blocks)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.extend(taking), daemon=True)
    thread.start()
    wait_until(lambda: len(dispatcher.asked) > 1)
    taking.close()
    thread.join(60)
    assert not thread.is_alive() and not got
    assert isinstance(dispatcher.asked[-1], away or pb.LeaveIterationRequest)
