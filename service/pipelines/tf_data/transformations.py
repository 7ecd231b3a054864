"""tf.data's transformations with functions of ours, whose iterators start quickly.

An iterator instantiates each function of its dataset. TensorFlow 2.21 takes some 3 ms for each, to
place the operations on devices and to optimize them. Our functions run on one device unchanged, and
have the attribute that tells tf.data so. This module is not for users' functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

# TensorFlow imports the others at first use, while a consumer waits for an element.
from tensorflow.python.data.ops import (  # noqa: F401
    concatenate_op,
    dataset_ops,
    ignore_errors_op,
    range_op,
    take_op,
)
from tensorflow.python.data.util import structure
from tensorflow.python.eager import context, execute
from tensorflow.python.eager.polymorphic_function import attributes as attributes_lib
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import gen_dataset_ops, gen_experimental_dataset_ops

Dataset = Any
Tensor = Any

_ON_ONE_DEVICE = "experimental_ints_on_device"


class Traced(NamedTuple):
    """A function of elements, for tf.data's operations."""

    function: Any
    output_structure: Any


def traced(function: Callable[..., Any], specs: Any) -> Traced:
    """A function of elements with these specs."""
    made = _traced(function, specs, {_ON_ONE_DEVICE: True})
    if tf.int32 in structure.get_flat_tensor_types(made.output_structure):
        # With the attribute, tf.data's optimizer would mistake such a function for a dataset.
        made = _traced(function, specs, {})
    return made


def _traced(function: Callable[..., Any], specs: Any, attributes: dict[str, bool]) -> Traced:
    found: list[Any] = []

    def of_tensors(*tensors: Tensor) -> list[Tensor]:
        element = structure.from_compatible_tensor_list(specs, tensors)
        made = function(*element) if type(element) is tuple else function(element)
        made = tuple(made) if isinstance(made, list) else made
        found.append(structure.type_spec_from_value(made))
        return list(map(tf.convert_to_tensor, structure.to_tensor_list(found[0], made)))

    attributes = {"_tf_data_function": True, **attributes}
    return Traced(concrete(of_tensors, structure.get_flat_tensor_specs(specs), attributes), *found)


def concrete(
    function: Callable[..., list[Tensor]],
    specs: Sequence[Any],
    attributes: dict[str, bool] | None = None,
) -> Any:
    """A function of tensors with these specs, traced without variables.

    `tf.function` takes twice as long, as it prepares for variables, gradients and other specs.
    """
    graph = func_graph.func_graph_from_py_func("forebay", function, tuple(specs), {})
    attrs = attributes_lib.parse_func_attrs(attributes or {})
    return concrete_function.ConcreteFunction.from_func_graph(graph, None, attrs)


def mapped(
    dataset: Dataset, function: Callable[..., Any], *, preserve_cardinality: bool = True
) -> Dataset:
    """`dataset.map(function)`, which runs in the thread that asks for elements."""
    made = traced(function, dataset.element_spec)
    return mapped_by(dataset, made, preserve_cardinality=preserve_cardinality)


def mapped_by(dataset: Dataset, made: Traced, *, preserve_cardinality: bool = True) -> Dataset:
    """`mapped` with a function that was traced before."""
    variant = gen_dataset_ops.map_dataset(
        dataset._variant_tensor,
        made.function.captured_inputs,
        f=made.function,
        use_inter_op_parallelism=False,  # 10 × faster for small functions
        preserve_cardinality=preserve_cardinality,
        **_types(made.output_structure),
    )
    return _Made(dataset, variant, made.output_structure)


def until_stopped(function: Callable[[], tuple[Tensor, ...]]) -> Dataset:
    """A dataset of what a function returns, call by call, until its Python raises StopIteration.

    An item takes a third of the time of `from_generator`. Python waits in the asking thread, not in
    a thread of TensorFlow's pool. After an error the function is called again.
    """
    endless = tf.data.Dataset.range(tf.int64.max)
    return mapped(endless, lambda _: function(), preserve_cardinality=False)


def flat_mapped(dataset: Dataset, function: Callable[..., Dataset]) -> Dataset:
    """`dataset.flat_map(function)`."""
    return opened(dataset, traced(function, dataset.element_spec))


def opened(dataset: Dataset, made: Traced, captured: Sequence[Tensor] | None = None) -> Dataset:
    """`flat_mapped` with a function that was traced before; `captured` replaces its captures."""
    captured = made.function.captured_inputs if captured is None else captured
    spec = made.output_structure._element_spec
    variant = gen_dataset_ops.flat_map_dataset(
        dataset._variant_tensor, captured, f=made.function, **_types(spec)
    )
    return _Made(dataset, variant, spec)


