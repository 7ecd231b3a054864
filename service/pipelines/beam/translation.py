"""Translates a PCollection that was built and not run into a chain of steps, and the inputs of each
bundle; into several chains if it is flattened.

All transforms of Beam consist of a few primitives, so the translation looks into composites, also
into reads. The steps before the first read run here, once, and so does Beam's splitting of that
read. If no step reads, the dataset is divided at the user's first Reshuffle, and the steps before
it run here. Without a Reshuffle, the created or matched elements are divided.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import apache_beam as beam
import cloudpickle
from apache_beam import pvalue
from apache_beam.io import filebasedsource, fileio, iobase, parquetio
from apache_beam.pipeline import AppliedPTransform
from apache_beam.runners import common
from apache_beam.transforms import core, util, window
from apache_beam.utils.timestamp import MIN_TIMESTAMP
from apache_beam.utils.windowed_value import WindowedValue

from ... import pickles
from ...errors import InvalidArgument
from . import internals
from .chain import Branches, Chain, SideInput, Step, TooMany

MAX_SPLITS = 1000
"""The most splits of created elements; up to it, each element is a split. If a step acts at the
start or finish of a bundle (it makes batches, say), n elements become about √n splits."""

MAX_READ = 100_000
"""Limit of splits of a read. Each split is pickled here, which takes 0.2 ms and 1 KB."""

_ADVICE = (
    "have a runner of Beam's that shuffles write its result to files (WriteToParquet does), and "
    "register these"
)

MAX_BRANCHES = 1000

_GIVES_THE_SAME = (
    core.Create,
    iobase.Read,
    filebasedsource.ReadAllFiles,
    fileio.MatchFiles,
    fileio.MatchAll,
    fileio.ReadMatches,
    parquetio.ReadFromParquet,
    parquetio.ReadAllFromParquet,
)
"""Composites that may run several times: they contain nothing of the user's but a source, which
Beam also calls several times."""

_Sides = dict[pvalue.PCollection, list[Any]]
"""The computed elements of side inputs."""


class Translated(NamedTuple):
    """The parts of a dataset."""

    chain: Chain
    splits: Sequence[bytes]
    """The inputs of the chain's bundles."""


def translate(pcollection: beam.PCollection, split_bytes: int | None = None) -> Translated:
    """Translate a PCollection.

    Args:
      pcollection: the last one; a named output of a ParDo is fine.
      split_bytes: the approximate size in bytes of the splits of bounded sources, and of the files
        of a ReadAllFrom…; Beam chooses by default. A file is divided if its format allows it:
        TFRecord and compressed files cannot be divided, Parquet between row groups.

    Each input of a flatten becomes a branch with all steps behind it. A read that branches share is
    read for each branch. A step of the user's would run for each branch as well, and is refused: it
    may draw other random numbers each time, which would lose elements.

    Raises InvalidArgument, with the transform's label, for anything but a chain behind one bounded
    read, for what needs a shuffle or windows, for `split_bytes` that no read uses, and for more
    than `MAX_READ` splits.
    """
    if split_bytes is not None and (type(split_bytes) is not int or split_bytes < 1):
        raise InvalidArgument(
            f"split_bytes={split_bytes!r} must be an int, at least 1: of how many bytes the splits "
            "of what is read should be, or None, for as Beam chooses it"
        )
    return _translate(pcollection, split_bytes, {})


def _translate(pcollection: beam.PCollection, split_bytes: int | None, sides: _Sides) -> Translated:
    paths = _paths(pcollection)
    _require_run_once(pcollection)
    if not paths:
        raise InvalidArgument(f"{_label(pcollection.producer)} flattens nothing: register a read")
    if split_bytes is not None and not any(map(_has_size, paths)):
        begin = paths[0][0].node if paths[0] else pcollection.producer
        raise InvalidArgument(
            f"split_bytes={split_bytes} is for reads of files, and other bounded sources; "
            f"{_label(begin)} is divided by its elements, or as its own DoFn likes: leave it out"
        )
    found = [_translate_path(applied, split_bytes, sides) for applied in paths]
    if len(found) == 1:
        return found[0]
    splits = [
        pickles.dumps((number, split)) for number, each in enumerate(found) for split in each.splits
    ]
    return Translated(Branches([each.chain for each in found]), splits)


def values(pcollection: beam.PCollection) -> list[Any]:
    """All elements, computed in this process."""
    return _values(pcollection, {})


def _values(pcollection: beam.PCollection, sides: _Sides) -> list[Any]:
    found: list[Any] = []
    chain, splits = _translate(pcollection, None, sides)
    try:
        for split in splits:
            chain.run_bundle(split, found.append)
    finally:
        chain.teardown()
    return found


class _Applied(NamedTuple):
    """A ParDo, and the output that the next step reads."""

    node: AppliedPTransform
    output: str | None
    is_reshuffled: bool = False  # the user reshuffles its input


