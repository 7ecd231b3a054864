"""Options of servers: each is declared once, as a field of the server's dataclass.

The field gives the name, the type and the unit (at the name's end), `option` the rest. Command line
arguments, environment variables (FOREBAY_<NAME>), Python arguments and their help are derived from
this. A field without `option` is for programs that build a server themselves.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from .address_forms import MAX_PORT, checked_address, checked_host
from .errors import InvalidArgument

T = TypeVar("T")


def option(default: T, help: str, **more: Any) -> T:  # noqa: A002
    """A dataclass's field that is an option: `port: int = option(0, "…", least=0)`. `more` is what
    `Declared` has. One with the default dataclasses.MISSING is required."""
    return dataclasses.field(default=default, metadata={"option": {"help": help, **more}})


_YEAR_H = 365 * 24
MOST = {"ms": _YEAR_H * 3_600_000, "hours": 100 * _YEAR_H, "bytes": 1 << 50}
"""The default maximum of an option, by the unit at its name's end."""

MOST_THINGS = 10**9
"""The default maximum of any other option."""


class Declared(NamedTuple):
    """An option.

    Values are from `least` to `most`, inclusive. `off` is one more allowed value, which turns the
    feature off. `convert` converts a given value, such as the command line's text, and raises
    InvalidArgument if it cannot.
    """

    name: str
    type: type
    default: Any  # dataclasses.MISSING: it is required
    most: float  # by default a sensible maximum for the unit
    help: str
    least: float | None = None
    off: float | None = None
    convert: Callable[[Any], Any] | None = None

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def range(self) -> str:
        """The allowed range in words; "" if there are no bounds."""
        least, off = self.least, self.off
        if least is None:
            return ""
        return f"{least} to {self.most}" if off is None else f"{off}, or {least} to {self.most}"

    def check(self, value: Any) -> Any:
        """The value to use; None stands for the default. Raises InvalidArgument."""
        if value is None and not self.required:
            return self.default
        if self.convert is not None:
            return self.convert(value)
        wanted: Any = (int, float) if self.type is float else self.type
        if not isinstance(value, wanted) or (isinstance(value, bool) and self.type is not bool):
            raise InvalidArgument(f"{self.name}={value!r} must be of type {self.type.__name__}")
        in_range = self.least is None or self.least <= value <= self.most
        if not in_range and (self.off is None or value != self.off):
            raise InvalidArgument(f"{self.name}={value!r} is out of range; give {self.range}")
        return value


def paths(given: str | Iterable[str]) -> tuple[str, ...]:
    """Absolute paths, of a comma-separated string or a list. Raises InvalidArgument."""
    listed = (given.split(",") if given else []) if isinstance(given, str) else list(given)
    if not all(isinstance(path, str) and path for path in listed):
        raise InvalidArgument(f"{given!r} has a path that is empty, or none; name files")
    try:
        "".join(listed).encode()
    except UnicodeEncodeError:  # TensorFlow and gRPC take no other
        raise InvalidArgument(f"the paths {listed} are not UTF-8; rename the files") from None
    return tuple(os.path.abspath(path) for path in listed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of all servers; each server's options are a subclass of this dataclass.

    Raises InvalidArgument for a value that its option does not allow. None means the default.
    """

    port: int = option(0, "Port to listen on; 0: any free one.", least=0, most=MAX_PORT)
    host: str = option("127.0.0.1", "Address to listen on.", convert=checked_host)
    address: str = option(
        "",
        "HOST:PORT that clients connect to; %port% stands for the port. By default, the "
        "address that it listens on.",
        convert=checked_address,
    )
    http_port: int = option(
        -1,
        "Port of --host for /metrics (Prometheus), /healthz and /readyz; 0: any free one, "
        "-1: none.",
        least=0,
        most=MAX_PORT,
        off=-1,
    )
    tls_ca: str = option(
        "", "Certificates of the authorities that sign peers' certificates: a PEM file."
    )
    tls_cert: str = option(
        "", "This server's certificate, and those between it and the CA: a PEM file."
    )
    tls_key: str = option("", "The certificate's private key, without a passphrase: a PEM file.")
    token_file: str = option(
        "",
        "A file with a token, of mode 600; several, comma-separated. Clients must send one of "
        "the tokens, and need no certificate.",
    )
    insecure: bool = option(
        False, "Listen beyond loopback without TLS: let in whoever reaches this server."
    )
    allow_tensorflow_clients: bool = option(
        False,
        "Serve tf.data service's own clients and workers beyond loopback, too: they cannot "
        "prove who they are.",
    )
    load_op_library: tuple[str, ...] = option(
        (),
        "Libraries of custom ops that datasets use, comma-separated: shared objects for "
        "TensorFlow's load_op_library.",
        convert=paths,
    )

    def __post_init__(self) -> None:
        for declared in options_of(type(self)):
            value = declared.check(getattr(self, declared.name))
            object.__setattr__(self, declared.name, value)


def options_of(options: type[ServerOptions]) -> tuple[Declared, ...]:
    """The options that a dataclass declares, in order."""
    hints = typing.get_type_hints(options)
    found = []
    for field in dataclasses.fields(options):
        if "option" in field.metadata:
            most = {"most": MOST.get(field.name.rpartition("_")[2], MOST_THINGS)}
            how = most | field.metadata["option"]
            found.append(Declared(field.name, hints[field.name], field.default, **how))
    return tuple(found)


def flags(options: ServerOptions) -> list[str]:
    """The command line arguments for these options; leaves out defaults."""
    given = []
    for declared in options_of(type(options)):
        value, flag = getattr(options, declared.name), f"--{declared.name.replace('_', '-')}"
        if value != declared.default:
            text = ",".join(value) if isinstance(value, tuple) else value
            given.append(flag if declared.type is bool else f"{flag}={text}")
    return given


def described(options: type[ServerOptions], names: Mapping[str, str] = {}) -> str:
    """One line per option, for Python's help. `names` maps options to their names there."""
    lines = []
    for declared in options_of(options):
        name = names.get(declared.name, declared.name)
        default = f"default {declared.default!r}" if declared.default else ""
        facts = ", ".join(
            filter(None, ("required" if declared.required else default, declared.range))
        )
        lines.append(f"    {name}: {declared.help}" + (f" ({facts})" if facts else ""))
    return "\n".join(lines)
