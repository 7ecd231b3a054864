"""What is registered of a tf.data.Dataset, or of a function that builds one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import compression_ops

from ....journal.proto import events_pb2 as ev
from ...errors import InvalidArgument, cut_error
from ...proto import forebay_pb2 as pb
from ...proto import python_pb2
from ...structure import encode
from ..definitions import bundle_doubts, encode_metadata
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
from ..tf_data.graphs import InvalidGraph
from ..tf_data.imports import Policy, graph_of
from ..tf_data.source_walk import NotSplittable
from ..tf_data.split_sources import contents_of, split_sources
from .functions import PythonDataset, request_of, require_few_components, unpickled

Dataset = Any
Tensor = Any
Request = pb.RegisterDatasetRequest


def definition(dataset: Dataset, *, compressed: bool = False) -> Request:
    """What is registered of a dataset, eagerly; `compressed`: each element is, as tf.data service
    does it. Raises InvalidArgument."""
    if not is_dataset(dataset):
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
        request.sources.extend(_sources(graph, request))
        return request

    graph = dataset._as_serialized_graph(external_state_policy=policy)
    return graph, cardinality, defined


def is_dataset(dataset: Any) -> bool:
    return isinstance(dataset, tf.data.Dataset)


def of_function(function: Callable[[], Any] | PythonDataset) -> Request:
    """What is registered of a function that builds a dataset, which is called. Raises
    InvalidArgument, and what the function raises."""
    if not isinstance(function, PythonDataset):
        function = PythonDataset(function, None)
    request = request_of(function, None)
    with unpickled(request) as (build, _):
        built = build()
        if not isinstance(built, tf.data.Dataset):
            raise InvalidArgument(
                f"the function returned {built!r:.100}, which is no tf.data.Dataset; if it is "
                "a function of splits, give `splits`"
            )
        try:
            graph = graph_of(built, Policy.IGNORE)
            if sources := _sources(graph, request):
                _add_sources(request, sources, graph)
        except InvalidGraph as error:  # the worker's process may have what is missing
            request.unsplittable = cut_error(str(error))
    spec = built.element_spec
    if has_extension_types(spec):
        raise InvalidArgument(
            f"the function builds a dataset of {spec}: map its extension types to tensors"
        )
    require_few_components(len(component_specs(spec)))
    request.structure = encode(spec)
    request.metadata = encode_metadata(encode_element_spec(spec), int(built.cardinality().numpy()))
    return request


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


def _sources(graph: bytes, request: Request) -> list[ev.SplitSource]:
    """Returns [] and sets `unsplittable` if the dataset cannot be split. Raises InvalidGraph."""
    try:
        return [source.splits for source in split_sources(graph, evaluate)]
    except NotSplittable as error:
        request.unsplittable = cut_error(str(error))
        return []


def _add_sources(request: Request, sources: Iterable[ev.SplitSource], graph: bytes) -> None:
    """Adds the sources of the dataset that the function builds, a digest of their contents, and
    what is to be said of its bundles. Worker processes compare the first two with what they build.
    Raises InvalidGraph."""
    sources = list(sources)
    stored = python_pb2.PythonDataset.FromString(request.python)
    stored.sources.extend(sources)
    stored.contents = contents_of(graph)
    try:
        found = bundle_doubts(graph, sources, within_bundles=True)
        stored.doubts.extend(dict.fromkeys(cut_error(_GENERATED.sub("", doubt)) for doubt in found))
    except NotSplittable as error:
        stored.no_bundles = cut_error(_GENERATED.sub("", str(error)))
    try:
        bundle_doubts(graph, sources, within_bundles=False)
    except NotSplittable as error:
        stored.counts = cut_error(_GENERATED.sub("", str(error)))
    request.sources.extend(sources)
    request.python = stored.SerializeToString(deterministic=True)


_GENERATED = re.compile(r"__inference_|(?<!/)_\d+(_keyed|_numbered)*(?=')")
"""What is left out of names in graphs, so that equal functions are one dataset."""
