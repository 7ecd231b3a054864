"""Text files, a record a line: JSON lines, parsed by msgspec, and lines as they are.

Where lines begin is in an index (record_index.py), of compressed files found as they are read. A
record of JSON lines is a dict of columns, whose types follow from the first records of all files.
A line that has others is damaged.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import operator
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from ...blocks import Block, Component
from ...errors import InvalidArgument
from . import formats, record_index
from .byte_sources import ByteSource
from .formats import Damaged, Facts, Format, Ints, Node, Options, chosen, dict_of, texts
from .streams import SAMPLE_RECORDS, Walk, unpacked

_BOM = b"\xef\xbb\xbf"
_WINDOW_BYTES = 1 << 20
_SAMPLE_STEPS = 4  # about 4 MB

_TENSORS = {bool: "bool", int: "int64", float: "float64", str: "string", bytes: "string"}
_TYPES: dict[str, Any] = {
    "bool": bool,
    "int64": Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)],
    "float64": float,
    "string": str,
}


_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


class _Lines(Walk):
    """All lines, or those of JSON, which are not blank."""

    says = None

    def __init__(self, *, skips_blank: bool = False) -> None:
        self._skips = skips_blank
        self._blanks = array("Q")  # of each that is left out, the record behind it

    def boundaries(self, source: ByteSource) -> Iterator[int]:
        self._blanks = array("Q")
        at = begin = len(_BOM) if bytes(source.read(0, len(_BOM))) == _BOM else 0
        record, is_blank = 0, self._skips  # as far as the line has been read
        while window := bytes(source.read(at, _WINDOW_BYTES)):
            start = 0
            while (end := window.find(b"\n", start)) >= 0:
                if is_blank and (window[start] > 32 or window[start:end].strip()):
                    is_blank = False
                if is_blank:
                    self._blanks.append(record)
                else:
                    yield begin
                    record += 1
                start = end + 1
                begin, is_blank = at + start, self._skips
            is_blank = is_blank and not window[start:].strip()
            at += len(window)
        if begin < at and not is_blank:
            yield begin
        yield at

    def said(self) -> bytes:
        return self._blanks.tobytes()


class _Decoder:
    """Lines of JSON to columns."""

    def __init__(self, columns: dict[str, Node], fill: dict[str, Any]) -> None:
        self._columns, self._fill = columns, fill
        fields: list[Any] = []
        for number, (name, node) in enumerate(columns.items()):
            default = [None] if name in fill else []
            kind = functools.reduce(operator.or_, default, _TYPES[node["tensor"]])
            if node["shape"]:
                kind = functools.reduce(operator.or_, default, list[kind])  # type: ignore[valid-type]
            fields.append((f"f{number}", kind, *default))
        names = {f"f{number}": name for number, name in enumerate(columns)}
        record = msgspec.defstruct("Record", fields, rename=names, kw_only=True)
        self.row = msgspec.json.Decoder(record).decode  # raises ValueError

    def components(self, rows: Sequence[Any]) -> Iterator[Component]:
        for number, (name, node) in enumerate(self._columns.items()):
            values = [getattr(row, f"f{number}") for row in rows]
            if node["shape"]:
                lists = [value or () for value in values]
                flat = self._flat(name, node, [*itertools.chain.from_iterable(lists)])
                lengths = np.array([[len(one)] for one in lists], np.int64)
                yield Component(flat.values, lengths).part(0, len(lists))
            else:
                yield self._flat(name, node, values)

    def _flat(self, name: str, node: Node, values: list[Any]) -> Component:
        if name in self._fill:
            value = self._fill[name]
            values = [value if one is None else one for one in values]
        if node["tensor"] != "string":
            return Component(np.array(values, node["tensor"]))
        return texts([one.encode() if isinstance(one, str) else one for one in values])


def _inspect_json(source: ByteSource, options: Options) -> Facts:
    walk, path = _Lines(skips_blank=True), source.path
    source, skips = unpacked(source, options, walk), options.get("skips")
    head = bytes(source.read(0, 512)).removeprefix(_BOM)
    begin = head.lstrip()
    if begin and not begin.startswith(b"{") and not skips:  # no index is left of another format
        line = 1 + head[: -len(begin)].count(b"\n")
        raise Damaged(f"line {line} is no JSON object")
    records, _ = record_index.counted(source, options, walk)
    if not records:
        return Facts(0, dict_of({}))
    with contextlib.closing(record_index.opened(source, options, walk)) as file:
        steps = itertools.islice(file.steps(0, min(records, SAMPLE_RECORDS)), _SAMPLE_STEPS)
        of = (formats.pieces(source, file.offsets, np.arange(*step)) for step in steps)
        found = [bytes(one) for one in itertools.chain.from_iterable(of)]
        said = file.said()
    rows = dict[int, Any]()
    for record, text in enumerate(found):
        try:
            rows[record] = _decode_object(text)
        except ValueError as error:
            if not skips:
                raise Damaged(f"line {_line(said, record)} is no JSON object: {error}") from error
    columns = _columns(path, rows.values(), options)
    decode = _Decoder(columns, options.get("fill") or {}).row
    for record in () if skips else rows:
        try:
            decode(found[record])
        except ValueError as error:
            where = f"{path}, line {_line(said, record)}"
            raise InvalidArgument(
                f"{where}: {error}. Write all lines alike, give `fill` for what is "
                'null or missing, other `columns`, or on_error="skip"'
            ) from error
    return record_index.facts(source, records, dict_of(columns))


def _columns(path: str, rows: Iterable[Any], options: Options) -> dict[str, Node]:
    """Their types, by what the rows have. Raises InvalidArgument."""
    fill = options.get("fill") or {}
    found = {}
    for name in chosen(path, sorted({name for row in rows for name in row}.union(fill)), options):
        values = [row[name] for row in rows if row.get(name) is not None]
        ranks = {int(isinstance(value, list)) for value in values}
        lists = [value if isinstance(value, list) else [value] for value in values]
        flat = itertools.chain(*lists, [fill.get(name)])
        kinds = {_TENSORS.get(type(one), "nested") for one in flat if one is not None}
        if kinds == {"int64", "float64"}:
            kinds = {"float64"}
        if len(kinds) != 1 or len(ranks) > 1 or "nested" in kinds:
            raise InvalidArgument(
                f"{path} has column {name!r} of {sorted(kinds)}{' and lists' * (len(ranks) > 1)} "
                "in its first lines: read others by `columns`, give `fill` whose type it takes, if "
                "it has no values, or read format='lines' with a `map`"
            )
        found[name] = {"tensor": kinds.pop(), "shape": [None] * max(ranks, default=0)}
    return found


def _line(said: bytes, record: int) -> int:
    """Of a record of JSON, from 1."""
    blanks = np.frombuffer(said, "<u8")
    return record + 1 + int(np.searchsorted(blanks, record, "right"))


class JsonLines(record_index.FileOfRecords):
    def __init__(self, source: ByteSource, options: Options) -> None:
        super().__init__(source, options, _Lines(skips_blank=True))
        columns = dict(json.loads(options["structure"])["dict"])
        self._decoder = _Decoder(columns, options.get("fill") or {})

    def take(self, records: Ints) -> Block:
        rows, decode = [], self._decoder.row
        for record, piece in zip(records.tolist(), self.pieces(records), strict=True):
            try:
                rows.append(decode(piece))
            except ValueError as error:
                raise Damaged(f"line {_line(self._file.said(), record)}: {error}") from error
        return Block(len(rows), tuple(self._decoder.components(rows)))


class TextLines(record_index.FileOfRecords):
    def __init__(self, source: ByteSource, options: Options) -> None:
        super().__init__(source, options, _Lines())

    def take(self, records: Ints) -> Block:
        found = [
            bytes(piece).removesuffix(b"\n").removesuffix(b"\r") for piece in self.pieces(records)
        ]
        return Block(len(found), (texts(found),))


JSON_FORMAT = Format(
    suffixes=(".jsonl", ".ndjson"),
    matches=lambda begin: begin.removeprefix(_BOM).lstrip().startswith(b"{"),
    inspect=_inspect_json,
    open=JsonLines,
    options=("columns", "fill", "index_dir", "count"),
)
LINES_FORMAT = Format(
    suffixes=(".txt",),
    matches=lambda begin: False,  # anything is text
    inspect=lambda source, options: record_index.inspected(source, options, _Lines()),
    open=TextLines,
    options=("index_dir", "count"),
    ambiguous=True,
)
