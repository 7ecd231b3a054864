"""What a dataset's definition has, for every kind of dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from .proto import events_pb2 as ev


def stored(definition: ev.DatasetDefinition) -> ev.TfDataGraph | ev.PythonFunction:
    """The message with the dataset's blob name and fingerprint, whatever its kind."""
    kind = definition.WhichOneof("kind")
    return definition.python_function if kind == "python_function" else definition.tf_data_graph


def content_fingerprint(definition: ev.DatasetDefinition) -> str:
    """A hash that two datasets share if they yield the same elements from the same splits, whatever
    their ids and dispatchers: 16 hexadecimal digits."""
    rest = ev.DatasetDefinition(structure=definition.structure, sources=definition.sources)
    forget_analysis(rest.sources)
    digest = hashlib.sha256(stored(definition).fingerprint.encode())
    digest.update(rest.SerializeToString(deterministic=True))
    return digest.hexdigest()[:16]


def forget_analysis(sources: Iterable[ev.SplitSource]) -> None:
    """Clear what another version may say otherwise of the same splits."""
    for source in sources:
        for field in ("unleasable", "singly"):
            source.ClearField(field)
