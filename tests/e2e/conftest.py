"""The clusters that several modules read from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from ..ordered_numbers import register_numbers
from ..ordered_reads import Cluster
from ..redis_server import new_storage
from ..stock import DispatcherProcess


@pytest.fixture(scope="module", params=["files"], ids=[pytest.HIDDEN_PARAM])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Its two workers may be killed, stopped and replaced. Its journal is in files, or on Redis
    where a test's parameter says so."""
    with contextlib.ExitStack() as stack:
        storage: Any = tmp_path_factory.mktemp("journal")
        if request.param == "redis":
            storage = stack.enter_context(new_storage(request.getfixturevalue("redis_url")))
        yield stack.enter_context(Cluster(storage, 2))


@pytest.fixture(scope="module")
def target(dispatcher: DispatcherProcess, workers: None) -> str:
    """A dispatcher with two workers."""
    return dispatcher.target


@pytest.fixture(scope="module")
def numbers(target: str) -> str:
    """The id of a dataset of numbers (ordered_numbers.py)."""
    return register_numbers(target)
