"""What is registered of a function of splits, pickled by value with its splits."""

from __future__ import annotations

import contextlib
import difflib
import glob
import inspect
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import cloudpickle

from ... import pickles
from ...block_limits import MAX_COMPONENTS
from ...blocks import Block, Component
from ...errors import ForebayError, InvalidArgument
from ...proto import forebay_pb2 as pb
from ...proto import python_pb2
from ...structure import leaves_of
from ..definitions import UNKNOWN_CARDINALITY, encode_metadata
from ..files.formats import written
from ..files.record_ranges import column_facts
from ..files.stores import is_url
from ..python.columns import Misfit, fields_of, iterated
from ..python.element_structures import element_spec_of, inferred, structure_of_spec
from ..python.pipeline import PythonPipeline
from ..python.stored import package_version, python_version
from ..splits import SplitRange
from .file_paths import matching

log = logging.getLogger(__name__)

MAX_SPLITS = 10_000_000
LOOKED_AT = 10
"""How many elements of the first split infer a spec, and how many splits are tried at most. Others
may widen it (`_widened`)."""

_LOOK_S, _OTHER_SPLITS = 2.0, 8
"""For further splits together, with the start of their process the first time; and how many."""

MAX_LIMIT = 1_000_000
"""The dispatcher remembers each record that is skipped."""

ON_ERROR = {"raise": python_pb2.RAISE, "skip": python_pb2.SKIP, "retry": python_pb2.RETRY}


@dataclass(frozen=True)
class PythonDataset:
    """A function that `register_dataset` takes, with its options. Made by `python_dataset`.
    Calling it calls the function."""

    function: Callable[..., Any]
    splits: Any
    element_spec: Any = None
    packages: tuple[str, ...] = ()
    on_error: str = "raise"
    limit: int = 100
    timeout_s: float | None = None
    lengths: Iterable[int] | None = None

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidArgument(f"{self.function!r} is no function; give one that takes a split")
        require_failure_rules(self.on_error, self.limit)
        seconds = self.timeout_s
        if seconds is not None and not (_is_number(seconds, int | float) and seconds > 0):
            raise InvalidArgument(
                f"timeout_s={seconds!r} must be a number of seconds above 0, or None for no limit"
            )


def require_failure_rules(on_error: Any, limit: Any) -> None:
    """Raises InvalidArgument."""
    if not isinstance(on_error, str) or on_error not in ON_ERROR:
        raise InvalidArgument(f"on_error={on_error!r} must be one of {[*ON_ERROR]}")
    if not _is_number(limit, int) or not 0 <= limit <= MAX_LIMIT:
        raise InvalidArgument(
            f"limit={limit!r} must be an int from 0 to {MAX_LIMIT}: how many splits or records may "
            "be skipped, or how often a split is retried"
        )


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def package_names(packages: Any) -> tuple[str, ...]:
    """Raises InvalidArgument."""
    if not isinstance(packages, str | bytes | Mapping) and isinstance(packages, Iterable):
        found = tuple(packages)
        if all(isinstance(name, str) for name in found):
            return found
    raise InvalidArgument(
        f"packages={packages!r} must be a list of names of distributions, such as ['numpy']"
    )


def require_options(given: Iterable[str], *others: str) -> None:
    """Raises InvalidArgument for names that are neither `python_dataset`'s nor in `others`."""
    known = list(dict.fromkeys([*inspect.signature(python_dataset).parameters, *others]))
    if unknown := [name for name in given if name not in known]:
        if close := difflib.get_close_matches(unknown[0], known, 1):
            raise InvalidArgument(f"there is no option {unknown[0]!r}: did you mean `{close[0]}`?")
        raise InvalidArgument(
            f"{unknown} are no options of a Python dataset, which has {known}: how often a split "
            "is retried is `limit`, and how many processes run it an option of the worker's, "
            "--processes"
        )


