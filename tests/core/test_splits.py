"""Splits: who leases which, and what becomes of those that are handed back."""

from __future__ import annotations

import msgspec
import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core import splits
from forebay.service.core.state import lease_caller
from forebay.service.core.status import status
from forebay.service.errors import FailedPrecondition, InvalidArgument, Unimplemented

from .given import Given


def test_splits_handed_back_find_another_task_when_all_others_have_completed() -> None:
    given = Given()
    first, second = given.worker(1), given.worker(2)
    given.iteration()
    mine, other = given.task_of(first), given.task_of(second)
    lease = given.lease(mine, 10)
    while given.lease(other, 100) is not None:
        pass
    given.when(c.CompleteTask(task_id=other))
    given.hand_back(lease, 4)
    given.when(c.LoseWorker(worker_id=first, reason="drained"))
    assert given.then == ["worker_lost", "task_created"]
    again = given.lease(given.task_of(second), 10)
    assert again.first == lease.first + lease.count - 4
    while given.lease(given.task_of(second), 10) is not None:
        pass
    given.when(c.CompleteTask(task_id=given.task_of(second)))
    assert given.then[-2:] == ["task_completed", "iteration_finished"]


def test_a_lease_is_at_most_half_of_an_even_share() -> None:
    given = Given()
    first = given.worker(1)
    given.worker(2)
    given.iteration()
    counts = []
    while (lease := given.lease(given.task_of(first), 1000)) is not None:
        counts.append(lease.count)
    assert counts[0] == 25
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == 100


def test_a_request_for_no_splits_only_asks_whether_the_pass_has_ended() -> None:
    given = Given()
    first, second = given.worker(1), given.worker(2)
    given.iteration()

    def ask(pass_number: int) -> ev.SplitsLeased | None:
        asking = c.LeaseSplits(task_id=given.task_of(second), source=0, pass_number=pass_number)
        answer: ev.SplitsLeased | None = given.when(asking)
        assert given.then == []
        return answer

    assert ask(0) is None
    while given.lease(given.task_of(first), 100) is not None:
        pass
    over = ask(0)
    assert over is not None and not over.count
    assert ask(1) is None  # which has not begun, and is not begun for that


def test_a_sweeping_task_ends_the_iteration_whatever_it_left() -> None:
    given = Given()
    first, second = given.worker(1), given.worker(2)
    given.iteration()
    mine, other = given.task_of(first), given.task_of(second)
    lease = given.lease(mine, 10)
    given.when(c.CompleteTask(task_id=other))  # as with take(n): not all splits were asked for
    given.hand_back(lease, 4)
    given.when(c.LoseWorker(worker_id=first, reason="drained"))
    given.when(c.CompleteTask(task_id=given.task_of(second)))
    assert given.then == ["task_completed", "iteration_finished"]


def test_splits_handed_back_by_the_last_worker_wait_for_the_next_one() -> None:
    given = Given()
    first = given.worker(1)
    given.iteration()
    mine = given.task_of(first)
    second = given.worker(2)
    other = given.task_of(second)
    given.when(c.CompleteTask(task_id=other))
    given.when(c.LoseWorker(worker_id=second, reason="it said goodbye", left=True))
    lease = given.lease(mine, 10)
    given.hand_back(lease, 4)
    given.when(c.LoseWorker(worker_id=first, reason="it said goodbye", left=True))
    assert given.then == ["worker_lost"]
    again = given.lease(given.task_of(given.worker(3)), 10)
    assert again.first == lease.first + lease.count - 4


@pytest.mark.parametrize("earlier", [False, True], ids=["of this pass", "of the one before"])
def test_the_kept_part_of_a_lease_is_a_lease_until_it_is_begun(earlier: bool) -> None:
    given = Given()
    worker_id, other = given.worker(1), given.worker(2)
    joined = given.iteration()
    task_id = given.task_of(worker_id)
    lease = given.lease(task_id, 10)
    if earlier:
        assert given.lease(given.task_of(other), 1, pass_number=1)
    number = (lease_caller(task_id, 0), 2)
    back = c.LeaseSplits(request=number, task_id=task_id, returned=((lease.lease_id, 4),))
    kept = given.when(back)
    assert given.then == ["lease_returned", "splits_leased"]
    assert (kept.first, kept.count, kept.pass_number) == (lease.first, lease.count - 4, 0)
    assert given.when(back) == kept  # if that was not heard
    assert given.then == []
    ledger = given.state.iterations[joined.iteration_id].ledgers[0]
    assert not ledger.begun
    given.when(c.LoseWorker(worker_id=worker_id, reason="no sign of life"))
    if not earlier:
        assert ledger.lost == [(kept.first, kept.first + kept.count)]
    worker_id = given.worker(1)  # it comes back
    assert given.when(back) == kept
    assert not ledger.lost
    again = given.lease(given.task_of(other), 10)
    assert again.first == kept.first + kept.count
    given.when(c.LeaseSplits(task_id=task_id, begun=(kept.lease_id,)))
    assert given.then == ["lease_begun"]
    given.when(c.LoseWorker(worker_id=worker_id, reason="it said goodbye", left=True))
    assert "lease_lost" not in given.then


