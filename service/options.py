"""Options of servers: each is declared once, as a field of a dataclass of the server's.

The field says its name, its type, its unit (at the name's end) and its default; `Option`, in its
annotation, the rest. What can be told on the command line, in the environment (FOREBAY_<NAME>)
and from Python is derived from that, and so is what is said about it. A field without an
`Option` is none: it is for those who build a server themselves.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple

from .errors import InvalidArgument


@dataclasses.dataclass(frozen=True)
class Option:
    """Stands in a field's annotation: `port: Annotated[int, Option("…", least=0)] = 0`.

    Values are from `least` to `most`, both included; by default, to what makes any sense in that
    unit. `convert` makes a value of what has been given, the command line's text among it, and
    raises InvalidArgument if it cannot.
    """

    help: str
    least: float | None = None
    most: float | None = None
    convert: Callable[[Any], Any] | None = None


_YEAR_H = 365 * 24
MOST = {"ms": _YEAR_H * 3_600_000, "hours": 100 * _YEAR_H, "bytes": 1 << 50}
"""Of an option, by the unit at its name's end."""

MOST_THINGS = 10**9
"""Of any other."""


class Declared(NamedTuple):
    """An option, and the field that declares it. Without a default it has to be given."""

    name: str
    type: type
    default: Any  # dataclasses.MISSING: none
    option: Option

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def most(self) -> float:
        unit = self.name.rpartition("_")[2]
        return MOST.get(unit, MOST_THINGS) if self.option.most is None else self.option.most

    @property
    def range(self) -> str:
        """In words; "" if there are no bounds."""
        return "" if self.option.least is None else f"{self.option.least} to {self.most}"

    def check(self, value: Any) -> Any:
        """The value to use; None stands for the default. Raises InvalidArgument."""
        option = self.option
        if value is None and not self.required:
            return self.default
        if option.convert is not None:
            return option.convert(value)
        wanted: Any = (int, float) if self.type is float else self.type
        if not isinstance(value, wanted) or (isinstance(value, bool) and self.type is not bool):
            raise InvalidArgument(f"{self.name}={value!r} must be of type {self.type.__name__}")
        if option.least is not None and not option.least <= value <= self.most:
            raise InvalidArgument(f"{self.name}={value!r} is out of range; give {self.range}")
        return value


def paths(given: str | Iterable[str]) -> tuple[str, ...]:
    """Several of them, comma-separated or in a list, made absolute. Raises InvalidArgument."""
    listed = (given.split(",") if given else []) if isinstance(given, str) else list(given)
    if not all(isinstance(path, str) and path for path in listed):
        raise InvalidArgument(f"{given!r} has a path that is empty, or none; name files")
    return tuple(os.path.abspath(path) for path in listed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What all servers can be told; theirs are dataclasses with this one as a base.

    Raises InvalidArgument for a value that is none of its option's; None is its default.
    """

    port: Annotated[int, Option("0: any free one.", least=0, most=65535)] = 0
    host: Annotated[str, Option("Address to listen on.")] = "127.0.0.1"
    address: Annotated[
        str,
        Option(
            "What clients are told, HOST:PORT; %port% stands for the port. By default, the "
            "address that it listens on."
        ),
    ] = ""
    load_op_library: Annotated[
        tuple[str, ...],
        Option(
            "Libraries of custom ops that datasets use, comma-separated: shared objects for "
            "TensorFlow's load_op_library.",
            convert=paths,
        ),
    ] = ()

    def __post_init__(self) -> None:
        for declared in options_of(type(self)):
            value = declared.check(getattr(self, declared.name))
            object.__setattr__(self, declared.name, value)


def options_of(options: type[ServerOptions]) -> tuple[Declared, ...]:
    """What a dataclass declares, in its order."""
    hints = typing.get_type_hints(options, include_extras=True)
    declared = [(f, typing.get_args(hints[f.name])) for f in dataclasses.fields(options)]
    return tuple(
        Declared(field.name, annotation[0], field.default, option)
        for field, annotation in declared
        for option in annotation[1:]
        if isinstance(option, Option)
    )


def flags(options: ServerOptions) -> list[str]:
    """The arguments of a command line that say the same."""
    given = []
    for declared in options_of(type(options)):
        value, flag = getattr(options, declared.name), f"--{declared.name.replace('_', '-')}"
        if value != declared.default:
            text = ",".join(value) if isinstance(value, tuple) else value
            given.append(flag if declared.type is bool else f"{flag}={text}")
    return given


def described(options: type[ServerOptions], names: Mapping[str, str] = {}) -> str:
    """A line for each option, for Python's help; `names` are those that they have there."""
    lines = []
    for declared in options_of(options):
        name, option = names.get(declared.name, declared.name), declared.option
        default = f"default {declared.default!r}" if declared.default else ""
        facts = ", ".join(
            filter(None, ("required" if declared.required else default, declared.range))
        )
        lines.append(f"    {name}: {option.help}" + (f" ({facts})" if facts else ""))
    return "\n".join(lines)
