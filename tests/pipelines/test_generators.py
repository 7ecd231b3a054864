"""Generators of random numbers that travel with a Python dataset's function."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import apache_beam as beam
import numpy as np
import pytest

from forebay.service import generators, pickles
from forebay.service.pipelines import SplitRange
from forebay.service.pipelines.beam.translation import translate

from .functions import numbers, pipeline_of, read

DRAWS = 20
LARGE = 1 << 40

Draw = Callable[[], Any]


def of_an_object(generator: Any) -> Draw:
    class Augments:
        def __init__(self) -> None:
            self.parts = {"noise": [generator]}

        def __call__(self) -> int:
            return int(self.parts["noise"][0].integers(LARGE))

    return Augments()


def of_a_bit_generator(bits: Any) -> Draw:
    return lambda: int(bits.random_raw()) % LARGE


def of_a_random_state(state: np.random.RandomState) -> Draw:
    return lambda: int(LARGE * state.uniform())


def of_gaussians(state: np.random.RandomState) -> Draw:
    """A state keeps the second one of each pair."""
    state.normal()
    return lambda: int(LARGE * state.normal())


def of_default(generator: Any) -> Draw:
    def draw(*, source: Any = generator) -> int:
        return int(source.integers(LARGE))

    return draw


def nested(generator: Any) -> Draw:
    chain: Any = generator
    for _ in range(400):  # too deep for a pickler in Python
        chain = [chain]

    def draw() -> int:
        found = chain
        while isinstance(found, list):
            found = found[0]
        return int(found.integers(LARGE))

    return draw


KINDS: dict[str, Callable[[], Draw]] = {
    "a Generator": lambda: functools.partial(np.random.default_rng().integers, LARGE),
    "with a seed": lambda: functools.partial(np.random.default_rng(7).integers, LARGE),
    "of another kind": lambda: functools.partial(
        np.random.Generator(np.random.Philox(7)).integers, LARGE
    ),
    "in an object": lambda: of_an_object(np.random.default_rng(7)),
    "in a default": lambda: of_default(np.random.default_rng(7)),
    "a BitGenerator": lambda: of_a_bit_generator(np.random.SFC64(7)),
    "a RandomState": lambda: of_a_random_state(np.random.RandomState(7)),
    "its Gaussians": lambda: of_gaussians(np.random.RandomState(7)),
    "of its own bits": lambda: of_a_random_state(np.random.RandomState(np.random.PCG64(7))),
    "NumPy's own": lambda: functools.partial(np.random.randint, LARGE),
    "a Random": lambda: functools.partial(random.Random(7).randrange, LARGE),
    "Python's own": lambda: functools.partial(random.randrange, LARGE),
    "spawned": lambda: functools.partial(
        lambda parent: int(parent.spawn(1)[0].integers(LARGE)), np.random.default_rng(7)
    ),
    "deep within": lambda: nested(np.random.default_rng(7)),
}  # fmt: skip


def drawing(draw: Draw) -> Callable[[int], Iterator[int]]:
    def function(split: int) -> Iterator[int]:
        for _ in range(DRAWS):
            yield int(draw())

    return function


@pytest.mark.parametrize("kind", KINDS)
def test_no_process_draws_what_another_draws(kind: str) -> None:
    function = drawing(KINDS[kind]())
    drawn = [x for _ in range(2) for x in read(function, range(2))]
    assert len(set(drawn)) == len(drawn) == 4 * DRAWS


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_bundle_draws_follows_from_seed_and_number(kind: str) -> None:
    function = drawing(KINDS[kind]())
    found: list[list[list[int]]] = []
    for order in (0, 1), (1, 0):
        pipeline = pipeline_of(function, range(2))
        drawn = {
            n: numbers(pipeline.bundle(SplitRange(0, 2, 0), number=n, seed=5).blocks())
            for n in order
        }
        numbers(pipeline.run(None).blocks())
        again = numbers(pipeline.bundle(SplitRange(0, 2, 0), number=0, seed=5).blocks())
        assert again == drawn[0]
        found.append([drawn[0], drawn[1]])
        pipeline.close()
    assert found[0] == found[1]
    assert len({x for drawn in found[0] for x in drawn}) == 4 * DRAWS


def test_generators_that_were_seeded_alike_go_on_drawing_the_same() -> None:
    """As those of images, and of their masks, do."""
    images, masks, other = (np.random.default_rng(seed) for seed in (3, 3, 4))

    def function(split: int) -> Iterator[list[int]]:
        yield [int(each.integers(LARGE)) for each in (images, masks, other)]

    (drawn,) = read(function, [0], '{"tensor":"int64","shape":[3]}')
    assert drawn[0] == drawn[1] != drawn[2]


class Permuted:
    """One order for all processes, and noise."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(7)

    def setup(self) -> None:
        self.order = self.generator.permutation(100)

    def __call__(self, split: int) -> Iterator[Any]:
        yield [*self.order, self.generator.integers(LARGE)]


def test_setup_draws_what_would_be_drawn_where_it_was_registered() -> None:
    structure = '{"tensor":"int64","shape":[101]}'
    (one,), (other,) = (read(Permuted(), [0], structure) for _ in range(2))
    assert one[:100].tolist() == np.random.default_rng(7).permutation(100).tolist()
    assert one[:100].tolist() == other[:100].tolist()
    assert one[100] != other[100]


def test_splits_keep_generators_of_their_own() -> None:
    splits = np.random.default_rng(7).spawn(3)
    wanted = [int(each.integers(LARGE)) for each in np.random.default_rng(7).spawn(3)]
    assert read(lambda split: [int(split.integers(LARGE))], splits) == wanted


class OwnReduce(random.Random):
    """One that pickles in its own way."""

    def __reduce__(self) -> Any:
        return OwnReduce, (5,)


def test_what_pickles_in_its_own_way_does_so() -> None:
    found, _ = generators.loads(pickles.dumps(OwnReduce(3), marks_generators=True))
    assert found.random() == random.Random(5).random()


def test_what_nobody_seeds_is_as_it_was() -> None:
    before = np.random.default_rng(7)
    before.integers(9)
    found, _ = generators.loads(pickles.dumps(before, marks_generators=True))
    assert found.integers(LARGE) == before.integers(LARGE)


def test_dofns_draw_their_own_numbers() -> None:
    generator = np.random.default_rng(7)

    class Noise(beam.DoFn):  # type: ignore[misc] # Beam has no types
        def setup(self) -> None:
            self.order = generator.permutation(9).tolist()

        def process(self, element: int) -> Iterator[list[int]]:
            if element == 5 and generator.integers(2):
                raise ValueError("set up anew")
            yield [*self.order, int(generator.integers(LARGE))]

    noisy = beam.Pipeline() | beam.Create([0, 1, 5] * 3) | beam.ParDo(Noise())
    translated = translate(noisy)
    structure = '{"tensor":"int64","shape":[10]}'
    how = {"on_error": "skip"}
    drawn = [
        x for _ in range(2) for x in read(translated.chain, translated.splits, structure, **how)
    ]
    assert len({tuple(x[:9]) for x in drawn}) == 1
    assert len({x[9] for x in drawn}) == len(drawn) > 2

    pipeline = pipeline_of(translated.chain, translated.splits, structure, on_error="retry")
    bundle = SplitRange(0, 1, 0)
    one, same, other = (
        [x.tolist() for b in pipeline.bundle(bundle, number=n, seed=1).blocks()
         for x in b.components[0].elements()]
        for n in (0, 0, 1)
    )  # fmt: skip
    pipeline.close()
    assert one == same != other
