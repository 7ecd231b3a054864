"""Python datasets: what of a function is registered, and is the same in every process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import tensorflow as tf

from forebay import service
from forebay.journal.proto import events_pb2 as ev
from forebay.service.errors import FailedPrecondition, InvalidArgument, PipelineError
from forebay.service.pipelines import PythonRules, Shard, open_pipeline
from forebay.service.pipelines.kinds.functions import (
    definition,
    first_elements,
    listed,
    python_dataset,
    request_of,
)
from forebay.service.pipelines.python.pipeline import PythonPipeline
from forebay.service.proto.python_pb2 import PythonDataset

from .functions import INT, Function, read


def test_what_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    def function(split: int) -> Iterator[int]:
        with lock:
            yield split

    with pytest.raises(
        InvalidArgument, match=r"the variable 'lock' of .*function.* cannot be pick"
    ):
        request_of(python_dataset([1])(function), [1], INT)
    with pytest.raises(InvalidArgument, match=r"split 1 .*lock.* cannot be pickled"):
        request_of(python_dataset([1])(lambda split: [1]), [0, lock], INT)


def test_a_module_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("only_here")
    module.__file__ = "/usr/lib/python3/dist-packages/only_here.py"
    monkeypatch.setitem(sys.modules, "only_here", module)

    def function(split: int) -> Iterator[object]:
        yield module

    with pytest.raises(PipelineError, match="needs the module 'only_here', which is not there"):
        read(function, [1])


def stored(**fields: Any) -> tuple[ev.DatasetDefinition, bytes]:
    request = request_of(python_dataset([1])(lambda split: [split]), [1], INT)
    dataset = PythonDataset.FromString(request.python)
    for name, value in fields.items():
        if name == "packages":
            dataset.packages.update(value)
        else:
            setattr(dataset, name, value)
    definition = ev.DatasetDefinition(sources=request.sources, structure=INT)
    definition.python_function.SetInParent()
    return definition, dataset.SerializeToString()


def test_other_versions_are_refused_with_both() -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(
        FailedPrecondition, match=rf"Python 2\.7, and this worker has Python {here}"
    ):
        open_pipeline(*stored(python="2.7"))
    with pytest.raises(
        FailedPrecondition, match=f"numpy 1.0, and this worker has {np.__version__}"
    ):
        open_pipeline(*stored(packages={"numpy": "1.0"}))
    with pytest.raises(FailedPrecondition, match=r"nosuch 1.0, and this worker has none"):
        open_pipeline(*stored(packages={"nosuch": "1.0"}))
    with pytest.raises(InvalidArgument, match=r"nosuch.* not installed here"):
        request_of(python_dataset([1], packages=["nosuch"])(print), [1], INT)


def test_workers_refuse_what_they_shall_not_run() -> None:
    with pytest.raises(FailedPrecondition, match=r"worker h:1 runs no Python .*--allow-python"):
        open_pipeline(*stored(), python=PythonRules(allowed=False, where="h:1"))
    with pytest.raises(InvalidArgument, match="divided by its splits"):
        open_pipeline(*stored(), Shard(ev.DATA, 0, 2))
    assert isinstance(open_pipeline(*stored()), PythonPipeline)


def test_splits_are_any_iterable_or_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.csv"):
        (tmp_path / name).touch()
    assert listed(str(tmp_path / "*.txt")) == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert listed(tmp_path / "c.csv") == [str(tmp_path / "c.csv")]
    assert listed(range(10**12)) == range(10**12)
    assert listed(x * x for x in range(3)) == [0, 1, 4]
    assert listed({"a": 1}) == ["a"]
    with pytest.raises(InvalidArgument, match=r"no file matches splits='.*\.nothing'"):
        listed(str(tmp_path / "*.nothing"))
    with pytest.raises(InvalidArgument, match=r"splits=7 must be a list.*: range\(7\) are so man"):
        listed(7)
    with pytest.raises(InvalidArgument, match="splits=b'a' must be a list"):
        listed(b"a")


def test_lengths_are_one_for_each_split() -> None:
    request = definition(python_dataset([1, 2], lengths=iter([3, 0]))(range))
    assert [*request.lengths] == [3, 0]
    for wrong in ([3], [3, -1], [3, 1.0], [True, 1], 3):
        with pytest.raises(InvalidArgument, match=r"lengths=.* must be 2 ints of at least 0, one"):
            definition(python_dataset([1, 2], lengths=wrong)(range))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="lengths are not known where on_error='skip'"):
        definition(python_dataset([1, 2], lengths=[1, 2], on_error="skip")(range))


def test_options_that_there_are_not() -> None:
    for name, value in {"retries": -1, "processes": 0}.items():
        with pytest.raises(InvalidArgument, match=rf"\['{name}'\] are no options .*'limit', 'time"):
            service.register_dataset("localhost:1", print, splits=[1], **{name: value})  # type: ignore[arg-type]


def test_more_components_than_can_travel_are_refused() -> None:
    def function(split: int) -> Iterator[object]:
        yield dict.fromkeys(map(str, range(2001)), 1)

    with pytest.raises(InvalidArgument, match="an element of 2001 tensors cannot travel, above 2"):
        service.register_dataset("localhost:1", function, splits=[1])


@pytest.mark.parametrize("element", [{}, (), None, (None, {"a": None})], ids=str)
def test_elements_without_tensors_are_refused(element: object) -> None:
    """As tf.data refuses them: TensorFlow's datasets have a component at least."""
    for spec in (None, element):
        with pytest.raises(InvalidArgument, match="the elements have no tensors"):
            service.register_dataset(
                "localhost:1", lambda split: [element], splits=[1], element_spec=spec
            )


