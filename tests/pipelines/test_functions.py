"""Python datasets: the contract of pipelines, and elements that fit or not."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from forebay.service.errors import PipelineError
from forebay.service.pipelines import Pipeline

from .contract import SPLITS, Step
from .functions import INT, FunctionContract, done, pipeline_of, read, structure_of


class TestContract(FunctionContract):
    def make(self, steps: Sequence[Step]) -> Pipeline:
        def function(split: int) -> Iterator[object]:
            elements: Iterator[object] = iter([split])
            for step in steps:
                elements = done(step, elements, random)  # type: ignore[arg-type]
            return elements

        return pipeline_of(function, range(SPLITS), structure_of(steps))


def test_elements_of_every_kind_arrive_as_they_were() -> None:
    structure = json.dumps(
        {
            "dict": [
                ["array", {"tensor": "float32", "shape": [None, 2]}],
                ["flag", {"tensor": "bool", "shape": []}],
                ["half", {"tensor": "bfloat16", "shape": []}],
                ["nothing", {"none": True}],
                ["pair", {"tuple": [{"tensor": "string", "shape": []}, json.loads(INT)]}],
                ["words", {"tensor": "string", "shape": [None]}],
            ]
        }
    )

    def function(split: int) -> Iterator[object]:
        for i in range(split):
            yield {
                "array": np.full((i % 3, 2), i, np.float32),
                "flag": i % 2 == 0,
                "half": i,
                "nothing": None,
                "pair": ("é" * i, np.int64(i)),
                "words": [b"w"] * (i % 4),
            }

    found = read(function, [0, 7, 1], structure)
    assert [element["pair"][1] for element in found] == [*range(7), 0]
    for element, i in zip(found, [*range(7), 0], strict=True):
        assert element["array"].shape == (i % 3, 2)
        assert (element["array"] == i).all()
        assert element["flag"] == (i % 2 == 0)
        assert element["half"] == i
        assert element["nothing"] is None
        assert element["pair"][0] == ("é" * i).encode()
        assert element["words"].tolist() == [b"w"] * (i % 4)


def test_names_of_files_that_are_no_text_arrive_as_they_are_on_the_disk() -> None:
    found = read(lambda split: [split], ["caf\udce9", "\ud800"], '{"tensor":"string","shape":[]}')
    assert found == [b"caf\xe9", "\ud800".encode(errors="surrogatepass")]


def test_an_error_that_is_no_text_is_told() -> None:
    def function(split: int) -> Iterator[object]:
        yield split
        raise FileNotFoundError("caf\udce9.txt")

    with pytest.raises(PipelineError, match=r"FileNotFoundError.*caf.udce9.txt"):
        read(function, [0])


def test_a_fork_that_goes_on_takes_nothing_of_the_functions_process() -> None:
    def function(split: int) -> Iterator[object]:
        os.fork()
        for i in range(40):
            yield np.full(1 << 20, i, np.uint8)  # more than may be on its way at once

    found = read(function, [0], '{"tensor":"uint8","shape":[1048576]}')
    assert [int(x[0]) for x in found] == [*range(40)]


def test_a_function_may_change_what_it_has_yielded() -> None:
    def function(split: int) -> Iterator[object]:
        buffer = np.zeros(3, np.int64)
        for i in range(100):
            buffer[:] = i
            yield buffer

    found = read(function, [0], '{"tensor":"int64","shape":[3]}')
    assert [x.tolist() for x in found] == [[i] * 3 for i in range(100)]


def test_strings_in_lists_are_what_they_are() -> None:
    words = [b"a\0", "b\0", b"\0\0", b""]
    for value in (words, np.array(words, object), [words, words]):
        shape = [None] * np.array(value, object).ndim
        (found,) = read(lambda split: [split], [value], json.dumps(STRINGS | {"shape": shape}))
        assert found.ravel().tolist() == [b"a\0", b"b\0", b"\0\0", b""] * len(shape)


class Uncopied:
    """Neither a number nor to be copied."""

    def __deepcopy__(self, memo: object) -> None:
        raise RuntimeError("not me")


class Arrays(Uncopied):
    """As other libraries' arrays are."""

    def __init__(self) -> None:
        self.values = np.zeros(2, np.float32)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.values


def test_what_other_libraries_call_an_array_is_one() -> None:
    def function(split: int) -> Iterator[object]:
        array = Arrays()
        for i in range(3):
            array.values[:] = i
            yield i, array

    assert [x.tolist() for _, x in read(function, [0], PAIR)] == [[i, i] for i in range(3)]


STRINGS = {"tensor": "string", "shape": [None]}
PAIR = '{"tuple":[{"tensor":"int64","shape":[]},{"tensor":"float32","shape":[2]}]}'


@pytest.mark.parametrize(
    ("structure", "element", "wrong"),
    [
        (INT, 1.5, "1.5 (float), and was registered as int64[]"),
        (INT, True, "True (bool)"),
        (INT, 1 << 70, "(int), and was registered as int64[]"),
        (INT, "text", "'text' (str)"),
        (INT, None, "None (NoneType)"),
        (INT, object, "(type)"),
        (INT, np.zeros(2, np.int64), "element is int64[2]"),
        (INT, np.int32(1), "(int32), and was registered as int64[]"),
        (INT, {"a": 1}, "a dict of ['a']"),
        (PAIR, (1,), "a tuple of 1, and was registered as a tuple of 2"),
        (PAIR, (1, np.zeros(3, np.float32)), "element[1] is float32[3]"),
        (PAIR, (1, np.zeros(2)), "element[1] is float64[2]"),
        (PAIR, (1, Uncopied()), "element[1] cannot be copied: RuntimeError('not me')"),
        (json.dumps(STRINGS), ["a", 1], "['a', 1] (list), and was registered as string[?]"),
        ('{"dict":[["a",{"none":true}]]}', {"b": None}, "a dict of ['b']"),
        ('{"tensor":"string","shape":[]}', 7, "7 (int), and was registered as string[]"),
    ],
)
def test_an_element_that_does_not_fit_is_named(structure: str, element: Any, wrong: str) -> None:
    """Those before it come."""
    good = {INT: 1, PAIR: (1, np.zeros(2, np.float32))}.get(structure, {"a": None})
    good = b"" if "string" in structure else good
    good = ["b"] if structure == json.dumps(STRINGS) else good

    def function(split: str) -> Iterator[object]:
        yield from [good] * 5
        if split == "second":
            yield element
        yield from [good] * 5

    pipeline = pipeline_of(function, ["first", "second"], structure)
    came = 0
    with pytest.raises(PipelineError) as raised:
        for block in pipeline.run(None).blocks():
            came += block.count
    pipeline.close()
    assert raised.value.code == "INVALID_ARGUMENT"
    assert "worker w:1: split 1 ('second'), element 5: element" in raised.value.message
    assert wrong in raised.value.message
    assert came == 15


def test_a_split_of_another_length_is_named_with_both_numbers() -> None:
    splits = ["a", "bbb", "cc"]

    def letters(split: str) -> Iterator[int]:
        yield from map(ord, split)

    assert sorted(read(letters, splits, lengths=[1, 3, 2])) == sorted(map(ord, "abbbcc"))
    for length, found in ((4, "3"), (2, "at least one more"), (0, "at least one more")):
        said = rf"split 1 \('bbb'\), element {min(length, 3)}: lengths= says .* {length} elements"
        with pytest.raises(PipelineError, match=f"{said}, and it has {found}: correct"):
            read(letters, splits, lengths=[1, length, 2])
