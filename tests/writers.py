"""Writers of files that a test leaves open, as a process does that is killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.storage.local.file_writer import FileWriter


@pytest.fixture(autouse=True)
def writers_are_closed() -> Iterator[None]:
    """The descriptors of all writers of this test, whoever let go of them."""
    begun: list[FileWriter] = []
    begin = FileWriter.__init__

    def begin_noted(self: FileWriter, *arguments: object) -> None:
        begin(self, *arguments)  # type: ignore[arg-type]
        begun.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileWriter, "__init__", begin_noted)
        yield
    for writer in begun:
        writer.close()
