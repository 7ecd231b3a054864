"""The state's encoding as bytes, for snapshots.

A snapshot names the schema of its structs (SCHEMA). Only that and EARLIER ones are decoded: a state
whose fields mean something else must not pass for one of today's.
"""

from __future__ import annotations

import hashlib

import msgspec

from .ledger import Ledger
from .state import State, Struct, WorkerGrant

MEANING = 1
"""Increment it when a field changes its meaning but not its name or type."""


def _schema() -> str:
    kinds: list[type] = [Ledger, WorkerGrant, *Struct.__subclasses__()]
    structs = {kind.__name__: dict(sorted(kind.__annotations__.items())) for kind in kinds}
    text = f"{MEANING} {sorted(structs.items())}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


SCHEMA = _schema()
"""A hash of the structs' names and of their fields' names and types."""

EARLIER = {
    *("02986e51fb64d7a3", "2693e5c452c7f0a3", "4263b202ff7dc3f4", "50e87d0de9c9a5d0"),
    *("78f280c202927a6d", "7c385580d4609a41", "88ec187679c91974", "f020b50002553a65"),
}
"""Schemas of released versions: all of their fields are here, with the same meaning, and what came
later has a default. tests/core/golden has a state of each."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(State).decode
_decode_named = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw]).decode


def encode_state(state: State) -> bytes:
    """The schema and the state, as msgpack."""
    return _encode((SCHEMA, state))


def decode_state(data: bytes) -> State:
    """Decode a snapshot's state; raises ValueError for bytes of an unknown schema."""
    schema, state = _decode_named(data)
    if schema not in (SCHEMA, *EARLIER):
        raise ValueError(
            f"its state has the schema {schema}, which this version of Forebay does not know: "
            "another one wrote it, and reads it"
        )
    return _decode(state)
