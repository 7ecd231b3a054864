"""`forebay materialize`: writes a dataset's elements to files."""

from __future__ import annotations

import difflib

import typer

from ..extras import needing
from .dataset import DATASET_ID, service_and_dataset
from .options import SERVICE, connects

LOOK_S = 5.0
"""How often to list the output's files, to show the progress."""


@connects
def materialize(
    context: typer.Context,
    service: str = SERVICE,
    dataset_id: str = DATASET_ID,
    output: str = typer.Option(..., help="A directory that the runner's workers see by this name."),
    shards: int = typer.Option(0, min=0, help="How many files; 0: one a split, up to 128."),
    seed: int = typer.Option(0, min=0, help="Seed of the dataset's random numbers."),
    runner: str = typer.Option("FnApiRunner", help="One of Beam's, by its name."),
    load_op_library: str = typer.Option(
        "",
        help="Libraries of custom ops that the dataset uses, comma-separated: paths where the "
        "runner's workers are.",
    ),
    verify: bool = typer.Option(
        False, help="Read what is there first, and write again what is damaged."
    ),
) -> None:
    """Write the elements of a dataset to TFRecord files, to be registered in its place.

    Further options are the runner's: --direct_num_workers=4. Run again, it does what is missing.
    """
    service, dataset_id = service_and_dataset(service, dataset_id)
    _require_no_misspelt_option(context)
    from .. import pipelines

    with needing("`forebay materialize` needs Beam", "beam"):
        from ..materialized.run import materialize as run
        from ..materialized.run import shards_done
    from .progress_bar import polled

    pipelines.hide_gpus()
    pipelines.load()  # before TensorFlow is imported in any other way

    with polled("shards", lambda: shards_done(output), every_s=LOOK_S):
        done = run(
            service, dataset_id, output, shards=shards or None, seed=seed, runner=runner,
            options=context.args, verify=verify, load_op_library=load_op_library,
        )  # fmt: skip
    print(
        f"{done.directory}: {done.elements:,} elements, {done.bytes:,} bytes in {done.shards} "
        f"shards, {done.written} of them written now"
    )


def _require_no_misspelt_option(context: typer.Context) -> None:
    """Refuse unknown options that resemble this command's own. Raises typer.BadParameter."""
    own = [name for parameter in context.command.params for name in parameter.opts]
    names = [option for option in own if option.startswith("--")]
    for given in context.args:
        name = given.partition("=")[0]
        close = difflib.get_close_matches(name, names, 1, cutoff=0.75)
        if name.startswith("--") and "_" not in name and close:
            raise typer.BadParameter(f"there is no option {name}: did you mean {close[0]}?")
