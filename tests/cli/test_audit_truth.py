"""What `forebay audit` says, beside what trainers wrote down: "given" is what they were given, "not
yet" is what they were not, and a promise that "held" did hold; also where the journal was cut.

The trainers are the client's arithmetic on a state machine, and write down what they are given.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.journal.codec import decode, encode
from forebay.journal.proto import events_pb2 as ev
from forebay.journal.reasons import GOODBYE, SILENT
from forebay.journal.snapshots import encode_snapshot
from forebay.service.cli import app
from forebay.service.cli.audit import _replayed
from forebay.service.cli.audit_ordered import OrderedAnswers
from forebay.service.cli.audit_shared import claimed, unordered
from forebay.service.cli.diff import compared
from forebay.service.client.positions import OrderedRead
from forebay.service.core import commands as c
from forebay.service.core.encoding import encode_state
from forebay.service.core.machine import apply, decide
from forebay.service.core.state import State
from forebay.service.core.status import status
from forebay.service.dashboard import views
from forebay.service.order import permuted
from forebay.storage import FileStorage
from forebay.storage.memory import MemoryStorage

from ..core.make_fold import FOLDS

Element = tuple[int, int]  # a bundle, and an index in it
ORDER = ev.OrderSpec(seed=3, shuffle=True, cycle_length=3, block_length=2, bundle_splits=1)
CLAIMED = ev.OrderSpec(
    seed=3, shuffle=True, cycle_length=1, block_length=1, bundle_splits=1, claimed=True
)


class Cluster:
    """A dispatcher's decisions, and its journal."""

    def __init__(self, draws: random.Random, lengths: list[int]) -> None:
        self.draws, self.state = draws, State()
        self.events: list[ev.Event] = []
        self.do(c.ElectLeader(term=1, address="a:1", version="0", journal_id="j"))
        self.register(lengths)

    def register(self, lengths: list[int]) -> None:
        self.lengths = lengths
        definition = ev.DatasetDefinition(sources=[ev.SplitSource(count=len(lengths))])
        self.do(c.RegisterDataset(dataset_id="d", definition=definition))
        self.do(c.DeclareLengths(dataset_id="d", lengths=tuple(lengths)))

    def do(self, command: c.Command) -> Any:
        events, answer = decide(self.state, command, 1000 + len(self.events))
        for event in events:
            apply(self.state, event)
            self.events.append(event)
        return answer

    def join(self, order: ev.OrderSpec, name: str = "j", **how: Any) -> ev.ConsumerJoined:
        return self.do(c.JoinJob(dataset_id="d", name=name, sharding=ev.OFF, order=order, **how))

    def histories(self, cut: int = 0) -> Any:
        """Of the journal, or of what is left if all before the event `cut` was removed."""
        storage = MemoryStorage()
        writer = storage.open_writer("test")
        writer.append([encode(event) for event in self.events])
        if cut:
            state = State()
            for event in self.events[:cut]:
                apply(state, event)
            writer.write_snapshot(cut, encode_snapshot(encode_state(state), 1))
            writer.trim(cut + 1)
        return _replayed(storage)[1].jobs

    def cuts(self) -> Iterator[int]:
        yield 0
        yield from self.draws.sample(range(3, len(self.events)), min(4, len(self.events) - 3))


