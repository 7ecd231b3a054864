"""The files in a materialized dataset's directory: its plan and its shards."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Self

import google_crc32c
import msgspec

from ...storage.errors import Corrupt
from ..errors import FailedPrecondition, NotFound
from . import files

PLAN, SHARD = "plan.json", "shard-"
VERSION = 2

_SHARD = re.compile(
    SHARD + r"(?P<number>\d{5,})-of-(?P<of>\d{5,})-(?P<plan>[0-9a-f]{8})"
    r"-(?P<elements>\d+)-(?P<bytes>\d+)-(?P<crc32c>[0-9a-f]{8})\.tfrecord"
)


class ComponentSpec(msgspec.Struct, frozen=True):
    """A component of the elements: a dense tensor."""

    name: str  # its path in an element, such as image or 0.tokens.values
    dtype: str  # TensorFlow's name


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Which dataset is materialized, and how it is divided."""

    dataset_id: str
    fingerprint: str
    splits: int
    shards: int
    seed: int
    structure: str  # of elements; service/structure.py
    element_spec: bytes  # as in TensorFlow's metadata
    components: list[ComponentSpec]
    version: int = VERSION  # of plan.json

    def bundle(self, number: int) -> tuple[int, int]:
        """A bundle's first split, and its number of splits."""
        first, stop = (self.splits * n // self.shards for n in (number, number + 1))
        return first, stop - first

    @property
    def dataset_name(self) -> str:
        """The name of the file with the registered dataset."""
        return f"dataset-{self.fingerprint[:16]}.pb"

    def shard_name(self, number: int, elements: int, size: int, crc32c: int) -> str:
        return f"{self.prefix(number)}{elements}-{size}-{crc32c:08x}.tfrecord"

    def prefix(self, number: int) -> str:
        """The prefix of a bundle's shard names; it is unique to this plan."""
        return f"{SHARD}{number:05d}-of-{self.shards:05d}-{self._digest}-"

    @property
    def _digest(self) -> str:
        """A digest of everything that determines a bundle's bytes."""
        whole = (self.fingerprint, self.splits, self.shards, self.seed)
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:8]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def decode(cls, data: bytes, path: str) -> Self:
        """Raises Corrupt, FailedPrecondition."""
        try:
            version = json.loads(data)["version"]
            if version == VERSION:
                return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise Corrupt(
                f"{path} is damaged, or no plan of a materialized dataset ({error!r}); "
                "materialize the dataset to a new directory"
            ) from error
        raise FailedPrecondition(
            f"{path} is of version {version}, and this Forebay knows {VERSION}: use the one that "
            "wrote it, or materialize to a new directory"
        )


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Shards:
    """What a directory has of a plan's shards."""

    whole: dict[int, ShardFile]  # one for each number
    others: list[str]  # files with the same numbers, of a function that is not deterministic
    broken: list[str]  # files whose size, or checksum, differs from their names

    @property
    def elements(self) -> int:
        return sum(shard.elements for shard in self.whole.values())

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.whole.values())


def shards_in(directory: str, plan: Plan, *, prefix: str = SHARD, verify: bool = False) -> Shards:
    """The plan's shards whose names begin with `prefix`. `verify` reads all of them, and compares
    their checksums. Raises Unavailable."""
    found = Shards({}, [], [])
    for name, size in sorted(files.listed(directory, prefix).items()):
        match = _SHARD.fullmatch(name)
        if match is None or not name.startswith(plan.prefix(int(match["number"]))):
            continue
        number, elements, named_size = (
            int(match[part]) for part in ("number", "elements", "bytes")
        )
        shard = ShardFile(number, name, elements, named_size, match["crc32c"])
        if size != named_size or (verify and not is_intact(directory, shard)):
            found.broken.append(name)
        elif number in found.whole:
            found.others.append(name)
        else:
            found.whole[number] = shard
    return found


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


def require_complete(directory: str, *, verify: bool = False) -> tuple[Plan, Shards]:
    """The plan of a directory, and all of its shards. With `verify`, also check their checksums,
    which reads all of them.

    Raises NotFound without a dataset, FailedPrecondition if a shard is missing, and Corrupt, which
    names the damaged shard.
    """
    plan = read_plan(directory)
    if plan is None:
        raise NotFound(
            f"there is no materialized dataset in {directory}, as it is seen here: give the "
            "--output of `forebay materialize`"
        )
    shards = shards_in(directory, plan, verify=verify)
    if shards.broken:
        path = f"{directory}/{shards.broken[0]}"
        raise Corrupt(
            f"shard {path} has another size or checksum than when it was written: run the same "
            "`forebay materialize` again with --verify, which writes it again"
        )
    if missing := [number for number in range(plan.shards) if number not in shards.whole]:
        raise FailedPrecondition(
            f"the dataset in {directory} is not complete, and lacks {len(missing)} of "
            f"{plan.shards} shards, the first of them {missing[0]}: run the same `forebay "
            "materialize` again, which does what is missing"
        )
    return plan, shards