def test_a_request_may_return_a_part_of_one_lease_only() -> None:
    given = Given()
    worker_id = given.worker(1)
    given.iteration()
    task_id = given.task_of(worker_id)
    leases = [given.lease(task_id, 4) for _ in range(2)]
    back = tuple((lease.lease_id, 2) for lease in leases if lease is not None)
    command = c.LeaseSplits(request=(lease_caller(task_id, 0), 2), task_id=task_id, returned=back)
    with pytest.raises(InvalidArgument, match="parts of 2 leases are returned"):
        given.when(command)
    whole = msgspec.structs.replace(command, returned=((back[0][0], 4), back[1]))
    kept = given.when(whole)
    assert given.then == ["lease_returned", "lease_returned", "splits_leased"]
    assert (kept.first, kept.count) == (4, 2)


def test_a_task_that_joins_an_endless_pipeline_late_leases_from_the_current_pass() -> None:
    given = Given()
    worker = given.worker(1)
    given.iteration()
    task = given.task_of(worker)
    for pass_number in range(3):
        while given.lease(task, 100, pass_number) is not None:
            pass
    lease = given.lease(task, 10, pass_number=3)
    late = given.task_of(given.worker(2))
    ask = c.LeaseSplits(task_id=late, source=0, pass_number=0, want=1, or_later=True)
    got = given.when(ask)
    assert (got.pass_number, got.first, got.count) == (3, lease.count, 1)
    while given.lease(task, 100, pass_number=3) is not None:
        pass
    end = given.when(ask)
    assert (end.pass_number, end.count) == (3, 0)
    assert given.then == []


def test_passes_of_no_splits_are_no_events() -> None:
    given = Given()
    given.register("empty", ev.SplitSource(count=0))
    given.worker(1)
    given.iteration(dataset_id="empty")
    task = max(given.state.tasks)
    for pass_number in range(3):
        assert given.lease(task, 1, pass_number) is None
        assert given.then == []


def zipped(*sizes: int) -> list[ev.SplitSource]:
    first, *rest = [ev.SplitSource(count=size) for size in sizes]
    for source in rest:
        source.leased_with = 0
    return [first, *rest]


def test_zipped_sources_are_leased_as_one_of_the_size_that_all_have() -> None:
    given = Given()
    given.register("z", *zipped(30, 20))
    given.worker(1)
    given.iteration(dataset_id="z")
    task = max(given.state.tasks)
    total = 0
    while (lease := given.lease(task, 100)) is not None:
        assert lease.first == total
        total += lease.count
    assert total == 20
    with pytest.raises(InvalidArgument, match="zipped with 0"):
        given.when(c.LeaseSplits(task_id=task, source=1, pass_number=0, want=1))


@pytest.mark.parametrize("ours_first", [True, False])
def test_zipped_sources_are_not_leased_to_both_kinds_of_workers(ours_first: bool) -> None:
    given = Given()
    given.register("z", *zipped(30, 30))
    given.worker(1)
    iteration_id = given.iteration(dataset_id="z").iteration_id
    task = max(given.state.tasks)

    def singly() -> None:
        for source in (1, 0):
            given.when(c.GetSplit(iteration_id=iteration_id, pass_number=0, source=source))

    def together() -> None:
        assert given.lease(task, 1) is not None

    first, second = (together, singly) if ours_first else (singly, together)
    first()
    first()
    with pytest.raises(FailedPrecondition, match="workers of one kind"):
        second()


SAVED = ev.SplitSource(saved_chunks=ev.SavedChunks(path="/save"))


def growing() -> tuple[Given, int]:
    """An iteration over what is being saved, and its id."""
    given = Given()
    given.worker(1)
    given.register("loaded", SAVED)
    return given, given.iteration(dataset_id="loaded").iteration_id


def find(given: Given, iteration_id: int, *names: str, complete: bool = False) -> None:
    found = c.FindSplits(iteration_id=iteration_id, source=0, names=names, complete=complete)
    given.when(found)


