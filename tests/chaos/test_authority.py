"""The throwaway authority of a run with TLS."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from forebay.chaos import authority as module
from forebay.service.connections import reloaded


def test_it_issues_anew_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloaded, "CHECK_S", 0.0)
    authority = module.Authority(tmp_path, ["127.0.0.1", "192.0.2.1"])
    own = authority.credentials
    assert stat.S_IMODE(os.stat(own.tls_key).st_mode) == 0o600
    first = own.loaded()
    authority.poll()
    assert own.loaded() is first, "it is not time yet"
    monkeypatch.setattr(authority, "_renew_at_s", 0.0)
    authority.poll()
    assert own.loaded().chain != first.chain
    assert stat.S_IMODE(os.stat(own.tls_key).st_mode) == 0o600
