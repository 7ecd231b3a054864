"""Turns blocks into a tf.data.Dataset, and a tf.data.Dataset into the graph to register.

A Python generator yields blocks, and C++ cuts them into elements: Python never touches an element.
TensorFlow adopts NumPy arrays that begin at a multiple of 64 bytes, without a copy.
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
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
from ..pipelines.tf_data.element_specs import carrier, component_specs, options_for, plain, restore
from ..pipelines.tf_data.transformations import (
    Once,
    Traced,
    call_unoptimized,
    concrete,
    flat_mapped,
    mapped,
    mapped_by,
    not_saved,
    nothing_of,
    opened,
    traced,
    unbatched,
    until_stopped,
)
from .block_sources import BlockSource, BlockSources
from .deferred_closer import deferred_closer
from .open_iterations import stopping
from .progress import StaysFailed

SLICED_BYTES = 4 << 10  # from this size on, an element is a slice of its block, not a copy

MAKERS = 100  # how many `makers` are kept

NOTHING = Block(0, ())
"""`open_blocks` may yield this while no block comes, so that TensorFlow can drop the iteration."""

Tensor = Any


class BlockIterator(Protocol):
    """Yields blocks to one thread at a time. `close` is called once, at the end."""

    def __iter__(self) -> Iterator[Block]: ...
    def close(self) -> None: ...


def number_of(open_blocks: Callable[[], BlockIterator], *, kept: bool) -> int:
    """The number of this block source in graphs: for ever if `kept`, else until it is evicted."""
    number = sources.add(BlockSource(open_blocks))
    if not kept:
        sources.drop_with(number, None)
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

    Each iteration calls `open_blocks`, and closes the result when it ends or is dropped. Functions
    may give a tensor of its `number_of` instead. With `compressed`, the blocks have one component:
    tf.data service's compressed elements, serialized. If a finite `cardinality` is wrong, iterating
    raises TensorFlow's FailedPreconditionError. The dataset, and datasets that are made of it, have
    these tf.data `options`. Raises UnsupportedElement.
    """
    specs = [tf.TensorSpec([], tf.variant)] if compressed else component_specs(element_spec)
    options = options_for(specs).merge(options or tf.data.Options())
    said = options._to_proto().SerializeToString(deterministic=True)
    key = (tuple(nest.flatten(element_spec)), compressed, cardinality, said)
    if not tf.executing_eagerly():  # traced into the user's graph, which owns the functions
        number: Any = open_blocks
        if callable(open_blocks):
            number = sources.add(BlockSource(open_blocks))
            sources.drop_with(number, _outermost_function())
        own = Maker(element_spec, compressed, cardinality, options)
        return _Elements(own.built(number), element_spec, cardinality, is_ready=own.is_ready)
    with _making:
        maker = makers.pop(key, None)
        if maker is None:
            with _callbacks_kept() as callbacks:
                maker = Maker(element_spec, compressed, cardinality, options)
            maker.callbacks = callbacks
        makers[key] = maker
        if len(makers) > MAKERS:
            del makers[next(iter(makers))]
        number = sources.add(BlockSource(open_blocks, maker))
        built = maker.make(number)
        dataset = _Elements(built, element_spec, cardinality, is_ready=maker.is_ready)
    sources.drop_with(number, dataset)
    return dataset


sources = BlockSources()
"""The block sources of this process's datasets."""

makers: dict[Any, Maker] = {}
"""An LRU, least recently used first. A key is all that its maker depends on."""

_making = threading.Lock()


def _outermost_function() -> Any:
    """The outermost graph that is being traced. It lives while its function may be run."""
    graph = ops.get_default_graph()
    while isinstance(outer := getattr(graph, "outer_graph", None), FuncGraph):
        graph = outer
    return graph


