"""Following, leading, and finding out that history was lost."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc
import pytest

from forebay.journal import encode, repair
from forebay.journal.proto import events_pb2 as ev
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.core import commands as c
from forebay.service.core.base import Decision
from forebay.service.core.encoding import encode_state
from forebay.service.core.lifecycles import WrongTransition
from forebay.service.core.machine import apply
from forebay.service.core.state import State
from forebay.service.dispatcher import dispatcher as dispatching
from forebay.service.dispatcher import server
from forebay.service.dispatcher.candidate import Candidate, Follower
from forebay.service.dispatcher.dispatcher import Dispatcher, continues, recover
from forebay.service.dispatcher.forebay_face import ForebayFace
from forebay.service.dispatcher.leadership import Leadership
from forebay.service.dispatcher.listener import Listener
from forebay.service.dispatcher.options import DispatcherOptions
from forebay.service.dispatcher.tensorflow_face import TensorFlowFace
from forebay.service.errors import (
    AnotherJournal,
    ForebayError,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unimplemented,
)
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto import tf_service_pb2 as tf
from forebay.storage import (
    Away,
    Corrupt,
    Fenced,
    MemoryStorage,
    Storage,
    StorageError,
    open_storage,
)

from ..stock import DispatcherProcess


def elected(term: int, *, after_repair: bool = False) -> bytes:
    leader = ev.LeaderElected(term=term, format=1, journal_id="j", after_repair=after_repair)
    return encode(ev.Event(time_ms=1, leader_elected=leader))


def dataset(name: str) -> bytes:
    return encode(ev.Event(dataset_registered=ev.DatasetRegistered(dataset_id=name)))


# -- following -------------------------------------------------------------------------------------


class TestFollower:
    def setup_method(self) -> None:
        self.storage = MemoryStorage()
        self.follower = Follower(self.storage)
        self.writer = self.storage.open_writer("the test")
        self.writer.append([elected(1), dataset("a")])

    def expect_current(self) -> None:
        self.follower.catch_up()
        assert encode_state(self.follower.state) == encode_state(recover(self.storage)[0])

    def test_it_keeps_up(self) -> None:
        self.expect_current()
        self.expect_current()
        self.writer.append([dataset("b"), dataset("c")])
        self.expect_current()
        assert self.follower.replayed == 4  # each event once
        assert list(self.follower.state.datasets) == ["a", "b", "c"]

    @pytest.mark.parametrize("more", [0, 1, 2])
    def test_an_append_that_failed_after_it_was_seen_vanishes(self, more: int) -> None:
        self.writer.append([dataset("vanishes"), dataset("too")])
        self.follower.catch_up()
        assert "vanishes" in self.follower.state.datasets
        del self.storage._records[-2:]
        self.writer.close()
        successor = self.storage.open_writer("its successor")
        successor.append([elected(successor.term), *map(dataset, "xyz"[:more])])
        self.expect_current()
        assert "vanishes" not in self.follower.state.datasets

    def test_what_was_seen_vanishes_and_nothing_follows(self) -> None:
        self.writer.append([dataset("vanishes")])
        self.follower.catch_up()
        del self.storage._records[-1:]
        self.expect_current()

    def test_it_is_overtaken_by_a_trim(self) -> None:
        self.follower.catch_up()
        self.writer.append([dataset(str(i)) for i in range(20)])
        state, _ = recover(self.storage)
        from forebay.journal.snapshots import encode_snapshot

        self.writer.write_snapshot(22, encode_snapshot(encode_state(state), 1))
        self.writer.trim(23)
        self.writer.append([dataset("more")])
        self.expect_current()


# -- leading ---------------------------------------------------------------------------------------


class Renewals(MemoryStorage):
    """A storage whose writer counts renewals, and refuses them if told so."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.error: StorageError | None = None
        self.answers = threading.Event()
        self.answers.set()

    def open_writer(self, owner: str, *, lease_ms: int = 0, place: str = "") -> Any:
        writer = super().open_writer(owner, lease_ms=lease_ms, place=place)
        writer.renew = self._renew  # type: ignore[method-assign]
        return writer

    def _renew(self) -> None:
        self.count += 1
        self.answers.wait(60)
        if self.error is not None:
            raise self.error


