"""Datasets as events say them: of each kind, where its definition is stored."""

from __future__ import annotations

from .proto import events_pb2 as ev


def stored(definition: ev.DatasetDefinition) -> ev.TfDataGraph | ev.PythonFunction:
    """The name of the dataset's blob, and its fingerprint: whatever kind it is of."""
    kind = definition.WhichOneof("kind")
    return definition.python_function if kind == "python_function" else definition.tf_data_graph
