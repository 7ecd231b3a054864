"""The state's encoding as bytes, for snapshots.

A snapshot names the schema of its structs (SCHEMA). Another schema is decoded only through its
converter in EARLIER: a state whose fields mean something else must not pass for one of today's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

from . import ranges
from .ledger import Ledger
from .ranges import Ranges
from .state import State, Struct

MEANING = 1
"""Increment it when a field changes its meaning but not its name or type."""


def _schema() -> str:
    kinds: list[type[msgspec.Struct]] = [Ledger, *Struct.__subclasses__()]
    structs = {kind.__name__: dict(sorted(kind.__annotations__.items())) for kind in kinds}
    text = f"{MEANING} {sorted(structs.items())}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


SCHEMA = _schema()
"""A hash of the structs' names and of their fields' names and types."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(State).decode
_decode_named = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw]).decode
_NAMED = b"\x92"  # an array of two; the state alone is a map


def encode_state(state: State) -> bytes:
    """The schema and the state, as msgpack."""
    return _encode((SCHEMA, state))


def decode_state(data: bytes) -> State:
    """Decode a snapshot's state; raises ValueError for bytes of an unknown schema."""
    named: tuple[str, Any] = _decode_named(data) if data[:1] == _NAMED else ("unnamed", data)
    schema, state = named
    if schema == SCHEMA:
        return _decode(state)
    if schema not in EARLIER:
        raise ValueError(
            f"its state has the schema {schema}, which this version of Forebay does not know: "
            "another one wrote it, and reads it"
        )
    try:
        converted = EARLIER[schema](msgspec.msgpack.decode(state))
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"it holds no state of the schema {schema}: {error!r}") from error
    return msgspec.convert(converted, State)


def _providers_to_ledgers(state: Any) -> Any:
    """Earlier names: provider for source, completed for begun, repetition for epoch and pass."""
    lost = [entry["task"] for entry in state.get("lost_tasks", {}).values()]
    leases = list(state.get("leases", {}).values())
    for task in (*state["tasks"].values(), *lost):
        leases += task.get("lost", ())
    for iteration in state["iterations"].values():
        _rename(iteration, repetition="epoch", providers="ledgers")
        for ledger in iteration["ledgers"]:
            _rename(ledger, repetition="pass_number", completed="begun")
    for lease in leases:
        _rename(lease, provider="source", repetition="pass_number")
    return _lost_tasks_to_tasks(state)


def _rename(fields: dict[str, Any], **names: str) -> None:
    for old, new in names.items():
        if old in fields:
            fields[new] = fields.pop(old)


def _lost_tasks_to_tasks(state: Any) -> Any:
    """Earlier, `lost_tasks` held pairs of the task and its process's uid."""
    state["lost_tasks"] = {
        task_id: {**lost["task"], "orphan": {"uid": lost["uid"]}}
        for task_id, lost in state.get("lost_tasks", {}).items()
    }
    return state


def _ended_saves(state: Any) -> Any:
    """Earlier, ended saves kept their streams."""
    for save in state.get("saves", {}).values():
        for end in ("finished", "failed", "message"):
            save.pop(end, None)
    for save_id, save in state.get("ended_saves", {}).items():
        streams = save.get("streams", [])
        completed: Ranges = []
        for number, stream in enumerate(streams):
            if stream.get("completed"):
                ranges.add(completed, number, number + 1)
        kept = ("save_id", "path", "prepared", "finished", "failed", "message")
        state["ended_saves"][save_id] = {
            **{name: save[name] for name in kept if name in save},
            "streams": len(streams),
            "completed": completed,
            "assigned": save["assigned"] if save["stock"] else sum(s["count"] for s in streams),
            "elements": sum(stream["elements"] for stream in streams),
        }
    return state


def _begun_indices(state: Any) -> Any:
    """Earlier, the state forgot the begun consumers that left. If any consumer has begun,
    assume that all indices have: the next consumer to join then restarts the read."""
    consumers, jobs = state["consumers"], state["jobs"]
    for iteration in state["iterations"].values():
        there = [consumers[number] for number in iteration["consumers"] if number in consumers]
        begun = any(each["began"] and each["index"] is not None for each in there)
        job = jobs[iteration["job_id"]] if begun else {}
        iteration["begun_indices"] = list(range(job.get("num_consumers") or 0))
    return state


EARLIER: dict[str, Callable[[Any], Any]] = {
    "unnamed": _providers_to_ledgers,
    "b2931630d57eaaaf": _providers_to_ledgers,
    "5bba8a9e19ddf821": _lost_tasks_to_tasks,
    "7def4e6b7414062f": _lost_tasks_to_tasks,
    "45b342bb4307ed57": _ended_saves,
    "8bea72ae9ea39145": _begun_indices,
    "586d9ddf81cfb734": lambda state: state,
}
"""Earlier schemas, with the functions that convert their states to today's fields.

Fields that they lack get their defaults. Without the converter, no dispatcher could start from an
earlier snapshot whose preceding events were trimmed. "unnamed" stands for snapshots from before
they named their schema.
"""