def leadership(lease_ms: int) -> tuple[Renewals, Leadership, list[StorageError]]:
    storage = Renewals()
    lost: list[StorageError] = []
    return storage, Leadership(storage.open_writer("x", lease_ms=lease_ms), lost.append), lost


def test_the_lead_is_proved_once_a_lease() -> None:
    storage, leads, lost = leadership(60_000)

    async def prove() -> None:
        await asyncio.gather(*(leads.prove() for _ in range(10)))
        await leads.prove()

    asyncio.run(prove())
    assert (storage.count, lost) == (1, [])
    assert leads.known


def test_a_lead_whose_lease_is_out_is_proved_anew() -> None:
    storage, leads, _ = leadership(1)

    async def prove() -> None:
        for _ in range(3):
            await leads.prove()
            await asyncio.sleep(0.005)

    asyncio.run(prove())
    assert storage.count == 3


def test_a_renewal_sent_before_it_was_asked_proves_nothing() -> None:
    """A process may be paused between the answer to a renewal and the question."""
    storage, leads, _ = leadership(1)

    async def prove() -> None:
        storage.answers.clear()
        early = asyncio.create_task(leads.prove())
        await until(lambda: storage.count == 1)
        await asyncio.sleep(0.005)  # longer than the lease
        late = asyncio.create_task(leads.prove())
        await asyncio.sleep(0)  # it has asked
        storage.answers.set()
        await asyncio.gather(early, late)

    asyncio.run(prove())
    assert storage.count == 2


def test_a_displaced_leader_learns_it_once() -> None:
    storage, leads, lost = leadership(1)
    storage.error = Fenced("term 2 exists")

    async def prove() -> None:
        with pytest.raises(Fenced):
            await leads.prove()
        await leads.keep()  # ends

    asyncio.run(prove())
    assert lost
    assert not leads.known


def run_dispatcher(
    storage: Storage, then: Callable[[Dispatcher], Coroutine[Any, Any, None]], **options: Any
) -> None:
    async def run() -> None:
        candidate = Candidate(storage, DispatcherOptions(**options), "here:1")
        dispatcher = await candidate.take_over()
        try:
            await then(dispatcher)
        finally:
            await dispatcher.close()

    asyncio.run(run())


async def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not true():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)


def test_what_cannot_be_applied_is_not_journaled_and_nobody_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = MemoryStorage()
    right = ev.Event(
        time_ms=1, worker_registered=ev.WorkerRegistered(worker_id=7, address="w:1", uid=7)
    )
    wrong = ev.Event(time_ms=1, task_completed=ev.TaskCompleted(task_id=7))

    async def a_bug(dispatcher: Dispatcher) -> None:
        status, request, _ = ForebayFace(dispatcher).methods()["GetStatus"]
        waiting = asyncio.create_task(dispatcher.wait_until(lambda: False, 60_000))
        await status(request())
        monkeypatch.setattr(dispatching, "decide", lambda *_: Decision([right, wrong], None))
        with pytest.raises(WrongTransition, match="task 7 is absent"):
            await dispatcher.execute(c.CompleteTask(task_id=7))
        assert dispatcher.stopped.is_set()
        await waiting
        with pytest.raises(Unavailable):
            await dispatcher.execute(c.CompleteTask(task_id=7))
        with pytest.raises(Unavailable):
            await status(request())

    run_dispatcher(storage, a_bug)
    monkeypatch.undo()

    async def the_next_one(dispatcher: Dispatcher) -> None:
        assert dispatcher.state.term == 2
        assert not dispatcher.state.workers

    run_dispatcher(storage, the_next_one)


