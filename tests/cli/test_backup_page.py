"""docs/operations.md: its commands back up a journal while a dispatcher leads, and restore it."""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forebay import service
from forebay.journal.verification import verify
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.core.encoding import encode_state
from forebay.service.dispatcher.recovery import recover
from forebay.service.errors import NotFound
from forebay.service.processes import free_port
from forebay.service.proto import forebay_pb2 as pb
from forebay.storage import Record, open_storage
from forebay.storage.memory import MemoryStorage

from ..cluster import WorkerProcess
from ..postgres_server import schema_of
from ..redis_server import running_redis
from ..stock import DispatcherProcess

PAGE = (pathlib.Path(__file__).parents[2] / "docs/operations.md").read_text()
SECTION = PAGE.partition("\n## Back up and restore\n")[2].partition("\n## ")[0]
NUMBERS = list(range(400))


def run(words: str, **variables: object) -> None:
    """Run the commands of the page behind these words, as somebody would who pastes them."""
    (block,) = re.findall(
        rf"^\*\*{words}\b.*?^```sh\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL
    )
    assert len(block.splitlines()) <= 10
    commands = block.replace("6390", str(free_port()))
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        env={**os.environ, "PATH": path, **{k: str(v) for k, v in variables.items()}},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert not done.returncode, done.stdout + done.stderr


@contextmanager
def decisions(target: str, dataset_id: str) -> Iterator[None]:
    """A leader that writes: it makes one job after the other."""
    client, ended = DispatcherClient(target), threading.Event()

    def decide() -> None:
        for number in itertools.count():
            job = pb.GetOrCreateJobRequest(
                dataset_id=dataset_id, job_name=f"{number}", sharding="DYNAMIC"
            )
            client.call_numbered(job, pb.GetOrCreateJobResponse)
            if ended.wait(0.002):
                return

    thread = threading.Thread(target=decide, name="decisions")
    thread.start()
    yield
    ended.set()
    thread.join()
    client.close()


@pytest.fixture(params=["local files", "Redis", "PostgreSQL"])
def kind_and_variables(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> Iterator[tuple[str, dict[str, object]]]:
    """Which storage, and the variables of the page."""
    (backup := tmp_path / "backup").mkdir(mode=0o700)
    url: object
    if request.param == "local files":
        url = tmp_path / "journal"
        yield request.param, {"BACKUP": backup, "FOREBAY_STORAGE": url, "JOURNAL": url}
    elif request.param == "Redis":
        with running_redis(tmp_path / "redis") as redis:  # all of its keys are replaced
            url = f"{redis.url}?prefix=training"
            yield request.param, {"BACKUP": backup, "FOREBAY_STORAGE": url, "REDIS": redis.url}
    else:
        url = request.getfixturevalue("postgres_storage_url")
        yield request.param, {
            "BACKUP": backup, "FOREBAY_STORAGE": url,
            "DATABASE": str(url).partition("?")[0], "SCHEMA": schema_of(str(url)),
        }  # fmt: skip


def replayed(records: list[Record]) -> bytes:
    memory = MemoryStorage()
    memory.open_writer("the test").append([record.data for record in records])
    return encode_state(recover(memory)[0])


def test_the_page_backs_up_a_journal_in_use_and_restores_it(
    kind_and_variables: tuple[str, dict[str, object]],
) -> None:
    import tensorflow as tf

    kind, variables = kind_and_variables
    url = str(variables["FOREBAY_STORAGE"])
    with DispatcherProcess(url) as dispatcher, WorkerProcess(dispatcher.address):
        dataset = tf.data.Dataset.range(len(NUMBERS)).map(lambda x: (x, tf.zeros([20_000])))
        dataset_id = service.register_dataset(dispatcher.target, dataset)

        def read(job_name: str) -> Iterator[int]:
            elements = service.read(
                dispatcher.target, dataset_id,
                processing_mode="distributed_epoch", job_name=job_name,
            )  # fmt: skip
            return (int(number) for number, _ in elements)

        open_read = read("open")
        next(open_read)
        with decisions(dispatcher.target, dataset_id):
            run(f"Back up {kind}", **variables)
        assert sorted(read("later")) == NUMBERS  # so a worker knows events that the backup lacks
        dispatcher.kill()
        history = list(open_storage(url).read())
        run(f"Restore {kind}", **variables)
        restored = list(open_storage(url).read())
        assert restored == history[: len(restored)] and len(restored) < len(history)
        state, _ = recover(open_storage(url))
        assert encode_state(state) == replayed(restored)

        run("After restoring", **variables)
        dispatcher.restart()
        assert sorted(read("anew")) == NUMBERS
        with pytest.raises(NotFound, match="a repair of the journal"):
            list(open_read)
        assert not verify(open_storage(url)).problems
