"""Saves: which worker writes which stream, and what belongs to it, once."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.encoding import decode_state, encode_state
from forebay.service.core.machine import apply
from forebay.service.core.save_streams import may_assign, streams_of
from forebay.service.core.state import Save
from forebay.service.core.status import status
from forebay.service.errors import AlreadyExists, FailedPrecondition, InvalidArgument, Unimplemented

from .given import Given

STARTED = {"path": "/s", "metadata": b"m", "prepared": "/s.p"}
TEN = ev.DatasetDefinition(sources=[ev.SplitSource(count=10)])
LOADED = ev.DatasetDefinition(sources=[ev.SplitSource(saved_chunks=ev.SavedChunks(path="/save"))])


@pytest.mark.parametrize("code", ["DEADLINE", "", "OK"])
def test_a_status_that_is_not_canonical_becomes_unknown(code: str) -> None:
    given = Saves()
    save = given.start()
    given.when(c.FailSave(save_id=save.save_id, code=code, message="boom"))
    ended = given.state.ended_saves[save.save_id]
    assert (ended.failed, ended.message) == ("UNKNOWN", f"{code}: boom")
    assert status(given.state)["saves"][0]["state"] == "failed"


@pytest.mark.parametrize("stock", [True, False])
def test_the_state_keeps_only_a_summary_of_an_ended_save(stock: bool) -> None:
    """However many streams it had."""
    given = Saves()
    save = given.start(metadata=b"m" * 10_000, sizes=(1_000,))
    for number, worker_id in enumerate([given.worker(number, stock) for number in range(100)]):
        given.assign(worker_id)
        if stock:
            given.split(number, number)
        else:
            given.commit(save, number, 0, number, "f" * 1_000)
    for number in range(0, 100, 2):
        given.complete(save, number, number)
    before = len(encode_state(given.state))
    given.when(c.FailSave(save_id=save.save_id, code="INTERNAL", message="why"))
    assert len(encode_state(given.state)) < before - 10_000
    ended = given.state.ended_saves[save.save_id]
    assert ended.completed == [(number, number + 1) for number in range(0, 100, 2)]
    assert (ended.streams, ended.elements) == (100, 0 if stock else 500)
    (shown,) = status(given.state)["saves"]
    assert shown["error"] == "INTERNAL: why"


class Saves(Given):
    def when(self, command: c.Command) -> Any:
        """By its events alone, also behind a restart."""
        replayed, told = decode_state(encode_state(self.state)), list[ev.Event]()
        subscribers, self._subscribers = self._subscribers, [*self._subscribers, told.append]
        answer = super().when(command)
        self._subscribers = subscribers
        for event in told:
            apply(replayed, ev.Event.FromString(event.SerializeToString()))
        assert replayed == self.state
        self.books_balance()
        return answer

    def books_balance(self) -> None:
        state = self.state
        both = state.saves | state.ended_saves
        assert {save.path: save_id for save_id, save in both.items()} == state.save_at
        for save in state.saves.values():
            given = [source for stream in save.streams for source in stream.sources]
            places = [
                place
                for source in given
                for run in source.runs
                for place in range(run.place, run.place + run.count)
            ]
            assert len({*places}) == len(places) == sum(source.assigned for source in given)
            if not any(stream.completed for stream in save.streams):
                assert len(places) == save.assigned
        assert len(status(state)["saves"]) == len(both)

    def start(self, path: str = "/s", sizes: tuple[int, ...] = (10,), **more: Any) -> Save:
        sources = [ev.SplitSource(count=size) for size in sizes]
        definition = ev.DatasetDefinition(sources=sources)
        fields: dict[str, Any] = {**STARTED, "path": path, "definition": definition, **more}
        started: ev.SaveStarted = self.when(c.StartSave(**fields))
        return self.state.saves[started.save_id]

    def assign(self, worker_id: int, most: int = 3) -> list[tuple[int, int]]:
        """What the worker writes now: save ids and streams."""
        self.when(c.AssignStream(worker_id=worker_id, most=most))
        mine = streams_of(self.state, self.state.workers[worker_id])
        return [(save.save_id, number) for save, number in mine]

    def split(self, stream: int, worker: int, pass_number: int = 0, source: int = 0) -> Any:
        """What the worker is told: how many splits the stream had, and the number of another."""
        local, event = self.when(
            c.AssignSplit(
                path="/s", stream=stream, source=source, pass_number=pass_number,
                worker_address=f"w:{worker}",
            )
        )  # fmt: skip
        return local, None if event is None else event.number

    def complete(self, save: Save, stream: int, worker: int) -> list[str]:
        by: dict[str, Any] = (
            {"worker_address": f"w:{worker}"} if save.stock else {"worker_uid": worker}
        )
        self.when(c.CompleteStream(save_id=save.save_id, stream=stream, **by))
        return self.then

    def commit(self, save: Save, stream: int, chunk: int, worker: int, file: str = "") -> None:
        self.when(
            c.CommitChunk(
                save_id=save.save_id, stream=stream, worker_uid=worker, chunk=chunk, elements=5,
                file=file or f"{worker}-{chunk}",
            )
        )  # fmt: skip

    def lose(self, worker_id: int) -> None:
        self.when(c.LoseWorker(worker_id=worker_id, reason="r"))

    def waits_for(self, save: Save) -> str:
        (shown,) = (s for s in status(self.state)["saves"] if s["path"] == save.path)
        return shown["waits_for"] or ""


@pytest.fixture
def given() -> Saves:
    return Saves()


def test_stock_workers_share_the_splits_of_each_pass(given: Saves) -> None:
    save = given.start(sizes=(3,))
    one, two = given.worker(1, stock=True), given.worker(2, stock=True)
    assert given.assign(one) == given.assign(one) == [(save.save_id, 0)]
    assert given.assign(two) == [(save.save_id, 1)]
    assert [given.split(0, 1), given.split(1, 2), given.split(0, 1)] == [(0, 0), (0, 1), (1, 2)]
    assert [given.split(0, 1), given.split(1, 2)] == [(2, None), (1, None)]
    assert given.then == []
    assert given.split(1, 2, pass_number=1) == (1, 0)
    assert given.split(0, 1, pass_number=0) == (2, None), "the pass is over"
    runs = [[(r.pass_number, r.first, r.place, r.count) for r in s.sources[0].runs]
            for s in save.streams]  # fmt: skip
    assert runs == [[(0, 0, 0, 1), (0, 2, 2, 1)], [(0, 1, 1, 1), (1, 0, 3, 1)]]


def test_a_save_ends_with_its_last_stream(given: Saves) -> None:
    save = given.start()
    one, two, late = (given.worker(i, stock=True) for i in (1, 2, 3))
    given.assign(one), given.assign(two)
    assert given.complete(save, 0, 1) == ["stream_completed"]
    assert given.complete(save, 0, 1) == [], "said again"
    assert given.assign(one) == [], "it has seen the end of the data"
    assert given.assign(late) == []
    assert given.complete(save, 1, 3) == [], "another's"
    assert given.complete(save, 1, 2) == ["stream_completed", "save_finished"]
    assert given.state.ended_saves[save.save_id].finished
    assert given.complete(save, 1, 2) == []
    with pytest.raises(FailedPrecondition, match="no stream 1 that is being written"):
        given.split(1, 2)


def test_a_stock_worker_that_is_restarted_has_its_stream_and_a_lost_ones_goes_on(
    given: Saves,
) -> None:
    save = given.start()
    one = given.worker(1, stock=True)
    given.assign(one)
    given.split(0, 1)
    again: int = given.when(c.RegisterWorker(address="w:1", uid=11, stock=True))
    assert given.assign(again) == [(save.save_id, 0)]
    assert given.then == []
    given.lose(again)
    two = given.worker(2, stock=True)
    assert given.assign(two) == [(save.save_id, 0)]
    with pytest.raises(
        FailedPrecondition, match=r"no longer written by the worker w:1, but .* w:2"
    ):
        given.split(0, 1)
    assert given.split(0, 2) == (1, 1), "behind what the stream has"


def test_forebays_workers_have_ranges_and_commit_chunks(given: Saves) -> None:
    one, two = given.worker(1), given.worker(2)
    save = given.start()
    assert given.assign(one) == [(save.save_id, 0)]
    assert given.assign(two) == [(save.save_id, 1)]
    assert [(s.first, s.count) for s in save.streams] == [(0, 3), (3, 2)]
    given.commit(save, 0, 0, 1)
    given.commit(save, 0, 0, 1)
    assert given.then == [], "said again"
    with pytest.raises(InvalidArgument, match=r"chunk 2 .* cannot follow: 1 chunks"):
        given.commit(save, 0, 2, 1)
    version = given.state.workers[one].version
    assert given.complete(save, 0, 1) == ["stream_completed"]
    assert given.state.workers[one].version > version
    given.assign(one)
    assert (save.streams[2].first, save.streams[2].count) == (5, 2)
    given.lose(two)
    assert given.assign(one, most=1) == [(save.save_id, 2)], "one of a save at a time"
    assert given.complete(save, 2, 1) == ["stream_completed"]
    assert given.assign(one) == [(save.save_id, 1)], "what was lost goes on first"
    with pytest.raises(FailedPrecondition, match="is not this worker's any more"):
        given.commit(save, 1, 0, 2)
    given.complete(save, 1, 1)
    given.assign(one)
    assert (save.streams[3].first, save.streams[3].count) == (7, 3), "alone: all that is left"
    assert given.complete(save, 3, 1) == ["stream_completed", "save_finished"]


def test_a_worker_that_drains_begins_no_stream_and_leaves_its_share_to_others(given: Saves) -> None:
    drains, stays = given.worker(1), given.worker(2)
    save = given.start()
    given.assign(drains)
    given.worker(1, draining=True)
    assert given.assign(drains) == [(save.save_id, 0)], "what it has"
    given.complete(save, 0, 1)
    assert not may_assign(given.state, given.state.workers[drains], 3)
    assert given.assign(drains) == []
    given.assign(stays)
    assert save.streams[1].count == 7, "alone: all that is left"


@pytest.mark.parametrize("stock", [True, False])
def test_a_dataset_without_elements_is_saved(given: Saves, stock: bool) -> None:
    save = given.start(sizes=(0,))
    worker = given.worker(1, stock=stock)
    assert given.assign(worker) == [(save.save_id, 0)]
    assert given.complete(save, 0, 1) == ["stream_completed", "save_finished"]


def test_zipped_sources_are_divided_together(given: Saves) -> None:
    worker, save = given.worker(1), given.start(sizes=(9, 7))
    given.assign(worker)
    assert save.streams[0].count == 7


def test_a_worker_writes_so_many_saves_and_the_emptiest_first(given: Saves) -> None:
    saves = [given.start(f"/s{i}").save_id for i in range(3)]
    one, two = given.worker(1, stock=True), given.worker(2, stock=True)
    assert given.assign(one, most=2) == [(saves[0], 0)], "one more each time"
    assert given.assign(two, most=2) == [(saves[1], 0)]
    assert given.assign(two, most=2) == [(saves[1], 0), (saves[2], 0)]
    assert not may_assign(given.state, given.state.workers[two], 2)
    assert given.assign(two, most=2) == [(saves[1], 0), (saves[2], 0)]


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_save_that_only_stock_workers_can_write_waits_for_one(
    given: Saves, ours_first: bool
) -> None:
    """Whoever comes first."""
    save = given.start(indivisible="node x")
    if not ours_first:
        given.lose(given.worker(2, stock=True))
    ours = given.worker(1)
    assert given.assign(ours) == []
    assert given.then == []
    assert "a worker of TensorFlow's" in given.waits_for(save)
    assert "node x" in given.waits_for(save)
    with pytest.raises(Unimplemented, match="node x"):
        given.start("/other", indivisible="node x")
    stock = given.worker(2, stock=True)
    assert given.waits_for(save) == ""
    assert given.assign(stock) == [(save.save_id, 0)]
    given.start("/other", indivisible="node x")


@pytest.mark.parametrize("stock", [True, False])
def test_one_kind_of_workers_writes_a_save_which_waits_for_it_and_says_so(
    given: Saves, stock: bool
) -> None:
    save = given.start()
    assert given.waits_for(save) == "", "for any"
    begins, other = given.worker(1, stock=stock), given.worker(2, stock=not stock)
    assert given.assign(begins) == [(save.save_id, 0)]
    assert given.waits_for(save) == ""
    with pytest.raises(FailedPrecondition):
        given.commit(save, 0, 0, 2) if stock else given.split(0, 2)
    given.lose(begins)
    assert given.assign(other) == []
    needed = "a worker of TensorFlow's" if stock else "one of Forebay's workers"
    assert given.waits_for(save) == f"{needed}: such ones have begun it, in a format of their own"
    again = given.worker(3, stock=stock)
    assert given.waits_for(save) == ""
    assert given.assign(again) == [(save.save_id, 0)]


def test_a_save_within_another_is_refused(given: Saves) -> None:
    save = given.start("/a/b")
    for path in ("/a/b/c", "/a/b/c/d", "/a", "/"):
        with pytest.raises(InvalidArgument, match=r"the save at /a/b is being written"):
            given.start(path)
    given.start("/a/bc")
    given.when(c.FailSave(save_id=save.save_id, code="UNKNOWN", message=""))
    given.start("/a/b/c", is_gone=True)


def test_the_first_error_of_who_writes_it_ends_a_save(given: Saves) -> None:
    save = given.start()
    one, two = given.worker(1, stock=True), given.worker(2, stock=True)
    given.assign(one), given.assign(two)
    fail = {"save_id": save.save_id, "code": "INTERNAL", "message": "why"}
    given.when(c.FailSave(**fail, stream=0, worker_address="w:2"))  # type: ignore[arg-type]
    assert given.then == []
    given.when(c.FailSave(**fail, stream=1, worker_address="w:2"))  # type: ignore[arg-type]
    assert given.then == ["save_failed"]
    ended = given.state.ended_saves[save.save_id]
    assert (ended.failed, ended.message) == ("INTERNAL", "why")
    assert given.assign(one) == []
    given.when(c.FailSave(**fail))  # type: ignore[arg-type]
    assert given.then == []


def test_a_path_has_only_one_save(given: Saves, monkeypatch: pytest.MonkeyPatch) -> None:
    save = given.start(request=("a", 1))
    for is_gone in (False, True):
        with pytest.raises(AlreadyExists, match=r"/s is already started or completed"):
            given.start(is_gone=is_gone)
    assert given.start(request=("a", 1)) is save, "a retry"
    given.assign(given.worker(1, stock=True))
    given.complete(save, 0, 1)
    with pytest.raises(AlreadyExists):
        given.start()
    another = given.start(is_gone=True)
    assert another.save_id not in (save.save_id, *given.state.ended_saves)
    monkeypatch.setattr("forebay.service.core.saves.MAX_ENDED_SAVES", 1)
    for save_id in (another.save_id, given.start("/two").save_id):
        given.when(c.FailSave(save_id=save_id, code="UNKNOWN", message=""))
    assert [save.path for save in given.state.ended_saves.values()] == ["/two"]
    assert list(given.state.save_at) == ["/two"]


def test_a_repair_that_cut_events_off_ends_saves(given: Saves) -> None:
    """A chunk may be in the directory, and its commit may be what was cut off."""
    save, one = given.start(), given.worker(1)
    given.assign(one)
    cut = ev.LeaderElected(term=2, journal_id="cut", after_repair=True)
    apply(given.state, ev.Event(leader_elected=cut))
    given.when(c.ElectLeader(term=3, address="a:1", version="0", journal_id="j"))
    assert "save_failed" in given.then
    assert given.state.ended_saves[save.save_id].failed == "DATA_LOSS"


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"path": ""}, InvalidArgument, "absolute path"),
        ({"path": "a/b"}, InvalidArgument, "cannot be saved to 'a/b'"),
        ({"path": "/a\0"}, InvalidArgument, "absolute path"),
        ({"definition": ev.DatasetDefinition(unsplittable="why")}, Unimplemented, "why"),
        ({"definition": LOADED}, Unimplemented, "copy its directory"),
    ],
)
def test_wrong_saves_are_refused(given: Saves, fields: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        given.when(c.StartSave(**STARTED | {"definition": TEN} | fields))


def test_the_status_says_how_far_saves_are(given: Saves) -> None:
    save, one = given.start(), given.worker(1)
    given.assign(one)
    given.commit(save, 0, 0, 1)
    given.start("/failed")
    given.when(c.FailSave(save_id=given.state.save_at["/failed"], code="INTERNAL", message="why"))
    assert status(given.state)["saves"] == [
        {"path": "/s", "state": "being written", "streams": 1, "completed_streams": 0,
         "splits": [10], "assigned": 10, "written": 0, "expected_elements": None, "elements": 5,
         "waits_for": None},
        {"path": "/failed", "state": "failed", "error": "INTERNAL: why"},
    ]  # fmt: skip