def test_an_append_proves_the_lead_for_what_it_decided_and_for_no_question() -> None:
    storage = Renewals()

    async def renewals_fail(dispatcher: Dispatcher) -> None:
        definition = ev.DatasetDefinition(sources=[ev.SplitSource(count=9)])
        await dispatcher.execute(c.RegisterDataset(dataset_id="d", definition=definition))
        job_id = await dispatcher.execute(c.GetOrCreateJob(dataset_id="d", name="", sharding=1))
        joined = await dispatcher.execute(c.JoinIteration(job_id=job_id, epoch=0))
        methods = TensorFlowFace(dispatcher).methods()
        storage.error = Away("it is away")
        await until(lambda: not dispatcher.leadership.known)
        get_split, get_workers = methods["GetSplit"][0], methods["GetWorkers"][0]
        found = await get_split(tf.GetSplitRequest(iteration_id=joined.iteration_id))
        assert not found.end_of_splits
        with pytest.raises(Unavailable):
            await get_workers(tf.GetWorkersRequest())

    run_dispatcher(storage, renewals_fail, leader_lease_ms=100)


@pytest.mark.parametrize(
    "wrong",
    [
        ev.Event(task_completed=ev.TaskCompleted(task_id=7)),
        ev.Event(task_completed=ev.TaskCompleted()),
        ev.Event(compression_decided=ev.CompressionDecided(dataset_id="none")),
        ev.Event(consumer_left=ev.ConsumerLeft(consumer_id=7)),
    ],
    ids=lambda event: f"{event.WhichOneof('event')} {event.ByteSize()}",
)
def test_a_journal_that_cannot_be_is_corrupt_for_everybody(wrong: ev.Event) -> None:
    storage = MemoryStorage()
    writer = storage.open_writer("a bug")
    writer.append([elected(writer.term), encode(wrong)])
    writer.close()
    for find in (recover, lambda storage: Follower(storage).catch_up()):
        with pytest.raises(Corrupt, match=r"record 2 is whole, and cannot follow what came"):
            find(storage)
    follower = Follower(storage)
    follower.state = recover(storage, 1)[0]
    with pytest.raises(Corrupt, match="record 2 is whole"):
        follower.catch_up()


def test_while_the_storage_is_away_questions_wait_and_nobody_is_given_up() -> None:
    storage = Renewals()

    async def away(dispatcher: Dispatcher) -> None:
        worker_id = await dispatcher.execute(c.RegisterWorker(address="w:1", uid=1))
        storage.error = StorageError("it is away")
        await until(lambda: not dispatcher.leadership.known)
        with pytest.raises(Unavailable, match="cannot be reached"):
            await dispatcher.settled()
        await asyncio.sleep(1.5)  # several times the worker's timeout
        assert worker_id in dispatcher.state.workers
        storage.error = None
        await dispatcher.settled()
        await until(lambda: worker_id not in dispatcher.state.workers)  # its silence is its own

    timeouts = {"worker_timeout_ms": 300, "reconnect_grace_ms": 100}
    run_dispatcher(storage, away, leader_lease_ms=100, **timeouts)


def test_members_of_a_restarted_dispatcher_have_time_to_find_it_whatever_the_timeouts() -> None:
    storage = MemoryStorage()
    members: list[int] = []

    async def before(dispatcher: Dispatcher) -> None:
        definition = ev.DatasetDefinition(sources=[ev.SplitSource(count=1)])
        await dispatcher.execute(c.RegisterDataset(dataset_id="d", definition=definition))
        job_id = await dispatcher.execute(c.GetOrCreateJob(dataset_id="d", name="", sharding=0))
        joined = await dispatcher.execute(c.JoinIteration(job_id=job_id, epoch=0))
        for n in range(2):
            worker = c.RegisterWorker(address=f"w:{n}", uid=n, stock=bool(n))
            members.append(await dispatcher.execute(worker))
        members.append(joined.consumer_id)

    async def after(dispatcher: Dispatcher) -> None:
        await asyncio.sleep(1.5)  # several times their timeout
        assert members == [*dispatcher.state.workers, *dispatcher.state.consumers]

    run_dispatcher(storage, before)
    run_dispatcher(storage, after, worker_timeout_ms=200, client_timeout_ms=200)


