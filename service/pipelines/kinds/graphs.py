"""What is registered of a tf.data.Dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import compression_ops

from ...errors import InvalidArgument, cut_error
from ...proto import forebay_pb2 as pb
from ...structure import encode
from ..definitions import encode_metadata
from ..tf_data.element_specs import (
    component_specs,
    encode_element_spec,
    flatten,
    has_extension_types,
    plain,
    restore,
    without_extension_types,
)
from ..tf_data.evaluate import evaluate
from ..tf_data.imports import Policy
from ..tf_data.source_walk import NotSplittable
from ..tf_data.split_sources import split_sources
from .functions import require_few_components

Dataset = Any
Tensor = Any
Request = pb.RegisterDatasetRequest


def definition(dataset: Dataset, *, compressed: bool = False) -> Request:
    """What is registered of a dataset, eagerly; `compressed`: each element is, as tf.data service
    does it. Raises InvalidArgument."""
    if not isinstance(dataset, tf.data.Dataset):
        raise InvalidArgument(f"`dataset` must be a tf.data.Dataset, not {type(dataset)}")
    graph, cardinality, defined = serialized(dataset, compressed=compressed)
    return defined(bytes(graph.numpy()), int(cardinality.numpy()))


def serialized(
    dataset: Dataset, *, compressed: bool = False
) -> tuple[Tensor, Tensor, Callable[[bytes, int], Request]]:
    """A dataset's graph and cardinality, as tensors, and what makes its definition of their
    values. Within a function of TensorFlow, these are known when it runs."""
    element_spec = dataset.element_spec
    structure, encoded_spec = encode(element_spec), encode_element_spec(element_spec)
    require_few_components(len(component_specs(element_spec)))
    cardinality = dataset.cardinality()
    # `options()` in a graph warns that it only knows the options of this dataset itself.
    options = dataset.options() if tf.executing_eagerly() else dataset._options_attr
    policy = options.experimental_external_state_policy or Policy.WARN
    dataset = as_registered(dataset)
    if compressed:
        dataset = dataset.map(
            lambda *element: compression_ops.compress(element), num_parallel_calls=tf.data.AUTOTUNE
        )

    def defined(graph: bytes, cardinality: int) -> Request:
        request = Request(
            graph=graph,
            metadata=encode_metadata(encoded_spec, cardinality, compressed=compressed),
            structure=structure,
        )
        try:
            request.sources.extend(split_sources(graph, evaluate))
        except NotSplittable as error:
            request.unsplittable = cut_error(str(error))
        return request

    graph = dataset._as_serialized_graph(external_state_policy=policy)
    return graph, cardinality, defined


def as_registered(dataset: Dataset) -> Dataset:
    """The dataset as workers run it: with the components of extension types in place of them."""
    spec = dataset.element_spec
    if not has_extension_types(spec):
        return dataset

    @plain
    def taken_apart(*element: Any) -> Any:
        whole = element if type(spec) is tuple else element[0]
        return restore(without_extension_types(spec), flatten(spec, whole))

    return dataset.map(taken_apart)
