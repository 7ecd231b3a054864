"""The files in a materialized dataset's directory: its plan, its shards and its index."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import google_crc32c

from ...storage.errors import Corrupt
from ..errors import FailedPrecondition, NotFound
from . import files

PLAN, INDEX, SHARD = "plan.json", "index.json", "shard-"
VERSION = 1
EXTENSIONS = {"tfrecord": "tfrecord", "arrayrecord": "array_record", "parquet": "parquet"}
"""File extensions by format."""

_SHARD = re.compile(
    SHARD + r"(?P<number>\d{5,})-of-(?P<of>\d{5,})-(?P<plan>[0-9a-f]{8})"
    r"-(?P<elements>\d+)-(?P<bytes>\d+)-(?P<crc32c>[0-9a-f]{8})\.\w+"
)


@dataclass(frozen=True)
class ComponentSpec:
    """A component of the elements: a dense tensor."""

    name: str  # its path in an element, such as image or 0.tokens.values
    dtype: str  # TensorFlow's name
    shape: list[int | None] | None


@dataclass(frozen=True)
class Plan:
    """Which dataset is materialized, and how it is divided."""

    dataset_id: str  # empty for a Beam pipeline's own elements
    fingerprint: str
    format: str
    splits: int
    shards: int
    seed: int
    structure: str  # of elements; service/structure.py
    element_spec: bytes  # as in TensorFlow's metadata
    components: list[ComponentSpec]

    def bundle(self, number: int) -> tuple[int, int]:
        """A bundle's first split, and its number of splits."""
        first, stop = (self.splits * n // self.shards for n in (number, number + 1))
        return first, stop - first

    def again(self, what: str, how: str = "") -> str:
        """The advice for an incomplete directory."""
        if self.dataset_id:
            return f"run the same `forebay materialize` again{how}, which {what}"
        return "delete the directory, and run the pipeline again"  # nothing is kept of its run

    @property
    def dataset_name(self) -> str:
        """The name of the file with the registered dataset."""
        return f"dataset-{self.fingerprint[:16]}.pb"

    def shard_name(self, number: int, elements: int, size: int, crc32c: int) -> str:
        return f"{self.prefix(number)}{elements}-{size}-{crc32c:08x}.{EXTENSIONS[self.format]}"

    def prefix(self, number: int) -> str:
        """The prefix of a bundle's shard names; it is unique to this plan."""
        return f"{SHARD}{number:05d}-of-{self.shards:05d}-{self._digest}-"

    @property
    def _digest(self) -> str:
        """A digest of everything that determines a bundle's bytes."""
        whole = (self.fingerprint, self.format, self.splits, self.shards, self.seed)
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:8]

    def encode(self) -> bytes:
        fields = asdict(self) | {"element_spec": base64.b64encode(self.element_spec).decode()}
        return json.dumps({"version": VERSION, **fields}, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes, path: str) -> Self:
        """Raises Corrupt, FailedPrecondition."""
        try:
            fields = json.loads(data)
            version = fields.pop("version")
            if version == VERSION:
                fields["element_spec"] = base64.b64decode(fields["element_spec"])
                fields["components"] = [ComponentSpec(**c) for c in fields["components"]]
                return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Corrupt(
                f"{path} is damaged, or no plan of a materialized dataset ({error!r}); "
                "materialize the dataset to a new directory",
                path,
            ) from error
        raise FailedPrecondition(
            f"{path} is of version {version}, and this Forebay knows {VERSION}: use a newer one"
        )


@dataclass(frozen=True, order=True)
class ShardFile:
    """A file with the elements of one bundle."""

    number: int
    file: str
    elements: int
    bytes: int
    crc32c: str  # of the file, 8 hexadecimal digits


def read_plan(directory: str) -> Plan | None:
    """The directory's plan; None without one. Raises Corrupt, FailedPrecondition, Unavailable."""
    path = f"{directory}/{PLAN}"
    try:
        return Plan.decode(files.read(path), path)
    except NotFound:
        return None


