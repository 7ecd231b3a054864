"""An emptied storage begins another journal; members of the old one wait until that is back."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.journal.verification import repair
from forebay.service.blocks import Block
from forebay.service.client.reader import Reader
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.errors import AnotherJournal, Unavailable
from forebay.service.proto import forebay_pb2 as pb
from forebay.storage import open_storage

from ..redis_server import opened_keys
from ..standbys import status, wait_until
from ..stock import GRAPH, DispatcherProcess
from ..transfer_servers import SERVERS

THEIRS = "7e15" * 8


@pytest.fixture
def client() -> Iterator[Callable[[DispatcherProcess], DispatcherClient]]:
    with contextlib.ExitStack() as opened:
        yield lambda dispatcher: opened.enter_context(DispatcherClient(dispatcher.target))


def beat(
    client: DispatcherClient, address: str = "w:1", patience_s: float = 20
) -> pb.WorkerHeartbeatResponse:
    request = pb.WorkerHeartbeatRequest(transfer_servers=SERVERS, address=address, uid=1)
    return client.call(request, pb.WorkerHeartbeatResponse, patience_s=patience_s)


def set_aside(url: str) -> Callable[[], None]:
    """Empty the storage; returns a function that restores it."""
    if url.startswith("redis://"):
        with opened_keys(url) as (client, keys):
            kept = [(key, f"{key}:kept") for key in keys]
            for key, aside in kept:
                if client.exists(key):
                    client.rename(key, aside)

        def bring_back() -> None:
            with opened_keys(url) as (client, _):
                for key, aside in kept:
                    client.delete(key)
                    if client.exists(aside):
                        client.rename(aside, key)

        return bring_back
    path, away = Path(url), Path(f"{url}.kept")
    path.rename(away)

    def mount() -> None:
        shutil.rmtree(path)
        away.rename(path)

    return mount


def test_workers_and_consumers_keep_to_the_journal_that_they_know(
    any_storage: str, client: Callable[[DispatcherProcess], DispatcherClient]
) -> None:
    dispatcher = DispatcherProcess(any_storage)
    worker = client(dispatcher)
    known = beat(worker)
    dispatcher.kill()
    bring_back = set_aside(any_storage)
    dispatcher.restart()

    wait_until(lambda: refusal(worker) != "")
    found = status(dispatcher)
    for words in (known.journal.journal_id, str(found["journal_id"]), "began on 20"):
        assert words in refusal(worker)
    assert found["workers"] == []
    assert [(s["who"], s["journal_id"]) for s in found["strangers"]] == [
        ("worker w:1", known.journal.journal_id)
    ]
    assert beat(client(dispatcher), "w:2").worker_id, "who knows nothing may begin"

    dispatcher.kill()
    bring_back()
    with dispatcher:
        dispatcher.restart()
        assert beat(worker).worker_id == known.worker_id
        assert status(dispatcher)["strangers"] == []


def test_a_worker_joins_a_restarted_dispatcher_whose_journal_was_in_memory(
    client: Callable[[DispatcherProcess], DispatcherClient],
) -> None:
    with DispatcherProcess("memory:") as dispatcher:
        worker = client(dispatcher)
        known = beat(worker)
        dispatcher.kill_and_restart()
        assert beat(worker).journal.journal_id != known.journal.journal_id


def test_a_worker_of_a_journal_on_disk_does_not_join_one_in_memory(tmp_path: Path) -> None:
    """memory: is the default storage, so somebody may forget to name the one on disk."""
    with DispatcherProcess("memory:") as other:
        dispatcher = DispatcherProcess(tmp_path)
        with DispatcherClient(f"{dispatcher.target},{other.target}") as worker:
            beat(worker)
            dispatcher.kill()
            wait_until(lambda: refusal(worker) != "")
        assert status(other)["workers"] == []


def refusal(client: DispatcherClient) -> str:
    """The error with which a heartbeat is refused; "" while no dispatcher answers."""
    try:
        beat(client, patience_s=0.01)
    except AnotherJournal as error:
        return str(error)
    except Unavailable:
        return ""
    raise AssertionError("it joined another journal")


def test_a_worker_joins_a_repaired_journal(
    tmp_path: Path, client: Callable[[DispatcherProcess], DispatcherClient]
) -> None:
    dispatcher = DispatcherProcess(tmp_path)
    worker = client(dispatcher)
    known = [beat(worker)]
    for _ in range(2):
        dispatcher.kill()
        storage = open_storage(str(tmp_path))
        writer = storage.open_writer("the test")
        writer.condemn("events are gone")
        writer.close()
        assert repair(storage, truncate_corrupt=True)
        dispatcher.restart()
        assert beat(client(dispatcher)).worker_id
    known.append(beat(worker))  # over two repairs at once
    assert known[1].journal.journal_id != known[0].journal.journal_id
    dispatcher.stop()


def knocking(dispatcher: DispatcherProcess) -> list[str]:
    return [stranger["who"] for stranger in status(dispatcher)["strangers"]]


# -- --existing ------------------------------------------------------------------------------------


def test_the_option_existing_refuses_to_begin_a_journal(any_storage: str) -> None:
    with pytest.raises(AssertionError, match="ended with 1"):
        DispatcherProcess(any_storage, existing=True)
    storage = open_storage(any_storage)
    assert storage.holdings().segments == 0
    assert not Path(any_storage).exists(), "nothing was touched"
    with DispatcherProcess(any_storage):
        pass
    with DispatcherProcess(any_storage, existing=True) as dispatcher:
        assert status(dispatcher)["term"] == 2


def test_a_client_that_waits_for_its_journal_logs_so(
    dispatcher: DispatcherProcess, caplog: pytest.LogCaptureFixture
) -> None:
    known = pb.JournalPosition(journal_id=THEIRS, sequence=7, lasting=True)
    with DispatcherClient(dispatcher.target, known=known) as stray:
        request = pb.WorkerHeartbeatRequest(transfer_servers=SERVERS, address="w:9", uid=9)
        waiting = threading.Thread(target=lambda: expect_end(stray, request))
        waiting.start()
        wait_until(lambda: f"know the journal {THEIRS} up to event 7" in caplog.text)
    waiting.join(60)
    assert not waiting.is_alive()


def expect_end(client: DispatcherClient, request: pb.WorkerHeartbeatRequest) -> None:
    with pytest.raises(Unavailable):
        client.call(request, pb.WorkerHeartbeatResponse)


def test_a_trainer_does_not_begin_its_next_epoch_on_another_journal(
    tmp_path: Path, client: Callable[[DispatcherProcess], DispatcherClient]
) -> None:
    journal = str(tmp_path / "journal")
    dispatcher = DispatcherProcess(journal)
    register(client(dispatcher))
    reader = Reader(dispatcher.target, "mine", "job")
    nothing = Block(0, ())
    epoch = reader.iterate(nothing)
    assert next(epoch) is nothing
    epoch.close()
    dispatcher.kill()
    bring_back = set_aside(journal)
    dispatcher.restart()
    register(client(dispatcher))
    came: list[Block] = []

    def read_next() -> None:
        epoch = reader.iterate(nothing)
        came.append(next(epoch))
        epoch.close()

    reading = threading.Thread(target=read_next)
    reading.start()
    wait_until(lambda: knocking(dispatcher) == ["a trainer of dataset mine"])
    assert status(dispatcher)["jobs"] == []
    dispatcher.kill()
    bring_back()
    with dispatcher:
        dispatcher.restart()
        reading.join(60)
        assert came == [nothing]


def register(client: DispatcherClient) -> None:
    request = pb.RegisterDatasetRequest(graph=GRAPH, dataset_id="mine")
    client.call(request, pb.RegisterDatasetResponse)