@pytest.mark.parametrize("stock", [True, False])
def test_members_that_do_not_find_a_restarted_dispatcher_are_given_up(stock: bool) -> None:
    storage = MemoryStorage()

    async def before(dispatcher: Dispatcher) -> None:
        await dispatcher.execute(c.RegisterWorker(address="w:1", uid=1, stock=stock))

    async def after(dispatcher: Dispatcher) -> None:
        await until(lambda: not dispatcher.state.workers)

    run_dispatcher(storage, before)
    timeout_ms = 200 if stock else 3_600_000
    run_dispatcher(storage, after, worker_timeout_ms=timeout_ms, reconnect_grace_ms=100)


def test_a_stop_answers_what_it_has_decided_however_slow_the_journal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decided, go_on = threading.Event(), threading.Event()

    class Slow(MemoryStorage):
        def open_writer(self, owner: str, **options: Any) -> Any:
            writer = super().open_writer(owner, **options)
            append = writer.append

            def slow_append(records: Sequence[bytes]) -> int:
                if b"w:1" in b"".join(records):
                    decided.set()
                    go_on.wait(60)
                return append(records)

            writer.append = slow_append  # type: ignore[method-assign]
            return writer

    async def run() -> None:
        listener = Listener("127.0.0.1", 0, standby=False)
        candidate = Candidate(Slow(), DispatcherOptions(), listener.address)
        ready = asyncio.Event()
        lead = asyncio.create_task(server._lead(listener, candidate, ready.set))
        await ready.wait()
        async with grpc.aio.insecure_channel(listener.address) as channel:
            beat = channel.unary_unary(
                "/forebay.v1.Dispatcher/WorkerHeartbeat",
                pb.WorkerHeartbeatRequest.SerializeToString,
                pb.WorkerHeartbeatResponse.FromString,
            )
            call = beat(pb.WorkerHeartbeatRequest(address="w:1", uid=1))
            await until(decided.is_set)
            lead.cancel()
            await asyncio.sleep(0.5)  # longer than the grace
            go_on.set()
            assert (await call).worker_id > 0
        await asyncio.gather(lead, return_exceptions=True)

    monkeypatch.setattr(server, "STOP_GRACE_S", 0.1)
    asyncio.run(run())


def test_a_stock_client_that_has_not_begun_to_read_is_not_given_up() -> None:
    async def silent(dispatcher: Dispatcher) -> None:
        definition = ev.DatasetDefinition(sources=[ev.SplitSource(count=1)])
        await dispatcher.execute(c.RegisterDataset(dataset_id="d", definition=definition))
        job_id = await dispatcher.execute(c.GetOrCreateJob(dataset_id="d", name="", sharding=0))
        face = TensorFlowFace(dispatcher)
        joined = await face.get_or_create_iteration(tf.GetOrCreateIterationRequest(job_id=job_id))
        await asyncio.sleep(1.5)  # several times its timeout
        client_id = joined.iteration_client_id
        assert client_id in dispatcher.state.consumers
        await face.client_heartbeat(tf.ClientHeartbeatRequest(iteration_client_id=client_id))
        await until(lambda: not dispatcher.state.consumers)
        await face.close()

    run_dispatcher(MemoryStorage(), silent, client_timeout_ms=200)


