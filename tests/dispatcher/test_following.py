"""Following a journal, taking over, and finding out that history was lost."""

from __future__ import annotations

import asyncio
import copy
import shutil
from pathlib import Path

import pytest

from forebay.journal.codec import encode
from forebay.journal.proto import events_pb2 as ev
from forebay.journal.verification import repair
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.core.encoding import encode_state
from forebay.service.core.machine import apply
from forebay.service.core.state import State
from forebay.service.dispatcher import history, positions
from forebay.service.dispatcher.candidate import Candidate, Follower
from forebay.service.dispatcher.dispatcher import Dispatcher
from forebay.service.dispatcher.history import continues
from forebay.service.dispatcher.options import DispatcherOptions
from forebay.service.dispatcher.recovery import recover
from forebay.service.errors import AnotherJournal, ForebayError, InvalidArgument, Unavailable
from forebay.service.proto import forebay_pb2 as pb
from forebay.storage import (
    Corrupt,
    Fenced,
    MemoryStorage,
    StorageError,
    StorageUnavailable,
    open_storage,
)

from ..stock import DispatcherProcess
from ..transfer_servers import SERVERS
from .leading import dataset, elected, run_dispatcher, until


class LossyStorage(MemoryStorage):
    """A storage that can lose its last records, whether they were acknowledged or not."""

    def lose(self, records: int) -> None:
        del self._records[-records:]


class TestFollower:
    def setup_method(self) -> None:
        self.storage = LossyStorage()
        self.follower = Follower(self.storage)
        self.writer = self.storage.open_writer("the test")
        self.writer.append([elected(1), dataset("a")])

    def expect_current(self) -> None:
        self.follower.catch_up()
        assert encode_state(self.follower.state) == encode_state(recover(self.storage)[0])

    def test_a_follower_keeps_up_with_the_writer(self) -> None:
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
        self.storage.lose(2)
        self.writer.close()
        successor = self.storage.open_writer("its successor")
        successor.append([elected(successor.term), *map(dataset, "xyz"[:more])])
        self.expect_current()
        assert "vanishes" not in self.follower.state.datasets

    def test_a_follower_continues_from_a_snapshot_when_its_records_were_trimmed(self) -> None:
        self.follower.catch_up()
        self.writer.append([dataset(str(i)) for i in range(20)])
        state, _ = recover(self.storage)
        from forebay.journal.snapshots import encode_snapshot

        self.writer.write_snapshot(22, encode_snapshot(encode_state(state), 1))
        self.writer.trim(23)
        self.writer.append([dataset("more")])
        self.expect_current()


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
def test_an_impossible_event_makes_the_journal_corrupt_for_every_reader(wrong: ev.Event) -> None:
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


@pytest.mark.parametrize("error", [StorageUnavailable("it is away"), Fenced("term 2 exists")])
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


def test_a_dispatcher_that_knows_fewer_events_than_a_member_stops() -> None:
    storage = MemoryStorage()

    async def check(dispatcher: Dispatcher) -> None:
        known = copy.copy(dispatcher.position())
        await dispatcher.history.check("x", known)
        known.sequence += 1
        positions.prove(dispatcher.state.position_key, known)  # as if it had been told
        another = pb.JournalPosition(journal_id="a" * 32, sequence=9)
        invented = pb.JournalPosition(journal_id=known.journal_id, sequence=known.sequence)
        for proof in (b"", known.proof[:-1] + b"?"):
            invented.proof = proof
            with pytest.raises(InvalidArgument, match="no dispatcher of this journal has said so"):
                await dispatcher.history.check("somebody", invented)
        await dispatcher.history.check("x", another)  # which was in memory
        another.lasting = True
        with pytest.raises(
            AnotherJournal, match=f"know the journal {another.journal_id} up to event 9"
        ):
            await dispatcher.history.check("x", another)
        another.journal_id = "J1" + "Z" * 900
        with pytest.raises(InvalidArgument, match="have 32 hexadecimal digits"):
            await dispatcher.history.check("x", another)
        assert not dispatcher.stopped.is_set()
        with pytest.raises(Unavailable):
            await dispatcher.history.check("worker w:1", known)
        assert dispatcher.stopped.is_set()

    run_dispatcher(storage, check)
    with pytest.raises(Corrupt, match="worker w:1 was told of event 2, and the journal ends at 1"):
        storage.open_writer("its successor")


