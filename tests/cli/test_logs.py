"""What others' texts can do to what people read."""

from __future__ import annotations

import io
import logging

import pytest

from forebay.service.cli.console import plain_console
from forebay.service.cli.logs import TextFormatter
from forebay.service.structure import describe

FORGED = "oh\n2026-01-01 00:00:00,000 INFO all is well\x1b[31m"


def test_no_message_begins_a_line_or_steers_a_terminal() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        record = logging.LogRecord("a", logging.INFO, "", 0, "%s", (error,), None)
        record.exc_info = (type(error), error, error.__traceback__)
    first, *rest = TextFormatter().format(record).split("\n")
    assert first.endswith(r" INFO a: oh\n2026-01-01 00:00:00,000 INFO all is well\x1b[31m")
    assert rest and all(line.startswith("    ") and line.isprintable() for line in rest)


def test_tables_have_no_control_characters() -> None:
    from rich.table import Table

    table = Table("a column")
    table.add_row("id\x1b[31m")
    file = io.StringIO()
    plain_console(file=file).print(table, "id\x1b[2J")
    assert "\x1b" not in file.getvalue() and r"id\x1b[31m" in file.getvalue()


@pytest.mark.parametrize("structure", ["[" * 1_000_000, "{", '{"dict": 3}', '{"shape": 3}', "[]"])
def test_a_structure_that_nobody_can_read_is_described_all_the_same(structure: str) -> None:
    assert describe(structure) in ("unknown, as what was registered describes no elements", "None")
