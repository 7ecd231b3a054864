"""Group commit, its failures, snapshots while appending, and closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.journal.codec import decode
from forebay.journal.journal import Journal
from forebay.journal.proto.events_pb2 import Event, SplitsLeased
from forebay.journal.replaying import replay
from forebay.journal.snapshots import Retention
from forebay.storage import AppendFailed, Fenced, MemoryStorage, StorageError, Writer

HOUR_MS = 3_600_000


def event(number: int) -> Event:
    return Event(time_ms=number, splits_leased=SplitsLeased(first=number, count=1))


def events(first: int, count: int) -> list[Event]:
    return [event(number) for number in range(first, first + count)]


class StepExecutor(Executor):
    """Runs a call when the test says so, as a deterministic simulation would."""

    def __init__(self) -> None:
        self.calls: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls.append((future, lambda: fn(*args, **kwargs)))
        return future

    def step(self, error: Exception | None = None) -> None:
        future, call = self.calls.pop(0)
        if error is not None:
            future.set_exception(error)
            return
        future.set_result(call())


class InlineExecutor(StepExecutor):
    """Runs each call at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        self.step()
        return future


async def turn() -> None:
    """Let the loop do all that is ready."""
    for _ in range(5):
        await asyncio.sleep(0)


class Batches(MemoryStorage):
    """Keeps the batches that were appended."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []

    def journal(self, **options: Any) -> Journal:
        writer = self.open_writer("the test")
        append = writer.append

        def record(records: Sequence[bytes]) -> int:
            self.batches.append([decode(0, data).time_ms for data in records])
            return append(records)

        writer.append = record  # type: ignore[method-assign]
        return Journal(self, writer, **options)


def test_sequences_come_at_once_and_durability_later() -> None:
    async def main() -> None:
        storage, executor = Batches(), StepExecutor()
        journal = storage.journal(append_executor=executor)
        assert journal.append(events(1, 2)) == 2
        assert (journal.sequence, journal.durable_sequence) == (2, 0)
        waiter = asyncio.create_task(journal.wait_durable(2))
        await turn()
        assert not waiter.done()
        executor.step()
        await waiter
        assert journal.durable_sequence == 2
        await journal.wait_durable(0)
        await journal.wait_durable(1)
        with pytest.raises(ValueError, match="no event 3 yet"):
            await journal.wait_durable(3)
        assert storage.batches == [[1, 2]]

    asyncio.run(main())


def test_events_that_come_during_an_append_form_the_next_batch() -> None:
    async def main() -> None:
        storage, executor = Batches(), StepExecutor()
        journal = storage.journal(append_executor=executor)
        journal.append(events(1, 1))
        journal.append(events(2, 1))  # in the same turn of the loop: the same batch
        await turn()
        assert len(executor.calls) == 1
        for number in range(3, 8):
            journal.append(events(number, 1))
            await turn()
        assert len(executor.calls) == 1
        executor.step()
        await turn()
        assert journal.durable_sequence == 2
        executor.step()
        await journal.wait_durable(7)
        assert storage.batches == [[1, 2], [3, 4, 5, 6, 7]]
        assert executor.calls == []

    asyncio.run(main())


@pytest.mark.long
@given(st.lists(st.integers(0, 6), max_size=30), st.integers(1, 60), st.data())
def test_a_decision_is_never_split_and_batches_are_bounded(
    decisions: list[int], batch_bytes: int, data: st.DataObject
) -> None:
    async def main() -> None:
        storage, executor = Batches(), StepExecutor()
        journal = storage.journal(append_executor=executor, batch_bytes=batch_bytes)
        begins = set()
        for size in decisions:
            begins.add(journal.sequence)
            journal.append(events(journal.sequence + 1, size))
            for _ in range(data.draw(st.integers(0, 2))):
                await turn()
                if executor.calls:
                    executor.step()
        await turn()
        while executor.calls:
            executor.step()
            await turn()
        await journal.wait_durable(journal.sequence)
        done = 0
        for batch in storage.batches:
            assert batch == list(range(done + 1, done + 1 + len(batch)))
            assert done in begins
            many = sum(done <= begin < done + len(batch) for begin in begins) > 1
            size = sum(len(event(number).SerializeToString()) for number in batch)
            assert size <= batch_bytes or not many
            done += len(batch)
        assert done == sum(decisions)

    asyncio.run(main())


def test_many_concurrent_waiters_share_few_appends() -> None:
    async def main() -> None:
        storage = Batches()
        journal = storage.journal()

        async def caller(number: int) -> None:
            for _ in range(20):
                sequence = journal.append([event(number)])
                await journal.wait_durable(sequence)
                assert journal.durable_sequence >= sequence

        await asyncio.gather(*map(caller, range(100)))
        assert journal.durable_sequence == 2000
        assert len(storage.batches) <= 1000
        await journal.close()

    asyncio.run(main())


def test_a_cancelled_waiter_disturbs_nobody() -> None:
    async def main() -> None:
        executor = StepExecutor()
        journal = Batches().journal(append_executor=executor)
        journal.append(events(1, 1))
        waiters = [asyncio.create_task(journal.wait_durable(1)) for _ in range(3)]
        await turn()
        waiters[1].cancel()
        await turn()
        assert waiters[1].cancelled()  # at once, whatever the disk does
        executor.step()
        await asyncio.gather(waiters[0], waiters[2])

    asyncio.run(main())


# -- failure ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [AppendFailed("disk full"), Fenced("replaced"), OSError("bug")])
def test_a_failed_append_fails_everything_after_it(error: Exception) -> None:
    async def main() -> None:
        failures: list[StorageError] = []
        storage, executor = Batches(), StepExecutor()
        journal = storage.journal(
            append_executor=executor, snapshot_executor=InlineExecutor(), on_failure=failures.append
        )
        journal.append(events(1, 2))
        early = asyncio.create_task(journal.wait_durable(2))
        await turn()
        executor.step()
        await early
        journal.append(events(3, 1))
        in_flight = [asyncio.create_task(journal.wait_durable(3)) for _ in range(3)]
        await turn()
        journal.append(events(4, 2))
        pending = [asyncio.create_task(journal.wait_durable(5)) for _ in range(3)]
        await turn()
        executor.step(error)
        kind = type(error) if isinstance(error, StorageError) else AppendFailed
        for waiter in (*in_flight, *pending):
            with pytest.raises(kind, match=str(error)):
                await waiter
        assert isinstance(journal.failed, kind)
        assert failures == [journal.failed]
        assert (journal.durable_sequence, journal.sequence) == (2, 5)
        with pytest.raises(kind):
            journal.append(events(6, 1))
        with pytest.raises(kind):
            await journal.wait_durable(5)
        with pytest.raises(kind):
            await journal.write_snapshot(2, b"s", 0)
        await journal.wait_durable(2)  # that much is durable
        assert executor.calls == []
        assert len(failures) == 1
        closing = asyncio.create_task(journal.close())
        await turn()
        executor.step()
        await closing
        storage.open_writer("the next").close()

    asyncio.run(main())


def test_a_writer_that_counts_otherwise_is_a_failure() -> None:
    async def main() -> None:
        storage = MemoryStorage()
        writer = storage.open_writer("the test")
        journal = Journal(storage, writer)
        writer.append([b"behind the journal's back"])
        journal.append(events(1, 1))
        with pytest.raises(AppendFailed, match="another writer"):
            await journal.wait_durable(1)
        await journal.close()

    asyncio.run(main())


# -- snapshots -------------------------------------------------------------------------------------


def test_a_snapshot_waits_for_its_events_and_not_for_later_ones() -> None:
    async def main() -> None:
        storage, appends = Batches(), StepExecutor()
        journal = storage.journal(append_executor=appends)
        journal.append(events(1, 3))
        snapshot = asyncio.create_task(journal.write_snapshot(3, b"state", 77))
        await turn()
        assert storage.snapshots() == []
        appends.step()
        await turn()
        journal.append(events(4, 1))
        await turn()
        assert len(appends.calls) == 1  # under way all the time
        await snapshot
        assert storage.snapshots() == [3]
        replayed = replay(storage)
        assert (replayed.state, replayed.snapshot_sequence) == (b"state", 3)
        appends.step()
        await turn()
        assert [sequence for sequence, _ in replay(storage).events] == [4]

    asyncio.run(main())


def test_retention_is_applied_after_a_snapshot() -> None:
    async def main() -> None:
        storage = MemoryStorage()
        journal = Journal(storage, storage.open_writer("the test"), retention=Retention(2))
        for quarter in range(40):  # of an hour
            journal.append(events(journal.sequence + 1, 10))
            await journal.write_snapshot(journal.sequence, b"s", quarter * HOUR_MS // 4)
        # It is 9:45. Two hours of history begin at the newest snapshot before 7:45, which is
        # the one of 7:00; then come those of 8:00 and 9:00, and the newest two.
        assert storage.snapshots() == [290, 330, 370, 390, 400]
        assert storage.first_sequence() == 291
        await journal.close()

        # A journal that finds them there goes on from their times.
        journal = Journal(storage, storage.open_writer("the next"), retention=Retention(1))
        journal.append(events(401, 10))
        await journal.write_snapshot(410, b"s", 10 * HOUR_MS)
        assert storage.snapshots() == [370, 400, 410]
        await journal.close()

    asyncio.run(main())


def test_a_damaged_snapshot_does_not_stop_the_retention() -> None:
    async def main() -> None:
        storage = MemoryStorage()
        journal = Journal(storage, storage.open_writer("the test"), retention=Retention(0))
        journal.append(events(1, 5))
        for sequence in (2, 3):
            await journal.write_snapshot(sequence, b"s", 0)
        await journal.close()
        writer = storage.open_writer("the next")
        writer.write_snapshot(1, b"\xff no snapshot")
        journal = Journal(storage, writer, retention=Retention(0))
        await journal.write_snapshot(5, b"s", HOUR_MS)
        assert storage.snapshots() == [1, 3, 5]
        assert storage.first_sequence() == 4
        await journal.close()

    asyncio.run(main())


def test_a_failed_snapshot_fails_nothing_else() -> None:
    async def main() -> None:
        storage = Batches()
        snapshots = StepExecutor()
        journal = storage.journal(append_executor=InlineExecutor(), snapshot_executor=snapshots)
        journal.append(events(1, 1))
        snapshot = asyncio.create_task(journal.write_snapshot(1, b"s", 0))
        await turn()
        snapshots.step(StorageError("no room"))
        with pytest.raises(StorageError, match="no room"):
            await snapshot
        assert journal.failed is None
        await journal.wait_durable(journal.append(events(2, 1)))

    asyncio.run(main())


# -- closing ---------------------------------------------------------------------------------------


def threads() -> list[str]:
    """Forebay's, but for what earlier tests in this process have left to be collected."""
    mine = (t for t in threading.enumerate() if t not in _earlier)
    return [t.name for t in mine if t.name.startswith("forebay-")]


