"""What the row of resumable reads takes for granted, of each library that is installed."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from forebay import service
from forebay.benchmarks import resumable
from forebay.benchmarks.resumable import FOREBAY, PEERS, Files, Way, moved, peers_python, ways
from forebay.service.errors import ForebayError

RECORDS, FILE_RECORDS = 5_000, 250


@pytest.fixture(scope="module")
def peers() -> pathlib.Path | None:
    """Their environment's Python. It is big, and no part of the tests' environment."""
    try:
        return peers_python()
    except ForebayError:
        return None


@pytest.fixture(scope="module")
def files(peers: pathlib.Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    found = Files(tmp_path_factory.mktemp("resumable"), RECORDS, FILE_RECORDS, peers)
    found.write(*(PEERS if peers else ()))
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
    address = dispatcher.target.partition("://")[2]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    found.register(address)
    yield found
    worker.stop()
    dispatcher.stop()


@pytest.mark.timeout(400)  # a peer's imports may take a minute on a busy machine
@pytest.mark.parametrize("way", [*ways(False), *ways(True)], ids=lambda way: way.name)
def test_each_way_gives_all_records_and_goes_on_at_half(
    way: Way, files: Files, peers: pathlib.Path | None
) -> None:
    if way.library != FOREBAY and peers is None:
        with pytest.raises(ForebayError, match="run scripts/peers"):
            peers_python()
        return
    order = files.ask(way, "order")
    assert sorted(order.numbers) == list(range(RECORDS)) != order.numbers
    half = RECORDS // 2
    resumed = files.ask(way, "resume", state=moved(order.state, half))
    assert resumed.numbers == order.numbers[half:][: len(resumed.numbers)]
    rate = files.ask(way, "rate", seconds=0.01)
    assert rate.records > 0
    assert rate.state == order.state


def test_without_the_peers_the_row_says_what_to_make(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "ENVIRONMENT", tmp_path / ".peers")
    with pytest.raises(ForebayError, match="run scripts/peers in a clone"):
        peers_python()


def test_only_the_position_of_a_state_is_moved() -> None:
    state = {"position": 750, "order": [1, 16, 1000], "iterators": [{"next": 750}], "first": True}
    assert moved(state, 5) == {
        "position": 5, "order": [1, 16, 1000], "iterators": [{"next": 5}], "first": True
    }  # fmt: skip
