"""The parameters of commands: those that several have, and those of an options class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperOption

from ..connections.credentials import Credentials, use_credentials
from ..errors import ForebayError
from ..options import Declared, ServerOptions, options_of

T = TypeVar("T", bound=ServerOptions)

SERVICE = typer.Argument(
    ..., help="HOST:PORT of the dispatcher; several, comma-separated.", envvar="FOREBAY_SERVICE"
)
JSON = typer.Option(False, "--json", help="As JSON, for programs.")


class FlagCommand(TyperCommand):
    """Each option that is not given takes its value from the environment: --log-format from
    FOREBAY_LOG_FORMAT."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for option in self.params:
            if isinstance(option, TyperOption) and not (option.hidden or option.envvar):
                flag = option.opts[0].removeprefix("--")
                option.envvar = f"FOREBAY_{flag.replace('-', '_').upper()}"


def takes(options: type[T]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function that takes these options and typer's own parameters.

    The error for a value that is not allowed names the flag and the environment variable.
    """

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        _, *further = inspect.signature(run, eval_str=True).parameters.values()
        parameters = [*map(_parameter, options_of(options)), *further]

        @functools.wraps(run)
        def command(**given: Any) -> None:
            others = {parameter.name: given.pop(parameter.name) for parameter in further}
            run(options(**given), **others)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def connects(run: Callable[..., None]) -> Callable[..., None]:
    """Give a command of a client the options of Credentials, for all its connections."""
    helps = {
        "tls_ca": "Certificates of the authorities that sign the servers' certificates: PEM.",
        "tls_cert": "This client's certificate, and those between it and the CA: PEM.",
        "tls_key": "The certificate's private key, without a passphrase: PEM.",
        "token_file": "A file with the token that servers ask for, of mode 600.",
    }
    own = inspect.signature(run, eval_str=True).parameters
    further = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option("", f"--{name.replace('_', '-')}", help=text, show_default=False),
            annotation=str,
        )
        for name, text in helps.items()
    ]

    @functools.wraps(run)
    def command(*given: Any, **options: Any) -> None:
        files = {name: options.pop(name) for name in helps}
        if any(files.values()):
            use_credentials(Credentials(**files))
        run(*given, **options)

    parameters = [*own.values(), *further]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _parameter(declared: Declared) -> inspect.Parameter:
    name, told = declared.name, declared.help
    is_plain = declared.type in (bool, int, float, str)
    flag = f"--{name.replace('_', '-')}"
    in_range = bool(declared.range)  # typer would say only the bound that is passed
    default = ... if declared.required else declared.default if is_plain else None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(
            default, flag, help=f"{told} ({declared.range})" if in_range else told,
            callback=_allowed(declared) if in_range or declared.convert else None,
        ),
        annotation=declared.type if is_plain else str | None,
    )  # fmt: skip


def _allowed(declared: Declared) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        try:
            declared.check(value)
        except ForebayError as error:
            raise typer.BadParameter(str(error)) from error
        return value

    return checked