def _paths(pcollection: Any, behind: Sequence[_Applied] = ()) -> list[list[_Applied]]:
    """The ParDos that make a PCollection, from the first one behind an impulse on, for each impulse
    that it comes from. `behind` are the ParDos that follow, the last one first."""
    if isinstance(pcollection, pvalue.DoOutputsTuple):
        raise InvalidArgument(
            f"these are several outputs, {pcollection!r}; register one: outputs.name, outputs[tag]"
        )
    if not isinstance(pcollection, pvalue.PCollection):
        raise InvalidArgument(f"{pcollection!r} is no PCollection, but {type(pcollection)}")
    found = [*behind]
    while True:
        node = pcollection.producer
        if (redistributing := _inside(node, util.Reshuffle, util.ReshufflePerKey)) is not None:
            if found and _inside(redistributing, core.Create) is None:
                found[-1] = found[-1]._replace(is_reshuffled=True)
            (pcollection,) = redistributing.inputs
            continue
        if isinstance(node.transform, core.Impulse):
            return [found[::-1]]
        if isinstance(node.transform, core.Flatten):
            paths: list[list[_Applied]] = []
            for each in node.inputs:
                paths += _paths(each, found)
                if len(paths) > MAX_BRANCHES:
                    raise InvalidArgument(
                        f"{_label(node)} flattens more than {MAX_BRANCHES} branches, each of which "
                        f"is set up by itself: read their files by one pattern, or {_ADVICE}"
                    )
            return paths
        _check(node, pcollection)
        found.append(_Applied(node, pcollection.tag))
        (pcollection,) = node.inputs


def _require_run_once(pcollection: beam.PCollection) -> None:
    """Raises InvalidArgument for a step that leads to a PCollection in more than one way. A side
    input doesn't count, as it is computed once."""
    seen: set[AppliedPTransform] = set()
    sides: set[pvalue.PCollection] = set()
    left = [(pcollection, False)]
    while left:
        found, is_shared = left.pop()
        node = found.producer
        is_shared = is_shared or node in seen
        seen.add(node)
        if (
            is_shared
            and isinstance(node.transform, core.ParDo)
            and _inside(node, *_GIVES_THE_SAME, util.Reshuffle, util.ReshufflePerKey) is None
        ):
            raise InvalidArgument(
                f"{_label(node)} runs once in Beam, and would run here for each of those that use "
                "its result; it might draw something else each time, and what it counts would "
                f"count again. Do in one DoFn what they do, or {_ADVICE}"
            )
        left.extend(
            (each, is_shared) for each in node.inputs if isinstance(each, pvalue.PCollection)
        )
        for side in node.side_inputs:
            if side.pvalue not in sides:
                sides.add(side.pvalue)
                left.append((side.pvalue, is_shared))


def _inside(node: AppliedPTransform, *kinds: type[Any]) -> AppliedPTransform | None:
    """The outermost transform of these kinds that contains a node, or is it."""
    found = None
    at: AppliedPTransform | None = node
    while at is not None:
        if isinstance(at.transform, kinds):
            found = at
        at = at.parent
    return found


def _check(node: AppliedPTransform, pcollection: beam.PCollection) -> None:
    """Raises InvalidArgument for a transform that cannot be a step."""
    transform = node.transform
    if isinstance(transform, core.GroupByKey):
        raise InvalidArgument(f"{_label(node)} groups, which needs a shuffle; {_ADVICE}")
    if not pcollection.is_bounded:
        raise InvalidArgument(f"{_label(node)} is unbounded; only bounded reads have splits")
    if not isinstance(transform, core.ParDo):
        raise InvalidArgument(
            f"{_label(node)} is a primitive of its own kind ({type(transform).__name__}), which "
            "only its runner knows; a chain is made of ParDos behind a bounded read"
        )
    if isinstance(transform.fn, core.WindowInto.WindowIntoFn) or not isinstance(
        pcollection.windowing.windowfn, window.GlobalWindows
    ):
        raise InvalidArgument(f"{_label(node)} has windows, which datasets do not; {_ADVICE}")
    if common.DoFnSignature(transform.fn).is_stateful_dofn():
        raise InvalidArgument(
            f"{_label(node)} keeps state by key, which needs a shuffle; {_ADVICE}"
        )
    if internals.has_batches(transform.fn):
        raise InvalidArgument(
            f"{_label(node)} takes or yields batches in place of elements, which only Beam's own "
            "runners convert: yield elements (of a Parquet file, read dicts or tables)"
        )


def _label(node: AppliedPTransform) -> str:
    """The label that the user wrote: that of the outermost transform around the node."""
    at = node
    while at.parent is not None and at.parent.full_label:
        at = at.parent
    return repr(at.full_label)


