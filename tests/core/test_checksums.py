"""Checksums of bundles: the first one of each is kept, and another one is an event."""

from __future__ import annotations

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import checksums
from forebay.service.core import commands as c
from forebay.service.core.status import status
from forebay.service.errors import InvalidArgument

from .test_lengths import Learning


class Checking(Learning):
    def check(self, checksums: dict[int, int], job_id: int | None = None) -> list[int]:
        number = self.job_of(self.consumer).job_id if job_id is None else job_id
        return self.when(
            c.CheckBundles(
                job_id=number, bundles=tuple(checksums), checksums=tuple(checksums.values())
            )
        )


def test_the_first_checksum_of_a_bundle_is_kept() -> None:
    given = Checking()
    job = given.job_of(given.consumer)
    assert given.check({3: 7, 8: 1 << 31}) == []
    assert given.then == ["bundles_checked"]
    assert given.check({3: 7}) == [] and given.then == []
    assert given.check({3: 7, 4: 9}) == []
    assert given.state.recent[-1][1].bundles_checked == ev.BundlesChecked(
        job_id=job.job_id, bundles=[4], checksums=[9]
    )
    assert job.checksums == {3: 7, 8: 1 << 31, 4: 9}
    assert checksums.describe_mismatches(job) == ""


def test_a_mismatch_is_told_once() -> None:
    given = Checking()
    job = given.job_of(given.consumer)
    given.check({3: 7, 8: 1})
    assert given.check({3: 6, 8: 1, 9: 2}) == [3]
    assert given.then == ["bundles_checked"]
    assert given.check({3: 5}) == [] and given.then == []
    assert given.check({8: 2}) == [8]
    assert (job.checksums, job.differing) == ({3: 7, 8: 1, 9: 2}, [3, 8])
    told = status(given.state)["jobs"][0]
    assert told["checksum_mismatches"] == [[0, 3], [1, 3]]
    assert "when they were run again: 3 of epoch 0, 3 of epoch 1." in told["warning"]
    assert "run again: 3 of epoch 1." in checksums.describe_mismatches(job, [8])


def test_both_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "MAX_CHECKSUMS", 10)
    monkeypatch.setattr(checksums, "MAX_MISMATCHES", 3)
    given = Checking()
    job = given.job_of(given.consumer)
    for first in range(0, 100, 5):
        given.check(dict.fromkeys(range(first, first + 5), 1))
        assert len(job.checksums) <= 20
    assert max(job.checksums) == 99 and min(job.checksums) >= 80
    given.check({0: 1})
    assert 0 in job.checksums
    assert given.check(dict.fromkeys(range(95, 100), 2)) == [95, 96, 97]
    assert given.check({99: 3}) == [] and given.then == []


def test_a_warning_names_the_first_five() -> None:
    given = Checking()
    given.check(dict.fromkeys(range(6), 1))
    found = given.check(dict.fromkeys(range(6), 2))
    text = checksums.describe_mismatches(given.job_of(given.consumer), found)
    assert "4 of epoch 0 and others." in text and "0 of epoch 1" not in text


def test_reports_of_other_jobs_are_ignored_and_wrong_ones_refused() -> None:
    given = Checking()
    joined = given.iteration("unordered")
    assert given.check({1: 1}, job_id=99) == [] and given.then == []
    other = given.iteration_of(given.state.consumers[joined.consumer_id]).job_id
    assert given.check({1: 1}, job_id=other) == [] and given.then == []
    with pytest.raises(InvalidArgument, match="0 checksums of 1 bundles"):
        given.when(
            c.CheckBundles(
                job_id=given.job_of(given.consumer).job_id, bundles=(1,), checksums=()
            )
        )  # fmt: skip
    with pytest.raises(InvalidArgument, match=r"bundles \(-1,\) of job .* has 5 bundles"):
        given.check({-1: 1})
