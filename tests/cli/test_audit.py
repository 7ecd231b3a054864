"""`forebay audit`, on the journals of small reads by real processes."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import service
from forebay.journal.proto import events_pb2 as ev
from forebay.service.cli import app
from forebay.service.cli.audit_ordered import OrderedAnswers
from forebay.service.cli.audit_shared import unordered
from forebay.service.core import commands as c
from forebay.service.errors import ForebayError, InvalidArgument, NotFound

from ..cluster import WorkerProcess
from ..core.test_job_history import Followed
from ..stock import DispatcherProcess
from .test_cli import error_of

SPLITS = range(100, 120)
BUNDLE_SPLITS = 3
ORDER = {"seed": 5, "cycle_length": 4, "block_length": 2, "bundle_splits": BUNDLE_SPLITS}
BATCH = 4


def numbers(split: int) -> Iterator[dict[str, int]]:
    for number in range(1 + split % 4):
        yield {"split": split, "number": number}


def element(split: int, number: int) -> tuple[int, int]:
    """Its bundle, and its index there."""
    bundle, place = divmod(split - SPLITS.start, BUNDLE_SPLITS)
    before = sum(1 + earlier % 4 for earlier in range(split - place, split))
    return bundle, before + number


TOTAL = sum(1 + split % 4 for split in SPLITS)
Batches = list[list[tuple[int, int]]]  # of elements


def read(dispatcher: DispatcherProcess, dataset_id: str, **how: Any) -> Batches:
    """The batches of an epoch."""
    how = {"ordered": True, **ORDER, "batch_size": BATCH, "job_name": "train", **how}
    with service.read(dispatcher.target, dataset_id, **how) as batches:
        return [
            [element(*each) for each in zip(*map(np.ndarray.tolist, pair), strict=True)]
            for pair in ((batch["split"], batch["number"]) for batch in batches)
        ]


def read_by(consumers: int, dispatcher: DispatcherProcess, dataset_id: str, **how: Any) -> Any:
    """The batches of each of so many consumers."""
    with ThreadPoolExecutor(consumers) as threads:
        reads = [
            threads.submit(
                read, dispatcher, dataset_id, consumer_index=n, num_consumers=consumers, **how
            )
            for n in range(consumers)
        ]
        return [each.result() for each in reads]


class Reads:
    """A journal, and what was read from it."""

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        with DispatcherProcess(journal) as dispatcher, WorkerProcess(dispatcher.address):
            self.dataset_id = service.register_dataset(dispatcher.target, numbers, splits=SPLITS)
            target = dispatcher.target
            self.first = read_by(2, dispatcher, self.dataset_id)
            self.second = read_by(3, dispatcher, self.dataset_id, start_position=TOTAL + BATCH * 3)
            self.third = read(
                dispatcher, self.dataset_id, start_step=2, drop_remainder=True, batch_size=10
            )
            self.unnamed = read(dispatcher, self.dataset_id, job_name=None)
            how = {"processing_mode": "distributed_epoch", "job_name": "unordered"}
            with service.read(target, self.dataset_id, **how) as once:  # type: ignore[arg-type]
                self.unordered = len(list(once))
            for most in (3, TOTAL):
                with service.read(
                    target, self.dataset_id, delivery="at_least_once", job_name="claims",
                    bundle_splits=4,
                ) as once:  # fmt: skip
                    self.claimed = len(list(itertools.islice(once, most)))
            assert dispatcher.stop() == 0

    def audit(self, job: object, *options: object) -> Any:
        return json.loads(audit(self.journal, job, *options, "--json"))

    def in_words(self, job: object, *options: object) -> str:
        return audit(self.journal, job, *options)


def audit(*arguments: object) -> str:
    """What the command prints, in this process: there are many of them."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        app(["audit", *map(str, arguments)], standalone_mode=False)
    return printed.getvalue()


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Reads:
    return Reads(tmp_path_factory.mktemp("audit") / "journal")


def given(step: dict[str, Any]) -> Batches:
    assert step["status"] == "given"
    return [[(bundle, index) for bundle, index in each["elements"]] for each in step["batches"]]


