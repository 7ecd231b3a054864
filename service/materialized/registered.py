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
from .layout import CompleteShards, require_complete


class Opened(NamedTuple):
    """A directory's dataset; its splits are the shards."""

    dataset: tf.data.Dataset
    shards: CompleteShards


def opened(directory: str | os.PathLike[str], *, verify: bool = False) -> Opened:
    """Raises NotFound, FailedPrecondition, Corrupt naming a shard, Unavailable."""
    shards = require_complete(files.checked(directory), verify=verify)
    spec = without_extension_types(decode_element_spec(shards.plan.element_spec))
    return Opened(_from_tfrecords(shards, spec), shards)


def definition(
    directory: str | os.PathLike[str], *, verify: bool = False, compressed: bool = False
) -> pb.RegisterDatasetRequest:
    """What is registered of a directory's dataset. Raises as `opened`."""
    dataset, shards = opened(directory, verify=verify)
    request = graphs.definition(dataset, compressed=compressed)
    request.structure, encoded = shards.plan.structure, shards.plan.element_spec
    request.metadata = encode_metadata(encoded, shards.elements, compressed=compressed)
    return request


def _from_tfrecords(shards: CompleteShards, spec: Any) -> Any:
    specs = component_specs(spec)
    wanted = {c.name: tf.io.FixedLenFeature([], tf.string) for c in shards.plan.components}

    @plain
    def parse(record: Any) -> Any:
        features = tf.io.parse_single_example(record, wanted)
        tensors = [
            tf.ensure_shape(tf.io.parse_tensor(features[component.name], own.dtype), own.shape)
            for component, own in zip(shards.plan.components, specs, strict=True)
        ]
        return restore(spec, tensors)

    dataset = tf.data.Dataset.from_tensor_slices(shards.paths)
    dataset = dataset.flat_map(tf.data.TFRecordDataset)
    dataset = dataset.map(parse, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.with_options(options_for(specs))
