"""Whatever happens to one file of a storage: `verify` names it, as a dispatcher that refuses does.

And what is said to be done about it ends it.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
import typer.testing

from forebay.journal.codec import encode
from forebay.journal.proto import events_pb2 as ev
from forebay.journal.snapshots import encode_snapshot
from forebay.journal.verification import repair, verify
from forebay.service.cli.journal import app
from forebay.service.core.encoding import encode_state
from forebay.service.core.state import State
from forebay.service.dispatcher.candidate import Candidate
from forebay.service.dispatcher.graphs import needed_blobs
from forebay.service.dispatcher.options import DispatcherOptions
from forebay.service.dispatcher.recovery import recover
from forebay.storage import Corrupt, FileStorage, Storage, StorageError

from ..stock import GRAPH
from ..storage.test_lost_files import delete, empty, fill_with_zeros, halve

RENAMED = GRAPH.replace(b"source", b"origin")
SNAPSHOTS = (6, 17)

T = TypeVar("T")


def storage_at(path: Path) -> FileStorage:
    return FileStorage(path, segment_bytes=400)  # three events or four


def leader(term: int) -> bytes:
    elected = ev.LeaderElected(term=term, journal_id="j", address="127.0.0.1:5050")
    return encode(ev.Event(time_ms=term, leader_elected=elected))


def dataset(name: str, blob: str) -> bytes:
    definition = ev.DatasetDefinition(tf_data_graph=ev.TfDataGraph(blob=blob))
    registered = ev.DatasetRegistered(dataset_id=name, definition=definition)
    return encode(ev.Event(time_ms=1, dataset_registered=registered))


def plain(path: Path, *, trimmed: bool = False) -> None:
    """Three terms, of which the last one has one event; each is of a dispatcher's kind."""
    for term in (1, 2, 3):
        storage = storage_at(path)
        writer = storage.open_writer("the test")
        blob = writer.write_blob(GRAPH)
        writer.append([leader(term)])
        for number in range(10) if term < 3 else ():
            writer.append([dataset(f"{term}.{number}", blob)])
        for sequence in SNAPSHOTS:
            if sequence <= writer.last_sequence and sequence not in storage.snapshots():
                state = encode_state(recover(storage, sequence)[0])
                writer.write_snapshot(sequence, encode_snapshot(state, 1))
        if trimmed and term == 2:
            writer.trim(7)
        writer.close()


def trimmed(path: Path) -> None:
    """What the first snapshot is made of is gone."""
    plain(path, trimmed=True)


MAKE = {make.__name__: make for make in (plain, trimmed)}


def append_a_line(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"something that was meant for another file\n")


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def replace_by_a_directory(path: Path) -> None:
    path.unlink()
    (path / "with something in it").mkdir(parents=True)


def replace_by_a_link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def replace_by_a_link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def replace_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_behind_a_link(path: Path) -> None:
    """Which is no damage."""
    (path.parent / "elsewhere").mkdir()
    path.rename(path.parent / "elsewhere" / path.name)
    path.symlink_to(f"elsewhere/{path.name}")


def leave_others_beside_it(path: Path) -> None:
    """No damage either: what file systems, editors and operators leave."""
    for name in (f"{path.name}~", f".{path.name}.swp", ".nfs000000000123", f"{path.name}.bak"):
        (path.parent / name).write_bytes(b"something else")
    (path.parent / "lost+found").mkdir()


CONTENT_DAMAGES = (delete, empty, halve, append_a_line, flip_a_bit, fill_with_zeros)
DAMAGES = (
    *CONTENT_DAMAGES,
    *(replace_by_a_directory, replace_by_a_link_to_nothing, replace_by_a_link_to_itself),
    *(replace_by_a_pipe, put_behind_a_link, leave_others_beside_it),
)


def delete_directory(path: Path) -> None:
    shutil.rmtree(path)


def empty_directory(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def replace_by_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"something else")


def put_nowhere_behind_a_link(path: Path) -> None:
    """A disk that is not mounted."""
    shutil.rmtree(path)
    path.symlink_to("nowhere")


DIRECTORY_DAMAGES = (
    *(delete_directory, empty_directory, replace_by_a_file, put_nowhere_behind_a_link),
    *(put_behind_a_link, leave_others_beside_it),
)


class Content(NamedTuple):
    """All that is to be had of a storage."""

    state: State
    events: list[bytes] | None  # None: not to be read, and not needed
    snapshots: list[bytes | None]


def content(path: Path) -> Content:
    """As a dispatcher finds it that begins. Raises StorageError."""
    storage = storage_at(path)
    writer = storage.open_writer("a dispatcher")
    try:
        state, _ = recover(storage)
        for blob in needed_blobs(state).values():
            storage.read_blob(blob)
        return Content(
            state,
            readable(lambda: [r.data for r in storage.read(storage.first_sequence() - 1)]),
            [readable(functools.partial(storage.read_snapshot, s)) for s in storage.snapshots()],
        )
    finally:
        writer.close()


