"""An upgrade without a stop: the previous version's dispatcher, worker and trainers beside today's.

The previous version is installed from ARCHIVE, with the libraries of today.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import tensorflow as tf
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet

from forebay import service
from forebay.journal.proto import events_pb2
from forebay.journal.verification import verify
from forebay.service.proto import forebay_pb2, transfer_pb2
from forebay.storage import open_storage
from forebay.storage.proto import segment_pb2

from ..cluster import WorkerProcess
from ..standbys import LEASE_MS, leads, wait_until
from ..stock import DispatcherProcess, ServerProcess, slow
from .test_tracing import collector

ARCHIVE = Path(__file__).with_name("previous_version.tar.xz")
"""v0.1.0. Once a later version is released: `git archive TAG service storage journal frameworks
pyproject.toml README.md LICENSE | xz -9`."""

ELEMENTS = 1_500
ORDER: dict[str, Any] = {"ordered": True, "seed": 7, "cycle_length": 4}
SHARED = {"processing_mode": "distributed_epoch", "job_name": "shared"}

TRAINER = """
import json, sys
from forebay import service
target, dataset_id, path, how = sys.argv[1:]
print("reads", flush=True)
with open(path, "w", buffering=1) as file:
    with service.read(target, dataset_id, **json.loads(how)) as elements:
        for element in elements:
            print(int(element), file=file)
"""

SCHEMAS = """
import sys
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from forebay.journal.proto import events_pb2
from forebay.service.proto import forebay_pb2, transfer_pb2
from forebay.storage.proto import segment_pb2
files = FileDescriptorSet()
for module in events_pb2, forebay_pb2, transfer_pb2, segment_pb2:
    module.DESCRIPTOR.CopyToProto(files.file.add())
sys.stdout.buffer.write(files.SerializeToString())
"""


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of programs of the previous version."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(source, filter="data")
    install = ("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([sys.executable, *install, "--target", site, source], check=True)
    # Ahead of today's; the folder that the test runs in is not looked at.
    environment = {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    where = "import forebay.service; print(forebay.service.__file__)"
    assert python(where, environment).decode().startswith(str(site))
    return environment


def python(code: str, environment: Mapping[str, str]) -> bytes:
    """What the code prints."""
    return subprocess.run(
        [sys.executable, "-c", code], env=dict(environment), check=True, stdout=subprocess.PIPE
    ).stdout


class Trainer:
    """A process that reads a dataset, and notes what it gets in a file."""

    def __init__(
        self,
        target: str,
        dataset_id: str,
        path: Path,
        how: Mapping[str, object],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        command = ["-c", TRAINER, target, dataset_id, str(path), json.dumps(how)]
        self._process = ServerProcess(command, environment)
        self._process.first_line()
        self._path = path

    @property
    def got(self) -> list[int]:
        return [*map(int, self._path.read_text().split())] if self._path.exists() else []

    def all(self) -> list[int]:
        """What it got to the end."""
        assert self._process.wait() == 0
        return self.got


@contextlib.contextmanager
def old(environment: Mapping[str, str], *command: object) -> Iterator[ServerProcess]:
    """A server of the previous version."""
    process = ServerProcess(["-m", "forebay.service.cli", *map(str, command)], environment)
    try:
        yield process
    finally:
        process.kill()


def test_a_newer_standby_takes_over_and_nothing_is_lost_or_repeated(
    previous: dict[str, str], redis_storage_url: str, tmp_path: Path
) -> None:
    storage = ("--storage", redis_storage_url, "--leader-lease-ms", LEASE_MS)
    with old(previous, "dispatcher", *storage) as leader, collector() as (url, spans):
        traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": url}  # today's tell it to the old ones
        first = leader.first_line().removeprefix("grpc://")
        standby = DispatcherProcess(redis_storage_url, standby=True, leader_lease_ms=LEASE_MS)
        addresses = f"{first},{standby.address}"
        dataset_id = service.register_dataset(
            addresses, slow(tf.data.Dataset.range(ELEMENTS), 0.001)
        )
        trainers = [
            Trainer(addresses, dataset_id, tmp_path / name, how, environment)
            for name, how, environment in (
                ("old, shared", SHARED, previous),
                ("today's, shared", SHARED, traced),
                ("old, ordered", ORDER, previous),
            )
        ]
        with standby, old(previous, "worker", "--dispatcher", addresses) as old_worker:
            for trainer in trainers:
                wait_until(lambda: len(trainer.got) > 100)  # noqa: B023
            leader.kill()
            wait_until(leads, standby, 2)
            with WorkerProcess(addresses, traced).until_told():
                assert old_worker.stop() == 0  # hands back what today's worker then reads
                *shared, in_order = (trainer.all() for trainer in trainers)
                assert sorted(itertools.chain(*shared)) == list(range(ELEMENTS))
                with service.read(addresses, dataset_id, **ORDER) as elements:
                    assert in_order == [int(element) for element in elements]
        assert "forebay.next" in {span.name for _, span in spans.values()}
    assert verify(open_storage(redis_storage_url)).ok


def test_fields_of_messages_keep_their_numbers_and_types(previous: dict[str, str]) -> None:
    """Of journals, snapshots and the wire. A number that is no longer used stays reserved."""
    before = messages(FileDescriptorSet.FromString(python(SCHEMAS, previous)))
    today = FileDescriptorSet()
    for module in (events_pb2, forebay_pb2, transfer_pb2, segment_pb2):
        module.DESCRIPTOR.CopyToProto(today.file.add())
    now = messages(today)
    changed = [
        f"{name}.{field.name}"
        for name, message in before.items()
        for field in message.field
        if not keeps(now.get(name, DescriptorProto()), field)
    ]
    assert before and not changed


def messages(files: FileDescriptorSet) -> dict[str, DescriptorProto]:
    """All messages by their full names, those within others included."""
    found: dict[str, DescriptorProto] = {}

    def add(prefix: str, message: DescriptorProto) -> None:
        found[f"{prefix}.{message.name}"] = message
        for inner in message.nested_type:
            add(f"{prefix}.{message.name}", inner)

    for file in files.file:
        for message in file.message_type:
            add(file.package, message)
    return found


def keeps(message: DescriptorProto, field: FieldDescriptorProto) -> bool:
    """Whether the field has its number and type, or its number is reserved."""
    same = (field.type, field.label, field.type_name, field.HasField("oneof_index"))
    for other in message.field:
        if other.number == field.number:
            described = (other.type, other.label, other.type_name, other.HasField("oneof_index"))
            return described == same
    return any(reserved.start <= field.number < reserved.end for reserved in message.reserved_range)