def python_dataset(
    splits: Any,
    *,
    element_spec: Any = None,
    packages: Iterable[str] = (),
    on_error: str = "raise",
    limit: int = 100,
    timeout_s: float | None = None,
    lengths: Iterable[int] | None = None,
) -> Callable[[Callable[..., Any]], PythonDataset]:
    """A decorator that makes a function a dataset, which `register_dataset` registers.

    A worker's processes call the function with each split. It returns an iterable of elements, or
    is a generator. Elements are arrays, numbers, strings, bytes and None, in dicts with strings as
    keys and in tuples. The function can only read data that the worker can reach.

    Each element must match what was registered. NumPy arrays and scalars must have the same dtype.
    Python numbers are rounded to it, and must not overflow. Named tuples must have the same fields.
    A list is one tensor: for several tensors, yield a tuple or a dict.

    The function may be an object with `__call__`. Each process calls its `setup()`, if it has one,
    before the first split: make objects there that are expensive or cannot be pickled, such as a
    model. Each process calls its `teardown()` at the end, unless it is killed. Registering calls
    both too, around the calls that infer the element_spec. No hook marks the begin or the end of a
    split: use the begin and end of the function.

    Random numbers differ by process and by epoch. This includes generators that are pickled with
    the function, such as `rng = np.random.default_rng(7)` in its module, closure or attribute. They
    get new states after `setup()`, whatever their seeds; two with the same seed still draw the same
    numbers. This holds for `random.Random`, NumPy's generators and PyTorch's. For numbers that
    depend only on the split, make the generator in the function:
    `np.random.default_rng([seed, split])`. `materialize` seeds all of these from its `seed`, except
    PyTorch's default generator.

    Args:
      splits: the parts that workers share: a sequence, such as a list or a range, or another finite
        iterable. A string is a glob pattern of files, or of objects (such as `s3://…/*.npz`), which
        is resolved here: the function gets paths or URLs, sorted.
      element_spec: of each element: a dtype, or a pair of dtype and shape, in which None is any
        size, nested as the elements: `{"image": ("uint8", (None, None, 3)), "label": "int64"}`. Or
        of `tf.TensorSpec`, or anything that has a `dtype` and a `shape`. By default it is inferred:
        the function is called here for the first elements, and in a process of its own for some of
        other splits, for two seconds at most. Dimensions that differ are unknown. One that differs
        later is a warning where NumPy or PyTorch reads it, and an error in a batch, and where
        TensorFlow or JAX was promised it.
      packages: names of distributions. Workers must have the versions that are installed here.
      on_error: what happens to a split if the function raises or its process ends.
        "raise": readers get the error, with the function's own traceback. "skip": an element that
        does not fit is left out, and so is one for which the iterator raises and goes on, as
        `map(decode, records)` does. The rest of the split is left out where a generator raises, as
        it has ended; or where the process ended, and then its last unsent elements are lost too,
        and a read in order or at least once gets the error. "retry":
        the function runs again and resumes after the last element received; it must yield the same
        elements again. With "skip" and "retry", a process that ends during its start, as in
        `setup()`, is started again. An exception there is an error.
      limit: how many elements and splits all workers may skip in an epoch; or how often a worker
        retries a split, or starts a process for it. The journal records each skip and its reason;
        `forebay status` shows them.
      timeout_s: how many seconds an element may take before its process is killed. The start of a
        process, with imports and `setup`, has at least a minute.
      lengths: how many elements each split has, if that is known. Then an ordered read
        begins at any position without counting, and the dataset has a len(). A split with another
        number is an error.

    Raises ValueError for invalid arguments.
    """

    if inspect.isroutine(splits) or inspect.isclass(splits):
        raise InvalidArgument(
            f"splits={splits!r:.100} is a function: decorate it with what its splits are, "
            "@python_dataset(splits=…)"
        )

    def made(function: Callable[..., Any]) -> PythonDataset:
        return PythonDataset(
            function, splits, element_spec, package_names(packages), on_error, limit, timeout_s,
            lengths,
        )  # fmt: skip

    return made


def listed(splits: Any) -> Sequence[Any]:
    """The splits as a sequence; resolves a glob pattern. Raises InvalidArgument, and of URLs
    NotFound and FailedPrecondition."""
    if isinstance(splits, str) and is_url(splits):
        return sorted(entry.path for entry in matching(splits, {}))
    if isinstance(splits, str | os.PathLike):
        found = sorted(glob.glob(os.fspath(splits), recursive=True))
        if not found:
            raise InvalidArgument(f"no file matches splits={os.fspath(splits)!r} here")
        return found
    if not isinstance(splits, Iterable) or isinstance(splits, bytes):
        hint = f": range({splits!r}) are so many" if _is_number(splits, int) else ""
        raise InvalidArgument(
            f"splits={splits!r} must be a list, a range, a pattern of files …{hint}"
        )
    if isinstance(splits, range):
        return splits
    found = list(itertools.islice(splits, MAX_SPLITS + 1))
    if len(found) > MAX_SPLITS:
        raise InvalidArgument(
            f"splits={splits!r} yields more than {MAX_SPLITS}: let each split be more of the data"
        )
    return found


