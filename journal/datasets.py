"""Finds the stored definition in a dataset's events, for every kind of dataset."""

from __future__ import annotations

from .proto import events_pb2 as ev


def stored(definition: ev.DatasetDefinition) -> ev.TfDataGraph | ev.PythonFunction:
    """The message with the dataset's blob name and fingerprint, whatever its kind."""
    kind = definition.WhichOneof("kind")
    return definition.python_function if kind == "python_function" else definition.tf_data_graph