def test_an_ordered_job(reads: Reads) -> None:
    said = reads.audit("train")
    assert said["order"] == [{"shuffle": True, "bundles": 7, "claimed": False, **ORDER}]
    assert (said["lengths"], said["epoch_elements"]) == ("of 7 of 7 bundles", TOTAL)
    assert sum(each["bundles"] for each in said["learned"]) == 7
    assert "unknown" in said and said["unknown"] is None
    first, second, third = said["groups"]
    assert (first["consumers"], first["position"], first["first_step"]) == (2, 0, 0)
    assert sorted(reader["index"] for reader in first["readers"]) == [0, 1]
    assert all(reader["joined_ms"] <= reader["left_ms"] for reader in first["readers"])
    assert (second["consumers"], second["position"]) == (3, TOTAL + BATCH * 3)
    assert (second["epoch"], second["offset"]) == (1, BATCH * 3)
    assert (third["batch_size"], third["drop_remainder"], third["first_step"]) == (10, True, 2)
    assert said["verdict"] == "held" and said["promise"].startswith(
        "one order held: no later run of a bundle"
    )
    words = reads.in_words("train")
    assert f"epoch elements {TOTAL}" in words
    assert f"group 2, consumers 3, batch size 4, position {TOTAL + 12}, epoch 1" in words
    assert "index 2, " in words and "promise one order held" in words


def test_a_job_by_its_whole_name_and_by_its_id(reads: Reads) -> None:
    by_name = reads.audit("train")
    assert reads.audit(f"dataset_id=/{reads.dataset_id}/train") == by_name
    assert reads.audit(by_name["job_id"]) == by_name


def test_a_step_is_what_the_consumers_were_given(reads: Reads) -> None:
    second = reads.audit("train")["groups"][1]["first_step"]
    for step in range(2):
        said = reads.audit("train", "--step", second + step)
        if said["group"] == 2:  # unless the third group read it last
            assert given(said) == [read[step] for read in reads.second]
    assert given(reads.audit("train", "--step", 0)) == [read[0] for read in reads.first]
    said = reads.audit("train", "--step", 2)
    assert (said["group"], said["batches"][0]["position"], given(said)) == (3, 20, reads.third[:1])
    assert said["other_groups"] == [{"group": 1, "status": "given"}]
    assert len(reads.third) == TOTAL // 10 - 2
    words = reads.in_words("train", "--step", 2)
    assert "consumer 0, status given, position 20, epoch 0, offset 20, count 10" in words
    for run in said["batches"][0]["bundles"]:
        bundle = run["bundle"]
        mine = [index for b, index in reads.third[0] if b == bundle]
        assert (run["indexes"], run["splits"]) == (
            [mine[0], mine[-1]], [3 * bundle, min(3 * bundle + 2, 19)],
        )  # fmt: skip
    after = reads.audit("train", "--step", 100000)
    assert after["status"] == "not yet" and after["other_groups"] == []
    assert "left in order at position" in after["batches"][0]["why"]


def test_an_element_is_where_the_consumer_was_given_it(reads: Reads) -> None:
    bundle, index = reads.first[1][1][2]
    said = reads.audit("train", "--element", f"{bundle}:{index}", "--epoch", 0)
    (found,) = [each for each in said["found"] if each["group"] == 1]
    assert (found["step"], found["consumer"], found["position"]) == (1, 1, 14)
    said = reads.audit("train", "--element", f"{bundle}:{index}")
    assert {each["epoch"] for each in said["found"]} == {0, 1}
    bundle, index = reads.second[2][0][0]
    words = reads.in_words("train", "--element", f"{bundle}:{index}", "--epoch", 1)
    assert f"position {TOTAL + 12 + 2 * BATCH}, epoch 1, offset {12 + 2 * BATCH}" in words


def test_a_job_that_went_with_its_reader(reads: Reads) -> None:
    with pytest.raises(NotFound) as error:
        reads.audit("nonsense")
    (unnamed,) = re.findall(r" (\d+) \(id \1\)", str(error.value))
    said = reads.audit(unnamed)
    assert said["job"] == unnamed and len(said["groups"]) == 1
    step = reads.audit(unnamed, "--step", 1)
    assert given(step) == [reads.unnamed[1]]


def test_an_unordered_job(reads: Reads) -> None:
    assert reads.unordered == TOTAL
    said = reads.audit("unordered")
    assert said["promise"].startswith("at most once held") and said["lost"] == []
    assert said["epochs"] == [{"epoch": 0, "finished": True}]
    assert [(r["epoch"], r["why"] is None) for r in said["readers"]] == [(0, False)]
    assert "sharding DYNAMIC" in reads.in_words("unordered")


