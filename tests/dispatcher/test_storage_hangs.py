"""A storage that hangs: who asks hears of it at once, and it uses up no threads of others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from forebay.journal import journal
from forebay.service.core import commands as c
from forebay.service.diagnosis import findings
from forebay.service.dispatcher import leadership, storage_watch
from forebay.service.dispatcher.dispatcher import Dispatcher
from forebay.service.dispatcher.dispatcher_servicer import DispatcherServicer
from forebay.service.errors import Unavailable
from forebay.service.findings import Finding
from forebay.service.processes import free_port
from forebay.service.proto import forebay_pb2 as pb
from forebay.storage import MemoryStorage, StorageError

from .. import forks
from ..postgres_server import running_postgres
from ..redis_server import running_redis
from ..scrapes import get
from ..standbys import wait_until
from ..stock import DispatcherProcess
from .leading import run_dispatcher, until


class Hanging(MemoryStorage):
    """Hangs as long as `answers` is not set: in appends, in renewals, and in reads of blobs."""

    def __init__(self, renews: bool) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()
        self.hanging = 0  # calls
        self.renews = renews  # even then: a disk on which fsync alone hangs

    def open_writer(self, owner: str, **options: Any) -> Any:
        writer = super().open_writer(owner, **options)
        append, renew = writer.append, writer.renew

        def slow_append(records: Sequence[bytes]) -> int:
            self._wait()
            return append(records)

        def slow_renew() -> None:
            if not self.renews:
                self._wait()
            renew()

        writer.append, writer.renew = slow_append, slow_renew  # type: ignore[method-assign]
        return writer

    def _wait(self) -> None:
        self.hanging += 1
        self.answers.wait(60)
        self.hanging -= 1

    def read_blob(self, name: str) -> bytes:
        self._wait()
        return super().read_blob(name)


async def told(dispatcher: Dispatcher, **request: Any) -> list[Finding]:
    answer = DispatcherServicer(dispatcher).methods()["GetStatus"][0]
    status = (await answer(pb.GetStatusRequest(**request))).status
    return findings(json.loads(status))


@pytest.mark.parametrize("renews", [False, True], ids=["server", "disk"])
def test_the_first_finding_is_the_storage_until_it_answers(
    renews: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_watch, "SILENT_S", 0.3)
    storage = Hanging(renews)

    async def hangs(dispatcher: Dispatcher) -> None:
        await dispatcher.execute(c.RegisterWorker(address="w:1", uid=1))
        assert not [one for one in await told(dispatcher) if one.severity == "problem"]
        storage.answers.clear()
        waits = asyncio.create_task(dispatcher.execute(c.RegisterWorker(address="w:2", uid=2)))
        await until(lambda: dispatcher.storage_watch.silent_s > 0)
        for name in ("GetStatus", "ListDatasets", "FindGoneConsumers"):
            answer, request, _ = DispatcherServicer(dispatcher).methods()[name]
            with pytest.raises(
                Unavailable, match=r"the journal's storage memory: has not answered"
            ):
                await answer(request())

        async def fails() -> None:
            raise dispatcher.unavailable()

        with pytest.raises(Unavailable, match="has not answered"):  # if a renewal fails meanwhile
            await dispatcher.storage_watch.bound(fails())
        first, *others = await told(dispatcher, unproved=True)
        assert (first.severity, first.subject) == ("problem", "storage memory:")
        assert first.since_s and "all go on by themselves" in first.advice
        assert not [one for one in others if one.subject.startswith("job")]
        # Asyncio's own threads are free, however many wait for graphs.
        reads = [
            asyncio.ensure_future(dispatcher.storage_threads.run(storage.read_blob, "b"))
            for _ in range(64)
        ]
        await asyncio.wait_for(asyncio.to_thread(int), 60)
        assert not waits.done()
        storage.answers.set()
        await waits
        await until(lambda: dispatcher.storage_watch.status()["answers_s"] is not None)
        (ended,) = [one for one in await told(dispatcher) if one.subject == "storage memory:"]
        assert (ended.severity, ended.advice) == ("note", "loads are measured anew")
        for error in await asyncio.gather(*reads, return_exceptions=True):
            assert isinstance(error, StorageError)  # there is no such graph

    run_dispatcher(storage, hangs, leader_lease_ms=400)


@pytest.mark.parametrize("renews", [False, True], ids=["server", "disk"])
def test_a_dispatcher_ends_though_its_storage_hangs(
    renews: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module, name in (journal, "FLUSH_S"), (journal, "CLOSE_S"), (leadership, "FLUSH_S"):
        monkeypatch.setattr(module, name, 0.2)
    storage = Hanging(renews)

    async def hangs(dispatcher: Dispatcher) -> None:
        storage.answers.clear()
        waits = asyncio.create_task(dispatcher.execute(c.RegisterWorker(address="w:2", uid=2)))
        await asyncio.sleep(0)
        waits.cancel()

    run_dispatcher(storage, hangs, leader_lease_ms=400)
    assert storage.hanging > 0, "it was not waited for"
    assert "memory: hangs: its threads end with this process" in caplog.text
    storage.answers.set()


@contextlib.contextmanager
def stopped_server(kind: str, tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """A storage on a server of its own."""
    if kind == "redis":
        with running_redis(tmp_path / "redis", appendonly="yes", appendfsync="always") as server:
            yield server.url, server
    else:
        with running_postgres() as server:
            yield server.url, server


def forebay(dispatcher: DispatcherProcess, *command: str) -> tuple[int, list[str]]:
    done = forks.run(
        ["-m", "forebay.service.cli", *command, dispatcher.target], 60, forks.DISPATCHER
    )
    return done.returncode, (done.stdout or done.stderr).splitlines()


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_a_stopped_server_is_what_the_page_and_the_commands_say_first(
    kind: str, tmp_path: Path
) -> None:
    port = free_port()
    with (
        stopped_server(kind, tmp_path) as (url, server),
        DispatcherProcess(url, http_port=port) as dispatcher,
        DispatcherProcess(url, standby=True) as standby,
    ):
        assert forebay(dispatcher, "doctor") == (0, ["nothing to do"])
        server.pause()
        try:
            wait_until(lambda: "does not answer: all figures are as of" in get(port, "/")[1])
            code, said = forebay(dispatcher, "doctor")
            assert code == 3 and said[0].startswith(f"problem: storage {kind}"), said
            assert "it does not answer" in said[0] and "see whether its server runs" in said[1]
            code, said = forebay(standby, "status")
            assert code == 0 and "does not answer" in said[0], said
            code, said = forebay(dispatcher, "dataset", "list")
            assert code == 1 and "has not answered for" in said[-1], said
            assert get(port, "/events")[0] == 503
            assert "waits for its storage, which has not answered" in get(port, "/readyz")[1]
            findings = get(port, "/")[1].partition("What is wrong")[2]
            assert findings.partition("</li>")[0].count("f-problem") == 1
            assert f"storage {kind}" in findings.partition("</li>")[0]
        finally:
            server.resume()
        wait_until(lambda: "answers again, and did not for" in get(port, "/")[1])
        assert forebay(dispatcher, "doctor")[0] == 0
