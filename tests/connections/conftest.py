"""Certificates and authorities that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from forebay.service import Credentials
from forebay.service.connections import reloaded

from ..certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> Credentials:
    return authority.issue("server")


@pytest.fixture(scope="module")
def trainer(authority: Authority) -> Credentials:
    return authority.issue("trainer", "trainer.example")


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at whenever they are needed."""
    monkeypatch.setattr(reloaded, "CHECK_S", 0.0)