_earlier: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def earlier_threads() -> None:
    _earlier.clear()
    _earlier.update(threading.enumerate())


def test_close_flushes_and_leaves_nothing_behind() -> None:
    async def main() -> None:
        storage = MemoryStorage()
        journal = Journal(storage, storage.open_writer("the test"))
        journal.append(events(1, 3))
        await journal.wait_durable(3)
        await journal.write_snapshot(3, b"s", 0)
        assert len(threads()) == 2
        journal.append(events(4, 3))
        await journal.close()
        await journal.close()
        assert threads() == []
        assert storage.extent().last == 6
        with pytest.raises(Fenced, match="closed"):
            journal.append(events(7, 1))
        with pytest.raises(Fenced):
            await journal.write_snapshot(6, b"s", 0)
        await journal.wait_durable(6)
        storage.open_writer("the next").close()

    asyncio.run(main())


def test_close_waits_for_a_snapshot_under_way() -> None:
    async def main() -> None:
        storage = MemoryStorage()
        writer = storage.open_writer("the test")
        begun, may_go_on = threading.Event(), threading.Event()
        write_snapshot = writer.write_snapshot

        def slow(sequence: int, data: bytes) -> None:
            begun.set()
            may_go_on.wait(60)
            write_snapshot(sequence, data)

        writer.write_snapshot = slow  # type: ignore[method-assign]
        journal = Journal(storage, writer)
        journal.append(events(1, 1))
        snapshot = asyncio.create_task(journal.write_snapshot(1, b"s", 0))
        await journal.wait_durable(1)
        while not begun.is_set():
            await turn()
        snapshot.cancel()
        closing = asyncio.create_task(journal.close())
        await turn()
        assert not closing.done()
        may_go_on.set()
        await closing
        assert storage.snapshots() == [1]
        assert threads() == []

    asyncio.run(main())


def test_an_unused_journal_closes_its_writer() -> None:
    storage = MemoryStorage()
    writer: Writer = storage.open_writer("the test")
    asyncio.run(Journal(storage, writer).close())
    storage.open_writer("the next").close()
