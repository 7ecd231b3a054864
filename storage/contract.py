"""What every storage must do, as tests: each storage's own tests subclass `StorageContract`.

For packages that bring a storage, too (docs/storages.md). Needs pytest and hypothesis, and nothing
else of Forebay imports it.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .base import LEASE_MS, Extent, Record, Storage, Writer, blob_digest, blob_name
from .errors import AppendFailed, Corrupt, Fenced, Locked, Missing, OutOfSequence, StorageError

EXAMPLES = settings().max_examples // 4  # of the profile that the tests are run with
NO_BLOBS = ["0" * 64, "", "..", "../FORMAT", "no digest", "A" * 64, f"{'0' * 64}.", f"{'0' * 64}./"]
BATCHES = st.lists(st.lists(st.binary(max_size=40), max_size=5), max_size=8)


class StorageContract(ABC):
    """A subclass says how a storage is made, and how a writer's place is stolen.

    Call `pytest.register_assert_rewrite("forebay.storage.contract")` in conftest.py, before the
    subclass is imported: then a failed assertion shows its values.
    """

    @abstractmethod
    def make(self) -> Storage:
        """A new, empty storage."""

    @abstractmethod
    def reopen(self, storage: Storage) -> Storage:
        """The same storage, as another process would open it."""

    @abstractmethod
    def steal(self, storage: Storage) -> Writer:
        """Become the writer although there is one: what a broken lock would do."""

    @pytest.fixture
    def storage(self) -> Storage:
        return self.make()

    @pytest.fixture
    def writer(self, storage: Storage) -> Writer:
        return storage.open_writer("the test")

    # -- the log -------------------------------------------------------------------------------

    def test_an_empty_storage_holds_nothing(self, storage: Storage) -> None:
        assert list(storage.read()) == []
        assert list(storage.read(after=7)) == []
        assert storage.extent() == Extent(1, 0)
        assert storage.first_sequence() == 1
        assert storage.snapshots() == []
        held = storage.holdings()
        assert (held.log_bytes, held.torn_bytes, held.snapshots, held.blobs) == (0, 0, 0, 0)
        storage.close()
        storage.close()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=[HealthCheck.differing_executors],
    )
    @given(batches=BATCHES, restarts=st.sets(st.integers(0, 7)))
    def test_it_reads_as_a_list(self, batches: list[list[bytes]], restarts: set[int]) -> None:
        storage = self.make()
        writer = storage.open_writer("the test")
        assert writer.term >= 1 and writer.last_sequence == 0
        model: list[Record] = []
        for i, batch in enumerate(batches):
            if i in restarts:
                writer.close()
                term, storage = writer.term, self.reopen(storage)
                writer = storage.open_writer("the test")
                assert writer.term > term and writer.last_sequence == len(model)
            model += [Record(len(model) + n + 1, writer.term, data) for n, data in enumerate(batch)]
            assert writer.append(batch) == writer.last_sequence == len(model)
            assert storage.extent() == Extent(1, len(model))
        for after in range(len(model) + 2):
            assert list(storage.read(after)) == model[after:]
        assert list(self.reopen(storage).read()) == model
        writer.close()

    def test_a_follower_sees_each_batch_whole(self, storage: Storage, writer: Writer) -> None:
        reader = self.reopen(storage)
        seen: list[Record] = []
        stop = threading.Event()

        def follow() -> None:
            while not stop.is_set():
                seen.extend(reader.read(after=len(seen)))

        follower = threading.Thread(target=follow, name="follower")
        follower.start()
        try:
            for i in range(200):
                writer.append([b"%d" % i] * 3)
        finally:
            stop.set()
            follower.join(60)
        seen.extend(reader.read(after=len(seen)))
        assert seen == list(storage.read())
        assert len(seen) == 600

    def test_records_may_be_large(self, storage: Storage, writer: Writer) -> None:
        large = bytes(range(256)) * 20_000
        writer.append([b"small", large])
        writer.append([large])
        assert [record.data for record in storage.read()] == [b"small", large, large]

    # -- one writer ----------------------------------------------------------------------------

    def test_a_second_writer_is_told_who_the_first_one_is(
        self, storage: Storage, writer: Writer
    ) -> None:
        with pytest.raises(Locked, match="the test"):
            self.reopen(storage).open_writer("another")
        writer.append([b"still works"])

    def test_a_closed_writer_does_nothing(self, storage: Storage, writer: Writer) -> None:
        writer.append([b"a"])
        writer.close()
        writer.close()
        with pytest.raises(Fenced):
            writer.append([b"b"])
        with pytest.raises(Fenced):
            writer.write_snapshot(1, b"s")
        with pytest.raises(Fenced):
            writer.write_blob(b"s")
        with pytest.raises(Fenced):
            writer.trim(1)
        with pytest.raises(Fenced):
            writer.delete_snapshot(1)
        assert storage.extent() == Extent(1, 1)
        assert storage.snapshots() == []

    def test_a_later_term_fences_the_earlier_writer(self, storage: Storage, writer: Writer) -> None:
        writer.append([b"a"])
        later = self.steal(storage)
        assert later.term > writer.term
        with pytest.raises(Fenced, match=r"must stop|gave up"):
            writer.append([b"b"])
        with pytest.raises(Fenced):
            writer.write_snapshot(1, b"s")
        later.append([b"c"])
        writer.close()
        later.append([b"d"])
        assert [record.data for record in storage.read()] == [b"a", b"c", b"d"]
        later.close()

    def test_a_writer_renews_until_it_is_fenced(self, storage: Storage, writer: Writer) -> None:
        assert writer.lease_ms == LEASE_MS
        writer.renew()
        later = self.steal(storage)
        with pytest.raises(Fenced):
            writer.renew()
        later.renew()
        later.close()
        with pytest.raises(Fenced):
            later.renew()

    def test_a_condemned_storage_takes_no_writer(self, storage: Storage, writer: Writer) -> None:
        writer.append([b"a"])
        writer.condemn("record 2 is gone")
        with pytest.raises((AppendFailed, Fenced)):
            writer.append([b"b"])
        writer.close()
        with pytest.raises(Corrupt, match="record 2 is gone"):
            self.reopen(storage).open_writer("the next")
        assert [record.data for record in storage.read()] == [b"a"]

    # -- snapshots and trimming ------------------------------------------------------------------

    def test_snapshots(self, storage: Storage, writer: Writer) -> None:
        writer.append([b"x"] * 12)
        writer.write_snapshot(10, b"ten")
        writer.write_snapshot(9, b"")
        reader = self.reopen(storage)
        assert reader.snapshots() == [9, 10]
        assert reader.read_snapshot(10) == b"ten"
        assert reader.read_snapshot(9) == b""
        writer.write_snapshot(10, b"again")
        assert reader.read_snapshot(10) == b"again"
        writer.delete_snapshot(9)
        writer.delete_snapshot(9)
        assert reader.snapshots() == [10]
        with pytest.raises(Missing):
            reader.read_snapshot(9)
        for sequence in (-1, 0, 13):
            with pytest.raises(OutOfSequence):
                writer.write_snapshot(sequence, b"s")
        assert storage.snapshots() == [10]

    def test_trimming_forgets_no_more_than_allowed(self, storage: Storage, writer: Writer) -> None:
        for i in range(40):
            writer.append([b"%d" % i] * 5)
        with pytest.raises(OutOfSequence):
            writer.trim(100)
        assert len(list(storage.read())) == 200
        writer.write_snapshot(120, b"s")
        with pytest.raises(OutOfSequence):
            writer.trim(122)
        writer.trim(121)
        first = storage.first_sequence()
        assert first <= 121
        assert storage.extent() == Extent(first, 200)
        assert [r.sequence for r in storage.read(120)] == list(range(121, 201))
        assert [r.sequence for r in storage.read(first - 1)] == list(range(first, 201))
        if first > 1:
            with pytest.raises(Missing, match="trimmed"):
                list(storage.read(first - 2))
        writer.trim(50)  # nothing left of it
        assert writer.append([b"next"]) == 201
        writer.close()
        assert self.reopen(storage).open_writer("the test").last_sequence == 201

    def test_sequences_go_on_after_everything_was_trimmed(
        self, storage: Storage, writer: Writer
    ) -> None:
        writer.append([b"x"] * 9)
        writer.write_snapshot(9, b"s")
        writer.trim(10)
        assert storage.extent().last == 9
        assert writer.append([b"y"]) == 10
        assert [record.data for record in storage.read(9)] == [b"y"]

    # -- blobs -----------------------------------------------------------------------------------

    def test_blobs(self, storage: Storage, writer: Writer) -> None:
        data = b"a graph" * 1000
        digest = writer.write_blob(data)
        assert digest == blob_digest(data) == hashlib.sha256(data).hexdigest()
        assert writer.write_blob(data) == digest
        assert writer.write_blob(b"") == hashlib.sha256(b"").hexdigest()
        reader = self.reopen(storage)
        assert reader.read_blob(digest) == data
        assert reader.read_blob(blob_digest(b"")) == b""
        assert reader.holdings().blobs == 2
        assert reader.holdings().blob_bytes == len(data)

        for name in NO_BLOBS:
            with pytest.raises(Missing):
                storage.read_blob(name)
            writer.delete_blob(name)
        assert storage.holdings().blobs == 2

    def test_a_blob_is_deleted_and_no_other_of_the_same_data(
        self, storage: Storage, writer: Writer
    ) -> None:
        names = [writer.write_blob(b"x", mark) for mark in ("", "1-0", "1-1")]
        assert names == [blob_name(b"x"), blob_name(b"x", "1-0"), blob_name(b"x", "1-1")]
        reader = self.reopen(storage)
        assert sorted(reader.blobs()) == sorted(names)
        for kept, name in zip((2, 1, 0), reversed(names), strict=True):
            assert reader.read_blob(name) == b"x"
            writer.delete_blob(name)
            writer.delete_blob(name)
            assert reader.holdings().blobs == kept
            with pytest.raises(Missing):
                reader.read_blob(name)
        assert writer.write_blob(b"x") == names[0]
        assert reader.read_blob(names[0]) == b"x"

    # -- many threads ----------------------------------------------------------------------------

    def test_snapshots_and_blobs_are_written_beside_appends(
        self, storage: Storage, writer: Writer
    ) -> None:
        writer.append([b"x"] * 50)
        errors: list[StorageError] = []

        def work(thread: int) -> None:
            try:
                for i in range(10):
                    writer.write_snapshot(thread * 10 + i + 1, b"%d" % i)
                    writer.write_blob(b"%d" % i)
            except StorageError as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,), name=f"work-{i}") for i in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            writer.append([b"y"])
        for thread in threads:
            thread.join(60)
        assert errors == []
        assert storage.snapshots() == list(range(1, 41))
        assert storage.extent() == Extent(1, 100)
        assert storage.holdings().blobs == 10