def test_who_claims_other_journals_without_end_alarms_little(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(history, "REFUSAL_PAUSE_MS", 0)

    async def check(dispatcher: Dispatcher) -> None:
        for number in range(100):
            known = pb.JournalPosition(journal_id=f"{number:032x}", sequence=1, lasting=True)
            for who, caller in (
                (f"a reader of dataset {number}", "token a"), ("worker w:1", "token b")
            ):  # fmt: skip
                with pytest.raises(AnotherJournal, match="claims to know"):
                    await dispatcher.history.check(who, known, caller)
        found = [refused_peer.who for refused_peer in dispatcher.history.refused_peers()]
        assert found[-1] == "worker w:1 (token b)"
        assert set(found[:-1]) == {f"a reader of dataset {n} (token a)" for n in range(84, 100)}

    run_dispatcher(MemoryStorage(), check)
    said = [one for one in caplog.records if "claims to know" in one.getMessage()]
    assert [one.levelname for one in said] == ["WARNING"] * 2, "a minute for each caller"


def lead_once(candidate: Candidate) -> None:
    async def run() -> None:
        dispatcher = await candidate.take_over()
        await dispatcher.close()
        candidate.remember(dispatcher.position())

    asyncio.run(run())


@pytest.mark.parametrize("kept", [0, 1])
def test_a_former_leader_does_not_lead_a_journal_that_lost_its_events(kept: int) -> None:
    storage = LossyStorage()
    candidate = Candidate(storage, DispatcherOptions(), "here:1")
    lead_once(candidate)
    lead_once(candidate)
    assert storage.extent().last == 2
    storage.lose(2 - kept)
    # With nothing left, the first event of a new journal is not yet written when it is found out.
    with pytest.raises(Corrupt, match=f"knows of event 2 of .*, and the log ends at {kept}"):
        lead_once(candidate)
    with pytest.raises(Corrupt, match="knows of event 2"):
        storage.open_writer("another")


def test_a_follower_does_not_lead_a_journal_that_lost_events_it_saw() -> None:
    storage = LossyStorage()
    writer = storage.open_writer("the leader")
    writer.append([elected(1)])
    candidate = Candidate(storage, DispatcherOptions(standby=True, leader_lease_ms=100), "here:1")

    async def follow() -> None:
        following = asyncio.create_task(candidate.take_over())
        await until(lambda: candidate._follower.state.sequence == 1)
        writer.append([dataset("a")])  # so the event before was acknowledged
        await until(lambda: candidate._follower.state.sequence == 2)
        storage.lose(2)
        writer.close()
        with pytest.raises(Corrupt, match="knows of event 1 of journal j, and the log ends at 0"):
            await following

    asyncio.run(follow())


@pytest.mark.parametrize("repaired", [True, False])
def test_a_candidate_accepts_a_shorter_journal_only_after_a_repair(repaired: bool) -> None:
    storage = LossyStorage()
    candidate = Candidate(storage, DispatcherOptions(), "here:1")
    lead_once(candidate)
    lead_once(candidate)
    storage.lose(2)
    writer = storage.open_writer("a repair, or somebody with another journal")
    writer.append([elected(writer.term, after_repair=repaired)])
    writer.close()
    if repaired:
        lead_once(candidate)
    else:
        with pytest.raises(Corrupt, match=r"holds the journal j, which began on .* and held"):
            lead_once(candidate)
        lead_once(Candidate(storage, DispatcherOptions(), "here:1"))


def test_a_repaired_journal_continues_the_one_before_the_repair() -> None:
    state = State()
    for journal_id, after_repair in (("a", False), ("b", True), ("c", True)):
        leader = ev.LeaderElected(journal_id=journal_id, after_repair=after_repair)
        apply(state, ev.Event(time_ms=7, leader_elected=leader))
    assert [continues(state, journal) for journal in "abcd"] == [True, True, False, False]
    of_nothing = State()
    apply(of_nothing, ev.Event(leader_elected=ev.LeaderElected(journal_id="b", after_repair=True)))
    assert continues(of_nothing, "a")


def beat(client: DispatcherClient, uid: int = 1) -> pb.WorkerHeartbeatResponse:
    request = pb.WorkerHeartbeatRequest(transfer_servers=SERVERS, address="w:1", uid=uid)
    return client.call(request, pb.WorkerHeartbeatResponse, patience_s=20)


def test_a_storage_that_was_restored_from_a_backup_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
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
            pb.WorkerHeartbeatRequest(transfer_servers=SERVERS, address="w:1", uid=2),
            pb.WorkerHeartbeatResponse,
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