class Maker:
    """Makes datasets of blocks that differ only in their block source.

    Their functions are traced once, because TensorFlow takes some 3 ms for each.
    """

    def __init__(self, element_spec: Any, compressed: bool, cardinality: int, options: Any) -> None:
        specs = [tf.TensorSpec([], tf.variant)] if compressed else component_specs(element_spec)
        columns = [_Column(spec) for spec in specs]
        self._cardinality = cardinality
        self._options = options
        # Whether every component is an array of rows, which is cut without a function call.
        stacked = bool(columns) and all(column.stacked for column in columns)
        self.is_ready = stacked and not compressed
        self._cut: Traced | None = None
        self._finished: Traced | None = None
        self._made: Any = None
        self.callbacks: list[Any] = []  # Python functions that the traced functions call
        if self.is_ready:
            self._trace_ready(columns, element_spec)
        else:
            self._trace(columns, element_spec, compressed)

    def make(self, number: int) -> Any:
        """The dataset of the block source with this number."""
        if self._made is None:  # traced too: one call instead of five, of a millisecond each
            self._made = concrete(
                lambda number: [self.built(number)._variant_tensor], [tf.TensorSpec([], tf.int64)]
            )
        (variant,) = call_unoptimized(self._made, tf.constant(number, tf.int64))
        return dataset_ops._VariantDataset(variant, self._spec).with_options(self._options)

    def built(self, number: Tensor) -> Any:
        """As `make`, within a traced function."""
        number = tf.convert_to_tensor(number, tf.int64)
        # A range: TensorFlow's sharding by files takes two flat_maps in a row over one tensor for
        # a list of files, and would give elements to the first trainer only.
        built = not_saved(opened(tf.data.Dataset.range(number, number + 1), self._blocks))
        said = self._cardinality == tf.data.UNKNOWN_CARDINALITY
        if self._cut is not None:
            built = not_saved(opened(built, self._cut))
        elif self._cardinality == tf.data.INFINITE_CARDINALITY:
            # Set on the blocks, it costs nothing per element, and unbatch passes it on.
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
    """Collects the Python functions that are traced inside, so that the caller can keep them.

    TensorFlow keeps them only as long as the default graph of the tracing thread lives.
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
    """The element in tf.data's internal form of composites, so that the element_spec is exact."""
    return tuple(to_tensor_list(element_spec, restore(element_spec, tensors)))


def _with_cardinality(dataset: Any, cardinality: int) -> Any:
    if cardinality == tf.data.INFINITE_CARDINALITY:
        # TensorFlow calls some finite datasets infinite, and an assertion would fail for those.
        # Concatenated with an empty dataset that counts as infinite, the dataset may end.
        return dataset.concatenate(nothing_of(dataset).repeat())
    return dataset.apply(tf.data.experimental.assert_cardinality(cardinality))


class _Elements(dataset_ops._VariantDataset):  # type: ignore[misc]
    """The service's elements. An iteration may be empty: other readers may have taken all."""

    may_repeat = staticmethod(lambda: not stopping.is_set())

    def __init__(self, built: Any, element_spec: Any, cardinality: int, *, is_ready: bool) -> None:
        """Elements that `is_ready` are only cut out of their block: eager loops read them without
        tf.data's prefetch, which would only pass single elements to another thread."""
        self._built, self._is_ready = built, is_ready
        super().__init__(built._variant_tensor, element_spec)
        self._cardinality = cardinality  # `cardinality()` is a tensor, without a value in a trace

    def _inputs(self) -> list[Any]:
        return [self._built]  # a trace takes its options for ours

    def __iter__(self) -> Any:
        # Nothing follows this dataset, so tf.data's rewriting (some 5 ms) and tuning gain nothing.
        # Tuning can also delay the thread that drops an iterator: drivers.py.
        options = tf.data.Options()
        options.experimental_optimization.apply_default_optimizations = False
        options.autotune.enabled = False
        ahead = self if self._is_ready else self.prefetch(tf.data.AUTOTUNE)  # as tf.data would
        dataset = dataset_ops.DatasetV2.with_options(ahead, options)
        return _Iterator(dataset) if tf.executing_eagerly() else iter(dataset)

    def repeat(self, count: Any = None, name: str | None = None) -> Any:
        """As `tf.data.Dataset.repeat`, but endless repetition continues after an empty iteration,
        until this process is told to stop.

        TensorFlow's own ends at an empty iteration, unless it repeats tf.data service's dataset.
        """
        times = -1 if count is None else tf.get_static_value(tf.convert_to_tensor(count))
        if times is None or times >= 0 or self._cardinality == 0:
            return super().repeat(count, name)
        endless = tf.data.Dataset.range(tf.int64.max).take_while(plain(self._continue_in_graph))
        repeated = endless.flat_map(plain(lambda _: self), name=name)
        repeated = repeated.with_options(self._options_attr)  # flat_map does not pass them on
        return _with_cardinality(repeated, tf.data.INFINITE_CARDINALITY)

    def _continue_in_graph(self, _: Tensor) -> Tensor:
        return tf.ensure_shape(tf.numpy_function(self.may_repeat, [], tf.bool), [])