def test_a_source_that_grows_has_no_end_before_it_is_complete() -> None:
    given, iteration_id = growing()

    def split(pass_number: int = 0) -> int | None:
        get = c.GetSplit(iteration_id=iteration_id, pass_number=pass_number, source=0)
        leased: ev.SplitsLeased | None = given.when(get)
        return None if leased is None else leased.first if leased.count else -1

    assert split() is None
    assert given.then == []
    find(given, iteration_id, "b", "a")
    assert given.then == ["splits_found"]
    assert [split(), split(), split()] == [0, 1, None]
    find(given, iteration_id, "a", "b")
    assert given.then == []
    find(given, iteration_id, "b", "c", complete=True)
    assert [split(), split(), split(), split(1), split(0)] == [2, -1, -1, 0, -1]
    assert [split(1), split(1), split(1)] == [1, 2, -1]
    find(given, iteration_id, "d")
    assert given.then == []
    (ledger,) = given.state.iterations[iteration_id].ledgers
    assert (ledger.names, ledger.size, ledger.grows) == (["b", "a", "c"], 3, False)


def test_the_status_shows_who_waits_for_a_save() -> None:
    given, iteration_id = growing()

    def waits_for() -> str | None:
        (job,) = status(given.state)["jobs"]
        return job["iterations"][0]["sources"][0]["waits_for"]

    assert waits_for() == "/save"
    find(given, iteration_id, "a")
    assert waits_for() is None
    given.lease(max(given.state.tasks), 1)
    assert waits_for() == "/save"
    find(given, iteration_id, complete=True)
    assert waits_for() is None


def test_a_lease_of_a_source_that_grows_waits_and_what_was_begun_is_known() -> None:
    given, iteration_id = growing()
    task = max(given.state.tasks)
    find(given, iteration_id, *map(str, range(5_000)))
    lease = given.lease(task, 4_000)
    assert lease.count == splits.MAX_NAMES
    given, iteration_id = growing()
    task = max(given.state.tasks)
    find(given, iteration_id, "a")
    first = given.lease(task, 1)
    ask = c.LeaseSplits(
        request=(f"task/{task}/0", 1), task_id=task, source=0, pass_number=0, want=1,
        begun=(first.lease_id,),
    )  # fmt: skip
    assert given.when(ask) is None
    assert given.then == ["lease_begun"]
    assert given.when(ask) is None  # the same request: it was not answered
    assert given.then == []
    find(given, iteration_id, "b")
    assert given.when(ask).first == 1
    assert given.when(ask).first == 1
    assert given.then == []


def test_a_save_without_chunks_has_no_splits_once_that_is_known() -> None:
    given, iteration_id = growing()
    find(given, iteration_id, complete=True)
    task = max(given.state.tasks)
    for pass_number in range(2):
        lease = c.LeaseSplits(task_id=task, source=0, pass_number=pass_number, want=1)
        assert given.when(lease).pass_number == 0
        assert given.then == []


@pytest.mark.parametrize("sharding", [ev.FILE, ev.DATA, ev.FILE_OR_DATA, ev.HINT])
def test_a_dataset_loaded_from_a_save_is_not_sharded_statically(sharding: int) -> None:
    """Each worker would number the chunks in the order in which it found them."""
    given = Given()
    given.register("loaded", SAVED)
    elect = c.ElectLeader(
        term=2, address="a:1", version="0", journal_id="j", worker_addresses=("w:1",)
    )
    given.when(elect)
    with pytest.raises(Unimplemented, match=r"is loaded from .*/save, .* OFF or DYNAMIC"):
        given.when(c.GetOrCreateJob(dataset_id="loaded", name="", sharding=sharding))
    given.when(c.GetOrCreateJob(dataset_id="loaded", name="", sharding=ev.OFF))


@pytest.mark.parametrize("path", ["", "save", "../save", "/save\0"])
def test_a_save_to_load_is_at_an_absolute_path(path: str) -> None:
    with pytest.raises(InvalidArgument, match="absolute path"):
        Given().register("loaded", ev.SplitSource(saved_chunks=ev.SavedChunks(path=path)))


def test_a_dataset_loaded_from_a_save_is_zipped_only_if_it_is_never_leased() -> None:
    first, second = ev.SplitSource(count=9), ev.SplitSource(leased_with=0)
    for saved, other in ((first, second), (second, first)):
        saved.saved_chunks.path = "/save"
        other.count = 9
        with pytest.raises(InvalidArgument, match="source 1 is leased with source 0"):
            Given().register("z", first, second)
    first.unleasable = "it is zipped"
    Given().register("z", first, second)