def readable(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except Corrupt:
        return None


def problems(path: Path) -> list[str]:
    try:
        return verify(storage_at(path), recover_blobs).problems
    except StorageError as error:  # as the command line does
        return [str(error)]


def recover_blobs(storage: Storage) -> dict[str, str]:
    return needed_blobs(recover(storage)[0])


@pytest.fixture(scope="module", autouse=True)
def without_syncs() -> Iterator[None]:
    """Nothing crashes here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr(os, "fdatasync", lambda fd: None)
        yield


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Content]]:
    made = {}
    for name, make in MAKE.items():
        path = tmp_path_factory.mktemp(name) / "storage"
        make(path)
        assert problems(path) == []
        kept = shutil.copytree(path, path.parent / "kept")
        made[name] = path, content(kept)
        assert len(storage_at(path).snapshots()) == 2
    return made


@pytest.mark.parametrize(
    ("damage", "of_files"),
    [*((one, True) for one in DAMAGES), *((one, False) for one in DIRECTORY_DAMAGES)],
)
@pytest.mark.parametrize("scene", MAKE)
def test_one_damaged_file_or_directory(
    sound: dict[str, tuple[Path, Content]],
    scene: str,
    damage: Callable[[Path], None],
    of_files: bool,
    tmp_path: Path,
) -> None:
    path, before = sound[scene]
    names = [Path(name) for name in ("segments", "snapshots", "blobs")]
    if of_files:
        names = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
        assert len(names) > 10
    for number, name in enumerate(names):
        copy = shutil.copytree(path, tmp_path / str(number))
        damage(copy / name)
        expect_named(copy, name, before)


def expect_named(path: Path, name: Path, before: Content) -> None:
    found = problems(path)
    named = any(str(path / name) in message for message in found)
    try:
        after = content(path)
    except StorageError as error:
        assert str(error).replace(str(path), "") in [m.replace(str(path), "") for m in found], name
        other = path.with_name(f"{path.name}-repaired")
        subprocess.run(["cp", "-a", path, other], check=True)
        expect_no_circle(other)
        end_it(path, str(error))
        assert problems(path) == []
        return
    assert after.state.sequence <= before.state.sequence
    if not named and after != before:
        assert is_as_usual(after, before), (name, found)


def expect_no_circle(path: Path) -> None:
    """Whoever tries a repair first either has one, or is told another step."""
    try:
        repair(storage_at(path), truncate_corrupt=True)
        content(path)
    except StorageError as error:
        assert "repair the journal" not in str(error)
        end_it(path, str(error))


def is_as_usual(after: Content, before: Content) -> bool:
    """Whether the damage looks like something that is no damage: a storage cannot tell."""
    if after.events is None or before.events is None:
        return False
    if after.state == before.state:  # the retention takes snapshots, and what is before them
        return after.events == before.events[-len(after.events) :]
    # A crash cuts off what was not acknowledged. What was, in the terms before, is known.
    return after.events == before.events[:-1] == before.events[: len(after.events)]


def end_it(path: Path, message: str, tries: int = 4) -> None:
    """Do what the message says, until a dispatcher begins."""
    for _ in range(tries):
        if line := re.search(r"(\S+): .*let its one line say '(.*)'", message):
            Path(line[1]).write_text(line[2] + "\n")
        elif "move it away" in message:
            found = re.search(r"(\S+) is (a|some)", message)
            assert found, message
            Path(found[1]).rename(found[1] + ".away")
        elif "register the dataset again" in message:
            writer = storage_at(path).open_writer("a dispatcher")
            writer.write_blob(GRAPH)
            writer.close()
        elif "repair the journal" in message:
            assert repair(storage_at(path), truncate_corrupt=True)
        else:
            assert "give the dispatcher another storage" in message, message
            shutil.rmtree(path)
        try:
            content(path)
            return
        except StorageError as error:
            message = str(error)
    raise AssertionError(message)


def register(path: Path, dataset_id: str, graph: bytes) -> tuple[str, bytes]:
    """With a dispatcher on the storage; the dataset's id and the graph that it has then."""

    async def run() -> tuple[str, bytes]:
        candidate = Candidate(FileStorage(path), DispatcherOptions(), "here:1")
        dispatcher = await candidate.take_over()
        try:
            definition = ev.DatasetDefinition(sources=[ev.SplitSource(count=9)])
            known = await dispatcher.graphs.register(dataset_id, definition, graph)
            registered = dispatcher.state.datasets[known].definition
            return known, await dispatcher.graphs._read_blob(registered.tf_data_graph.blob)
        finally:
            await dispatcher.close()

    return asyncio.run(run())


@pytest.mark.parametrize("damage", CONTENT_DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("again", [GRAPH, RENAMED], ids=["the same graph", "renamed nodes"])
@pytest.mark.parametrize("dataset_id", ["", "mine"])
def test_a_dataset_that_lost_its_graph_is_registered_again(
    tmp_path: Path, dataset_id: str, again: bytes, damage: Callable[[Path], None]
) -> None:
    registered, _ = register(tmp_path, dataset_id, GRAPH)
    (blob,) = (tmp_path / "blobs").iterdir()
    damage(blob)
    repaired = typer.testing.CliRunner().invoke(app, ["repair", str(tmp_path)])
    assert repaired.exit_code == 1
    assert f"datasets '{registered}' can be read by nobody until" in repaired.stdout
    assert register(tmp_path, dataset_id, again) == (registered, again)
    assert problems(tmp_path) == []
    repaired = typer.testing.CliRunner().invoke(app, ["repair", str(tmp_path)])
    assert repaired.exit_code == 0, repaired.stdout