def test_errors(reads: Reads, tmp_path: Path) -> None:
    for wrong, options in (
        ("job 'nonsense' is not in the journal; these are: train (id ", ("nonsense",)),
        ("unordered is not read in order", ("unordered", "--step", 1)),
        ("'7' is not of the form BUNDLE:INDEX", ("train", "--element", "7")),
        ("bundle 7 is none of 7", ("train", "--element", "7:0")),
        ("elements: count from 0", ("train", "--element", "0:99")),
        ("--step 1 and --element 0:0: ask for one", ("train", "--step", 1, "--element", "0:0")),
        ("--epoch 1 is for --element", ("train", "--epoch", 1)),
        ("job claims is not read in order", ("claims", "--step", 0)),
    ):
        with pytest.raises(ForebayError, match=re.escape(wrong)):
            audit(reads.journal, *options)
    assert "there is no journal" in error_of("audit", tmp_path, "train")


def test_values_that_the_journal_knows() -> None:
    """Of numbers and of explicit splits; zipped sources have values each."""
    given = Followed()
    named = ev.ExplicitSplits(splits=[f"file-{n}".encode() for n in range(5)])
    given.register(
        "e",
        ev.SplitSource(arithmetic=ev.Arithmetic(start=10, stop=100, step=10)),
        ev.SplitSource(explicit=named, leased_with=0),
        ev.SplitSource(count=7, leased_with=0),
    )
    given.job("e", bundle_splits=2)
    ordered = OrderedAnswers(given.history)
    assert [ordered.splits_of(bundle) for bundle in (1, 2)] == [
        {"splits": (2, 3), "values": [(30, 40), ("file-2", "file-3")]},
        {"splits": (4, 4), "values": [(50, 50), ("file-4", "file-4")]},
    ]


def test_positions_that_are_not_determined_yet_are_named() -> None:
    """A consumer has joined, and no bundle was run."""
    given = Followed()
    given.join(1, of=2, start=0)
    ordered = OrderedAnswers(given.history)
    needed = "not determined yet: 0 positions are, .* bundles .* are needed; read"
    with pytest.raises(InvalidArgument, match=needed):
        ordered.element("0:0", None)
    step = ordered.step(0)
    assert re.search(needed, step["unknown"])
    assert [batch["status"] for batch in step["batches"]] == ["not yet", "not known"]
    said = ordered.overview()
    assert said["lengths"].startswith("of 0 of ") and "is not determined" in said["unknown"]


def test_claims_and_what_returned(reads: Reads) -> None:
    said = reads.audit("claims")
    assert reads.claimed == TOTAL - 3
    assert said["delivery"] == "at_least_once"
    assert said["epochs"] == [{"epoch": 0, "bundles_done": 5, "of": 5, "finished": True}]
    first, second = said["readers"]
    assert first["claimed"] == len(first["bundles"]) > 0
    done = [each["bundle"] for by in (first, second) for each in by["bundles"] if each["done_ms"]]
    assert sorted(done) == [0, 1, 2, 3, 4]
    assert said["returned"]
    for each in said["returned"]:
        assert each["why"] == "it said goodbye" and not each["may_have_come_twice"]
        assert each["claimed_next_by"] == second["consumer_id"]
    assert any(each["cursor"] for each in said["returned"])
    assert said["promise"].endswith("no element came twice")
    assert "delivery at_least_once" in reads.in_words("claims")


def test_a_promise_that_did_not_hold_is_named() -> None:
    given = Followed()
    job_id = given.state.iterations[given.join(0, of=1).iteration_id].job_id
    for checksum in (7, 6):
        given.when(c.CheckBundles(job_id=job_id, bundles=(3,), checksums=(checksum,)))
    given.histories.follow_end(given.state)
    history = given.histories.jobs[job_id]
    promise = OrderedAnswers(history).overview()["promise"]
    assert promise.startswith("one order did not hold: ") and "3 of epoch" in promise

    given = Followed()
    given.iteration("j")
    history = given.history
    said = unordered(given.state, history)
    assert said["verdict"] == "not known" and "epoch 0 is not finished" in said["promise"]
    history.leased_twice.append(ev.SplitsLeased(first=4, count=2))
    said = unordered(given.state, history)
    assert said["verdict"] == "did not hold" and "the first one of splits 4 … 5" in said["promise"]