def test_silence_is_given_no_less_than_a_connection_that_broke() -> None:
    async def silent(dispatcher: Dispatcher) -> None:
        await dispatcher.execute(c.RegisterWorker(address="w:1", uid=1))
        await asyncio.sleep(1.5)
        assert dispatcher.state.workers

    run_dispatcher(MemoryStorage(), silent, worker_timeout_ms=200)


def test_a_dispatcher_that_is_fenced_stops() -> None:
    storage = Renewals()

    async def fence(dispatcher: Dispatcher) -> None:
        storage.error = Fenced("term 2 exists")
        await asyncio.wait_for(dispatcher.stopped.wait(), 60)
        assert dispatcher.displaced
        with pytest.raises(Unavailable):
            await dispatcher.execute(c.RegisterWorker(address="w:1", uid=1))

    run_dispatcher(storage, fence, leader_lease_ms=100)


@pytest.mark.parametrize("kind", [ForebayFace, TensorFlowFace])
def test_a_leader_that_does_not_know_whether_it_leads_answers_nobody(
    kind: type[ForebayFace] | type[TensorFlowFace],
) -> None:
    storage = Renewals()

    async def resumed(dispatcher: Dispatcher) -> None:
        methods = kind(dispatcher).methods()
        assert len(methods) >= 11
        for answer, request, _ in methods.values():
            with contextlib.suppress(InvalidArgument, NotFound, Unimplemented):
                await answer(request())
        storage.error = Fenced("term 2 exists")
        await until(lambda: not dispatcher.leadership.known)
        for answer, request, _ in methods.values():
            with pytest.raises(Unavailable):
                await answer(request())

    run_dispatcher(storage, resumed, leader_lease_ms=100)


@pytest.mark.parametrize("error", [Away("it is away"), Fenced("term 2 exists")])
def test_a_standby_that_cannot_begin_tries_again(error: StorageError) -> None:
    class Flickering(MemoryStorage):
        tries = 0

        def snapshots(self) -> list[int]:
            if self._writer is not None:  # so it has the place, and is about to begin
                self.tries += 1
                if self.tries == 1:
                    raise error
            return super().snapshots()

    storage = Flickering()

    async def begun(dispatcher: Dispatcher) -> None:
        assert storage.tries > 1
        assert dispatcher.state.term == 2

    run_dispatcher(storage, begun, standby=True, leader_lease_ms=100)


# -- lost history ----------------------------------------------------------------------------------


def test_a_dispatcher_that_knows_less_than_others_stops() -> None:
    storage = MemoryStorage()

    async def check(dispatcher: Dispatcher) -> None:
        known = dispatcher.position()
        await dispatcher.check_history("x", known)
        known.sequence += 1
        another = pb.JournalPosition(journal_id="another", sequence=9)
        await dispatcher.check_history("x", another)  # which was in memory
        another.lasting = True
        with pytest.raises(AnotherJournal, match="knows the journal another up to event 9"):
            await dispatcher.check_history("x", another)
        assert not dispatcher.stopped.is_set()
        with pytest.raises(Unavailable):
            await dispatcher.check_history("worker w:1", known)
        assert dispatcher.stopped.is_set()

    run_dispatcher(storage, check)
    with pytest.raises(Corrupt, match="worker w:1 was told of event 2, and the journal ends at 1"):
        storage.open_writer("its successor")


def lead_once(candidate: Candidate) -> None:
    async def run() -> None:
        dispatcher = await candidate.take_over()
        await dispatcher.close()
        candidate.remember(dispatcher.position())

    asyncio.run(run())


@pytest.mark.parametrize("kept", [0, 1])
def test_who_led_does_not_lead_on_less(kept: int) -> None:
    storage = MemoryStorage()
    candidate = Candidate(storage, DispatcherOptions(), "here:1")
    lead_once(candidate)
    lead_once(candidate)
    assert storage.extent().last == 2
    del storage._records[kept:]
    # With nothing left, the first event of a new journal is not yet written when it is found out.
    with pytest.raises(Corrupt, match=f"knows of event 2 of .*, and the log ends at {kept}"):
        lead_once(candidate)
    with pytest.raises(Corrupt, match="knows of event 2"):
        storage.open_writer("another")


