"""Mixtures: sources in one order with shares, whatever the workers, the consumers, and who dies."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from typer.testing import CliRunner, Result

from forebay import service
from forebay.service.cli import app
from forebay.service.cli.audit import _replayed
from forebay.service.cli.audit_ordered import OrderedAnswers
from forebay.service.client import ordered as ordered_mode
from forebay.service.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unimplemented,
)
from forebay.service.picks import shares
from forebay.storage import FileStorage

from ..ordered_reads import TROUBLES, At, Cluster, read, uneven_numbers
from ..picked import picked

ORDER: dict[str, Any] = {"seed": 7, "cycle_length": 3, "block_length": 2}
WEIGHTS = {"books": 0.1, "code": 0.3, "web": 0.6}
STEPS = 1_500
STEP = 24


def books(split: int) -> Iterator[Any]:
    """A few of each: the source has several epochs within a test."""
    for number in range(split % 3):
        yield np.int64(2_000_000 + 10 * split + number)


@pytest.fixture(scope="module")
def sources(cluster: Cluster) -> dict[str, str]:
    """One filters, one is small, one is a Python function with unknown lengths."""
    register = service.register_dataset
    code = tf.data.Dataset.range(1_000_000, 1_000_300)
    return {
        "web": register(cluster.target, uneven_numbers(3_000)),
        "code": register(cluster.target, code),
        "books": register(cluster.target, books, splits=range(12)),
    }


@pytest.fixture(scope="module")
def mixture(cluster: Cluster, sources: dict[str, str]) -> str:
    weighted = {name: (sources[name], weight) for name, weight in WEIGHTS.items()}
    return service.register_mixture(cluster.target, weighted)


def stream(cluster: Cluster, dataset_id: str, **order: Any) -> Iterator[int]:
    """The numbers of a source read by itself, epoch by epoch."""
    position = 0
    while True:
        how = {**ORDER, **order, "start_position": position}
        epoch = read(cluster.target, dataset_id, **how).numbers
        position += len(epoch)
        yield from epoch


@pytest.fixture(scope="module")
def expected(cluster: Cluster, sources: dict[str, str]) -> list[int]:
    """Each position's element: the next one of the source that it picks, read by itself."""
    names = sorted(WEIGHTS)
    streams = [stream(cluster, sources[name]) for name in names]
    found = picked(shares([WEIGHTS[name] for name in names]), 0, STEPS + 600)
    return [next(streams[source]) for source in found.tolist()]


def test_each_source_keeps_its_own_order(
    cluster: Cluster, mixture: str, expected: list[int]
) -> None:
    assert read(cluster.target, mixture, steps=STEPS, **ORDER).numbers == expected[:STEPS]
    assert len({number for number in expected if number >= 2_000_000}) < 30, "several epochs"