def definition(dataset: PythonDataset) -> pb.RegisterDatasetRequest:
    """What is registered of a function of splits. Without an element_spec, calls the function.
    Raises InvalidArgument, and the function's errors."""
    request = request_of(dataset, listed(dataset.splits))
    request.structure = structure_of(
        request, dataset.element_spec, dataset.function, lambda: inferred(first_elements(request))
    )
    request.metadata = encode_metadata(element_spec_of(request.structure), UNKNOWN_CARDINALITY)
    return request


def _lengths(dataset: PythonDataset, splits: int) -> list[int]:
    """Of each split; none if they are not known. Raises InvalidArgument."""
    if dataset.lengths is None:
        return []
    given = [*dataset.lengths] if isinstance(dataset.lengths, Iterable) else []
    if len(given) != splits or not all(_is_number(n, Integral) and n >= 0 for n in given):
        raise InvalidArgument(
            f"lengths={dataset.lengths!r:.100} must be {splits} ints of at least 0, one for each "
            "split"
        )
    if dataset.on_error == "skip":
        raise InvalidArgument("lengths are not known where on_error='skip' may leave elements out")
    return [int(n) for n in given]


def structure_of(
    request: pb.RegisterDatasetRequest, element_spec: Any, function: Any, infer: Callable[[], str]
) -> str:
    """The structure of what the function yields, by its element_spec if it is given. Raises
    InvalidArgument, and what `infer` raises."""
    if is_given := element_spec is not None:
        structure = structure_of_spec(element_spec)
    else:
        structure = infer()
    require_expressible(structure)
    return structure if is_given else _widened(request, structure, function)


def require_expressible(structure: str) -> None:
    """Raises InvalidArgument if a function cannot yield elements of this structure."""
    try:
        fields, _ = fields_of(structure)
    except ValueError as error:
        raise InvalidArgument(str(error)) from error
    require_few_components(len(fields))


def require_few_components(components: int) -> None:
    """Raises InvalidArgument for no components, or for more than MAX_COMPONENTS."""
    if not components:
        raise InvalidArgument(
            "the elements have no tensors, and nothing would travel: let each have one at least, "
            "such as its number"
        )
    if components > MAX_COMPONENTS:
        raise InvalidArgument(
            f"an element of {components} tensors cannot travel, above {MAX_COMPONENTS}: stack them"
        )


def first_elements(request: pb.RegisterDatasetRequest) -> list[Any]:
    """Elements of the first non-empty split, by a copy of the function, as a worker has it: calling
    it does not change what is registered. Raises InvalidArgument, and the function's errors."""
    stored = python_pb2.PythonDataset.FromString(request.python)
    function, splits = pickles.loads(stored.function, stored.splits)
    getattr(function, "setup", _nothing)()
    try:
        for split in splits[:LOOKED_AT]:
            try:
                elements = iterated(function(split))
            except Misfit as misfit:
                raise InvalidArgument(f"split {split!r:.100}: {misfit}") from None
            if found := list(itertools.islice(elements, LOOKED_AT)):
                return found
    finally:
        getattr(function, "teardown", _nothing)()
    if not len(splits):
        raise InvalidArgument(
            "there are no splits, so it is not known what elements are: give splits that are "
            "there, or element_spec"
        )
    raise InvalidArgument(
        f"the function yields no element for its first {min(len(splits), LOOKED_AT)} splits, so it "
        "is not known what elements are: give element_spec"
    )


def _nothing() -> None: ...


def request_of(
    dataset: PythonDataset, splits: Sequence[Any], structure: str = ""
) -> pb.RegisterDatasetRequest:
    """The request without metadata. Raises InvalidArgument."""
    stored = stored_of(dataset, splits)
    request = pb.RegisterDatasetRequest(
        python=stored.SerializeToString(deterministic=True),
        structure=structure,
        lengths=stored.lengths,
    )
    request.sources.add(count=len(splits))
    return request


