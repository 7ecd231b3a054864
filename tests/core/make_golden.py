"""Makes a golden state: `python -m tests.core.make_golden`, into golden/<its schema>.

A golden state is one that a version has encoded. From the first release on it is never made again:
every later version decodes it, to the fields that lie beside it as JSON. When the state's structs
change, add another one, and convert the one before in service/core/encoding.py.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from forebay.service.core.encoding import SCHEMA, encode_state
from forebay.service.core.state import State

GOLDEN = Path(__file__).parent / "golden"


def filled(kind: Any, numbers: Iterator[int]) -> Any:
    """A value of that type, with every field set to something that is not its default."""
    origin, inner = get_origin(kind), [a for a in get_args(kind) if a is not NoneType]
    if origin is UnionType:
        return filled(inner[0], numbers)
    if hasattr(kind, "_fields"):
        return kind(*(filled(one, numbers) for one in get_type_hints(kind).values()))
    if origin is tuple and inner[-1] is ...:
        return (filled(inner[0], numbers), filled(inner[0], numbers))
    if origin is tuple:
        return tuple(filled(one, numbers) for one in inner)
    if origin in (list, set):
        return origin([filled(inner[0], numbers), filled(inner[0], numbers)])
    if origin is dict:
        return {filled(inner[0], numbers): filled(inner[1], numbers) for _ in range(2)}
    if issubclass(kind, msgspec.Struct):
        return kind(**{n: filled(t, numbers) for n, t in get_type_hints(kind).items()})
    number = next(numbers)
    return {bool: True, bytes: bytes([number % 256, 0, 255]), str: f"{number} é"}.get(kind, number)


def described(state: State) -> Any:
    """The state as JSON has it."""
    return json.loads(msgspec.json.encode(state))


if __name__ == "__main__":
    path = GOLDEN / f"{SCHEMA}.state"
    if path.exists():
        sys.exit(f"{path} exists, and stays as it is")
    state = filled(State, itertools.count(1000))
    path.write_bytes(encode_state(state))
    text = json.dumps(described(state), indent=1, ensure_ascii=False)
    path.with_suffix(".json").write_text(text + "\n")