def test_who_followed_does_not_lead_on_less() -> None:
    storage = MemoryStorage()
    writer = storage.open_writer("the leader")
    writer.append([elected(1)])
    candidate = Candidate(storage, DispatcherOptions(standby=True, leader_lease_ms=100), "here:1")

    async def follow() -> None:
        following = asyncio.create_task(candidate.take_over())
        await until(lambda: candidate._follower.state.sequence == 1)
        writer.append([dataset("a")])  # so the event before was acknowledged
        await until(lambda: candidate._follower.state.sequence == 2)
        storage._records.clear()
        writer.close()
        with pytest.raises(Corrupt, match="knows of event 1 of journal j, and the log ends at 0"):
            await following

    asyncio.run(follow())


@pytest.mark.parametrize("repaired", [True, False])
def test_a_dispatcher_follows_its_journal_over_a_repair_only(repaired: bool) -> None:
    storage = MemoryStorage()
    candidate = Candidate(storage, DispatcherOptions(), "here:1")
    lead_once(candidate)
    lead_once(candidate)
    storage._records.clear()
    writer = storage.open_writer("a repair, or somebody with another journal")
    writer.append([elected(writer.term, after_repair=repaired)])
    writer.close()
    if repaired:
        lead_once(candidate)
    else:
        with pytest.raises(Corrupt, match=r"holds the journal j, which began on .* and held"):
            lead_once(candidate)
        lead_once(Candidate(storage, DispatcherOptions(), "here:1"))


def test_what_a_repair_has_made_continues_what_it_repaired() -> None:
    state = State()
    for journal_id, after_repair in (("a", False), ("b", True), ("c", True)):
        leader = ev.LeaderElected(journal_id=journal_id, after_repair=after_repair)
        apply(state, ev.Event(time_ms=7, leader_elected=leader))
    assert [continues(state, journal) for journal in "abcd"] == [True, True, False, False]
    of_nothing = State()
    apply(of_nothing, ev.Event(leader_elected=ev.LeaderElected(journal_id="b", after_repair=True)))
    assert continues(of_nothing, "a")


def beat(client: DispatcherClient, uid: int = 1) -> pb.WorkerHeartbeatResponse:
    request = pb.WorkerHeartbeatRequest(address="w:1", uid=uid)
    return client.call(request, pb.WorkerHeartbeatResponse, patience_s=20)


def test_a_storage_that_was_set_back_is_not_continued(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    journal, older = tmp_path / "journal", tmp_path / "older"
    dispatcher = DispatcherProcess(journal)
    client = DispatcherClient(dispatcher.target)
    first = beat(client)
    dispatcher.kill()
    shutil.copytree(journal, older)
    dispatcher.restart()
    known = beat(client, uid=2).journal.sequence
    dispatcher.kill()
    shutil.rmtree(journal)
    older.rename(journal)

    dispatcher.restart()  # and finds a journal that looks whole
    with pytest.raises(ForebayError):
        client.call(
            pb.WorkerHeartbeatRequest(address="w:1", uid=2), pb.WorkerHeartbeatResponse,
            patience_s=0.01,
        )  # fmt: skip
    assert dispatcher.wait() == 1
    with pytest.raises(AssertionError, match="ended with 1"):
        dispatcher.restart()
    assert f"was told of event {known}" in capfd.readouterr().err.splitlines()[-1]

    storage = open_storage(str(journal))
    with pytest.raises(Corrupt, match="was told of event"):
        repair(storage)
    assert repair(storage, truncate_corrupt=True)
    dispatcher.restart()
    again = beat(client, uid=2)
    assert again.journal.journal_id != first.journal.journal_id
    assert again.worker_id > first.worker_id
    client.close()
    dispatcher.stop()
