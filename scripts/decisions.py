"""Generates docs/decisions/README.md, the index by number; with --check, compares instead.

`python scripts/decisions.py [--check] [FOLDER]`. Each entry is a heading `## 7. Title` and, below
it, the date of its last change and its status: `*2026-11-21 · in force · also 24, 86*`, where
"also" names the entries that it has taken in. The index is refused while an entry lacks that line,
or a number is missing or used twice.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sys

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "docs" / "decisions"
HEADING = re.compile(r"^## (\d+)\. (.+)$")
STATUS = re.compile(r"^\*(\d{4}-\d\d-\d\d) · in force(?: · also (\d+(?:, \d+)*))?\*$")
LEAD = """\
# Decisions

What was decided, why, instead of what, and its price, as it is today. The words are those of \
[architecture.md](../architecture.md). An entry's date is that of its last change.

Code and documents refer to a decision by its number. An entry that has taken in others also has \
their numbers. `scripts/decisions.py` makes this index of the files beside it; `make check` fails \
if it is out of date.
"""


@dataclasses.dataclass
class Entry:
    """One decision, as its heading and the line below it say."""

    number: int
    title: str
    file: str
    date: str = ""
    also: tuple[int, ...] = ()

    @property
    def row(self) -> str:
        words = re.sub(r"[^\w\- ]", "", f"{self.number} {self.title}".lower())
        link = f"[{self.title}]({self.file}#{words.replace(' ', '-')})"
        also = f"<br>also {', '.join(map(str, self.also))}" if self.also else ""
        return f"| {self.number} | {link}{also} | {self.date} |"


def read(folder: pathlib.Path) -> tuple[list[Entry], list[str]]:
    """The entries of all files, by number, and what is wrong with their dates and statuses."""
    entries, faults = [], []
    for path in sorted(folder.glob("*.md")):
        if path.name == "README.md":
            continue
        lines = path.read_text().splitlines()
        for at, line in enumerate(lines):
            if not line.startswith("## "):
                continue
            heading = HEADING.match(line)
            if heading is None:
                faults.append(f"{path.name}: {line!r} is not `## <number>. <title>`")
                continue
            entry = Entry(int(heading[1]), heading[2], path.name)
            entries.append(entry)
            below = next((text for text in lines[at + 1 :] if text), "")
            if (status := STATUS.match(below)) is None:
                faults.append(
                    f"{entry.number}: {below!r} is not `*<date> · in force · also <numbers>*`"
                )
                continue
            entry.date = status[1]
            entry.also = tuple(map(int, re.findall(r"\d+", status[2] or "")))
    return sorted(entries, key=lambda entry: entry.number), faults


def compare(entries: list[Entry]) -> list[str]:
    """What is wrong with the entries' numbers: each from 1 on is used once, none is missing."""
    faults = []
    by_number: dict[int, Entry] = {}
    for entry in entries:
        for number in (entry.number, *entry.also):
            if number in by_number:
                faults.append(f"{number}: in {by_number[number].file} and {entry.file}")
            by_number[number] = entry
    missing = set(range(1, max(by_number, default=0) + 1)) - set(by_number)
    faults += [f"{number}: missing" for number in sorted(missing)]
    return faults


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--check"]
    folder = pathlib.Path(arguments[0]) if arguments else FOLDER
    entries, faults = read(folder)
    faults += compare(entries)
    if faults:
        print(*faults, sep="\n", file=sys.stderr)
        return 1
    table = ["| | decision | date |", "|---|---|---|", *(e.row for e in entries)]
    fresh = LEAD + "\n" + "\n".join(table) + "\n"
    index = folder / "README.md"
    if index.exists() and index.read_text() == fresh:
        return 0
    if "--check" in sys.argv:
        print(f"out of date, run `python scripts/decisions.py`: {index}", file=sys.stderr)
        return 1
    index.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
