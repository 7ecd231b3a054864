"""Warnings that peers provoke: one peer's do not hide another's, nor fill memory or log."""

from __future__ import annotations

import logging

import pytest

from forebay.service.rate_limited_log import MOST_KINDS, RateLimitedLog


def test_each_kind_is_logged_once_and_kinds_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    rate_limited_log = RateLimitedLog(logging.getLogger("test"))
    for caller in ("token a", "token b", "token a"):
        rate_limited_log.warn("refused: %s", f"{caller} may not", kind=f"RemoveDataset {caller}")
    assert [record.getMessage() for record in caplog.records] == [
        "refused: token a may not", "refused: token b may not"
    ]  # fmt: skip
    for number in range(2 * MOST_KINDS):
        rate_limited_log.warn("refused", kind=str(number))
    assert len(rate_limited_log._said) == MOST_KINDS
