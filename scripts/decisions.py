"""Generates docs/decisions/README.md, the index by number; with --check, compares instead.

`python scripts/decisions.py [--check] [FOLDER]`. Each entry is a heading `## 7. Title` and, below
it, a line in italics: its date, then its status, as in `*2026-11-21 · amends 3 · amended by 146*`.
The index is refused while an entry lacks that line, a number is missing or used twice, or an entry
names another one that does not say the reverse.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sys

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "docs" / "decisions"
HEADING = re.compile(r"^## (\d+)\. (.+)$")
STATUS = re.compile(r"^\*(\d{4}-\d\d-\d\d) · (.+)\*$")
RELATION = re.compile(r"^(amends|amended by|supersedes|superseded by) (\d+(?:, \d+)*)$")
REPORT = re.compile(r"^a report, now in \[[^]]+\]\([^)]+\)$")
REVERSE = {
    "amends": "amended by",
    "amended by": "amends",
    "supersedes": "superseded by",
    "superseded by": "supersedes",
}
LEAD = """\
# Decisions

What was decided, why, and what else was considered. The words are those of \
[architecture.md](../architecture.md). An entry that is amended or superseded stays, and names the \
entry that did so. The repository begins on 2026-11-21, so no entry has an earlier date.

Code and documents refer to a decision by its number, which never changes. `scripts/decisions.py` \
makes this index of the files beside it; `make check` fails if it is out of date.
"""


@dataclasses.dataclass
class Entry:
    """One decision, as its heading and the line below it say."""

    number: int
    title: str
    file: str
    date: str = ""
    status: str = ""
    relations: dict[str, set[int]] = dataclasses.field(default_factory=dict)

    @property
    def row(self) -> str:
        words = re.sub(r"[^\w\- ]", "", f"{self.number} {self.title}".lower())
        link = f"[{self.title}]({self.file}#{words.replace(' ', '-')})"
        return f"| {self.number} | {link} | {self.date} | {self.status} |"


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
                faults.append(f"{entry.number}: no line `*<date> · <status>*` below its heading")
                continue
            entry.date, entry.status = status[1], status[2]
            for part in entry.status.split(" · "):
                if relation := RELATION.match(part):
                    numbers = {int(number) for number in relation[2].split(", ")}
                    entry.relations.setdefault(relation[1], set()).update(numbers)
                elif part != "in force" and not REPORT.match(part):
                    faults.append(f"{entry.number}: {part!r} is no status")
    return sorted(entries, key=lambda entry: entry.number), faults


def compare(entries: list[Entry]) -> list[str]:
    """What is wrong among the entries: their numbers, and relations that only one side names."""
    faults = []
    by_number: dict[int, Entry] = {}
    for entry in entries:
        if entry.number in by_number:
            faults.append(f"{entry.number}: in {by_number[entry.number].file} and {entry.file}")
        by_number[entry.number] = entry
    missing = set(range(1, max(by_number, default=0) + 1)) - set(by_number)
    faults += [f"{number}: missing" for number in sorted(missing)]
    for entry in entries:
        for relation, others in entry.relations.items():
            for number in sorted(others):
                other = by_number.get(number)
                if other is None or entry.number not in other.relations.get(REVERSE[relation], ()):
                    faults.append(
                        f"{entry.number}: {relation} {number}, "
                        f"which does not say {REVERSE[relation]} {entry.number}"
                    )
    return faults


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--check"]
    folder = pathlib.Path(arguments[0]) if arguments else FOLDER
    entries, faults = read(folder)
    faults += compare(entries)
    if faults:
        print(*faults, sep="\n", file=sys.stderr)
        return 1
    table = ["| | decision | date | status |", "|---|---|---|---|", *(e.row for e in entries)]
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
