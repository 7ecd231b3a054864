"""Common parts of `materialize` and `materialize_pcollection`: argument checks, running the
pipeline, and the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import apache_beam as beam
from apache_beam.runners.runner import PipelineState

from ..errors import InvalidArgument, PipelineError
from .formats import WRITERS
from .layout import Plan, ShardFile

MAX_SHARDS = 99_999

FAILED = "failed to write shard "
"""The mark of our own message within a runner's error."""


@dataclass(frozen=True)
class Materialized:
    """The result of `materialize`."""

    directory: str
    elements: int
    bytes: int
    shards: int
    written: int  # the number of shards that were missing or damaged


def check_format(format: str) -> None:  # noqa: A002 - what all writers call it
    """Raises InvalidArgument."""
    if format not in WRITERS:
        raise InvalidArgument(f"format={format!r} must be one of {[*WRITERS]}")


def check_shards(shards: int) -> None:
    """Raises InvalidArgument."""
    if not isinstance(shards, int) or not 1 <= shards <= MAX_SHARDS:
        raise InvalidArgument(f"shards={shards} must be from 1 to {MAX_SHARDS}")


def require_all(directory: str, plan: Plan, written: Mapping[int, ShardFile], advice: str) -> None:
    """Raises PipelineError."""
    if missing := [number for number in range(plan.shards) if number not in written]:
        raise PipelineError(
            "DATA_LOSS",
            f"the runner says that it is done, and {len(missing)} of {plan.shards} shards are not "
            f"in {directory}, the first of them number {missing[0]}: its workers must see the "
            f"directory under this name. {advice}",
        )


class UnknownOption(InvalidArgument):
    """A runner's option is unknown. Its own class, since runners re-raise a DoFn's errors."""


def run_to_its_end(pipeline: beam.Pipeline, advice: str) -> None:
    """Run the pipeline, and wait for its end. Raises PipelineError with the advice."""
    name = type(pipeline.runner).__name__
    client = None
    try:
        result = pipeline.run()
        client = getattr(result, "client", None)  # Dask's, which else keeps looking for its cluster
        state = result.wait_until_finish()
    except UnknownOption:
        raise
    except Exception as error:
        _, mark, said = str(error).rpartition(FAILED)
        last = (str(error).strip() or repr(error)).splitlines()[-1].strip()
        raise PipelineError(
            "ABORTED",
            f"{name} failed ({advice}): {(mark + said).strip() or last}",
        ) from error
    finally:
        if client is not None:
            client.close()
    if state not in (PipelineState.DONE, None):
        raise PipelineError(
            "ABORTED",
            f"{name} ended with {state}: its log says why ({advice})",
        )
