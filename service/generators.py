"""Finds and reseeds the random number generators in a pickled function.

A pickle holds a generator's state. Every process that unpickles it would draw the same numbers, and
a restarted process would draw them again. So `pickles.dumps` marks each generator (`reduced`),
`loads` finds the marked ones, and the process that runs the function reseeds them (`seed`).

Generators with equal states get equal new states. So two that a user seeded alike, for images and
for their masks, still draw the same numbers.

JAX's keys and NumPy's SeedSequences are immutable values, so they stay as they are.
"""

from __future__ import annotations

import copy
import hashlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import numpy as np

_KINDS = (random.Random, np.random.BitGenerator, np.random.RandomState)
"""NumPy's Generators are not listed: their state is in their BitGenerator."""

_loading = threading.local()


def reduced(value: Any) -> Any:
    """Reduces a generator so that `loads` finds it. Returns NotImplemented for anything else."""
    if type(value) is np.random.Generator and isinstance(value.__reduce__()[1][0], str):
        return np.random.Generator, (value.bit_generator,)  # NumPy 1 would pickle its state alone
    if not (isinstance(value, _KINDS) or _is_torchs(value)):
        return NotImplemented
    how = value.__reduce__()
    if not isinstance(how, tuple) or len(how) != 3:  # a class with its own way of pickling
        return NotImplemented
    return *how, None, None, _restore


def _restore(generator: Any, state: Any) -> None:
    generator.__setstate__(state)
    found: list[Any] | None = getattr(_loading, "found", None)
    if found is not None:
        found.append(generator)


@contextmanager
def _finding() -> Iterator[list[Any]]:
    before, _loading.found = getattr(_loading, "found", None), []
    try:
        yield _loading.found
    finally:
        _loading.found = before


def loads(pickled: bytes) -> tuple[Any, Generators]:
    """The unpickled object, and the generators in it."""
    with _finding() as found:
        return cloudpickle.loads(pickled), Generators(found)


class Generators:
    """The generators of one pickle. They have their pickled states until they are `seed`ed."""

    def __init__(self, found: list[Any]) -> None:
        numbers: dict[bytes, int] = {}
        self._numbered = [(each, numbers.setdefault(_next(each), len(numbers))) for each in found]

    def seed(self, seed: str | None) -> None:
        """Give them states that depend only on the seed; without a seed, unique states."""
        if not self._numbered:
            return
        secret = os.urandom(32) if seed is None else seed.encode()
        for generator, number in self._numbered:
            digest = hashlib.sha256(b"%d %b" % (number, secret)).digest()
            _seed(generator, int.from_bytes(digest))


def _next(generator: Any) -> bytes:
    """The generator's next draw, without advancing it: the same for equal states."""
    if _is_torchs(generator):
        return bytes(generator.get_state().numpy())
    draws = copy.deepcopy(generator)
    if isinstance(draws, np.random.BitGenerator):
        return bytes(draws.random_raw(4))
    draw: Callable[[int], bytes] = getattr(draws, "bytes", None) or draws.randbytes
    return draw(32)


def _seed(generator: Any, number: int) -> None:
    if isinstance(generator, random.Random):
        generator.seed(number)
    elif isinstance(generator, np.random.BitGenerator):
        fresh: Any = generator  # NumPy's type stubs lack some of its methods
        fresh.__setstate__(type(generator)(number).__reduce__()[2])  # also what it spawns from
    elif isinstance(generator, np.random.RandomState):
        bits = type(generator._bit_generator)(number)
        generator.set_state(np.random.RandomState(bits).get_state(legacy=False))
    else:
        generator.manual_seed(number >> 193)


def _is_torchs(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Generator)
