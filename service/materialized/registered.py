"""What is registered of a materialized directory. Needs TensorFlow."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import tensorflow as tf

from ..pipelines.definitions import encode_metadata
from ..pipelines.kinds import graphs
from ..pipelines.tf_data.element_specs import (
    component_specs,
    decode_element_spec,
    options_for,
    plain,
    restore,
    without_extension_types,
)
from ..proto import forebay_pb2 as pb
from . import files
from .layout import Plan, Shards, require_complete


class Opened(NamedTuple):
    """A directory's dataset; its splits are the shards."""

    dataset: tf.data.Dataset
    plan: Plan
    shards: Shards


def opened(directory: str | os.PathLike[str], *, verify: bool = False) -> Opened:
    """Raises NotFound, FailedPrecondition, Corrupt naming a shard, Unavailable."""
    where = files.checked(directory)
    plan, shards = require_complete(where, verify=verify)
    paths = [f"{where}/{shards.whole[number].file}" for number in range(plan.shards)]
    return Opened(_from_tfrecords(paths, plan), plan, shards)


def definition(
    directory: str | os.PathLike[str], *, verify: bool = False, compressed: bool = False
) -> pb.RegisterDatasetRequest:
    """What is registered of a directory's dataset. Raises as `opened`."""
    dataset, plan, shards = opened(directory, verify=verify)
    request = graphs.definition(dataset, compressed=compressed)
    request.structure = plan.structure
    request.metadata = encode_metadata(plan.element_spec, shards.elements, compressed=compressed)
    return request


def _from_tfrecords(paths: list[str], plan: Plan) -> Any:
    spec = without_extension_types(decode_element_spec(plan.element_spec))
    specs = component_specs(spec)
    wanted = {c.name: tf.io.FixedLenFeature([], tf.string) for c in plan.components}

    @plain
    def parse(record: Any) -> Any:
        features = tf.io.parse_single_example(record, wanted)
        tensors = [
            tf.ensure_shape(tf.io.parse_tensor(features[component.name], own.dtype), own.shape)
            for component, own in zip(plan.components, specs, strict=True)
        ]
        return restore(spec, tensors)

    dataset = tf.data.Dataset.from_tensor_slices(paths)
    dataset = dataset.flat_map(tf.data.TFRecordDataset)
    dataset = dataset.map(parse, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.with_options(options_for(specs))