def stored_of(
    dataset: PythonDataset, splits: Sequence[Any] | None = None
) -> python_pb2.PythonDataset:
    """A function with its options, and its splits if it is not one of records. Raises
    InvalidArgument."""
    versions = {name: package_version(name) or "" for name in ("cloudpickle", *dataset.packages)}
    if missing := [name for name, version in versions.items() if not version]:
        raise InvalidArgument(f"packages={[*dataset.packages]}: {missing} are not installed here")
    with pickles.by_value():
        return python_pb2.PythonDataset(
            function=_pickled(dataset.function, marks_generators=True),
            splits=b"" if splits is None else _pickled(splits),
            python=python_version(),
            packages=versions,
            on_error=ON_ERROR[dataset.on_error],
            limit=dataset.limit,
            timeout_s=dataset.timeout_s or 0,
            inferred=splits is not None and dataset.element_spec is None,
            lengths=() if splits is None else _lengths(dataset, len(splits)),
        )


def _pickled(value: Any, **how: bool) -> bytes:
    try:
        return pickles.dumps(value, **how)
    except Exception as error:
        raise InvalidArgument(
            f"{_culprit(value)} cannot be pickled, and so not be sent to workers ({error}): make "
            "it within the function, or within what it imports"
        ) from error


def _culprit(value: Any) -> str:
    """In words, the part of a function or a sequence that cannot be pickled."""
    parts: Mapping[str, Any] = {}
    if inspect.isfunction(value):
        known = inspect.getclosurevars(value)
        parts = {
            f"the variable {name!r} of {value.__qualname__}": part
            for name, part in {**known.globals, **known.nonlocals}.items()
        }
    elif isinstance(value, list):
        parts = {f"split {number}": part for number, part in enumerate(value)}
    for name, part in parts.items():
        try:
            cloudpickle.dumps(part)
        except Exception:  # noqa: BLE001 - whatever pickling it raises
            return f"{name} ({part!r:.100})"
    return f"{value!r:.100}"


def _widened(request: pb.RegisterDatasetRequest, structure: str, function: Any) -> str:
    """The structure, in which dimensions are unknown that differ among elements of further splits.
    These run as on a worker, as one may take long, fail, or end its process; that says nothing
    here, and reads name it. A function with a `setup`, and a Beam chain, is not run again: what it
    sets up may be large, or shared."""
    nodes = json.loads(structure)
    shapes = [node["shape"] for _, node in leaves_of(nodes)]
    known = any(size is not None for shape in shapes for size in shape)
    if not known or hasattr(function, "setup") or hasattr(function, "run_bundle"):
        return structure
    splits = request.sources[0].count
    far = {splits * part // _OTHER_SPLITS - 1 for part in range(1, _OTHER_SPLITS + 1)}
    give_up_s = time.monotonic() + _LOOK_S
    pipeline = PythonPipeline(request.python, request.sources, structure, may_skip=lambda _: True)
    with contextlib.closing(pipeline):
        for split in sorted((at for at in far if at > 0), reverse=True):
            for block in _first_blocks(pipeline, split, give_up_s):
                for shape, component in zip(shapes, block.components, strict=True):
                    _widen(shape, component)
    return written(nodes)


def _first_blocks(pipeline: PythonPipeline, split: int, give_up_s: float) -> Iterator[Block]:
    """Some first blocks of a split; none once the time is over."""
    if (left_s := give_up_s - time.monotonic()) <= 0:
        return
    run = pipeline.bundle(SplitRange(split, 1, 0), number=split, seed=0)
    timer = threading.Timer(left_s, run.cancel)
    timer.start()
    try:
        with contextlib.closing(run.blocks()) as blocks:
            for count, block in enumerate(blocks, 1):
                yield block
                if count == 2:  # the first one has one element
                    break
    except ForebayError as error:
        log.info("split %d failed as its elements were looked at: %s", split, error)
    finally:
        timer.cancel()
        timer.join()


def _widen(shape: list[int | None], component: Component) -> None:
    _, _, found = column_facts(component)
    for sizes in found.tolist():
        shape[:] = [a if a == b else None for a, b in zip(shape, sizes, strict=True)]
