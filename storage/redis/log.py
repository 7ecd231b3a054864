"""Reads the log in Redis: a stream, each entry of it one batch.

<prefix>:meta        a hash: the fields of Meta
<prefix>:log         a stream: id = <sequence of the batch's last record>-0, its one field a frame
<prefix>:snapshots   a hash: a frame by sequence
<prefix>:blobs       a hash: data by name, which is its SHA-256 and perhaps a mark
<prefix>:cut:<n>:…   keys that a repair moved aside
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ACCEPT_LOSS, REPAIR, Corrupt
from ..server_log import Meta, check_format
from .client import RENAME

RESTORE = "restore Redis's data from a backup"
MEND = f"{RESTORE}, {REPAIR}"
REMEDY = f"{RESTORE} that has them, or {ACCEPT_LOSS}"  # for a condemned log


class Keys(NamedTuple):
    """The names of a journal's keys, in the order of the scripts' arguments."""

    meta: str
    log: str
    snapshots: str
    blobs: str

    @classmethod
    def of(cls, prefix: str) -> Keys:
        return cls(*(f"{prefix}:{name}" for name in cls._fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisMeta(Meta):
    """The content of a journal's meta."""

    entries: int  # of the log


def parse_meta(reply: list[bytes], where: str) -> RedisMeta | None:
    """Parse the reply to HGETALL; None if it is empty. Raises NewerFormat, Corrupt."""
    if not reply:
        return None
    values = {
        k.decode(): v.decode(errors="replace") for k, v in zip(*[iter(reply)] * 2, strict=True)
    }
    try:
        version = int(values["format"])
        check_format(version, where)
        meta = RedisMeta(
            format=version,
            token=values["token"],
            owner=values["owner"],
            place=values["place"],
            cut_term=int(values.get("cut_term", "0")),
            condemned=values.get("condemned", ""),
            **{
                name: int(values[name])
                for name in ("term", "lease_ms", "beat", "first", "last", "entries", "began")
            },
        )
    except (KeyError, ValueError) as error:
        raise Corrupt(
            f"{where}: is no journal's meta ({error!r}); {RESTORE}, or {RENAME}"
        ) from None
    if meta.term < 1 or not meta.fits:
        raise Corrupt(
            f"{where}: term {meta.term}, first {meta.first}, last {meta.last} and began "
            f"{meta.began} do not fit; {RESTORE}, or {RENAME}"
        )
    return meta