@pytest.mark.parametrize("found", [{"a": 1}, "text", b"text", 1, None, np.int64(1), np.array(1)])
def test_what_a_function_returns_is_its_elements_and_not_one_of_them(found: object) -> None:
    with pytest.raises(InvalidArgument, match=r"the function returned .* yield each element, or r"):
        first(lambda split: found, [1])


def test_what_is_forgotten_or_misspelt_is_said() -> None:
    def parse(file: str, label: int = 1) -> list[int]:
        return [len(str(file)) + label]

    for wrong, said in (
        ({}, r"parse is a function, and no `splits` are given .* such as range\(100\).*returns"),
        ({"splits": [1], "dataset_id": 5}, "`dataset_id` must be a string, not <class 'int'>"),
        ({"split": [1]}, "there is no option 'split': did you mean `splits`"),
        ({"splits": [1], "on_eror": "skip"}, "'on_eror': did you mean `on_error`"),
        ({"splits": [1], "retries": 3}, r"\['retries'\] are no options .* `limit`"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            service.register_dataset("localhost:1", parse, **wrong)
    with pytest.raises(InvalidArgument, match=r"address comes before the dataset"):
        service.register_dataset(tf.data.Dataset.range(3), "localhost:1")
    with pytest.raises(InvalidArgument, match="dataset_id=5 must be a string, as `register_data"):
        service.read("localhost:1", 5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"is a function: decorate it .* @python_dataset\("):
        service.python_dataset(parse)


def first(function: Function, splits: Sequence[Any]) -> list[Any]:
    return first_elements(request_of(python_dataset(splits)(function), splits))


def test_a_function_that_yields_nothing_has_no_spec() -> None:
    assert read(lambda split: [], range(5)) == []
    assert first(lambda split: [split] * split, range(5)) == [1]
    with pytest.raises(InvalidArgument, match="yields no element for its first 5 splits"):
        first(lambda split: [], range(5))


class Counted:
    """Counts its calls, and has to be set up."""

    calls: int
    said: tuple[str, ...] = ()

    def setup(self) -> None:
        self.calls = 0

    def __call__(self, split: list[int]) -> Iterator[int]:
        self.calls += 1
        yield self.calls + split.pop()


def test_a_function_is_registered_as_it_was_before_its_elements_were_looked_at() -> None:
    function, splits = Counted(), [[10], [20]]
    assert first(function, splits) == [11]
    assert vars(function) == {}
    assert splits == [[10], [20]]
    assert read(function, splits) == [11, 22]


ROWS = """
import dataclasses, enum

class Kind(enum.Enum):
    A = 1

@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    kind: Kind = Kind.A
    extra: frozenset = frozenset("u")
"""
TRAINER = """
import dataclasses, hashlib
import own.part
from rows import Row
from forebay.service.pipelines.kinds.functions import python_dataset, request_of

@dataclasses.dataclass(frozen=True)
class Own(Row):
    pass

WORDS = {"one", "two", "three", b"four", 5, Row("six"), Own("seven"), frozenset("abc")}

def function(split):
    if split.name in {"x", "y", "z", "split"} and split not in WORDS and own.part.LIMIT:
        yield Own(split.name, extra=split.extra | {"more"})

splits = [Row(name, extra=frozenset("abcdef")) for name in ("x", "y")]
request = request_of(python_dataset(splits)(function), splits)
print(hashlib.sha256(request.python).hexdigest())
"""


def test_equal_functions_are_the_same_bytes_in_all_processes(tmp_path: Path) -> None:
    """Or trainers of a shared job would each have a dataset of their own."""
    (tmp_path / "rows.py").write_text(ROWS)
    (tmp_path / "own").mkdir()  # a package without a file of its own
    (tmp_path / "own" / "part.py").write_text("LIMIT = 3")
    (tmp_path / "trainer.py").write_text(TRAINER)
    said = [
        subprocess.run(
            [sys.executable, "trainer.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"/{seed}"},
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] != b""


INSTALLED = """
import sys
import cloudpickle, own_module
from forebay.service.pipelines.kinds.functions import PythonDataset, request_of
assert cloudpickle.__file__.startswith(sys.argv[1]), cloudpickle.__file__
pickled = request_of(PythonDataset(own_module.three, [1]), [1]).python
print(b"THREE" in pickled, len(pickled) < 10_000)
"""


def test_what_is_installed_in_any_folder_does_not_travel(tmp_path: Path) -> None:
    """As by `pip install --target`: also cloudpickle, which could not pickle itself. What is
    beside it and belongs to no package does."""
    installed = Path(cloudpickle.__file__).parent
    for folder in (installed, *installed.parent.glob("cloudpickle-*.dist-info")):
        shutil.copytree(folder, tmp_path / "installed" / folder.name)
    (tmp_path / "installed" / "own_module.py").write_text(
        "def three(split):\n    return [THREE]\nTHREE = 3"
    )
    places = [str(tmp_path / "installed"), *sys.path]
    ran = subprocess.run(
        [sys.executable, "-c", INSTALLED, str(tmp_path)],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
    )  # fmt: skip
    assert ran.stdout.split() == ["True", "True"], ran.stderr


def test_classes_of_the_same_name_remain_two() -> None:
    def kind(value: int) -> type[Any]:
        class Kind:
            def value(self) -> int:
                return value

        return Kind

    one, two, words = kind(1), kind(2), {"a", "b"}

    def function(split: int) -> Iterator[int]:
        assert words == {"b", "a"} and type(words) is set
        yield one().value() + 10 * two().value()

    for _ in range(2):
        assert first(function, [0]) == [21]
    assert read(function, [0]) == [21]


def test_functions_may_have_arrays_without_items() -> None:
    arrays: list[Any] = [np.zeros((0, 3)), np.zeros((2, 0), np.int8), np.zeros(0)]
    nothing = b""
    readonly = np.zeros(0, np.uint8)
    readonly.setflags(write=False)

    def function(split: int) -> Iterator[int]:
        assert [array.shape for array in [*arrays, readonly]] == [(0, 3), (2, 0), (0,), (0,)]
        assert type(nothing) is bytes
        assert not readonly.flags.writeable and arrays[0].flags.writeable
        yield split

    assert first(function, [0]) == [0]
    assert read(function, [0]) == [0]


def test_what_a_dataset_would_not_heed_is_refused() -> None:
    decorated = service.python_dataset([1], on_error="skip")(lambda split: [split])
    for how in ({"splits": [2]}, {"limit": 3}):
        with pytest.raises(InvalidArgument, match=r"(splits|limit)'\] are given for a dec"):
            service.register_dataset("localhost:1", decorated, **how)


@pytest.mark.parametrize(
    "wrong",
    [
        {"on_error": "Skip"},
        {"on_error": ["skip"]},
        {"limit": -1},
        {"limit": 1.5},
        {"limit": True},
        {"timeout_s": 0},
        {"timeout_s": "5"},
        {"timeout_s": float("nan")},
        {"packages": "numpy"},
        {"packages": None},
        {"packages": [np]},
    ],
)
def test_arguments_that_make_no_sense(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(InvalidArgument, match=rf"{name}={re.escape(repr(value))} must be"):
        python_dataset([1], **wrong)(print)
    with pytest.raises(InvalidArgument, match="no function"):
        python_dataset([1])(7)  # type: ignore[arg-type]
