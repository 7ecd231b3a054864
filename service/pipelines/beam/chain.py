"""A chain of DoFns that runs bundle by bundle in this process, with Beam's life cycle.

Each step is one of Beam's own `DoFnRunner`s, which handles start and finish of a bundle, side
inputs, tagged outputs and splittable DoFns. A step calls the next one with each element, so only
one element is in memory, however much a source yields.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle
from apache_beam.io import fileio, filesystem, filesystems
from apache_beam.metrics.execution import MetricKey, MetricsContainer
from apache_beam.runners import common
from apache_beam.runners.worker import statesampler
from apache_beam.transforms import core
from apache_beam.transforms.sideinputs import SideInputMap
from apache_beam.transforms.window import GlobalWindows
from apache_beam.utils.counters import CounterFactory
from apache_beam.utils.windowed_value import WindowedValue

from ... import generators, pickles, user_metrics
from ...errors import InvalidArgument
from ...proto import metrics_pb2 as pb
from . import internals

log = logging.getLogger(__name__)

Emit = Callable[[Any], None]
_FEW = 10


class SideInput(NamedTuple):
    """A side input: its elements, and the view that the DoFn has of them."""

    view: type[Any]  # AsList, AsDict, …: a class of apache_beam.pvalue
    options: Mapping[str, Any]
    values: Sequence[Any]


@dataclass(frozen=True)
class Step:
    """A ParDo: a DoFn with its arguments, and the output that the next step reads."""

    label: str
    fn: core.DoFn
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    sides: Sequence[SideInput] = ()
    output: str | None = None  # None: the main one; the others are dropped

    @property
    def is_splittable(self) -> bool:
        return bool(common.DoFnSignature(self.fn).is_splittable_dofn())

    @property
    def reads_source(self) -> bool:
        """Whether it is the DoFn with which Beam reads bounded sources."""
        if not self.is_splittable:
            return False
        provider = common.DoFnSignature(self.fn).get_restriction_provider()
        return isinstance(provider, internals.SourceRestrictionProvider)

    @property
    def reads_ranges(self) -> bool:
        """Whether it is the DoFn with which Beam reads ranges of files, each given with its
        file."""
        return isinstance(self.fn, internals.ReadRange)

    @property
    def reads(self) -> bool:
        """Whether its inputs say what to read; each is a split then."""
        return self.is_splittable or self.reads_ranges

    @property
    def sees_bundles(self) -> bool:
        """Whether the DoFn does something at the start or finish of a bundle."""
        return any(
            getattr(type(self.fn), name, None) is not getattr(core.DoFn, name)
            for name in ("start_bundle", "finish_bundle")
        )

    def restrictions(self, element: Any) -> Iterator[Any]:
        """The restrictions of an element of a splittable DoFn, split as its provider does."""
        provider = common.DoFnSignature(self.fn).get_restriction_provider()
        yield from provider.split(element, provider.initial_restriction(element))


class Chain:
    """A sequence of steps, perhaps empty. It can be pickled; it is not thread-safe.

    A split is the pickled inputs of the first step: elements, or, for a splittable DoFn, pairs of
    an element and a restriction. They are Beam's windowed values if they have times. They are
    pickled because reading changes a restriction.

    The steps are kept pickled too, because running changes a DoFn. Pickling a chain that has run
    gives unused DoFns. As in Beam, a DoFn that has raised is not used again.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        """Raises InvalidArgument for a step that cannot be pickled."""
        self._begin(_pickled(steps))
        self._unused: Sequence[Step] | None = None

    def __getstate__(self) -> bytes:
        return self._pickled

    def __setstate__(self, pickled: bytes) -> None:
        self._begin(pickled)
        self._unused = self._load()  # fail early if a module is missing

    def _begin(self, pickled: bytes) -> None:
        self._pickled = pickled
        self._generators = generators.Generators([])
        self._seeds: tuple[str | None] | None = None  # None: DoFns draw as when they were pickled
        self._running: _Running | None = None

    def _load(self) -> Sequence[Step]:
        steps, self._generators = generators.loads(self._pickled)
        return steps  # type: ignore[no-any-return] # what was pickled

    def seed_generators(self, seed: str | None) -> None:
        """Like `Generators.seed`, for DoFns that are set up now or later."""
        self._seeds = (seed,)
        if self._running is not None:
            self._generators.seed(seed)

    def run_bundle(self, split: bytes, emit: Emit) -> pb.Metrics | None:
        """Like `run_windowed`, but `emit` gets only the element."""
        return self.run_windowed(split, lambda windowed: emit(windowed.value))

    def run_windowed(self, split: bytes, emit: Emit) -> pb.Metrics | None:
        """Run a bundle. Calls `emit` with each windowed value of the last step. Returns what the
        bundle's metrics have counted, if anything.

        The first bundle sets up the DoFns. As in Beam, an exception tears them down, and the next
        bundle sets up new ones.
        """
        if self._running is None:
            unused, self._unused = self._unused, None
            self._running = _Running(unused or self._load())
            if self._seeds is not None:
                self._generators.seed(*self._seeds)
        running, inputs = self._running, cloudpickle.loads(split)
        try:
            return running.bundle(inputs, emit)
        except BaseException as error:
            self.teardown()
            if (file := _file(running.input)) is not None:
                error.add_note(f"while a chain read {file}")
            raise

    def __call__(self, split: bytes) -> Iterator[Any]:
        """The first elements of a bundle; the rest is not run."""
        elements: list[Any] = []

        def emit(element: Any) -> None:
            elements.append(element)
            if len(elements) >= _FEW:
                raise _StopReading

        with contextlib.suppress(_StopReading):
            self.run_bundle(split, emit)
        return iter(elements)

    def teardown(self) -> None:
        """Call it after the last bundle. Idempotent."""
        running, self._running = self._running, None
        if running is not None:
            running.teardown()


