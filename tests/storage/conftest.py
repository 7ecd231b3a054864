"""What tests of storages have in common."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from forebay.storage import writer_watch

from ..writers import writers_are_closed as writers_are_closed

pytest.register_assert_rewrite("forebay.storage.contract")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The storages' monotonic clock: `now`, in seconds."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(writer_watch, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock
