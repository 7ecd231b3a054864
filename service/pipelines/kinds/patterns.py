"""Patterns of names with braces, as in bash, and with `*`, as in glob."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from ...errors import FailedPrecondition, InvalidArgument, NotFound
from ..files.stores import is_url

MOST_EXPANDED = 1 << 18
"""Names that braces stand for."""


def expanded(pattern: str) -> list[str]:
    """With braces as in bash and WebDataset: `{a,b}` and `{000..127}`, also within others."""
    for opening in re.finditer(r"{", pattern):
        depth, commas = 0, [opening.start()]
        for at in range(opening.start(), len(pattern)):
            depth += {"{": 1, "}": -1}.get(pattern[at], 0)
            if not depth:
                commas.append(at)
                break
            if pattern[at] == "," and depth == 1:
                commas.append(at)
        else:
            continue  # it is not closed
        within = [pattern[a + 1 : b] for a, b in itertools.pairwise(commas)]
        choices = within if len(within) > 1 else _range(within[0])
        if choices:
            before, behind = pattern[: opening.start()], pattern[commas[-1] + 1 :]
            found: list[str] = []
            for choice in choices:
                found += [before + one for one in expanded(choice + behind)]
                _require_few(pattern, len(found))
            return found
    return [pattern]


def fixed(pattern: str) -> str:
    """The directory, with its slash, of all that matches a pattern, which may be a URL."""
    return re.match(r"(\w[\w+.-]*://)?([^*?\[{]*/)?", pattern)[0]  # type: ignore[index]


def _require_few(pattern: str, names: int) -> None:
    """Raises InvalidArgument."""
    if names > MOST_EXPANDED:
        raise InvalidArgument(
            f"{pattern!r:.100} is more than {MOST_EXPANDED} names: give a pattern with *"
        )


def _range(text: str) -> list[str]:
    """Of `000..127`, also `0..9..3`; none of another text."""
    if (found := re.fullmatch(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?", text)) is None:
        return []
    first, last, step = int(found[1]), int(found[2]), abs(int(found[3] or 1)) or 1
    _require_few(f"{{{text}}}", abs(last - first) // step)
    digits = found[1].removeprefix("-"), found[2].removeprefix("-")
    padded = any(len(one) > 1 and one[0] == "0" for one in digits)
    width = max(len(found[1]), len(found[2])) if padded else 0
    step, end = (step, last + 1) if first <= last else (-step, last - 1)
    return [f"{number:0{width}}" for number in range(first, end, step)]


def matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path are those of a pattern, by the rules of glob: `**` is any
    directories, and hidden names match only where the pattern has their dot."""
    if not pattern:
        return not path
    first, *rest = pattern
    if first == "**":
        shown = sum(1 for _ in itertools.takewhile(lambda name: name[:1] != ".", path))
        if not rest:
            return bool(path) and shown == len(path)
        return any(matches(path[at:], rest) for at in range(shown + 1))
    if not path or not fnmatch.fnmatchcase(path[0], first):
        return False
    return (path[0][:1] != "." or first[:1] == ".") and matches(path[1:], rest)


@contextlib.contextmanager
def errors_named(path: str) -> Iterator[None]:
    """Raises NotFound or FailedPrecondition for an OSError."""
    try:
        yield
    except OSError as error:
        kind = NotFound if isinstance(error, FileNotFoundError) else FailedPrecondition
        advice = "" if is_url(path) else ". Make it readable, or leave it out"
        raise kind(
            f"{error.filename or path} cannot be read: {error.strerror or error}{advice}"
        ) from error


def unmatched(what: str, pattern: str, there: Iterable[str]) -> NotFound:
    """For a pattern that none of the names that are `there`, below its directory, matches."""
    root, names = fixed(pattern), sorted(there)
    names = difflib.get_close_matches(pattern[len(root) :], names, 3) or names[:3]
    deeper = ". `**/` stands for directories of any depth" if names and "*" in pattern else ""
    return NotFound(f"no {what} matches {pattern!r}: {root or '.'} has {names}{deeper}")
