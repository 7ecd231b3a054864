"""A command's parameters, from what its options declare."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from ..options import Declared, ServerOptions, options_of

T = TypeVar("T", bound=ServerOptions)


def takes(options: type[T]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function of these options, and of further parameters as typer has them.

    What the command raises for a value that is out of range names the flag, or the variable.
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


def _parameter(declared: Declared) -> inspect.Parameter:
    option, name = declared.option, declared.name
    is_plain = declared.type in (bool, int, float, str)
    flag = f"--{name.replace('_', '-')}"
    default = ... if declared.required else declared.default if is_plain else None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(
            default, flag, help=option.help, envvar=f"FOREBAY_{name.upper()}",
            min=option.least, max=option.most,
        ),
        annotation=declared.type if is_plain else str | None,
    )  # fmt: skip