class Trainer:
    """One consumer of an ordered read, to the end of its epoch."""

    def __init__(self, cluster: Cluster, read: OrderedRead) -> None:
        self.cluster, self.read, self.member = cluster, read, read.member
        joined = cluster.join(ORDER, epoch=0, member=self.member)
        self.consumer_id, self.iteration_id = joined.consumer_id, joined.iteration_id
        order = ev.OrderSpec()
        order.CopyFrom(ORDER)
        order.bundles = len(cluster.lengths)
        read.learn(order, cluster.lengths)
        self.epoch = read.begin(order)
        places, indexes = self.epoch.order.elements(0, self.epoch.order.known_until)
        end = self.epoch.deal.end(len(places), read.drop_remainder)
        mine = self.epoch.deal.mine(np.arange(end)).tolist()
        names = [(self.epoch.bundles[places[at]], int(indexes[at])) for at in mine]
        size = read.batch_size or 1
        self.batches = [names[at : at + size] for at in range(0, len(names), size)]
        self.reported = 0

    def take(self, most: int) -> None:
        self.read.given = min(len(self.batches), self.read.given + most)

    @property
    def given(self) -> list[list[Element]]:
        return self.batches[: self.read.given]

    def position(self) -> int:
        if self.read.given == len(self.batches):
            return (self.epoch.number + 1) * sum(self.cluster.lengths)
        return self.epoch.position(self.read.given) if self.read.given else self.read.position()

    def report(self) -> None:
        self.reported = self.read.given
        found = {self.consumer_id: self.position()}
        self.cluster.do(c.MoveConsumers(iteration_id=self.iteration_id, positions=found))

    def end(self, *, killed: bool) -> None:
        how: dict[str, Any] = {"reason": GOODBYE, "position": self.position()}
        self.reported = self.reported if killed else self.read.given
        if killed:
            how = {"reason": SILENT}
        self.cluster.do(c.LeaveIteration(consumer_id=self.consumer_id, **how))


