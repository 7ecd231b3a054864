"""The clusters that several modules read from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.service.client import portions, read_ahead

from ..ordered_numbers import register_numbers
from ..ordered_reads import Cluster
from ..stock import DispatcherProcess


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Its two workers may be killed, stopped and replaced."""
    with Cluster(tmp_path_factory.mktemp("journal"), 2) as running:
        yield running


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers of ordered reads ask for little ahead, so that workers are asked until the end."""
    monkeypatch.setattr(read_ahead, "WINDOW_BYTES", 8 << 10)
    monkeypatch.setattr(portions, "PORTION_BYTES", 2 << 10)


@pytest.fixture(scope="module")
def target(dispatcher: DispatcherProcess, workers: None) -> str:
    """A dispatcher with two workers."""
    return dispatcher.target


@pytest.fixture(scope="module")
def numbers(target: str) -> str:
    """The id of a dataset of numbers (ordered_numbers.py)."""
    return register_numbers(target)
