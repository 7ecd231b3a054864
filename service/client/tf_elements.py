"""Blocks as a tf.data.Dataset, and what is registered of a tf.data.Dataset.

A Python generator yields blocks, and C++ takes them apart, so that Python touches a block and
never an element. NumPy arrays that begin at a multiple of 64 bytes are adopted, not copied.
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import compression_ops
from tensorflow.python.data.ops import dataset_ops, iterator_ops
from tensorflow.python.data.util import nest
from tensorflow.python.data.util.structure import to_tensor_list
from tensorflow.python.framework import errors_impl, ops
from tensorflow.python.framework.func_graph import FuncGraph

from .. import malloc
from ..blocks import Array, Block, Component, Strings, numpy_dtype
from ..errors import ForebayError, PipelineError, status_of
from ..pipelines.tf_data.element_specs import (
    carrier,
    component_specs,
    flatten,
    has_extension_types,
    options_for,
    plain,
    restore,
    without_extension_types,
)
from ..pipelines.tf_data.transformations import (
    Once,
    Traced,
    call_as_it_is,
    concrete,
    flat_mapped,
    mapped,
    mapped_by,
    nothing_of,
    opened,
    traced,
    unbatched,
    until_stopped,
)
from .block_sources import BlockSource, BlockSources
from .leaving import stopping

SLICED_BYTES = 4 << 10  # elements that are worth a slice of their block instead of a copy

MAKERS = 100  # of datasets, kept for the next of their kind

NOTHING = Block(0, ())
"""What `open_blocks` may yield while no block comes, so that an iteration can be dropped then."""

Tensor = Any
ExternalStatePolicy = tf.data.experimental.ExternalStatePolicy


class BlockIterator(Protocol):
    """Blocks, until StopIteration; for one thread at a time. `close` is called once, at last."""

    def __iter__(self) -> Iterator[Block]: ...
    def close(self) -> None: ...


def number_of(open_blocks: Callable[[], BlockIterator], *, kept: bool) -> int:
    """What stands for it in graphs: from now on if it is `kept`, else until many others came."""
    number = _sources.add(BlockSource(open_blocks))
    if not kept:
        _sources.drop_with(number, None)
    return number


def dataset_of_blocks(
    open_blocks: Callable[[], BlockIterator] | Tensor,
    element_spec: Any,
    *,
    compressed: bool = False,
    cardinality: int = tf.data.UNKNOWN_CARDINALITY,
    options: Any = None,
) -> Any:
    """A `tf.data.Dataset` of the elements in blocks, with exactly this element_spec.

    `open_blocks` is called for each iteration over the dataset, and what it returned is closed
    when that iteration ends or is dropped; functions may give a tensor of its `number_of`
    instead. With `compressed` the blocks have one component,
    tf.data service's compressed elements, serialized. Elements that are more or fewer than a
    finite `cardinality` are TensorFlow's FailedPreconditionError. The dataset, and what is made
    of it, has these tf.data `options`. Raises UnsupportedElement.
    """
    specs = [tf.TensorSpec([], tf.variant)] if compressed else component_specs(element_spec)
    options = options_for(specs).merge(options or tf.data.Options())
    said = options._to_proto().SerializeToString(deterministic=True)
    key = (tuple(nest.flatten(element_spec)), compressed, cardinality, said)
    kind = _ReadyElements if _are_ready(list(map(_Column, specs)), compressed) else _Elements
    if not tf.executing_eagerly():  # the functions are the user's, which says what becomes of them
        number: Any = open_blocks
        if callable(open_blocks):
            number = _sources.add(BlockSource(open_blocks))
            _sources.drop_with(number, _outermost_function())
        built = _Maker(element_spec, compressed, cardinality, options).built(number)
        return kind(built, element_spec, cardinality)
    with _making:
        maker = _makers.pop(key, None)
        if maker is None:
            with _callbacks_kept() as callbacks:
                maker = _Maker(element_spec, compressed, cardinality, options)
            maker.callbacks = callbacks
        _makers[key] = maker
        if len(_makers) > MAKERS:
            del _makers[next(iter(_makers))]
        number = _sources.add(BlockSource(open_blocks, maker))
        dataset = kind(maker.make(number), element_spec, cardinality)
    _sources.drop_with(number, dataset)
    return dataset


_sources = BlockSources()
"""What opens the blocks of a dataset."""

_makers: dict[Any, _Maker] = {}
"""Those that were used last, by all that they depend on; the one used longest ago comes first."""

_making = threading.Lock()


def _outermost_function() -> Any:
    """The graph of what is being traced, by whatever function: it is kept while that may be run."""
    graph = ops.get_default_graph()
    while isinstance(outer := getattr(graph, "outer_graph", None), FuncGraph):
        graph = outer
    return graph


class _Maker:
    """Makes datasets of blocks that differ in nothing but where the blocks come from.

    Their functions are traced once: TensorFlow takes some 3 ms for each.
    """

    def __init__(self, element_spec: Any, compressed: bool, cardinality: int, options: Any) -> None:
        specs = [tf.TensorSpec([], tf.variant)] if compressed else component_specs(element_spec)
        columns = [_Column(spec) for spec in specs]
        self._cardinality = cardinality
        self._options = options
        self._ready = _are_ready(columns, compressed)
        self._cut: Traced | None = None
        self._finished: Traced | None = None
        self._made: Any = None
        self.callbacks: list[Any] = []  # the Python functions in what it has traced
        if self._ready:
            self._trace_ready(columns, element_spec)
        else:
            self._trace(columns, element_spec, compressed)

    def make(self, number: int) -> Any:
        """The dataset of the blocks that are opened under this number."""
        if self._made is None:  # traced as well: one call instead of five, of a millisecond each
            self._made = concrete(
                lambda number: [self.built(number)._variant_tensor], [tf.TensorSpec([], tf.int64)]
            )
        (variant,) = call_as_it_is(self._made, tf.constant(number, tf.int64))
        return dataset_ops._VariantDataset(variant, self._spec).with_options(self._options)

    def built(self, number: Tensor) -> Any:
        """The same, in a function."""
        number = tf.convert_to_tensor(number, tf.int64)
        # Of a range, because TensorFlow's sharding by files takes two flat_maps in a row over one
        # tensor for a list of files, and would leave all but the first trainer without elements.
        built = opened(tf.data.Dataset.range(number, number + 1), self._blocks)
        said = self._cardinality == tf.data.UNKNOWN_CARDINALITY
        if self._cut is not None:
            built = opened(built, self._cut)
        elif self._cardinality == tf.data.INFINITE_CARDINALITY:
            # Said of blocks it costs elements nothing, and unbatch passes it on.
            built, said = unbatched(_with_cardinality(built, self._cardinality)), True
        else:
            built = unbatched(built)
        if self._finished is not None:
            built = mapped_by(built, self._finished)
        self._spec = built.element_spec
        built = built.with_options(self._options)
        return built if said else _with_cardinality(built, self._cardinality)

    def _trace_ready(self, columns: list[_Column], element_spec: Any) -> None:
        def stacks(count: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
            return tuple(own[0] for own in _rows(columns, count, parts))

        self._blocks = _opening(columns, stacks)
        stacked = self._blocks.output_structure._element_spec
        if sum(column.least_bytes for column in columns) >= SLICED_BYTES:
            self._cut = traced(lambda *s: tf.data.Dataset.from_tensor_slices(s), stacked)
        if not all(isinstance(leaf, tf.TensorSpec) for leaf in nest.flatten(element_spec)):
            rows = tuple(tf.TensorSpec(spec.shape[1:], spec.dtype) for spec in stacked)
            self._finished = traced(partial(_finished, element_spec), rows)

    def _trace(self, columns: list[_Column], element_spec: Any, compressed: bool) -> None:
        def elements(count: Tensor, *parts: Tensor) -> Any:
            own = _rows(columns, count, parts)

            def element(row: Tensor) -> Any:
                tensors = [c.element(r, row) for c, r in zip(columns, own, strict=True)]
                if compressed:
                    return compression_ops.uncompress(tensors[0], element_spec)
                return _finished(element_spec, *tensors)

            return mapped(tf.data.Dataset.range(count), element)

        self._blocks = _opening(columns)
        self._cut = traced(elements, self._blocks.output_structure._element_spec)


@contextmanager
def _callbacks_kept() -> Iterator[list[Any]]:
    """The Python functions that TensorFlow calls in what is traced meanwhile, to be kept with it.

    TensorFlow keeps them in the default graph of the thread that traces, as long as that lives.
    """
    graph: Any = ops.get_default_graph()
    if not hasattr(graph, "_py_funcs_used_in_graph"):
        graph._py_funcs_used_in_graph = []
    before = len(graph._py_funcs_used_in_graph)
    kept: list[Any] = []
    yield kept
    kept += graph._py_funcs_used_in_graph[before:]
    del graph._py_funcs_used_in_graph[before:]


def _rows(columns: list[_Column], count: Tensor, parts: tuple[Tensor, ...]) -> list[list[Tensor]]:
    rest = iter(parts)
    return [c.rows(count, [next(rest) for _ in c.signature]) for c in columns]


def _finished(element_spec: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """As tf.data itself keeps composites inside, so that the element_spec is exactly it."""
    return tuple(to_tensor_list(element_spec, restore(element_spec, tensors)))


def _are_ready(columns: list[_Column], compressed: bool) -> bool:
    """Is every component an array of rows, which is cut without a function call?"""
    return bool(columns) and not compressed and all(column.stacked for column in columns)


def _with_cardinality(dataset: Any, cardinality: int) -> Any:
    if cardinality == tf.data.INFINITE_CARDINALITY:
        # TensorFlow says it of some that end, too. An assertion would fail then; concatenated with
        # what is said to be infinite, and is empty, the dataset may end.
        return dataset.concatenate(nothing_of(dataset).repeat())
    return dataset.apply(tf.data.experimental.assert_cardinality(cardinality))


class _Elements(dataset_ops._VariantDataset):  # type: ignore[misc]
    """The elements of an iteration, of which others may have taken all."""

    def __init__(self, built: Any, element_spec: Any, cardinality: int) -> None:
        self._built = built
        super().__init__(built._variant_tensor, element_spec)
        self._cardinality = cardinality  # `cardinality()` is a tensor, and unknown to a trace

    def _inputs(self) -> list[Any]:
        return [self._built]  # whose options a trace takes for ours

    def __iter__(self) -> Any:
        # Of this very dataset, with nothing behind it that tf.data's rewriting, some 5 ms, could
        # make faster, nor its tuning, for which who drops an iterator may wait: drivers.py.
        options = tf.data.Options()
        options.experimental_optimization.apply_default_optimizations = False
        options.autotune.enabled = False
        dataset = dataset_ops.DatasetV2.with_options(self._as_iterated(), options)
        return _Iterator(dataset) if tf.executing_eagerly() else iter(dataset)

    def _as_iterated(self) -> Any:
        return self.prefetch(tf.data.AUTOTUNE)  # as tf.data would

    def repeat(self, count: Any = None, name: str | None = None) -> Any:
        """As of any dataset; without end, it goes on after an iteration without elements, too,
        until this process is told to stop.

        TensorFlow's own ends then, unless it finds its service's dataset behind it.
        """
        times = -1 if count is None else tf.get_static_value(tf.convert_to_tensor(count))
        if times is None or times >= 0 or self._cardinality == 0:
            return super().repeat(count, name)
        endless = tf.data.Dataset.range(tf.int64.max).take_while(plain(_goes_on))
        repeated = endless.flat_map(plain(lambda _: self), name=name)
        repeated = repeated.with_options(self._options_attr)  # which a function's result keeps back
        return _with_cardinality(repeated, tf.data.INFINITE_CARDINALITY)


def _is_to_go_on() -> bool:
    return not stopping.is_set()


def _goes_on(_: Tensor) -> Tensor:
    return tf.ensure_shape(tf.numpy_function(_is_to_go_on, [], tf.bool), [])


class _ReadyElements(_Elements):
    """Elements that only have to be cut out of their block: eager loops take them at once."""

    def _as_iterated(self) -> Any:
        # tf.data's prefetch would only hand one element after another to another thread.
        return self


def _opening(
    columns: list[_Column], then: Callable[..., tuple[Tensor, ...]] | None = None
) -> Traced:
    """The dataset of the blocks of a number: their counts and arrays, or what `then` makes of
    these.

    TensorFlow's generator only opens and closes an iteration. In a function, as alone TensorFlow
    could not serialize it.
    """
    number = tf.TensorSpec([], tf.int64)
    signature = [number, *[part for column in columns for part in column.signature]]
    nothing = [_no_rows(part) for part in signature]

    def arrays(iteration: Any) -> list[Any]:
        blocks, _ = _under_way[int(iteration)]
        block = next(blocks)
        if block is NOTHING:
            return nothing
        try:
            _check_components(columns, block)
            pairs = zip(columns, block.components, strict=True)
            return [block.count, *[part for c, own in pairs for part in c.arrays(own)]]
        except BaseException:
            blocks.close()  # it is asked again
            raise

    def one(iteration: Tensor) -> tuple[Tensor, ...]:
        found = tf.numpy_function(arrays, [iteration], [spec.dtype for spec in signature])
        # In tf.data's debug mode, a single one comes as it is.
        tensors = found if isinstance(found, list | tuple) else [found]
        for tensor, spec in zip(tensors, signature, strict=True):
            tensor.set_shape(spec.shape)
        return then(*tensors) if then is not None else tuple(tensors)

    turn = _turn() if tf.executing_eagerly() else Once(_python(_begin), _python(_end), number)

    def items(number: Tensor) -> Any:
        return flat_mapped(turn.dataset(number), lambda i: until_stopped(lambda: one(i)))

    return traced(items, number)


_under_way: dict[int, tuple[Generator[Block, None, None], BlockSource]] = {}
"""The blocks of each iteration, by its number; with all that it needs to its end."""

_iterations = itertools.count()


def _begin(number: Any) -> Any:
    malloc.keep_large_buffers()  # only now: TensorFlow set its own when it made this iterator
    with _as_tensorflows_errors():
        source = _sources.use(int(number))
    iteration = next(_iterations)
    _under_way[iteration] = _blocks_of(source), source
    return np.int64(iteration)


def _end(iteration: Any) -> Any:
    blocks, _ = _under_way.pop(int(iteration))
    blocks.close()
    return np.int64(0)


def _blocks_of(source: BlockSource) -> Generator[Block, None, None]:
    with closing(source.open_blocks()) as blocks, _as_tensorflows_errors():
        yield from blocks


@functools.cache
def _turn() -> Once:
    """What begins and ends an iteration, of whatever elements; kept for good."""
    with _callbacks_kept() as callbacks:
        _turns.append(callbacks)
        return Once(_python(_begin), _python(_end), tf.TensorSpec([], tf.int64))


_turns: list[list[Any]] = []


def _python(function: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
    """A function of an int64 that Python is called for; it returns another."""

    def call(number: Tensor) -> Tensor:
        found = tf.numpy_function(function, [number], tf.int64)
        found.set_shape([])
        return found

    return call


def as_registered(dataset: Any) -> Any:
    """The dataset as workers run it: with the components of extension types in their place."""
    spec = dataset.element_spec
    if not has_extension_types(spec):
        return dataset

    @plain
    def taken_apart(*element: Any) -> Any:
        whole = element if type(spec) is tuple else element[0]
        return restore(without_extension_types(spec), flatten(spec, whole))

    return dataset.map(taken_apart)


def graph_of(dataset: Any, external_state_policy: Any = ExternalStatePolicy.WARN) -> bytes:
    """The serialized GraphDef of a dataset, as it is registered.

    Raises TensorFlow's errors for what cannot be serialized.
    """
    graph = dataset._as_serialized_graph(external_state_policy=external_state_policy)
    return bytes(graph.numpy())


class _Column:
    """One component: what of it is yielded for a block, and how an element is cut out."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec
        self._carrier = carrier(spec.dtype)
        self._text = spec.dtype in (tf.string, tf.variant)
        self._shape = spec.shape.as_list() if spec.shape.is_fully_defined() else None
        name = self._carrier.dtype.name if spec.dtype.is_quantized else spec.dtype.name
        self._kind = "string" if self._text else numpy_dtype(name)
        # Can unbatch cut it? It knows no variants and none of the dtypes that need a carrier,
        # and TensorFlow 2.21 crashes where it is given elements without values.
        known = spec.dtype == self._carrier.dtype and spec.dtype != tf.variant
        self.stacked = self._shape is not None and 0 not in self._shape and known
        self.least_bytes = spec.shape.num_elements() * spec.dtype.size if self.stacked else 0
        if self._text:  # all bytes, and where each string begins and how long it is
            integers = tf.TensorSpec([None], tf.int64)
            self.signature = [tf.TensorSpec([], tf.string), integers, integers]
        elif self._shape is not None:
            self.signature = [tf.TensorSpec([None, *self._shape], self._carrier.dtype)]
        else:
            self.signature = [tf.TensorSpec([None], self._carrier.dtype)]
        if self._shape is None:
            self.signature.append(tf.TensorSpec([None, spec.shape.rank], tf.int64))

    def arrays(self, component: Component) -> list[Any]:
        """The component of a block, as the signature says. Raises ValueError if it is another."""
        self._check(component)
        values, shapes = component.values, component.shapes
        if self._shape is None and shapes is None:
            stacked = values.lengths if isinstance(values, Strings) else values
            shapes = np.tile(np.asarray(stacked.shape[1:], np.int64), (len(stacked), 1))
        parts: list[Any] = []
        if isinstance(values, Strings):
            lengths = values.lengths.reshape(-1)
            parts += [
                np.array(values.data.tobytes(), object),
                np.cumsum(lengths) - lengths,
                lengths,
            ]
        else:
            flat = values if self._shape is not None else values.reshape(-1)
            parts.append(_as_dtype(flat, self._carrier.dtype))
        return parts if self._shape is not None else [*parts, shapes]

    def _check(self, component: Component) -> None:
        """TensorFlow would take a column of another dtype or shape apart without a word."""
        values, shapes = component.values, component.shapes
        lengths = values.lengths if isinstance(values, Strings) else values
        kind = "string" if isinstance(values, Strings) else values.dtype
        if kind != self._kind:
            raise ValueError(f"{_WRONG_SPEC}: {self._spec.dtype.name} instead of {kind}")
        if self._shape is not None and (
            shapes is not None or list(lengths.shape[1:]) != self._shape
        ):
            found = "several shapes" if shapes is not None else tuple(lengths.shape[1:])
            raise ValueError(f"{_WRONG_SPEC}: the shape {self._spec.shape} instead of {found}")

    def rows(self, count: Tensor, parts: list[Tensor]) -> list[Tensor]:
        """Computed once a block: the values, and, where shapes differ, where each begins."""
        if self._text:
            joined, positions, lengths = parts[:3]
            values = tf.strings.substr(joined, positions, lengths)
            if self._shape is not None:
                values = tf.reshape(values, [count, *self._shape])
        else:
            values = parts[0]
        if self._shape is not None:
            return [values]
        shapes = parts[-1]
        stops = tf.cumsum(tf.reduce_prod(shapes, axis=1))
        return [values, tf.concat([[0], stops], 0), shapes]

    def element(self, rows: list[Tensor], row: Tensor) -> Tensor:
        if self._spec.dtype == tf.variant:
            return tf.io.parse_tensor(rows[0][row], tf.variant)
        if self._shape is not None:
            return self._carrier.back(rows[0][row])
        values, starts, shapes = rows
        own = values[starts[row] : starts[row + 1]]
        return self._carrier.back(tf.reshape(own, shapes[row]))


