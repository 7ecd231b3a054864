"""The files in which a run's readers record what they got: who wrote which, and what is in them."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from .members import Member
from .records import Joined, Record, Started, read_records


class RecordFiles:
    """The record files of a run in its directory, by the members that wrote them."""

    def __init__(self, directory: pathlib.Path, members: Mapping[str, Sequence[Member]]) -> None:
        self._directory = directory
        self._members = members

    def path_of(self, role: str, number: int) -> pathlib.Path:
        """The file of a trainer, of any kind."""
        return self._directory / f"{role}{number}.records"

    def content(self, reader: Member) -> bytes:
        """What a trainer of any kind has written so far."""
        path = self.path_of(reader.role, reader.number)
        return path.read_bytes() if path.exists() else b""

    def of_trainers(self, role: str = "trainer") -> list[list[Record]]:
        """Each trainer's records so far; with the role "claimer", those that read at least once,
        and with "ordered", those that read in order."""
        paths = [self.path_of(role, member.number) for member in self._members[role]]
        return [list(read_records(path)) for path in paths]

    def consumers(self) -> dict[int, str]:
        """The processes of all consumers, by the consumers' ids."""
        found = {}
        for records in (*self.of_trainers(), *self.of_trainers("claimer")):
            name = ""
            for record in records:
                if isinstance(record, Started):
                    name = record.name
                elif isinstance(record, Joined):
                    found[record.consumer_id] = name
        return found
