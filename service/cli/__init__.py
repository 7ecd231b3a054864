"""The `forebay` command. Errors are one line on stderr; exit 2 for usage, 1 for failure."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from ..errors import ForebayError
from ..processes import open_standard_descriptors
from . import audit, bench, chaos, dataset, diff, doctor, job, journal, materialize, servers, status
from .console import plain
from .options import FlagCommand

app = typer.Typer(
    name="forebay",
    help="An event-sourced, fault-tolerant input-data service for ML training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"forebay {version('forebay')}")
        raise typer.Exit


@app.callback()
def options(
    _: bool = typer.Option(
        False, "--version", help="Say which version this is.", is_eager=True, callback=_version
    ),
) -> None: ...


app.command(cls=FlagCommand)(servers.dispatcher)
app.command(cls=FlagCommand)(servers.worker)
app.command(cls=FlagCommand)(status.status)
app.command(cls=FlagCommand)(doctor.doctor)
app.command(
    cls=FlagCommand, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)(materialize.materialize)
app.command(cls=FlagCommand)(audit.audit)
app.command(cls=FlagCommand)(diff.diff)
app.command(cls=FlagCommand)(job.replay)
app.command(cls=FlagCommand)(chaos.chaos)
app.command(cls=FlagCommand)(bench.bench)
app.add_typer(dataset.app, name="dataset")
app.add_typer(job.app, name="job")
app.add_typer(journal.app, name="journal")


def main() -> NoReturn:
    """Run the command line of this process, and exit."""
    open_standard_descriptors()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # we report its errors in one line
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]
    try:
        code = app(standalone_mode=False)
    except usage_error as error:
        message: str = error.format_message()  # type: ignore[attr-defined]
        if not message:  # the help has been printed instead
            sys.exit(2)
        _fail(2, f"{' '.join(message.split())} (`forebay --help` tells more)")
    except ForebayError as error:
        _fail(1, str(error))
    except UnicodeEncodeError as error:  # an argument, or a FOREBAY_… of the environment
        _fail(2, f"{error.object!r} is not UTF-8; write it in UTF-8")
    except (KeyboardInterrupt, typer.Abort):
        _fail(130, "interrupted")
    except BrokenPipeError:  # the reader of our output, such as `head`, has had enough
        sys.stderr.close()
        sys.exit(0)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(code: int, message: str) -> NoReturn:
    print(plain(f"forebay: {message}"), file=sys.stderr)
    sys.exit(code)
