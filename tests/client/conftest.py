"""What the tests of a consumer have in common."""

from __future__ import annotations

import pytest

from forebay.service.client import links

from .connections import Client


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers connect to `Client`s."""
    monkeypatch.setattr(links, "BlockClient", Client)
    monkeypatch.setattr(Client, "all", {}, raising=False)