@pytest.mark.usefixtures("small_windows")
@TROUBLES
def test_nobody_notices(
    cluster: Cluster, mixture: str, expected: list[int], trouble: Callable[[Cluster], At]
) -> None:
    cluster.resize(2)
    how = {"batch_size": 20, "at": trouble(cluster), **ORDER}
    got = read(cluster.target, mixture, 3, steps=STEPS // 60, **how)
    assert got.numbers == expected[:STEPS]


def test_it_goes_on_from_its_state_with_another_number_of_consumers(
    cluster: Cluster, mixture: str, expected: list[int]
) -> None:
    got: list[int] = []
    state = None
    for consumers, batch_size in itertools.islice(itertools.cycle([(2, 12), (3, 8), (1, 24)]), 6):
        part = read(
            cluster.target, mixture, consumers, steps=9, state=state, batch_size=batch_size,
            **ORDER,
        )  # fmt: skip
        got += part.numbers
        state = part.state
    assert got == expected[: len(got)] and len(got) == 6 * 9 * 24
    assert len(str(state)) < 300
    with pytest.raises(FailedPrecondition, match="another dataset"):
        other = service.register_mixture(
            cluster.target,
            {"web": (service.register_dataset(cluster.target, uneven_numbers(9)), 1)},
        )
        read(cluster.target, other, state=state, steps=1, batch_size=24, **ORDER)


def test_tensorflow_reads_the_same(cluster: Cluster, mixture: str, expected: list[int]) -> None:
    for first in (0, 5):
        dataset = service.from_dataset_id(
            "parallel_epochs", cluster.target, mixture, ordered=True, batch_size=STEP,
            start_step=first, job_name=f"tf {first}", **ORDER,
        )  # fmt: skip
        assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        batches = dataset.take(6).as_numpy_iterator()
        assert np.concatenate([*batches]).tolist() == expected[first * STEP : (first + 6) * STEP]


def test_keras_trains_on_it(cluster: Cluster, mixture: str, expected: list[int]) -> None:
    import keras

    seen: list[int] = []

    class Recording(keras.Model):  # type: ignore[misc]
        def train_step(self, batch: Any) -> dict[str, Any]:
            seen.extend(batch.numpy().tolist())
            return {"loss": tf.constant(0.0)}

    dataset = service.from_dataset_id(
        "parallel_epochs", cluster.target, mixture, ordered=True, batch_size=STEP, **ORDER
    )
    model = Recording()
    model.compile(run_eagerly=True)
    model.fit(dataset, steps_per_epoch=7, epochs=3, verbose=0, shuffle=False)
    assert seen[: 21 * STEP] == expected[: 21 * STEP]


def test_elements_with_their_sources(cluster: Cluster, mixture: str, expected: list[int]) -> None:
    names = sorted(WEIGHTS)
    found = picked(shares([WEIGHTS[name] for name in names]), 0, STEPS)
    wanted = [(number, names[s].encode()) for number, s in zip(expected, found, strict=False)]
    how = {"ordered": True, "add_source": True, "job_name": "named", **ORDER}
    with service.read(cluster.target, mixture, **how) as elements:
        assert [(int(n), name) for n, name in itertools.islice(elements, 300)] == wanted[:300]
    got: dict[int, list[Any]] = {}
    for index in range(2):
        with service.read(
            cluster.target, mixture, batch_size=12, consumer_index=index, num_consumers=2,
            **{**how, "job_name": f"alone {index}"},
        ) as batches:  # fmt: skip
            got[index] = [
                [*zip(numbers.tolist(), sources.tolist(), strict=True)]
                for numbers, sources in itertools.islice(batches, 10)
            ]
    line = [pair for step in zip(got[0], got[1], strict=True) for batch in step for pair in batch]
    assert line == wanted[: 20 * 12]
    dataset = service.from_dataset_id(
        "parallel_epochs", cluster.target, mixture, batch_size=24, add_position=True,
        **{**how, "job_name": "by tf"},
    )  # fmt: skip
    (numbers, sources), position = next(iter(dataset.as_numpy_iterator()))
    assert [*zip(numbers.tolist(), sources.tolist(), strict=True)] == wanted[:24]
    assert position == 24


class TestBadInput:
    def test_registration(self, cluster: Cluster, sources: dict[str, str], mixture: str) -> None:
        web = sources["web"]
        texts = service.register_dataset(cluster.target, tf.data.Dataset.from_tensors("text"))
        register = service.register_mixture
        for given, error, match in (
            ({}, InvalidArgument, "give a dict of names"),
            ({"web": web}, InvalidArgument, "a dataset's id and a weight"),
            ({"web": (web, -1)}, InvalidArgument, "weight is -1"),
            ({"web": (web, 0)}, InvalidArgument, "all 0"),
            ({"web": ("no-such", 1)}, NotFound, "no-such"),
            ({"web": (web, 1), "all": (mixture, 1)}, InvalidArgument, "a mixture itself"),
            ({"web": (web, 1), "texts": (texts, 1)}, InvalidArgument, "'texts' has .*string"),
        ):
            with pytest.raises(error, match=match):
                register(cluster.target, given)  # type: ignore[arg-type]

    def test_only_a_mixture_has_sources(self, cluster: Cluster, sources: dict[str, str]) -> None:
        with pytest.raises(InvalidArgument, match="which is no mixture"):
            read(cluster.target, sources["web"], add_source=True, **ORDER)

    def test_equal_mixtures_are_one(
        self, cluster: Cluster, sources: dict[str, str], mixture: str
    ) -> None:
        again = {name: (sources[name], 10 * WEIGHTS[name]) for name in ("web", "code", "books")}
        assert service.register_mixture(cluster.target, again) == mixture

    def test_it_is_read_in_order_only(self, cluster: Cluster, mixture: str) -> None:
        for how in ({}, {"processing_mode": "distributed_epoch"}, {"delivery": "at_least_once"}):
            with pytest.raises(Unimplemented, match="ordered=True"):
                next(iter(service.read(cluster.target, mixture, **how)))  # type: ignore[arg-type]

    def test_a_source_stays_while_it_is_one(
        self, cluster: Cluster, sources: dict[str, str], mixture: str
    ) -> None:
        with pytest.raises(FailedPrecondition, match=f"source of the mixtures {mixture}"):
            service.remove_dataset(cluster.target, sources["web"])

    def test_a_source_without_elements(self, cluster: Cluster, sources: dict[str, str]) -> None:
        empty = service.register_dataset(
            cluster.target, tf.data.Dataset.range(100).filter(lambda x: x < 0)
        )
        weighted = {"web": (sources["web"], 1), "empty": (empty, 1)}
        mixture = service.register_mixture(cluster.target, weighted)
        with pytest.raises(FailedPrecondition, match="'empty' of the mixture has no elements"):
            read(cluster.target, mixture, steps=10, **ORDER)


class Oracle:
    """What positions have, with changes of weights and steps that are left out: an oracle of walks.

    It walks along the line, position by position, and asks nothing of service/schedule.py."""

    def __init__(self, streams: dict[str, Iterator[int]]) -> None:
        self.streams = streams
        self.line: list[int] = []  # elements, by place

    def walk(self, weights: dict[str, float], until: int) -> None:
        """The elements of the places up to this one have these weights."""
        names = sorted(weights)
        count = until - len(self.line)
        for source in picked(shares([weights[name] for name in names]), 0, count).tolist():
            self.line.append(next(self.streams[names[source]]))


@pytest.fixture
def oracle(cluster: Cluster, sources: dict[str, str]) -> Oracle:
    return Oracle({name: stream(cluster, dataset) for name, dataset in sources.items()})


CHANGED = {"books": 0.1, "code": 0.3, "web": 0.05}


class TestChanges:
    def test_weights_change_at_a_step_for_all_who_read(
        self, cluster: Cluster, mixture: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ordered_mode, "GIVEN_S", 0.0)  # as if a step took long
        steps: list[int] = []

        def change(**how: Any) -> Callable[[], None]:
            return lambda: steps.append(
                service.change_weights(cluster.target, "changed", {"web": 0.05}, **how)
            )

        at = {10: change(from_step=20), 30: change(reason="soon")}
        how = {"batch_size": 8, "at": at, "in_lockstep": True, "job_name": "changed", **ORDER}
        got = read(cluster.target, mixture, 3, steps=60, **how)
        assert steps[0] == 20 and 31 <= steps[1] < 55
        oracle.walk(WEIGHTS, 20 * STEP)
        oracle.walk(CHANGED, steps[1] * STEP)
        total = sum(CHANGED.values())  # the others keep what they have, in units of the whole
        oracle.walk({**{n: w / total for n, w in CHANGED.items()}, "web": 0.05}, 60 * STEP)
        assert got.numbers == oracle.line

    def test_steps_are_left_out_after_a_rewind(
        self, cluster: Cluster, mixture: str, expected: list[int]
    ) -> None:
        how = {"job_name": "spike", **ORDER}
        first = read(cluster.target, mixture, 2, steps=40, batch_size=12, **how)
        to_52 = read(cluster.target, mixture, 2, steps=12, batch_size=12, state=first.state, **how)
        assert first.numbers + to_52.numbers == expected[: 52 * STEP]
        assert service.skip_steps(cluster.target, "spike", 50, 52, reason="loss spike") == 50
        again = read(cluster.target, mixture, 3, steps=20, batch_size=8, state=first.state, **how)
        assert again.numbers == expected[40 * STEP : 50 * STEP] + expected[52 * STEP : 62 * STEP]
        assert again.state["position"] == 62 * STEP
        behind = read(cluster.target, mixture, 1, steps=5, batch_size=24, state=to_52.state, **how)
        assert behind.numbers == expected[52 * STEP : 57 * STEP]
        by_step = read(cluster.target, mixture, 1, steps=5, batch_size=24, start_step=50, **how)
        assert by_step.numbers == expected[52 * STEP : 57 * STEP]

    def test_a_change_outlives_its_dispatcher(
        self, cluster: Cluster, mixture: str, oracle: Oracle
    ) -> None:
        def change() -> None:
            weights = {"web": 0.05}
            assert service.change_weights(cluster.target, "outlives", weights, from_step=15) == 15
            cluster.dispatcher.kill()
            cluster.dispatcher.restart()

        got = read(
            cluster.target, mixture, 2, steps=30, batch_size=12, at={10: change}, in_lockstep=True,
            job_name="outlives", **ORDER,
        )  # fmt: skip
        oracle.walk(WEIGHTS, 15 * STEP)
        oracle.walk(CHANGED, 30 * STEP)
        assert got.numbers == oracle.line
        state = got.state
        oracle.walk(CHANGED, 40 * STEP)
        more = read(
            cluster.target, mixture, 1, steps=10, batch_size=24, state=state,
            job_name="outlives", **ORDER,
        )  # fmt: skip
        assert more.numbers == oracle.line[30 * STEP :]
        assert len(str(state)) < 300
        for job in ("another", "outlives"):
            if job == "outlives":  # a change before the state, that was decided behind it
                service.change_weights(cluster.target, job, {"web": 9}, from_step=5)
            with pytest.raises(FailedPrecondition, match="a job whose weights changed otherwise"):
                read(
                    cluster.target, mixture, steps=1, batch_size=24, state=state, job_name=job,
                    **ORDER,
                )  # fmt: skip

    def test_the_commands(self, cluster: Cluster, mixture: str) -> None:
        read(cluster.target, mixture, steps=2, batch_size=24, job_name="by hand", **ORDER)

        def job(*arguments: str) -> Result:
            return CliRunner().invoke(
                app, ["job", arguments[0], cluster.target, "by hand", *arguments[1:]]
            )

        done = job("weights", "web=2", "--from-step", "9", "--reason", "more of it")
        assert done.output == "job by hand has these weights from step 9 on\n"
        assert done.exit_code == 0
        done = job("skip", "4", "6")
        assert (done.exit_code, done.output) == (0, "job by hand leaves out the steps 4 to 5\n")
        said = CliRunner().invoke(app, ["status", cluster.target])
        for text in ("changes of schedules", "more of it", "2 steps left out"):
            assert text in said.output
        assert job("weights", "web").exit_code == 2
        assert job("weights", "web=1", "--from-step", "-1").exit_code == 2
        _, histories, _ = _replayed(FileStorage(cluster.journal))
        (found,) = (h.job for h in histories.jobs.values() if h.job.user_name == "by hand")
        assert [(c.skipped, c.reason) for c in found.changes] == [(0, "more of it"), (2 * STEP, "")]

    def test_bad_input(self, cluster: Cluster, mixture: str) -> None:
        read(cluster.target, mixture, steps=2, batch_size=24, job_name="bad", **ORDER)
        change = service.change_weights
        for arguments, error, match in (
            (("no-such", {"web": 1}), NotFound, "no job 'no-such'"),
            (("bad", {}), InvalidArgument, "give a dict"),
            (("bad", {"web": -1}), InvalidArgument, "weight is -1"),
            (("bad", {"wbe": 1}), FailedPrecondition, "its next step is not known"),
        ):
            with pytest.raises(error, match=match):
                change(cluster.target, *arguments)
        for weights, match in (
            ({"wbe": 1}, "no source .'wbe'"),
            (dict.fromkeys(WEIGHTS, 0), "all 0"),
        ):
            with pytest.raises(InvalidArgument, match=match):
                change(cluster.target, "bad", weights, from_step=7)
        change(cluster.target, "bad", {"web": 2}, from_step=7, reason="mine")
        with pytest.raises(AlreadyExists, match="a change there already, 'mine'"):
            change(cluster.target, "bad", {"web": 3}, from_step=7)
        assert service.skip_steps(cluster.target, "bad", 3, 5) == 3
        with pytest.raises(AlreadyExists, match="leaves out these steps already"):
            service.skip_steps(cluster.target, "bad", 3, 5)
        with pytest.raises(InvalidArgument, match="first=5 and stop=5"):
            service.skip_steps(cluster.target, "bad", 5, 5)


class TestForks:
    def test_of_a_mixture(
        self, cluster: Cluster, mixture: str, oracle: Oracle, expected: list[int]
    ) -> None:
        how = {"batch_size": 12, **ORDER}
        begin = read(cluster.target, mixture, 2, steps=20, job_name="origin", **how)
        for weights, step in (({"web": 0.05}, 30), ({"web": 9}, 50)):
            service.change_weights(cluster.target, "origin", weights, from_step=step)
        service.skip_steps(cluster.target, "origin", 40, 45, reason="spike")
        fork = functools.partial(service.fork_job, cluster.target, "origin")
        assert fork("fork", at_step=40, reason="without the skip") == 40 * STEP
        oracle.walk(WEIGHTS, 30 * STEP)
        oracle.walk(CHANGED, 60 * STEP)
        before = oracle.line[20 * STEP :]
        how |= {"batch_size": 8, "state": begin.state, "steps": 40}
        assert read(cluster.target, mixture, 3, job_name="fork", **how).numbers == before
        origin = read(cluster.target, mixture, 3, job_name="origin", **how).numbers
        assert origin[: 20 * STEP] == before[: 20 * STEP]
        assert origin[20 * STEP : 25 * STEP] == before[25 * STEP : 30 * STEP]
        assert fork("earlier", at_step=30) == 30 * STEP
        got = read(cluster.target, mixture, 3, job_name="earlier", **how).numbers
        assert got == expected[20 * STEP : 60 * STEP]
        with pytest.raises(AlreadyExists, match="there is a job fork already"):
            fork("fork", at_step=40)
        for step in (3, 20, 39, 40, 59):
            batch = service.batch_of(cluster.target, "origin", step)
            line = expected[: 20 * STEP] + origin
            assert batch.tolist() == line[step * STEP : (step + 1) * STEP]
        future = service.batch_of(cluster.target, "origin", 60).tolist()
        more = {**how, "start_step": 60, "steps": 1, "state": None}
        assert read(cluster.target, mixture, 3, job_name="origin", **more).numbers == future

    def test_of_one_dataset_through_epochs(
        self, cluster: Cluster, numbers: str, epochs: list[list[int]]
    ) -> None:
        steps = -(-len(epochs[0]) // STEP)
        how = {**ORDER, "batch_size": 12}
        read(cluster.target, numbers, 2, steps=3, job_name="one origin", **how)
        service.skip_steps(cluster.target, "one origin", steps + 1, steps + 3)
        for at_step in (steps, steps + 1, steps + 2):
            name = f"fork at {at_step}"
            position = service.fork_job(cluster.target, "one origin", name, at_step=at_step)
            last = max(0, (at_step - steps) * STEP) + (2 * STEP if at_step > steps + 1 else 0)
            assert position == len(epochs[0]) + last
            got = read(cluster.target, numbers, 2, start_step=steps, job_name=name, **how)
            skips = at_step > steps + 1
            assert got.numbers == (epochs[1][:STEP] + epochs[1][3 * STEP :] if skips else epochs[1])
        fresh = service.register_dataset(cluster.target, lambda n: [n] * (n % 3), splits=range(500))
        read(cluster.target, fresh, steps=1, batch_size=2, job_name="fresh", seed=1)
        with pytest.raises(FailedPrecondition, match=r"may end before position 800: .* replay"):
            service.fork_job(cluster.target, "fresh", "wrong", at_step=400)
        service.batch_of(cluster.target, "fresh", 400)
        assert service.fork_job(cluster.target, "fresh", "right", at_step=400) == 799
        for step, batch in (
            (0, epochs[0][:STEP]),
            (steps - 1, epochs[0][(steps - 1) * STEP :]),
            (steps + 1, epochs[1][3 * STEP : 4 * STEP]),
        ):
            assert service.batch_of(cluster.target, "one origin", step).tolist() == batch

    def test_the_commands(
        self, cluster: Cluster, mixture: str, expected: list[int], tmp_path: Path
    ) -> None:
        read(cluster.target, mixture, steps=2, batch_size=24, job_name="by hand too", **ORDER)

        def run(*arguments: str) -> Result:
            return CliRunner().invoke(app, [*arguments])

        forked = ["job", "fork", cluster.target, "by hand too", "by hand b", "--at-step", "1"]
        done = run(*forked, "--reason", "another end")
        assert done.output == "job by hand b parts from job by hand too at position 24\n"
        for text in ("no longer as job", "another end"):
            assert text in run("status", cluster.target).output
        out = tmp_path / "batch.npz"
        done = run("replay", cluster.target, "by hand b", "--step", "30", "--out", str(out))
        assert done.exit_code == 0 and done.output.startswith("batch: int64 (24,) sha256 ")
        with np.load(out) as arrays:
            assert arrays["batch"].tolist() == expected[30 * STEP : 31 * STEP]
        assert run("replay", cluster.target, "by hand b", "--step", "-1").exit_code == 2
        assert run(*forked[:-1], "-1").exit_code == 2
        _, histories, _ = _replayed(FileStorage(cluster.journal))
        by_name = {h.job.user_name: h for h in histories.jobs.values()}
        (_, said) = OrderedAnswers(by_name["by hand b"]).overview()["changes"]
        assert (said["from_step"], said["reason"]) == (1, "another end")
        assert said["fork_of"] == by_name["by hand too"].job.job_id

    def test_bad_input(self, cluster: Cluster, mixture: str, numbers: str) -> None:
        fork, replay = service.fork_job, service.batch_of
        with pytest.raises(NotFound, match="no job 'no-such'"):
            fork(cluster.target, "no-such", "new", at_step=1)
        with pytest.raises(NotFound, match="no job 'no-such'"):
            replay(cluster.target, "no-such", 1)
        with pytest.raises(InvalidArgument, match="new=''"):
            fork(cluster.target, "no-such", "", at_step=1)
        for step in (-1, True, 1.5):
            with pytest.raises(InvalidArgument, match="step="):
                fork(cluster.target, "no-such", "new", at_step=step)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match="step="):
                replay(cluster.target, "no-such", step)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def numbers(cluster: Cluster) -> str:
    return service.register_dataset(cluster.target, uneven_numbers(1_000))


@pytest.fixture(scope="module")
def epochs(cluster: Cluster, numbers: str) -> list[list[int]]:
    found: list[list[int]] = []
    for _ in range(3):
        begin = sum(map(len, found))
        found.append(read(cluster.target, numbers, start_position=begin, **ORDER).numbers)
    return found


class TestOneDataset:
    """Steps of a dataset by itself are left out, too."""

    def test_over_an_epochs_end_while_it_is_read(
        self, cluster: Cluster, numbers: str, epochs: list[list[int]]
    ) -> None:
        steps = -(-len(epochs[0]) // STEP)
        change = functools.partial(
            service.skip_steps, cluster.target, "one end", steps - 3, steps + 2
        )
        how = {"job_name": "one end", **ORDER, "batch_size": 12}
        got = read(cluster.target, numbers, 2, at={5: change}, in_lockstep=True, **how)
        assert got.numbers == epochs[0][: (steps - 3) * STEP]
        got = read(cluster.target, numbers, 3, state=got.state, **{**how, "batch_size": 8})
        assert got.numbers == epochs[1][2 * STEP :]
        got = read(cluster.target, numbers, 2, state=got.state, **how)
        assert got.numbers == epochs[2]
        _, histories, _ = _replayed(FileStorage(cluster.journal))
        (history,) = (h for h in histories.jobs.values() if h.job.user_name == "one end")
        answers = OrderedAnswers(history)
        (said,) = answers.overview()["changes"]
        assert (said["from_step"], said["skipped_steps"]) == (steps - 3, 5)
        step = answers.step(steps - 3)  # the first one of epoch 1
        assert (step["status"], step["batches"][0]["epoch"]) == ("given", 1)
        assert step["batches"][0]["offset"] == 0
        assert step["batches"][0]["position"] == len(epochs[0]) + 2 * STEP

    def test_bad_input(self, cluster: Cluster, numbers: str, epochs: list[list[int]]) -> None:
        other = service.register_dataset(cluster.target, uneven_numbers(2_999))  # of nobody else
        read(cluster.target, other, steps=6, batch_size=24, job_name="one bad", **ORDER)
        with pytest.raises(InvalidArgument, match="is no mixture and has no weights"):
            service.change_weights(cluster.target, "one bad", {"web": 1}, from_step=9)
        with pytest.raises(FailedPrecondition, match=r"known to have \d+ elements, until more"):
            service.skip_steps(cluster.target, "one bad", 5, 5_000)
        read(cluster.target, numbers, steps=1, batch_size=24, job_name="one twice", **ORDER)
        last = len(epochs[0]) // STEP  # has fewer elements than the step that comes in its place
        with pytest.raises(AlreadyExists, match="leaves out these steps already"):
            for _ in range(2):
                service.skip_steps(cluster.target, "one twice", last, last + 1)


def test_the_audit_names_what_each_life_was_given(
    cluster: Cluster, mixture: str, expected: list[int]
) -> None:
    """Of the source that has its numbers in a row, each element's number follows from its name."""
    how = {"job_name": "audited", "batch_size": 12, **ORDER}
    begin = read(cluster.target, mixture, 2, steps=20, **how)
    read(cluster.target, mixture, 2, steps=10, state=begin.state, **how)
    service.skip_steps(cluster.target, "audited", 22, 25, reason="spike")
    at = {5: lambda: service.change_weights(cluster.target, "audited", {"web": 9}, from_step=40)}
    again = read(
        cluster.target, mixture, 2, steps=30, state=begin.state, at=at, in_lockstep=True, **how
    )
    _, histories, _ = _replayed(FileStorage(cluster.journal))
    (history,) = (each for each in histories.jobs.values() if each.job.user_name == "audited")
    answers = OrderedAnswers(history)
    changes = answers.overview()["changes"]
    assert [change["from_step"] for change in changes] == [0, 22, 40]
    assert (changes[1]["skipped_steps"], changes[1]["reason"]) == (3, "spike")
    assert changes[2]["weights"]["web"] == pytest.approx(9 / (9 + 0.4), abs=1e-5)

    def numbers(step: int) -> tuple[list[int | None], str]:
        """Those of "code", and None for others; and whether the step was given."""
        found = answers.step(step)
        named: list[int | None] = []
        for batch in found["batches"]:
            of = {each["bundle"]: each for each in batch["bundles"]}
            for bundle, index in batch["elements"]:
                is_code = of[bundle]["source"] == "code"
                first = of[bundle]["splits"][0] + index
                named.append(1_000_000 + first if is_code else None)
        return named, found["status"]

    def of_code(got: list[int]) -> list[int | None]:
        return [number if 1_000_000 <= number < 2_000_000 else None for number in got]

    for step in range(20):
        assert numbers(step) == (of_code(expected[step * STEP : (step + 1) * STEP]), "given")
    for step in range(22, 50):  # of the life that was last, which has left out three steps
        mine = again.numbers[(step - 20) * STEP : (step - 19) * STEP]
        assert numbers(step) == (of_code(mine), "given")
