"""The cluster that trainers read from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..cluster import WorkerProcess
from ..stock import DispatcherProcess


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A dispatcher, with one worker."""
    directory = tmp_path_factory.mktemp("journal")
    with DispatcherProcess(directory) as dispatcher, WorkerProcess(dispatcher.address):
        yield dispatcher.target