def trained(cluster: Cluster) -> list[Trainer]:
    """Groups of one to three that go on where the last one was, begin again, or begin anywhere."""
    draws, trainers = cluster.draws, []
    total = sum(cluster.lengths)
    start = 0
    for _ in range(draws.randint(1, 6)):
        consumers, size = draws.randint(1, 3), draws.choice([1, 2, 4])
        where: dict[str, Any] = {"start_position": start}
        if not draws.randrange(3):
            where = {"start_step": start // (consumers * size)}
        group = [
            Trainer(
                cluster,
                OrderedRead(
                    seed=ORDER.seed, cycle_length=3, block_length=2, batch_size=size,
                    drop_remainder=not draws.randrange(3), consumer_index=index,
                    num_consumers=consumers, **where,
                ),
            )
            for index in draws.sample(range(consumers), draws.randint(1, consumers))
        ]  # fmt: skip
        trainers += group
        for _ in range(draws.randint(0, 12)):
            trainer = draws.choice(group)
            trainer.take(draws.choice([1, 1, 3, 99]))
            if draws.randrange(2):
                trainer.report()
        for trainer in group:
            trainer.end(killed=bool(draws.randrange(2)))
        start = draws.choice([start, start + draws.randrange(total), (1 + start // total) * total])
    return trainers


@pytest.mark.parametrize("seed", range(15))
def test_what_ordered_trainers_wrote_down(seed: int) -> None:
    draws = random.Random(seed)
    cluster = Cluster(draws, [draws.randint(0, 7) for _ in range(draws.randint(2, 6))] + [3])
    trainers = trained(cluster)
    seen = {element for t in trainers for batch in t.given for element in batch}
    for cut in cluster.cuts():
        ((_, history),) = cluster.histories(cut).items()
        answers = OrderedAnswers(history)
        for step in (*range(12), 100_000):
            expect_step(answers.step(step), history, trainers)
        for element in draws.sample(sorted(seen), min(len(seen), 9)):
            said = answers.element(f"{element[0]}:{element[1]}", None)
            for found in said["found"]:
                given = [t for t in trainers if given_at(t, element, found["epoch"])]
                if found["status"] == "given":
                    assert any(fits(t, found) for t in given)
                if found["status"] == "not yet":
                    assert not given
            for trainer in trainers if not cut else ():
                mine = [f for f in said["found"] if fits(trainer, f)]
                mine = [f["status"] for f in mine if f["epoch"] == trainer.epoch.number]
                if any(element in batch for batch in trainer.batches[: trainer.reported]):
                    assert "given" in mine
                elif any(element in batch for batch in trainer.given):
                    assert "given" in mine or "not known" in mine


def given_at(trainer: Trainer, element: Element, epoch: int) -> bool:
    return trainer.epoch.number == epoch and any(element in batch for batch in trainer.given)


def fits(trainer: Trainer, said: dict[str, Any]) -> bool:
    read = trainer.read
    return (read.consumer_index, read.num_consumers, read.batch_size, read.drop_remainder) == tuple(
        said.get(key) for key in ("consumer", "consumers", "batch_size", "drop_remainder")
    )


def expect_step(said: dict[str, Any], history: Any, trainers: list[Trainer]) -> None:
    assert said["status"] in ("given", "not yet", "not known", "differs by consumer")
    for batch in said.get("batches", ()):
        elements = [(bundle, index) for bundle, index in batch["elements"]]
        given = [
            t for t in trainers if fits(t, {**said, **batch}) and elements in t.given and elements
            and t.epoch.number == batch["epoch"]
        ]  # fmt: skip
        if elements and batch["status"] == "given":
            assert given
        if batch["status"] == "not yet":
            members = {s.consumer_id for s in history.groups()[said["group"] - 1]}
            assert not any(t.consumer_id in members for t in given)
        if batch["status"] == "not known":
            assert batch["why"]
    if said["status"] == "not yet" and "batches" not in said:
        assert not history.missing


def test_an_ordered_job_that_stopped_in_its_midst_is_exact() -> None:
    """All left in order: nothing is not known, up to a step that nobody will have."""
    cluster = Cluster(random.Random(1), [8] * 8)
    group = [
        Trainer(
            cluster,
            OrderedRead(seed=3, cycle_length=3, block_length=2, batch_size=2, consumer_index=index,
                        num_consumers=2),
        )
        for index in range(2)
    ]  # fmt: skip
    for trainer, batches in zip(group, (5, 3), strict=True):
        trainer.take(batches)
        trainer.end(killed=False)
    (row,) = views.jobs(status(cluster.state))
    assert (row["state"], row["epochs"]) == ("idle", [])
    (history,) = cluster.histories().values()
    answers = OrderedAnswers(history)
    assert [answers.step(n)["status"] for n in (0, 2, 3, 4, 5, 15, 16, 100_000)] == [
        *("given", "given", "differs by consumer", "differs by consumer"), *["not yet"] * 4,
    ]  # fmt: skip
    assert [b["status"] for b in answers.step(4)["batches"]] == ["given", "not yet"]


def parted(skipped: int = 0, bundle_splits: int = 1) -> list[list[Any]]:
    """The positions and steps at which two jobs part, all of whose bundles differ, while the second
    one leaves out so many elements at the begin."""
    cluster, order = Cluster(random.Random(1), [8] * 40), ev.OrderSpec()
    order.MergeFrom(ORDER)
    order.bundle_splits, bundles = bundle_splits, tuple(range(40 // bundle_splits))
    member = ev.GroupMember(consumers=1, batch_size=4)
    for number, name in enumerate("jk"):
        joined = cluster.join(order, name, epoch=0, member=member)
        job_id = cluster.state.iterations[joined.iteration_id].job_id
        made = (number,) * len(bundles)
        cluster.do(c.CheckBundles(job_id=job_id, bundles=bundles, checksums=made))
        cluster.do(c.LeaveIteration(consumer_id=joined.consumer_id, reason=GOODBYE))
    if skipped:
        skip = ev.ScheduleChange(skipped=skipped)
        cluster.do(c.ChangeSchedule(job_id=job_id, change=skip, readers=()))
    found = compared(*map(OrderedAnswers, cluster.histories().values()))["differences"]
    assert "whose checksums are 00000000 and 00000001" in found[-1]["what"]
    return [[each[name] for name in ("position", "first_step", "second_step")] for each in found]


def test_jobs_part_at_the_first_bundle_by_position() -> None:
    """With the steps that each of them has it in, if that is known."""
    assert parted() == [[0, 0, 0], [2, 0, 0], [4, 1, 1], [24, 6, 6], [26, 6, 6]]
    left_out = [[0, 0, None], [2, 0, None], [4, 1, None]]
    assert parted(skipped=12) == [[0, 0, 0], *left_out, [24, 6, 3], [26, 6, 3]]
    assert parted(bundle_splits=2) == [[None] * 3] * 5, "lengths are not known"


def test_a_journal_of_an_earlier_version_says_not_known() -> None:
    """Nothing is reported, and goodbyes have no position."""
    cluster = Cluster(random.Random(1), [8] * 8)
    trainer = Trainer(cluster, OrderedRead(seed=3, cycle_length=3, block_length=2, batch_size=2))
    trainer.take(5)
    cluster.do(c.LeaveIteration(consumer_id=trainer.consumer_id, reason=GOODBYE))
    (history,) = cluster.histories().values()
    answers = OrderedAnswers(history)
    assert [answers.step(n)["status"] for n in (0, 31, 32)] == ["not known"] * 2 + ["not yet"]
    assert "has reported nothing" in answers.step(0)["batches"][0]["why"]


def test_lengths_are_of_the_dataset_that_a_job_has_read() -> None:
    """It was removed, and another one was registered with its id."""
    cluster = Cluster(random.Random(1), [2, 3])
    Trainer(cluster, OrderedRead(seed=3, cycle_length=3, block_length=2)).end(killed=False)
    cluster.do(c.RemoveDataset(dataset_id="d"))
    cluster.register([9, 9, 9, 9])
    Trainer(cluster, OrderedRead(seed=3, cycle_length=3, block_length=2)).end(killed=False)
    before, after = (OrderedAnswers(h).overview() for h in cluster.histories().values())
    assert (before["epoch_elements"], [each["bundles"] for each in before["learned"]]) == (5, [2])
    assert (after["epoch_elements"], [each["bundles"] for each in after["learned"]]) == (36, [4])


@pytest.mark.parametrize("seed", range(15))
def test_what_trainers_that_read_at_least_once_wrote_down(seed: int) -> None:
    """With kills, and the journal cut anywhere."""
    draws = random.Random(seed)
    cluster = Cluster(draws, [draws.randint(1, 5) for _ in range(draws.randint(2, 6))])
    given: Counter[tuple[int, int, int]] = Counter()  # epoch, place, index
    epochs = draws.randint(1, 3)
    for epoch in range(1, epochs + 1):
        here: dict[int, dict[int, int]] = {}  # by consumer: place → where its trainer is
        for _ in range(draws.randint(1, 60)):
            if epoch in finished_epochs(cluster):
                break
            if not here or (len(here) < 3 and not draws.randrange(6)):
                here[cluster.join(CLAIMED, epoch=epoch).consumer_id] = {}
            consumer_id, claims = draws.choice([*here.items()])
            for place in [*claims]:
                if claims[place] < length_of(cluster, epoch, place) and draws.randrange(2):
                    given[epoch, place, claims[place]] += 1
                    claims[place] += 1
            if not draws.randrange(8):
                reason = draws.choice([SILENT, GOODBYE])
                if reason == GOODBYE:
                    report(cluster, consumer_id, claims, epoch, 0)
                cluster.do(c.LeaveIteration(consumer_id=consumer_id, reason=reason))
                del here[consumer_id]
            elif draws.randrange(2):
                report(cluster, consumer_id, claims, epoch, draws.randint(1, 3))
        for consumer_id in here:
            cluster.do(c.LeaveIteration(consumer_id=consumer_id, reason=SILENT))
        for number in [*cluster.state.iterations] if draws.randrange(2) else ():
            cluster.do(c.CollectIteration(iteration_id=number))
        if epoch in finished_epochs(cluster) and draws.randrange(2):  # one that comes late
            late = cluster.join(CLAIMED, epoch=epoch).consumer_id
            cluster.do(c.LeaveIteration(consumer_id=late, reason=GOODBYE))
    finished = finished_epochs(cluster)
    wanted = {
        (epoch, place, index)
        for epoch in range(1, epochs + 1)
        for place in range(len(cluster.lengths))
        for index in range(length_of(cluster, epoch, place))
    }
    for cut in cluster.cuts():
        (history,) = cluster.histories(cut).values()
        said = claimed(history)
        if said["verdict"] == "held":
            assert wanted <= {*given} and len(finished) == epochs
        else:
            assert said["verdict"] == "not known" and len(finished) < epochs
        if "no element came twice" in said["promise"] and not history.missing:
            assert not given or max(given.values()) == 1
        if history.missing:
            assert "what came twice is not known" in said["promise"]
        assert [e["epoch"] for e in said["epochs"] if e["finished"]] == [e - 1 for e in finished]


def finished_epochs(cluster: Cluster) -> list[int]:
    there = [each.epoch for each in cluster.state.iterations.values() if each.finished]
    gone = [
        epoch
        for job in cluster.state.jobs.values()
        for a, b in job.summarized
        for epoch in range(a, b)
    ]
    return sorted([*there, *gone])


def length_of(cluster: Cluster, epoch: int, place: int) -> int:
    return cluster.lengths[permuted(place, len(cluster.lengths), 3, epoch)]


def report(
    cluster: Cluster, consumer_id: int, claims: dict[int, int], epoch: int, most: int
) -> None:
    """As the client does; a bundle is done once its trainer was given all of it."""
    done = [place for place, at in claims.items() if at == length_of(cluster, epoch, place)]
    moved = {place: at for place, at in claims.items() if place not in done}
    answer = cluster.do(
        c.ClaimBundles(
            consumer_id=consumer_id, most=most, done=tuple(done), places=tuple(moved),
            cursors=tuple(moved.values()),
        )
    )  # fmt: skip
    claims.clear()
    claims.update({place: max(at, moved.get(place, at)) for place, at in answer.claims.items()})


def test_the_exit_code_is_1_where_a_promise_did_not_hold(tmp_path: Path) -> None:
    """And 0 where that is not known."""
    cluster = Cluster(random.Random(1), [2, 3])
    joined = cluster.join(CLAIMED, epoch=1)
    report(cluster, joined.consumer_id, {}, 1, 2)
    writer = FileStorage(tmp_path).open_writer("test")
    told = 0
    for checksum, code in ((7, 0), (6, 1)):
        job_id = cluster.state.job_by_name["j"]
        cluster.do(c.CheckBundles(job_id=job_id, bundles=(3,), checksums=(checksum,)))
        writer.append([encode(event) for event in cluster.events[told:]])
        told = len(cluster.events)
        assert app(["audit", str(tmp_path), "j"], standalone_mode=False) == code
    writer.close()
    (history,) = cluster.histories().values()
    assert "run again: 1 of epoch 0. " in claimed(history)["promise"]


@pytest.mark.parametrize("path", sorted(FOLDS.iterdir()), ids=lambda path: path.stem)
def test_each_golden_journal_has_a_verdict_wherever_it_was_cut(path: Path) -> None:
    """What earlier versions wrote, repairs and removed jobs included."""
    cluster = Cluster(random.Random(path.stem), [1])
    events = json.loads(path.read_text())["events"]
    cluster.events = [decode(n, bytes.fromhex(event)) for n, event in enumerate(events, 1)]
    for cut in cluster.cuts():
        for history in cluster.histories(cut).values():
            if history.job.is_ordered:
                answers = OrderedAnswers(history)
                said = answers.overview()
                assert answers.step(100_000)["status"] in (
                    "not yet",
                    "not known",
                    "differs by consumer",
                )
            else:
                said = claimed(history) if history.job.is_claimed else unordered(State(), history)
            assert said["verdict"] in ("held", "not known", "did not hold") and said["promise"]
            assert not (history.missing and said["verdict"] == "held" and "sharding" in said)
