"""Claims: which consumer gets which bundles, cursors, and what happens when a consumer leaves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.claims import MAX_CLAIMS, Claimed
from forebay.service.core.encoding import decode_state, encode_state
from forebay.service.core.read_kinds import why_no_task
from forebay.service.core.state import BundleSpec, Iteration, Job
from forebay.service.core.status import status
from forebay.service.errors import InvalidArgument, NotFound

from ..hypothesis_profiles import examples
from .given import Given

ORDER = ev.OrderSpec(
    seed=7, shuffle=True, cycle_length=1, block_length=1, bundle_splits=1, claimed=True
)


class Claiming(Given):
    """A job of so many bundles, which is read at least once."""

    def __init__(self, bundles: int = 10) -> None:
        super().__init__()
        self.register("e", ev.SplitSource(count=bundles))
        self.worker_id = self.worker(1)

    def job(self, name: str = "j", **fields: Any) -> Job:
        how = {"dataset_id": "e", "name": name, "sharding": ev.OFF, "order": ORDER, **fields}
        return self.state.jobs[self.when(c.GetOrCreateJob(**how))]

    def join(self, name: str = "j", epoch: int = 0) -> int:
        job_id = self.job(name).job_id
        joined: ev.ConsumerJoined = self.when(c.JoinIteration(job_id=job_id, epoch=epoch))
        return joined.consumer_id

    def claim(self, by: int, most: int = 100, done: Any = (), **cursors: int) -> Claimed:
        """Cursors are given as p3=7: of place 3."""
        command = c.ClaimBundles(
            consumer_id=by, most=most, done=tuple(done),
            places=tuple(int(name[1:]) for name in cursors), cursors=tuple(cursors.values()),
        )  # fmt: skip
        return self.when(command)

    def leave(self, consumer_id: int) -> None:
        self.when(c.LeaveIteration(consumer_id=consumer_id, reason="r"))

    def iteration_of(self, consumer_id: int) -> Iteration:
        return self.state.iterations[self.state.consumers[consumer_id].iteration_id]


def test_a_job_is_read_at_least_once() -> None:
    given = Claiming(10)
    job = given.job()
    assert job.order == BundleSpec(7, True, 1, 1, 1, 10, claimed=True)
    assert (job.is_claimed, job.is_ordered) == (True, False)
    consumer = given.join()
    assert given.then == ["iteration_created", "task_created", "consumer_joined"]
    given.claim(consumer, most=2)
    (shown,) = status(given.state)["jobs"]
    assert shown["iterations"][0]["claims"] == {
        "bundles": 10, "done": 0, "unclaimed": 8, "consumers": {str(consumer): 2},
    }  # fmt: skip
    assert shown["iterations"][0]["group"] == []


def test_a_consumer_gets_half_of_its_share_of_what_is_left() -> None:
    given = Claiming(100)
    one, other = given.join(), given.join()
    assert given.claim(one) == Claimed(dict.fromkeys(range(25), 0), 75)
    assert given.then == ["bundles_claimed"]
    assert [*given.claim(other).claims] == [*range(25, 44)]
    assert given.claim(other, most=20).claims.keys() == {*range(25, 45)}
    assert given.claim(other, most=0).claims.keys() == {*range(25, 45)}
    assert given.then == []


def test_the_claims_of_a_consumer_are_bounded() -> None:
    given = Claiming(10 * MAX_CLAIMS)
    consumer = given.join()
    assert len(given.claim(consumer, most=10 * MAX_CLAIMS).claims) == MAX_CLAIMS


def test_the_last_bundles_go_to_consumers_without_claims() -> None:
    given = Claiming(4)
    consumers = [given.join() for _ in range(4)]
    assert [*given.claim(consumers[0]).claims] == [0]
    assert [*given.claim(consumers[0]).claims] == [0], "fewer are left than consumers"
    assert [*given.claim(consumers[1]).claims] == [1]
    assert given.claim(consumers[0], done=[0]) == Claimed({2: 0}, 1)
    assert given.claim(consumers[1], done=[1]) == Claimed({3: 0}, 0)
    assert given.claim(consumers[2]) == Claimed({}, 0)


def test_returned_claims_are_claimed_first_at_their_cursors() -> None:
    given = Claiming(10)
    one, other = given.join(), given.join()
    given.claim(one, most=3)
    given.claim(other, most=1)
    given.claim(one, most=0, p1=7, p2=1, done=[0])
    assert given.then == ["claims_moved"]
    version = given.iteration_of(one).version
    given.leave(one)
    assert given.then == ["consumer_left"]
    assert given.iteration_of(other).version > version, "others hear of it"
    of = given.iteration_of(other).claims
    assert of is not None and (of.returned, of.done, of.next) == ({1: 7, 2: 1}, [(0, 1)], 4)
    assert given.claim(other, most=4).claims == {3: 0, 1: 7, 2: 1, 4: 0}
    assert of.returned == {}


def test_cursors_only_grow() -> None:
    given = Claiming()
    consumer = given.join()
    given.claim(consumer, most=2)
    assert given.claim(consumer, 0, p0=5, p1=2).claims == {0: 5, 1: 2}
    assert given.claim(consumer, 0, p0=3, p1=4).claims == {0: 5, 1: 4}
    assert given.claim(consumer, 0, p0=5, p1=4).claims == {0: 5, 1: 4}
    assert given.then == []
    assert given.claim(consumer, 0, p0=-1).claims == {0: 5, 1: 4}
    assert given.then == []


def test_late_and_repeated_requests_change_nothing() -> None:
    given = Claiming()
    one, other = given.join(), given.join()
    given.claim(one, most=2)
    given.claim(one, most=0, p1=3, done=[0])
    for _ in range(2):  # and what others have claimed, or nobody
        assert given.claim(one, most=0, done=[0, 0, 7], p1=3, p0=9, p5=1).claims == {1: 3}
        assert given.then == []
    given.claim(other, most=1)
    assert given.claim(one, most=0, done=[2], p2=4).claims == {1: 3}
    assert given.claim(other, most=0).claims == {2: 0}
    given.leave(one)
    with pytest.raises(NotFound, match=f"Consumer id {one} not found: it left, or was given up"):
        given.claim(one, p1=4)


def test_the_last_one_done_finishes_the_epoch() -> None:
    given = Claiming(3)
    one, other = given.join(), given.join()
    given.claim(one, most=1)
    given.claim(other, most=1)
    given.claim(one, most=1, done=[0])
    given.claim(other, most=1, done=[1])
    iteration = given.iteration_of(one)
    assert given.claim(one, done=[2]) == Claimed({}, 0)
    assert given.then == ["claims_moved", "iteration_paused", "iteration_finished"]
    assert iteration.finished and not iteration.all_tasks
    assert given.claim(one, done=[2]) == Claimed({}, 0)
    assert given.then == []
    for consumer in (one, other):
        given.leave(consumer)
        assert given.then == ["consumer_left"]
    given.join()
    assert given.then == ["consumer_joined"]
    again = given.join(epoch=1)
    assert given.then == ["iteration_created", "task_created", "consumer_joined"]
    assert given.claim(again, most=1).claims == {0: 0}


def test_the_next_consumer_goes_on_where_the_last_one_left() -> None:
    given = Claiming(3)
    consumer = given.join()
    given.claim(consumer, most=2)
    given.claim(consumer, most=0, p1=4, done=[0])
    iteration = given.iteration_of(consumer)
    given.leave(consumer)
    assert given.then == ["consumer_left", "iteration_paused"]
    assert not iteration.all_tasks and not iteration.finished
    given.when(c.CollectIteration(iteration_id=iteration.iteration_id))
    assert given.then == [], "it keeps what was read"
    consumer = given.join()
    assert given.then == ["task_created", "consumer_joined"]
    assert given.claim(consumer, most=1).claims == {1: 4}


def test_a_job_without_a_name_goes_with_its_consumer() -> None:
    given = Claiming()
    consumer = given.join("")
    given.claim(consumer)
    given.leave(consumer)
    assert given.then == ["consumer_left", "iteration_collected"]


def test_stock_workers_and_clients_have_no_part_in_it() -> None:
    given = Claiming()
    given.when(c.LoseWorker(worker_id=given.worker_id, reason="r", left=True))
    given.worker(2, stock=True)
    assert given.then == ["worker_registered"]
    iteration = given.iteration_of(given.join())
    assert "j is read in bundles" in why_no_task(given.state, iteration)
    with pytest.raises(InvalidArgument, match="Existing order: <at least once, seed=7"):
        given.job(order=None)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"sharding": ev.DYNAMIC}, "a read at least once does not go with DYNAMIC sharding; use"),
        ({"dataset_id": "endless"}, r"dataset endless has no end.*use take\(n\), or remove repeat"),
    ],
)
def test_options_that_do_not_go_with_claims_are_refused(fields: dict[str, Any], why: str) -> None:
    given = Claiming()
    given.register("endless", ev.SplitSource(endless=ev.Endless()))
    with pytest.raises(InvalidArgument, match=why):
        given.job(**fields)


def test_a_job_is_found_by_the_same_way_to_read_only() -> None:
    given = Claiming()
    job = given.job()
    assert given.job() is job
    in_order, other_seed = ev.OrderSpec(), ev.OrderSpec()
    in_order.CopyFrom(ORDER)
    in_order.claimed = False
    other_seed.CopyFrom(ORDER)
    other_seed.seed = 8
    for order, got in ((in_order, "seed=7"), (other_seed, "at least once, seed=8")):
        with pytest.raises(InvalidArgument, match=f"<at least once, seed=7.*got <{got}"):
            given.job(order=order)


def test_other_kinds_of_consumers_cannot_claim() -> None:
    given = Claiming()
    joined = given.iteration("other")
    with pytest.raises(InvalidArgument, match="which is not read at least once"):
        given.claim(joined.consumer_id)


def test_each_place_has_its_cursor() -> None:
    given = Claiming()
    consumer = given.join()
    with pytest.raises(InvalidArgument, match="reports 1 cursors of 2 bundles; report one of each"):
        given.when(c.ClaimBundles(consumer_id=consumer, most=1, places=(0, 1), cursors=(3,)))


class Trainer:
    """Knows its claims from the last answer, and gives their elements one after another."""

    def __init__(self, consumer_id: int) -> None:
        self.consumer_id = consumer_id
        self.cursors: dict[int, int] = {}
        self.done: set[int] = set()
        self.unreported: Counter[tuple[int, int]] = Counter()


class Training:
    """Trainers, the lengths of bundles, and what was given."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.given = Claiming(len(lengths))
        self.trainers: list[Trainer] = []
        self.got: Counter[tuple[int, int]] = Counter()
        self.may_repeat: Counter[tuple[int, int]] = Counter()  # of trainers that died
        self.iteration_id = 0

    def join(self) -> Trainer:
        trainer = Trainer(self.given.join())
        self.iteration_id = self.given.state.consumers[trainer.consumer_id].iteration_id
        self.trainers.append(trainer)
        return trainer

    @property
    def finished(self) -> bool:
        return self.given.state.iterations[self.iteration_id].finished

    def report(self, trainer: Trainer, most: int, heard: bool = True) -> None:
        """`heard`: the answer comes; the request does in any case."""
        claimed = self.given.when(
            c.ClaimBundles(
                consumer_id=trainer.consumer_id, most=most, places=tuple(trainer.cursors),
                cursors=tuple(trainer.cursors.values()), done=tuple(trainer.done),
            )
        )  # fmt: skip
        trainer.unreported.clear()
        if heard:
            trainer.done.clear()
            trainer.cursors = claimed.claims | trainer.cursors

    def take(self, trainer: Trainer, count: int) -> None:
        for place in sorted(trainer.cursors):
            while count and trainer.cursors[place] < self.lengths[place]:
                element = place, trainer.cursors[place]
                self.got[element] += 1
                trainer.unreported[element] += 1
                trainer.cursors[place] += 1
                count -= 1
            if trainer.cursors[place] == self.lengths[place]:
                del trainer.cursors[place]
                trainer.done.add(place)

    def leave(self, trainer: Trainer, in_order: bool) -> None:
        if in_order:
            self.report(trainer, 0)
        self.may_repeat += trainer.unreported
        self.trainers.remove(trainer)
        self.given.leave(trainer.consumer_id)

    def read_to_the_end(self) -> None:
        if not self.trainers:
            self.join()
        while not self.finished:
            for trainer in self.trainers:
                self.report(trainer, 3)
                self.take(trainer, 5)


@drawn(st.lists(st.integers(0, 6), max_size=12), st.data())
@settings(max_examples=examples(200), deadline=None)
def test_no_element_is_missing_whichever_trainer_dies(
    lengths: list[int], data: st.DataObject
) -> None:
    """Elements come twice only if a dead trainer was given them after its last report."""
    training = Training(lengths)
    training.join()
    steps = st.sampled_from(["join", "claim", "claim", "take", "take", "unheard", "leave", "die"])
    for step in data.draw(st.lists(steps, max_size=40)):
        if step == "join":
            training.join()
            continue
        if not training.trainers:
            continue
        trainer = data.draw(st.sampled_from(training.trainers))
        if step == "take":
            training.take(trainer, data.draw(st.integers(0, 8)))
        elif step in ("claim", "unheard"):
            training.report(trainer, data.draw(st.integers(0, 5)), heard=step == "claim")
        else:
            training.leave(trainer, in_order=step == "leave")
        state = training.given.state
        assert decode_state(encode_state(state)) == state
    training.read_to_the_end()
    whole = {(place, i) for place, length in enumerate(lengths) for i in range(length)}
    assert training.got.keys() == whole
    repeated = training.got - Counter(whole)
    assert repeated <= training.may_repeat