def _opening(
    columns: list[_Column], then: Callable[..., tuple[Tensor, ...]] | None = None
) -> Traced:
    """Traces a function from a source's number to the dataset of its blocks: counts and arrays,
    passed through `then` if given.

    TensorFlow's generator dataset only opens and closes an iteration. It is within a function,
    because TensorFlow cannot serialize it alone.
    """
    number = tf.TensorSpec([], tf.int64)
    signature = [number, *[part for column in columns for part in column.signature]]
    nothing = [_no_rows(part) for part in signature]

    def arrays(iteration: Any) -> list[Any]:
        blocks, _ = under_way[int(iteration)]
        block = next(blocks)
        if block is NOTHING:
            return nothing
        try:
            if (found := len(block.components)) != len(columns):
                raise ValueError(f"{_WRONG_SPEC}: {len(columns)} tensors instead of {found}")
            pairs = zip(columns, block.components, strict=True)
            return [block.count, *[part for c, own in pairs for part in c.arrays(own)]]
        except BaseException as error:
            blocks.fail(error)  # TensorFlow asks again
            raise

    def one(iteration: Tensor) -> tuple[Tensor, ...]:
        found = tf.numpy_function(arrays, [iteration], [spec.dtype for spec in signature])
        # In tf.data's debug mode, a single tensor comes without a list.
        tensors = found if isinstance(found, list | tuple) else [found]
        for tensor, spec in zip(tensors, signature, strict=True):
            tensor.set_shape(spec.shape)
        return then(*tensors) if then is not None else tuple(tensors)

    turn = _turn() if tf.executing_eagerly() else Once(_python(_begin), _python(_end), number)

    def items(number: Tensor) -> Any:
        return flat_mapped(turn.dataset(number), lambda i: until_stopped(lambda: one(i)))

    return traced(items, number)


under_way: dict[int, tuple[StaysFailed, BlockSource]] = {}
"""The blocks of each open iteration, by its number, with the source, which must live as long."""

_iterations = itertools.count()


def _begin(number: Any) -> Any:
    malloc.keep_large_buffers()  # only now: TensorFlow set its own when it made this iterator
    with _as_tensorflows_errors():
        source = sources.use(int(number))
    deferred_closer.wait()
    iteration = next(_iterations)
    under_way[iteration] = StaysFailed(_blocks_of(source)), source
    return np.int64(iteration)


def _end(iteration: Any) -> Any:
    blocks, _ = under_way.pop(int(iteration))
    deferred_closer.later(blocks)  # TensorFlow calls this also where garbage is collected
    return np.int64(0)


def _blocks_of(source: BlockSource) -> Generator[Block, None, None]:
    with closing(source.open_blocks()) as blocks, _as_tensorflows_errors():
        yield from blocks


@functools.cache
def _turn() -> Once:
    """Begins and ends the iterations of all eager datasets; traced once, and kept for ever."""
    with _callbacks_kept() as callbacks:
        _turns.append(callbacks)
        return Once(_python(_begin), _python(_end), tf.TensorSpec([], tf.int64))


_turns: list[list[Any]] = []


