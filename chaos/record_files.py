"""The files in which a run's readers record what they got: who wrote which, and what is in them."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from itertools import chain

from . import crowd, modes, saves
from .members import Life, Member
from .records import Joined, Record, Started, read_records
from .saves import Saved


class RecordFiles:
    """The record files of a run in its directory, by the members that wrote them."""

    def __init__(self, directory: pathlib.Path, members: Mapping[str, Sequence[Member]]) -> None:
        self._directory = directory
        self._members = members

    @property
    def _crowds(self) -> list[Life]:
        return self._members["crowd"][0].lives

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

    def crowds(self) -> dict[str, dict[str, list[list[Record]]]]:
        """The records of each crowd's readers, by process and job."""
        found: dict[str, dict[str, list[list[Record]]]] = {}
        for life in self._crowds:
            jobs = found[life.name] = {}
            for reader in range(crowd.READERS + crowd.PYTHON_READERS):
                path = crowd.records_of(self._directory / life.name, reader)
                of_job = jobs.setdefault(crowd.job_of(life.name, reader), [])
                of_job.append(list(read_records(path)))
        return found

    def modes(self) -> dict[str, dict[str, list[list[Record]]]]:
        """The records of each crowd's readers in other modes, by process and mode."""
        return {
            life.name: {
                mode: [
                    list(read_records(modes.records_of(self._directory / life.name, mode, reader)))
                    for reader in range(modes.EACH)
                ]
                for mode in modes.MODES
            }
            for life in self._crowds
        }

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
        for crowds in (self.crowds(), self.modes()):
            for name, readers in crowds.items():
                of_crowd = chain.from_iterable(chain.from_iterable(readers.values()))
                joined = (record for record in of_crowd if isinstance(record, Joined))
                found |= dict.fromkeys((record.consumer_id for record in joined), name)
        return found

    def saved(self) -> dict[str, Saved]:
        """Each crowd's save, by process. Raises ValueError if it cannot be read."""
        names = [life.name for life in self._crowds]
        paths = {name: saves.path_in(self._directory / name) for name in names}
        return saves.saved(paths, self._directory)
