"""What tests of the transport begin with, and must leave behind: nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from forebay.service.transport import BlockServer

from .peers import started


@pytest.fixture(autouse=True)
def leave_no_thread() -> Iterator[None]:
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("forebay-blocks")] == []


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def server(closing: ExitStack) -> BlockServer:
    return started(closing)
