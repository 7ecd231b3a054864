"""What every kind of pipeline keeps, through both of its ways to run.

A kind subclasses PipelineContract and says how it makes a dataset of these steps. The source has an
element for each split, the split's number; elements are int64, or batches of them. What a step
mixes are elements of a bundle, or, of functions, of a split.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from forebay.journal.proto import events_pb2 as ev
from forebay.service.blocks import BLOCK_BYTES, Block
from forebay.service.errors import PipelineError
from forebay.service.pipelines import Pipeline, Run, SplitRange

SPLITS = 1000
SEED = 7


class Step(NamedTuple):
    kind: str
    number: int = 0


def times(number: int) -> Step:
    """x → number · x"""
    return Step("times", number)


def without(number: int) -> Step:
    """Those that the number does not divide."""
    return Step("without", number)


def spread(number: int) -> Step:
    """x → number · x, number · x + 1, … before number · (x + 1)"""
    return Step("spread", number)


def batch(number: int) -> Step:
    """Arrays of so many, and of what is left."""
    return Step("batch", number)


def shuffle(number: int) -> Step:
    """By a buffer of so many."""
    return Step("shuffle", number)


def interleave(number: int) -> Step:
    """x → x, x + 1; by turns, of so many of them at a time."""
    return Step("interleave", number)


def wide(number: int) -> Step:
    """x → an array of so many"""
    return Step("wide", number)


def drawn() -> Step:
    """x → x + 1,000,000 · a random number that is less than 1,000"""
    return Step("drawn")


def failing(number: int) -> Step:
    """Raises an error that says "no such element" at this one."""
    return Step("failing", number)


PLAIN = st.builds(times, st.integers(1, 5)) | st.builds(without, st.integers(2, 5))
PLAIN |= st.builds(spread, st.integers(1, 3))
MIXING = PLAIN | st.builds(shuffle, st.integers(2, 20)) | st.builds(interleave, st.integers(1, 3))
MIXING |= st.just(drawn())
STEPS = st.tuples(st.integers(1, 4), st.lists(MIXING, max_size=4), st.integers(0, 4)).map(
    lambda of: [spread(of[0]), *of[1], *([batch(of[2])] if of[2] else [])]
)
"""They begin with several elements of a split, so that mixing does something within one."""

RANGES = st.builds(SplitRange, st.integers(0, SPLITS - 30), st.integers(0, 30), st.just(0))
FEW = settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.differing_executors],
    derandomize=True,
)
"""Each example is traced, so they are few, and not shrunk."""


class Ranges:
    """A feed of these ranges of one source."""

    def __init__(self, ranges: Iterable[SplitRange]) -> None:
        self.sources: Sequence[ev.SplitSource] = [ev.SplitSource(count=SPLITS)]
        self._ranges = iter(ranges)

    def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
        return next(self._ranges, None)

    def is_over(self, sources: Iterable[int]) -> bool:
        return False


def elements_of(blocks: Iterable[Block]) -> list[tuple[int, ...]]:
    """Each element as its integers."""
    read: list[tuple[int, ...]] = []
    for block in blocks:
        read += (tuple(np.ravel(element).tolist()) for element in block.components[0].elements())
    return read


def reference(steps: Iterable[Step], splits: Iterable[int]) -> list[tuple[int, ...]]:
    """Of steps that mix nothing."""
    found = list(splits)
    for kind, n in steps:
        match kind:
            case "times":
                found = [n * x for x in found]
            case "without":
                found = [x for x in found if x % n]
            case "spread":
                found = [y for x in found for y in range(n * x, n * (x + 1))]
            case _:
                raise ValueError(f"{kind} mixes")
    return [(x,) for x in found]


def numbers_of(splits: SplitRange) -> range:
    return range(splits.first, splits.first + splits.count)


FIRST, SECOND = SplitRange(0, 20, 0), SplitRange(100, 30, 0)


class PipelineContract(ABC):
    @abstractmethod
    def make(self, steps: Sequence[Step]) -> Pipeline:
        """The pipeline of these steps, over a source of SPLITS splits."""

    def runs(self, pipeline: Pipeline, splits: SplitRange, number: int = 0) -> list[Run]:
        """One of each way to run these."""
        bundle = pipeline.bundle(splits, number=number, seed=SEED)
        return [pipeline.run(Ranges([splits])), bundle]

    @contextlib.contextmanager
    def opened(self, *steps: Step) -> Iterator[Pipeline]:
        """And soon after it is closed, no thread is left."""
        before = set(threading.enumerate())
        pipeline = self.make(steps)
        try:
            yield pipeline
        finally:
            pipeline.close()
        for thread in set(threading.enumerate()) - before:
            thread.join(timeout=90)  # of TensorFlow's minute: drivers.py
        assert set(threading.enumerate()) <= before

    @FEW
    @given(st.lists(PLAIN, max_size=3), st.lists(RANGES, max_size=3))
    def test_a_run_has_all_elements_in_order(
        self, steps: list[Step], ranges: list[SplitRange]
    ) -> None:
        ranges = [splits for splits in ranges if splits.count]
        with self.opened(*steps) as pipeline:
            blocks = list(pipeline.run(Ranges(ranges)).blocks())
            assert all((block.bundle, block.index) == (None, 0) for block in blocks)
            wanted = [x for splits in ranges for x in numbers_of(splits)]
            assert elements_of(blocks) == reference(steps, wanted)

    def test_blocks_are_bounded(self) -> None:
        """An element that is larger travels alone."""
        with self.opened(wide(1 << 15)) as pipeline:  # of 256 KB each
            for run in self.runs(pipeline, FIRST):
                blocks = list(run.blocks())
                assert sum(block.count for block in blocks) == 20
                assert all(0 < block.payload_bytes <= BLOCK_BYTES for block in blocks)
        with self.opened(wide(1 << 21)) as pipeline:
            for run in self.runs(pipeline, SplitRange(3, 2, 0)):
                assert [block.count for block in run.blocks()] == [1, 1]

    def test_errors_are_the_users_and_end_only_their_run(self) -> None:
        with self.opened(failing(10)) as pipeline:
            for splits in (FIRST, SplitRange(10, 1, 0)):
                for run in self.runs(pipeline, splits):
                    with pytest.raises(PipelineError, match="no such element"):
                        list(run.blocks())
            for run in self.runs(pipeline, SplitRange(11, 5, 0), 2):
                assert elements_of(run.blocks()) == [(i,) for i in range(11, 16)]

    def test_a_run_that_is_cancelled_or_closed_ends(self) -> None:
        """Before, between and after its blocks; and twice."""
        with self.opened(wide(1 << 17)) as pipeline:
            for run in self.runs(pipeline, SECOND):
                run.cancel()
                assert list(run.blocks()) == []
                run.cancel()
            for run in self.runs(pipeline, SECOND):
                blocks = run.blocks()
                next(blocks)
                run.cancel()
                list(blocks)
            for run in self.runs(pipeline, SECOND):
                blocks = run.blocks()
                next(blocks)
                blocks.close()  # type: ignore[attr-defined]
                run.cancel()
            for run in self.runs(pipeline, SECOND):
                with ThreadPoolExecutor(1) as pool:
                    reading = pool.submit(lambda blocks: sum(b.count for b in blocks), run.blocks())
                    run.cancel()
                    reading.result(timeout=60)

    def test_runs_at_the_same_time_do_not_mix(self) -> None:
        with self.opened(times(10)) as pipeline, ThreadPoolExecutor(4) as pool:
            runs = [
                (number, pool.submit(lambda run: elements_of(run.blocks()), run))
                for number in range(20)
                for run in self.runs(pipeline, SplitRange(10 * number, 10, 0), number)
            ]
            long = pool.submit(lambda: elements_of(pipeline.run(Ranges([FIRST, SECOND])).blocks()))
            for number, run in runs:
                wanted = range(100 * number, 100 * (number + 1), 10)
                assert run.result(timeout=60) == [(x,) for x in wanted]
            wanted_of_run = [*numbers_of(FIRST), *numbers_of(SECOND)]
            assert long.result(timeout=60) == [(10 * x,) for x in wanted_of_run]

    def test_a_run_that_nobody_reads_holds_up_no_other(self) -> None:
        with self.opened(wide(1 << 17)) as pipeline:
            unread = [
                run.blocks() for number in range(4) for run in self.runs(pipeline, SECOND, number)
            ]
            for blocks in unread:
                next(blocks)
            with ThreadPoolExecutor(1) as pool:
                for run in self.runs(pipeline, SplitRange(5, 1, 0), 9):
                    read = pool.submit(lambda run: elements_of(run.blocks()), run)
                    assert len(read.result(timeout=60)) == 1
            for blocks in unread:
                blocks.close()  # type: ignore[attr-defined]

    def bundle(
        self,
        pipeline: Pipeline,
        splits: SplitRange,
        number: int = 0,
        seed: int = SEED,
        start: int = 0,
    ) -> list[tuple[int, ...]]:
        """Its elements, of blocks that say which they are."""
        read: list[tuple[int, ...]] = []
        run = pipeline.bundle(splits, number=number, seed=seed, start=start)
        for block in run.blocks():
            assert (block.bundle, block.index) == (number, start + len(read))
            read += elements_of([block])
        return read

    @FEW
    @given(st.lists(PLAIN, max_size=3), RANGES)
    def test_a_bundle_has_what_a_run_over_its_splits_has(
        self, steps: list[Step], splits: SplitRange
    ) -> None:
        with self.opened(*steps) as pipeline:
            alone = self.bundle(pipeline, splits)
            assert alone == reference(steps, numbers_of(splits))
            ranges = [splits] if splits.count else []
            assert alone == elements_of(pipeline.run(Ranges(ranges)).blocks())

    @FEW
    @given(STEPS, RANGES, st.integers(0, 2**40), st.integers(-(2**63), 2**63 - 1))
    def test_the_same_bundle_has_the_same_elements(
        self, steps: list[Step], splits: SplitRange, number: int, seed: int
    ) -> None:
        """Again, in another pipeline of the same steps, and while others run."""
        with self.opened(*steps) as pipeline:
            first = self.bundle(pipeline, splits, number, seed)
            self.bundle(pipeline, SECOND, number + 1, seed)
            unread = pipeline.bundle(splits, number=number, seed=seed).blocks()
            next(unread, None)
            assert self.bundle(pipeline, splits, number, seed) == first
            unread.close()  # type: ignore[attr-defined]
            other = self.make(steps)
            assert self.bundle(other, splits, number, seed) == first
            other.close()

    @FEW
    @given(STEPS, st.integers(0, 12))
    def test_every_start_gives_the_tail(self, steps: list[Step], count: int) -> None:
        with self.opened(*steps) as pipeline:
            whole = self.bundle(pipeline, SplitRange(50, count, 0))
            for start in {*range(min(len(whole), 9)), len(whole) - 1, len(whole), len(whole) + 3}:
                if start >= 0:
                    tail = self.bundle(pipeline, SplitRange(50, count, 0), start=start)
                    assert tail == whole[start:], start

    @pytest.mark.parametrize("step", [shuffle(30), drawn()])
    def test_what_is_random_differs_by_bundle_and_by_seed(self, step: Step) -> None:
        with self.opened(spread(9), step) as pipeline:
            one, other = (self.bundle(pipeline, SECOND, number) for number in (0, 1))
            again = self.bundle(pipeline, SECOND, 0, SEED + 1)
            assert len({tuple(one), tuple(other), tuple(again)}) == 3

    def test_what_was_drawn_differs_by_element(self) -> None:
        with self.opened(drawn()) as pipeline:
            read = self.bundle(pipeline, SECOND)
            assert [x % 1_000_000 for (x,) in read] == [*numbers_of(SECOND)]
            assert len({x // 1_000_000 for (x,) in read}) > 20

    def test_an_empty_bundle_ends(self) -> None:
        with self.opened(times(3)) as pipeline:
            assert self.bundle(pipeline, SplitRange(0, 0, 0)) == []
            assert self.bundle(pipeline, FIRST, 1) == [(3 * i,) for i in range(20)]

    def test_a_pipeline_is_closed_while_its_bundles_run(self) -> None:
        with self.opened(times(2)) as pipeline:
            blocks = pipeline.bundle(FIRST, number=0, seed=0).blocks()
            first = next(blocks)
            pipeline.close()
            assert elements_of([first, *blocks]) == [(2 * i,) for i in range(20)]
            assert self.bundle(pipeline, FIRST, 1) == [(2 * i,) for i in range(20)]