def _translate_path(
    applied: Sequence[_Applied], split_bytes: int | None, sides: _Sides
) -> Translated:
    if not applied:
        raise InvalidArgument("an Impulse alone has nothing to read")
    steps = [_step(each, sides) for each in applied]
    first = _first(applied, steps)
    chain = Chain(steps[first:])
    reads = first < len(steps) and steps[first].reads
    if reads and split_bytes is not None and steps[first].reads_ranges:
        steps = [_of_size(step, split_bytes) for step in steps]
    inputs = [window.GlobalWindows.windowed_value(b"")]
    if first:
        before, impulse, inputs = Chain(steps[:first]), _split(inputs), []

        def take(windowed: WindowedValue) -> None:
            if reads and len(inputs) >= MAX_READ:
                raise TooMany
            inputs.append(windowed)

        try:
            before.run_windowed(impulse, take)
        except TooMany:
            raise _too_many(applied[first], split_bytes) from None
        finally:
            before.teardown()
    if reads:
        found = (each for value in inputs for each in _begin(steps[first], value, split_bytes))
        try:
            splits = [_split([each]) for each in itertools.islice(found, MAX_READ)]
            if next(found, None) is not None:
                raise TooMany
        except TooMany:
            raise _too_many(applied[first], split_bytes) from None
        return Translated(chain, splits)
    size = math.ceil(len(inputs) / MAX_SPLITS)
    if any(step.sees_bundles for step in steps[first:]):
        size = math.isqrt(max(0, len(inputs) - 1)) + 1
    bounds = range(0, len(inputs), max(1, size))
    return Translated(chain, [_split(inputs[at : at + size]) for at in bounds])


def _has_size(applied: Sequence[_Applied]) -> bool:
    """Whether `split_bytes` applies to the first step that reads."""
    steps = (Step("", each.node.transform.fn) for each in applied)
    first = next((step for step in steps if step.reads), None)
    return first is not None and (first.reads_source or first.reads_ranges)


def _of_size(step: Step, split_bytes: int) -> Step:
    """The step; with ranges of this size if it divides files into ranges."""
    if not isinstance(step.fn, internals.ExpandIntoRanges):
        return step
    return replace(step, fn=internals.with_range_bytes(copy.copy(step.fn), split_bytes))


def _too_many(reading: _Applied, split_bytes: int | None) -> InvalidArgument:
    what = "" if split_bytes is None else f" of split_bytes={split_bytes}"
    return InvalidArgument(
        f"{_label(reading.node)} has more than {MAX_READ} splits{what}, each of which is kept: "
        "give a larger split_bytes, or put what is read into fewer files"
    )


def _first(applied: Sequence[_Applied], steps: Sequence[Step]) -> int:
    """The step that bundles begin with: the first one that reads. If none reads, the first one
    behind a Reshuffle, or else the first one behind what was created or matched.
    """
    for at, step in enumerate(steps):
        if step.reads:
            return at
    for at, each in enumerate(applied):
        if each.is_reshuffled:
            return at
    for at, each in enumerate(applied):
        if _inside(each.node, core.Create, fileio.MatchAll) is None:
            return at
    return len(steps)  # only created elements


def _split(inputs: Sequence[WindowedValue]) -> bytes:
    """The pickled inputs; those without a time of their own as plain values."""
    return pickles.dumps(
        [each if each.timestamp != MIN_TIMESTAMP else each.value for each in inputs]
    )


def _begin(
    first: Step, windowed: WindowedValue, split_bytes: int | None
) -> Iterator[WindowedValue]:
    """The inputs of the reading step, split, for one of its original inputs."""
    element = windowed.value
    if not first.is_splittable:
        yield windowed
        return
    # For a bounded source the element is redundant: restrictions hold the parts of the source, and
    # splitting changes the source (one of files keeps them all).
    unused = None if first.reads_source else pickle.loads(cloudpickle.dumps(element))
    if split_bytes is None or not isinstance(element, iobase.BoundedSource):
        restrictions = first.restrictions(element)
    else:
        with contextlib.suppress(NotImplementedError):  # the source knows no size
            if (element.estimate_size() or 0) > MAX_READ * split_bytes:
                raise TooMany  # before splitting, which would take minutes
        restrictions = map(internals.SourceRestriction, element.split(split_bytes))
    for restriction in restrictions:
        yield windowed.with_value((unused, restriction))


def _step(applied: _Applied, sides: _Sides) -> Step:
    transform = applied.node.transform
    return Step(
        label=applied.node.full_label,
        fn=transform.fn,
        args=tuple(transform.args),
        kwargs=dict(transform.kwargs),
        sides=tuple(_side(side, sides) for side in transform.side_inputs),
        output=applied.output,
    )


def _side(side: pvalue.AsSideInput, sides: _Sides) -> SideInput:
    if side.pvalue not in sides:
        sides[side.pvalue] = _values(side.pvalue, sides)
    return SideInput(type(side), internals.view_options(side), sides[side.pvalue])
