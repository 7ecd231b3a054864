"""Makes a dataset of a materialized directory, to register it. Needs TensorFlow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from ..pipelines.tf_data.element_specs import (
    component_specs,
    decode_element_spec,
    options_for,
    plain,
    restore,
    without_extension_types,
)
from . import files
from .formats import ShardReader
from .layout import Index, require_complete


@dataclass(frozen=True)
class MaterializedDataset:
    """A directory's dataset for `register_dataset`, with details that the dataset does not have."""

    dataset: Any  # a tf.data.Dataset, or a function of a shard's path
    paths: list[str]
    spec: Any
    element_spec: bytes  # as in TensorFlow's metadata
    structure: str
    cardinality: int


def opened(directory: str | os.PathLike[str], *, verify: bool = False) -> MaterializedDataset:
    """The dataset in a directory; its splits are the shards.

    Raises NotFound, FailedPrecondition, Corrupt naming a shard, Unavailable.
    """
    index = require_complete(files.checked(directory), verify=verify)
    plan = index.plan
    spec = without_extension_types(decode_element_spec(plan.element_spec))
    if plan.format == "tfrecord":
        dataset = _from_tfrecords(index, spec)
    else:
        dataset = ShardReader(plan.format, plan.structure, plan.components)
    return MaterializedDataset(
        dataset, index.paths, spec, plan.element_spec, plan.structure, index.elements
    )


def _from_tfrecords(index: Index, spec: Any) -> Any:
    specs = component_specs(spec)
    wanted = {c.name: tf.io.FixedLenFeature([], tf.string) for c in index.plan.components}

    @plain
    def parse(record: Any) -> Any:
        features = tf.io.parse_single_example(record, wanted)
        tensors = [
            tf.ensure_shape(tf.io.parse_tensor(features[component.name], own.dtype), own.shape)
            for component, own in zip(index.plan.components, specs, strict=True)
        ]
        return restore(spec, tensors)

    dataset = tf.data.Dataset.from_tensor_slices(index.paths)
    dataset = dataset.flat_map(tf.data.TFRecordDataset)
    dataset = dataset.map(parse, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.with_options(options_for(specs))