def unbatched(dataset: Dataset) -> Dataset:
    """`dataset.unbatch()` for plain tensors; tf.data's adds a map that changes nothing."""
    spec = tuple(tf.TensorSpec(own.shape[1:], own.dtype) for own in dataset.element_spec)
    variant = gen_experimental_dataset_ops.unbatch_dataset(dataset._variant_tensor, **_types(spec))
    return _Made(dataset, variant, spec)


def not_saved(dataset: Dataset) -> Dataset:
    """The same elements, without checkpoints of the iterator.

    TensorFlow refuses symbolic checkpoints if a dataset doesn't support them; this one doesn't, and
    asserts nothing about its inputs. It takes 12 ns an element.
    """
    variant = gen_experimental_dataset_ops.assert_next_dataset(
        dataset._variant_tensor, [], **_types(dataset.element_spec)
    )
    return _Made(dataset, variant, dataset.element_spec)


def nothing_of(dataset: Dataset) -> Dataset:
    """An empty dataset whose cardinality TensorFlow doesn't know."""
    return dataset.take(0).ignore_errors()


def drained(dataset: Dataset, function: Callable[[Any], Any] | None = None) -> Tensor:
    """Call a function, if given, for each element of a dataset, with the dataset's options.

    It runs in the iterating thread, as in `mapped`, but TensorFlow doesn't time each call.
    """

    def go_on(state: Tensor, element: Any) -> Tensor:
        if function is None:
            return state
        function(element)
        return tf.constant(0, tf.int64)

    made = traced(go_on, (tf.TensorSpec([], tf.int64), dataset.element_spec))
    (state,) = gen_dataset_ops.reduce_dataset(
        dataset._variant_tensor,
        [tf.constant(0, tf.int64)],
        made.function.captured_inputs,
        f=made.function,
        use_inter_op_parallelism=False,
        **_types(made.output_structure),
    )
    return state


class Once:
    """Functions for a dataset of one tensor: each iteration yields what `begin(argument)` returns,
    and `end` gets it when the iteration is over or dropped.
    """

    def __init__(
        self, begin: Callable[[Tensor], Tensor], end: Callable[[Tensor], Tensor], argument: Any
    ) -> None:
        """`argument` is a spec."""
        self._first = traced(begin, argument)
        spec = self._first.output_structure
        self._again, self._last = traced(tf.identity, spec), traced(end, spec)

    def dataset(self, argument: Tensor) -> Dataset:
        spec = self._first.output_structure
        variant = gen_dataset_ops.generator_dataset(
            [argument, *self._first.function.captured_inputs],
            self._again.function.captured_inputs,
            self._last.function.captured_inputs,
            init_func=self._first.function,
            next_func=self._again.function,
            finalize_func=self._last.function,
            **_types(spec),
        )
        return dataset_ops._VariantDataset(variant, spec).take(1)


def call_unoptimized(function: Any, *inputs: Tensor, place: int = 0) -> list[Tensor]:
    """Call a traced function that only builds datasets, or drives one.

    This skips TensorFlow's optimizer, which takes tens of milliseconds at the first call and gains
    nothing: datasets and their functions are optimized when they are iterated.

    All calls of a function with the same configuration share one set of kernels, and some kernels,
    such as `reduce`'s, serve one call at a time. A second call would wait for the first to end. So
    each concurrent call has its own `place`.
    """
    config = config_pb2.ConfigProto.FromString(
        context.context().function_call_options.config_proto_serialized
    )
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.experimental.session_metadata.version = place
    # Don't call it directly: CancellationManager.get_cancelable_function keeps the manager in a
    # global variable, which the calls of all threads share.
    found: list[Tensor] = execute.execute(
        function.name.decode(),
        num_outputs=len(function.outputs),
        inputs=[*inputs, *function.captured_inputs],
        attrs=("executor_type", "", "config_proto", config.SerializeToString(deterministic=True)),
        ctx=context.context(),
    )
    return found


class _Made(dataset_ops._VariantDataset):  # type: ignore[misc]
    def __init__(self, source: Dataset, variant: Tensor, spec: Any) -> None:
        self._source = source
        super().__init__(variant, spec)

    def _inputs(self) -> list[Dataset]:
        return [self._source]  # it inherits these options


def _types(spec: Any) -> dict[str, Any]:
    return {
        "output_types": structure.get_flat_tensor_types(spec),
        "output_shapes": structure.get_flat_tensor_shapes(spec),
    }