class Branches(Chain):
    """Chains whose elements together are a PCollection's. A split names its chain. Only one
    chain's DoFns are set up at a time."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        self._chains = chains
        self._last: Chain | None = None

    def __reduce__(self) -> tuple[type[Branches], tuple[Sequence[Chain]]]:
        return Branches, (self._chains,)

    def seed_generators(self, seed: str | None) -> None:
        for chain in self._chains:
            chain.seed_generators(seed)

    def run_windowed(self, split: bytes, emit: Emit) -> pb.Metrics | None:
        number, inner = cloudpickle.loads(split)
        if self._last is not self._chains[number]:
            self.teardown()
            self._last = self._chains[number]
        return self._last.run_windowed(inner, emit)

    def teardown(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.teardown()


def _pickled(steps: Sequence[Step]) -> bytes:
    try:
        return pickles.dumps(tuple(steps), marks_generators=True)
    except Exception as error:
        if len(steps) > 1:
            for step in steps:
                _pickled([step])  # so that the message names the step
        label = steps[-1].label
        raise InvalidArgument(
            f"{label!r} cannot be pickled, and so not be sent to workers ({error}): make what it "
            "needs in its setup()"
        ) from error


def _file(read: WindowedValue | None) -> str | None:
    """The file that an input is about, if Beam's own types tell; never calls user's elements."""
    value = None if read is None else read.value
    for part in value if type(value) is tuple else (value,):
        match part:
            case internals.SourceRestriction():
                return internals.file_read(part.source())
            case filesystem.FileMetadata():
                return str(part.path)
            case fileio.ReadableFile():
                return str(part.metadata.path)
    return None


class _StopReading(internals.PassedOn):
    pass


class TooMany(internals.PassedOn):
    """A chain has given more than fits."""


class _Next(common.Receiver):  # type: ignore[misc]
    """Passes a step's elements on."""

    def __init__(self, take: Callable[[WindowedValue], object]) -> None:
        self.receive = take  # no method around it, which would take as long as a step


_DROPPED = _Next(lambda _: None)


class _Read(core.DoFn):  # type: ignore[misc]
    """Reads like Beam's splittable DoFn around a bounded source, without the watermark that Beam
    keeps with each record: bundles here are never deferred."""

    def process(self, read: tuple[Any, Any]) -> Any:
        _, restriction = read
        return restriction.source().read(restriction.range_tracker())


class _Metrics:
    """The metrics of user code. All steps share one container, as metrics have names.

    This object replaces the state sampler of Beam's worker.
    """

    def __init__(self) -> None:
        self.metrics_container = MetricsContainer("chain")

    def take(self) -> pb.Metrics | None:
        """Counts since the last call, which are those of the bundle that has ended."""
        if not self.metrics_container.metrics:
            return None
        found = self.metrics_container.get_cumulative()
        self.metrics_container = MetricsContainer("chain")
        told = pb.Metrics(splits=1)
        for key, count in found.counters.items():
            told.metrics.append(user_metrics.counter(*_name(key), count))
        for key, of in found.distributions.items():
            values = (of.count, of.sum, of.min, of.max)
            told.metrics.append(user_metrics.distribution(*_name(key), *values))
        for key, last in found.gauges.items():
            told.metrics.append(user_metrics.gauge(*_name(key), last.value, last.timestamp))
        return user_metrics.Totals([told]).told()

    def update_metric(self, name: Any, value: Any) -> None:
        self.metrics_container.get_metric_cell(name).update(value)

    def current_state(self) -> _Metrics:
        return self


