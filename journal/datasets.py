"""Reads definitions of every kind: where the blob is, and a fingerprint of the content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from .proto import events_pb2 as ev

SHARES = 1 << 32
"""The shares of a mixture's sources add up to this."""

MAX_POSITION = 1 << 56
"""Of an element in a training that is read in order."""


def stored(definition: ev.DatasetDefinition) -> ev.TfDataGraph | ev.PythonFunction | ev.Mixture:
    """The message with the dataset's blob name and fingerprint, whatever its kind."""
    kind = definition.WhichOneof("kind")
    return getattr(definition, kind or "tf_data_graph")  # type: ignore[no-any-return]


def content_fingerprint(definition: ev.DatasetDefinition) -> str:
    """A hash that two datasets share if they yield the same elements from the same splits, whatever
    their ids and dispatchers: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in (
        stored(definition).fingerprint.encode(),
        definition.structure.encode(),
        *map(_serialized, definition.sources),
    ):
        digest.update(b"%d " % len(part))
        digest.update(part)
    return digest.hexdigest()[:16]


def _serialized(source: ev.SplitSource) -> bytes:
    if source.unleasable or source.singly:
        plain = ev.SplitSource()
        plain.CopyFrom(source)
        forget_analysis([plain])
        source = plain  # a million named splits are copied only here
    return source.SerializeToString(deterministic=True)


def forget_analysis(sources: Iterable[ev.SplitSource]) -> None:
    """Clear the fields that depend on the version that analysed the dataset."""
    for source in sources:
        for field in ("unleasable", "singly"):
            source.ClearField(field)
