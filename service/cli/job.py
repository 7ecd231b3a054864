"""`forebay job …`: changes what the trainers of an ordered job read."""

from __future__ import annotations

import typer

from ..http.families import printable
from .options import SERVICE, FlagCommand, connects
from .status import PATIENCE_S

app = typer.Typer(help="Change what an ordered job reads.", no_args_is_help=True)

JOB = typer.Argument(..., help="The job's name, or its id.", envvar="FOREBAY_JOB")
REASON = typer.Option("", help="Is kept in the journal; `forebay audit` shows it.")


@app.command(cls=FlagCommand)
@connects
def weights(
    service: str = SERVICE,
    job: str = JOB,
    given: list[str] = typer.Argument(..., help="SOURCE=WEIGHT, one or more."),  # noqa: B008
    from_step: int | None = typer.Option(
        None, min=0, help="By default the earliest that is possible, while the job is read."
    ),
    reason: str = REASON,
) -> None:
    """Change weights of sources. Those that are not named keep theirs."""
    from ..client.schedules import change_weights

    found = {}
    for each in given:
        name, equals, weight = each.rpartition("=")
        try:
            found[name] = float(weight)
        except ValueError:
            equals = ""
        if not (name and equals):
            raise typer.BadParameter(f"{each!r} is no weight of a source: give web=0.5")
    step = change_weights(
        service, job, found, from_step=from_step, reason=reason, timeout_s=PATIENCE_S
    )
    print(printable(f"job {job} has these weights from step {step} on"))


@app.command(cls=FlagCommand)
@connects
def skip(
    service: str = SERVICE,
    job: str = JOB,
    first: int = typer.Argument(..., help="The first step to leave out."),
    stop: int = typer.Argument(..., help="The step behind the last one."),
    reason: str = REASON,
) -> None:
    """Leave out steps: step FIRST then has what step STOP would have had."""
    from ..client.schedules import skip_steps

    skip_steps(service, job, first, stop, reason=reason, timeout_s=PATIENCE_S)
    print(printable(f"job {job} leaves out the steps {first} to {stop - 1}"))
