"""`forebay job …`: changes what the trainers of an ordered job read; `forebay replay` shows it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from ..errors import InvalidArgument
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


@app.command(cls=FlagCommand)
@connects
def fork(
    service: str = SERVICE,
    job: str = JOB,
    new: str = typer.Argument(..., help="The name of the job to make."),
    at_step: int = typer.Option(..., min=0, help="All steps before this one are the same."),
    reason: str = REASON,
) -> None:
    """Make another job with the same steps before AT_STEP, without the changes from there on."""
    from ..client.schedules import fork_job

    position = fork_job(service, job, new, at_step=at_step, reason=reason, timeout_s=PATIENCE_S)
    print(printable(f"job {new} parts from job {job} at position {position}"))


@connects
def replay(
    service: str = SERVICE,
    job: str = JOB,
    step: int = typer.Option(..., min=0, help="In steps of the group that joined last."),
    out: str = typer.Option("", help="A file of NumPy's .npz format to write the batch to."),
) -> None:
    """The global batch of a step of an ordered job, past or future, by its present schedule."""
    import numpy as np

    from ..client.schedules import batch_of

    arrays = dict(_arrays(batch_of(service, job, step, timeout_s=PATIENCE_S), "batch"))
    for name, array in arrays.items():
        content = array.tobytes() if array.dtype != object else repr(array.tolist()).encode()
        digest = hashlib.sha256(content).hexdigest()[:16]
        print(printable(f"{name}: {array.dtype} {array.shape} sha256 {digest}"))
    if out:
        try:
            with Path(out).open("wb") as file:
                np.savez(file, **arrays)
        except OSError as error:
            raise InvalidArgument(f"--out {out} cannot be written: {error.strerror}") from error


def _arrays(batch: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The arrays of a batch by their places in it, such as batch['image']; of a component whose
    elements differ in shape, one of each element."""
    import numpy as np

    if isinstance(batch, dict):
        inner = [(repr(key), each) for key, each in batch.items()]
    elif isinstance(batch, tuple | list):
        inner = [(str(number), each) for number, each in enumerate(batch)]
    else:
        yield path, np.asarray(batch)
        return
    for key, each in inner:
        yield from _arrays(each, f"{path}[{key}]")