def _name(key: MetricKey) -> tuple[str, str]:
    return key.metric.namespace, key.metric.name


class _Running:
    """Steps that are set up."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.metrics = _Metrics()
        self.input: WindowedValue | None = None  # the current one; None if unknown
        self._steps = steps
        self._runners: list[common.DoFnRunner] = []  # the last step's first
        self._end = _Next(_discard)
        self._begin: Callable[[WindowedValue], object] = self._pass_on
        receiver = self._end
        statesampler.set_current_tracker(self.metrics)
        try:
            for step in reversed(steps):
                runner = _runner(step, receiver)
                runner.setup()
                self._runners.append(runner)
                self._begin = _begin_of(step, runner)
                receiver = _Next(_split(step, self._begin) if step.is_splittable else self._begin)
        except BaseException:
            self.teardown()
            raise

    def bundle(self, split: Sequence[Any], emit: Emit) -> pb.Metrics | None:
        statesampler.set_current_tracker(self.metrics)  # for this thread
        self._end.receive = emit
        self.input = None
        for runner in self._runners:
            runner.start()
        for value in split:
            timed = isinstance(value, WindowedValue)
            self.input = value if timed else GlobalWindows.windowed_value(value)
            self._begin(self.input)
        if len(split) > 1:
            self.input = None  # elements of finish_bundle may come from any input
        for runner in reversed(self._runners):
            runner.finish()
        for runner in self._runners:
            runner.finalize()
        return self.metrics.take()

    def teardown(self) -> None:
        """Tear down all steps. Logs their exceptions, which would hide why the run ends."""
        statesampler.set_current_tracker(self.metrics)
        for step, runner in [*zip(reversed(self._steps), self._runners, strict=False)][::-1]:
            try:
                runner.teardown()
            except Exception:
                log.exception("the teardown of %r raised", step.label)

    def _pass_on(self, windowed: WindowedValue) -> None:
        """The identity, for a chain without steps."""
        self._end.receive(windowed)


def _discard(_: Any) -> None:
    raise AssertionError("an element of no bundle")


def _runner(step: Step, receiver: _Next) -> common.DoFnRunner:
    # There are no windows here: every element is in the global one.
    # Elements for other outputs are dropped, declared or not.
    receivers = defaultdict(lambda: _DROPPED, {None: _DROPPED, step.output: receiver})
    sides = [
        SideInputMap(view, options, [GlobalWindows.windowed_value(value) for value in values])
        for view, options, values in step.sides
    ]
    return common.DoFnRunner(
        _Read() if step.reads_source else step.fn,
        step.args,
        step.kwargs,
        sides,
        core.Windowing(GlobalWindows()),
        tagged_receivers=receivers,
        step_name=step.label,
        state=common.DoFnState(CounterFactory()),
    )


def _begin_of(step: Step, runner: common.DoFnRunner) -> Callable[[WindowedValue], object]:
    """A function that takes an input of a bundle's first step."""
    if step.reads_ranges:
        return _begin_file(runner)
    if step.is_splittable and not step.reads_source:
        return _begin_restricted(step, runner)
    return runner.process  # type: ignore[no-any-return]


def _begin_restricted(step: Step, runner: common.DoFnRunner) -> Callable[[WindowedValue], None]:
    signature = common.DoFnSignature(step.fn)

    def begin(windowed: WindowedValue) -> None:
        estimators = signature.get_watermark_estimator_provider()
        element, restriction = windowed.value
        state = estimators.initial_estimator_state(element, restriction)
        sized = (element, (restriction, state)), 0
        if runner.process_with_sized_restriction(windowed.with_value(sized)):
            raise InvalidArgument(
                f"{step.label!r} put off a part of {restriction!r}: in a bundle, a splittable "
                "DoFn has to go through what it was given to its end"
            )

    return begin


def _begin_file(runner: common.DoFnRunner) -> Callable[[WindowedValue], None]:
    def begin(windowed: WindowedValue) -> None:
        metadata, _ = windowed.value
        if not filesystems.FileSystems.exists(metadata.path):  # Beam would read it as empty
            raise FileNotFoundError(errno.ENOENT, "the file was there once", metadata.path)
        runner.process(windowed)

    return begin


def _split(step: Step, begin: Callable[[WindowedValue], object]) -> Callable[[Any], object]:
    def take(windowed: WindowedValue) -> None:
        for restriction in step.restrictions(windowed.value):
            begin(windowed.with_value((windowed.value, restriction)))

    return take