def shards_among(sizes: Mapping[str, int], plan: Plan) -> tuple[list[ShardFile], list[str]]:
    """The plan's whole shards among these files, in name order, and the names of those whose size
    differs from their name.

    A number has several shards if a function was not deterministic.
    """
    found, broken = [], []
    for name in sorted(sizes):
        match = _SHARD.fullmatch(name)
        if match is None or not name.startswith(plan.prefix(int(match["number"]))):
            continue
        number, elements, size = (int(match[part]) for part in ("number", "elements", "bytes"))
        if sizes[name] == size:
            found.append(ShardFile(number, name, elements, size, match["crc32c"]))
        else:
            broken.append(name)
    return found, broken


def is_intact(directory: str, shard: ShardFile) -> bool:
    """Whether the file's size and checksum match its name. Reads all of it. Raises Unavailable."""
    checksum, size = 0, 0
    try:
        for data in files.chunks(f"{directory}/{shard.file}"):
            checksum = google_crc32c.extend(checksum, data)
            size += len(data)
    except NotFound:
        return False
    return size == shard.bytes and f"{checksum:08x}" == shard.crc32c


def encode_index(plan: Plan, shards: Iterable[ShardFile]) -> bytes:
    rows = []
    for shard in sorted(shards):
        first, count = plan.bundle(shard.number)
        rows.append({**asdict(shard), "first_split": first, "splits": count})
    index: dict[str, Any] = json.loads(plan.encode()) | {
        "elements": sum(row["elements"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "files": rows,
    }
    return json.dumps(index, indent=1).encode()


def _again(directory: str) -> str:
    """The advice for a damaged index."""
    plan = read_plan(directory)
    if plan is None:
        return f"{PLAN} is missing, too: materialize to a new directory"
    return plan.again("makes it of what is there")


@dataclass(frozen=True)
class Index:
    """A complete materialized dataset."""

    directory: str
    plan: Plan
    shards: tuple[ShardFile, ...]

    @property
    def elements(self) -> int:
        return sum(shard.elements for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def paths(self) -> list[str]:
        return [f"{self.directory}/{shard.file}" for shard in self.shards]


def read_index(directory: str) -> Index | None:
    """The directory's index, even if its files are missing; None without an index.

    Raises Corrupt, FailedPrecondition, Unavailable.
    """
    path = f"{directory}/{INDEX}"
    try:
        data = files.read(path)
    except NotFound:
        return None
    try:
        fields = json.loads(data)
        rows = fields.pop("files")
        del fields["elements"], fields["bytes"]
        names = ShardFile.__dataclass_fields__
        shards = tuple(ShardFile(**{name: row[name] for name in names}) for row in rows)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{path} is damaged ({error!r}): {_again(directory)}", path) from error
    plan = Plan.decode(json.dumps(fields).encode(), path)
    numbers = [shard.number for shard in shards]
    if len(numbers) != plan.shards or numbers != [*range(len(numbers))]:
        why = f"does not list each of its {plan.shards} shards once"
        raise Corrupt(f"{path} {why}: {_again(directory)}", path)
    return Index(directory, plan, shards)


def require_complete(directory: str, *, verify: bool = False) -> Index:
    """The index of a directory that has all its shards. With `verify`, also check their checksums,
    which reads all of them.

    Raises NotFound without a dataset, FailedPrecondition if it is not complete, and Corrupt, which
    names the missing or damaged shard.
    """
    index = read_index(directory)
    if index is None:
        if (plan := read_plan(directory)) is not None:
            raise FailedPrecondition(
                f"the dataset in {directory} is not complete: {plan.again('does what is missing')}"
            )
        raise NotFound(
            f"there is no materialized dataset in {directory}, as it is seen here: give the "
            "--output of `forebay materialize`, or that of `materialize_pcollection`"
        )
    sizes = files.listed(directory)
    for shard in index.shards:
        why = ""
        if shard.file not in sizes:
            why = "is missing"
        elif sizes[shard.file] != shard.bytes:
            why = f"has {sizes[shard.file]} bytes, and had {shard.bytes}"
        elif verify and not is_intact(directory, shard):
            why = "has another checksum than when it was written"
        if why:
            path = f"{directory}/{shard.file}"
            advice = index.plan.again("writes again what is missing or damaged", " with --verify")
            raise Corrupt(f"shard {path} {why}: {advice}", path)
    return index