_WRONG_SPEC = "the element_spec is not that of the elements, it says"


def _check_components(columns: list[_Column], block: Block) -> None:
    if len(block.components) != len(columns):
        found = len(block.components)
        raise ValueError(f"{_WRONG_SPEC}: {len(columns)} tensors instead of {found}")


def _no_rows(spec: Any) -> Array:
    shape = [dimension or 0 for dimension in spec.shape]
    if spec.dtype == tf.string:
        return np.full(shape, b"", object)
    return np.zeros(shape, spec.dtype.as_numpy_dtype)


def _as_dtype(values: Array, dtype: Any) -> Array:
    native = dtype.as_numpy_dtype
    return values if values.dtype == native else values.astype(native)


@contextmanager
def _as_tensorflows_errors() -> Iterator[None]:
    """Raise what TensorFlow turns into the error of the same code; the rest become UNKNOWN, and
    say the code first."""
    try:
        yield
    except ForebayError as error:
        code = status_of(error)
        text = str(error) if isinstance(error, PipelineError) else f"{code}: {error}"
        raise _RAISED.get(code, RuntimeError)(text) from error


class _Iterator(iterator_ops.OwnedIterator):  # type: ignore[misc]
    """An eager iterator, which raises the error of an UNKNOWN error's real code."""

    def _next_internal(self) -> Any:
        try:
            return super()._next_internal()
        except tf.errors.UnknownError as error:
            said = _SAID.search(error.message)
            code = getattr(tf.errors, said[1], None) if said else None
            if said is None or not isinstance(code, int) or code == tf.errors.OUT_OF_RANGE:
                raise  # of which a loop would make its end
            kind = errors_impl.exception_type_from_error_code(code)
            raise kind(None, None, said[2]) from error


_SAID = re.compile(
    r"RuntimeError: ([A-Z_]+): (.*?)(?:\nTraceback \(most recent call last\):|$)", re.DOTALL
)
"""In the message of an UNKNOWN error, a code and what we said."""


# Python's exceptions of which TensorFlow makes an error of the same code, when a function of ours
# raises them: NotImplementedError is how its UnimplementedError is said, and no stub.
_RAISED = {
    "INVALID_ARGUMENT": ValueError,
    "UNIMPLEMENTED": NotImplementedError,
    "RESOURCE_EXHAUSTED": MemoryError,
}