def _python(function: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
    """Wraps a Python function from int64 to int64 as a function of tensors."""

    def call(number: Tensor) -> Tensor:
        found = tf.numpy_function(function, [number], tf.int64)
        found.set_shape([])
        return found

    return call


class _Column:
    """One component: the arrays that a block yields for it, and how an element is cut out."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec
        self._carrier = carrier(spec.dtype)
        self._text = spec.dtype in (tf.string, tf.variant)
        self._shape = spec.shape.as_list() if spec.shape.is_fully_defined() else None
        sizes = spec.shape.as_list() if spec.shape.rank is not None else [None]
        self._sizes = None if sizes and not any(n is not None for n in sizes) else sizes
        name = self._carrier.dtype.name if spec.dtype.is_quantized else spec.dtype.name
        self._kind = "string" if self._text else numpy_dtype(name)
        # Whether unbatch can cut it. unbatch supports neither variants nor dtypes that need a
        # carrier, and TensorFlow 2.21 crashes in it on elements without values.
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
        """The component's arrays, as in `signature`. Raises ValueError if it does not match."""
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
            parts.append(flat.astype(self._carrier.dtype.as_numpy_dtype, copy=False))
        return parts if self._shape is not None else [*parts, shapes]

    def _check(self, component: Component) -> None:
        """Raises ValueError for another dtype or shape, which TensorFlow would misread silently."""
        values, shapes = component.values, component.shapes
        lengths = values.lengths if isinstance(values, Strings) else values
        kind = "string" if isinstance(values, Strings) else values.dtype
        if kind != self._kind:
            raise ValueError(f"{_WRONG_SPEC} {self._spec.dtype.name} instead of {kind}")
        if self._sizes is None or (shapes is None and self._is_known(lengths.shape[1:])):
            return
        there = [lengths.shape[1:]] if shapes is None else np.unique(shapes, axis=0).tolist()
        if wrong := [tuple(shape) for shape in there if not self._is_known(shape)]:
            found = wrong[0] if shapes is None else f"several shapes, such as {wrong[0]}"
            raise ValueError(
                f"{_WRONG_SPEC} the shape {self._spec.shape} instead of {found}: give an "
                "element_spec with None for such a dimension, where the dataset is registered"
            )

    def _is_known(self, shape: Sequence[int]) -> bool:
        sizes = self._sizes or []
        return len(shape) == len(sizes) and all(
            a is None or a == b for a, b in zip(sizes, shape, strict=True)
        )

    def rows(self, count: Tensor, parts: list[Tensor]) -> list[Tensor]:
        """The values, and, if shapes differ, where each begins. Computed once per block."""
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


def _no_rows(spec: Any) -> Array:
    shape = [dimension or 0 for dimension in spec.shape]
    if spec.dtype == tf.string:
        return np.full(shape, b"", object)
    return np.zeros(shape, spec.dtype.as_numpy_dtype)


@contextmanager
def _as_tensorflows_errors(raised: type[ForebayError] = ForebayError) -> Iterator[None]:
    """Raises exceptions that TensorFlow turns into errors of the same code. Other codes become
    UNKNOWN, with the code first in the message. `raised` is at hand also when an iteration that is
    still open goes at the interpreter's end, behind this module's names."""
    try:
        yield
    except raised as error:
        code = status_of(error)
        text = str(error) if isinstance(error, PipelineError) else f"{code}: {error}"
        raise _RAISED.get(code, RuntimeError)(text) from error


class _Iterator(iterator_ops.OwnedIterator):  # type: ignore[misc]
    """An eager iterator that raises an UNKNOWN error as the error of its real code."""

    def _next_internal(self) -> Any:
        try:
            return super()._next_internal()
        except tf.errors.UnknownError as error:
            said = _SAID.search(error.message)
            code = getattr(tf.errors, said[1], None) if said else None
            if said is None or not isinstance(code, int) or code == tf.errors.OUT_OF_RANGE:
                raise  # not as OutOfRangeError, which would end a loop silently
            kind = errors_impl.exception_type_from_error_code(code)
            raise kind(None, None, said[2]) from error


_SAID = re.compile(
    r"RuntimeError: ([A-Z_]+): (.*?)(?:\nTraceback \(most recent call last\):|$)", re.DOTALL
)
"""Finds our code and message in the message of an UNKNOWN error."""


# TensorFlow turns these exceptions, raised by Python functions, into errors of the same code.
# NotImplementedError stands for its UnimplementedError here, not for a stub.
_RAISED = {
    "INVALID_ARGUMENT": ValueError,
    "UNIMPLEMENTED": NotImplementedError,
    "RESOURCE_EXHAUSTED": MemoryError,
}
