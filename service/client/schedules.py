"""Changes what the trainers of an ordered job read, from a step on, without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...journal.datasets import MAX_POSITION
from ..connections.dispatcher_client import DispatcherClient
from ..errors import FailedPrecondition, InvalidArgument
from ..picks import shares
from ..proto import forebay_pb2 as pb
from .datasets import PATIENCE_S
from .options import read_options
from .reader import OrderedIterator, Reader


def change_weights(
    service: str | tuple[str, str],
    job: str,
    weights: Mapping[str, float],
    *,
    from_step: int | None = None,
    reason: str = "",
    timeout_s: float | None = PATIENCE_S,
) -> int:
    """Change the weights of a mixture that a job reads, and return the step from which they hold.

    All trainers of the job know of it before they come to that step, or the change is refused.
    Elements of earlier steps stay as they are, and each source goes on where it is.

    Args:
      service: as in `read`.
      job: the job's name, or its id.
      weights: by source. Sources that are not named keep the weights that they have at that step,
        which add up to 1; then all are divided by their sum. Weight 0 leaves a source out.
      from_step: the first step of the new weights; by default the earliest that is possible, while
        the job is read. A later change that was decided before no longer holds.
      reason: is kept in the journal.
      timeout_s: how long to retry the dispatcher, in seconds; None: for ever.

    Raises ValueError for wrong weights, NotFound for an unknown job, AlreadyExists if other weights
    begin with that step, FailedPrecondition, with the earliest step that is possible, if a trainer
    was given that step already, or if one does not answer, and Unavailable.
    """
    _require_name(job)
    if not isinstance(weights, Mapping) or not weights:
        raise InvalidArgument(
            f"weights={weights!r:.200}: give a dict of sources' names and weights"
        )
    shares([*weights.values(), 1])  # as these are checked here
    named = [pb.SourceWeight(source=name, weight=weights[name]) for name in weights]
    request = pb.ChangeScheduleRequest(job=job, weights=named, reason=reason)
    if from_step is not None:
        request.from_step = _step("from_step", from_step)
    return _changed(service, request, timeout_s).step


def skip_steps(
    service: str | tuple[str, str],
    job: str,
    first: int,
    stop: int,
    *,
    reason: str = "",
    timeout_s: float | None = PATIENCE_S,
) -> int:
    """Leave out the global batches of the steps first … stop - 1 of an ordered job, of a mixture or
    of one dataset; returns `first`.

    Step `first` then has what step `stop` would have had. Bundles that lie wholly in between are
    not run, where their lengths are known. A state that was saved behind them goes on where it was.

    Of one dataset, steps count through its epochs, as `start_step` does. What is left out may go
    over an epoch's end: the epoch then ends at `first`, and the next one begins behind. While an
    epoch's length is unknown, `stop` must not be behind what is known to be in it.

    The arguments and errors are those of `change_weights`.
    """
    _require_name(job)
    first, stop = _step("first", first), _step("stop", stop)
    if first >= stop:
        raise InvalidArgument(
            f"first={first} and stop={stop}: give the first step to leave out, and the one behind "
            "the last"
        )
    request = pb.ChangeScheduleRequest(job=job, from_step=first, stop=stop, reason=reason)
    return _changed(service, request, timeout_s).step


def fork_job(
    service: str | tuple[str, str],
    job: str,
    new: str,
    *,
    at_step: int,
    reason: str = "",
    timeout_s: float | None = PATIENCE_S,
) -> int:
    """Make another job of an ordered one: all steps before `at_step` are the same. Returns the
    position at which they part, in elements, as `start_position` of `read` counts.

    The new job has the dataset, the order and the earlier changes of `job`, and none of those from
    `at_step` on. Later changes of one are not the other's. Trainers read it with job_name=`new` and
    the arguments of `job`, from a state of `job` or from that position.

    Args:
      new: its name.
      at_step: in steps of the group that joined `job` last.
      service, job, reason, timeout_s: as in `change_weights`.

    Raises ValueError, AlreadyExists if the dataset has a job of that name, NotFound for an unknown
    job, FailedPrecondition for one that was never read, and Unavailable.
    """
    _require_name(job)
    if not isinstance(new, str) or not new:
        raise InvalidArgument(f"new={new!r} is no name of a job: give a non-empty string")
    step = _step("at_step", at_step)
    _schedule(service, job, timeout_s)  # a dispatcher that knows no forks would change the job
    request = pb.ChangeScheduleRequest(job=job, from_step=step, fork=new, reason=reason)
    return _changed(service, request, timeout_s).place


def batch_of(
    service: str | tuple[str, str], job: str, step: int, *, timeout_s: float | None = PATIENCE_S
) -> Any:
    """The global batch of a step of an ordered job, past or future, by its schedule as it is now:
    the elements of all consumers, in their order, put together as `read` does.

    Workers make it anew; trainers of the job go on undisturbed. What a group read before the last
    changes were decided, `forebay audit` names.

    Args:
      step: in steps of the group that joined last.
      service, job, timeout_s: as in `change_weights`.

    Raises ValueError, NotFound for an unknown job, FailedPrecondition for one that was never read,
    or whose dataset has no elements, and Unavailable.
    """
    _require_name(job)
    step = _step("step", step)
    found = _schedule(service, job, timeout_s)
    names = ("seed", "shuffle", "cycle_length", "block_length")
    order = {name: getattr(found.order, name) for name in names}
    options = read_options(
        ordered=True, **order, within_bundles=True, start_step=step, batch_size=found.step,
        drop_remainder=found.drops_remainder,
    )  # fmt: skip
    assert options.ordered is not None
    options.ordered.schedule_of = job
    reader = Reader(service, found.dataset_id, None, options)
    with OrderedIterator(reader) as batches:
        for batch in batches:
            return batch
    raise FailedPrecondition(f"step {step} of job {job} has no elements")


def _step(name: str, step: Any) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_POSITION:
        raise InvalidArgument(f"{name}={step!r} must be an integer from 0 to {MAX_POSITION}")
    return step


def _require_name(job: Any) -> None:
    if not isinstance(job, str) or not job:
        raise InvalidArgument(f"job={job!r} is not a job's name or id: give a non-empty string")


def _schedule(
    service: str | tuple[str, str], job: str, timeout_s: float | None
) -> pb.GetScheduleResponse:
    with DispatcherClient(service) as client:
        asked = pb.GetScheduleRequest(job=job)
        return client.call(asked, pb.GetScheduleResponse, patience_s=timeout_s)


def _changed(
    service: str | tuple[str, str], request: pb.ChangeScheduleRequest, timeout_s: float | None
) -> pb.ChangeScheduleResponse:
    with DispatcherClient(service) as client:
        return client.call_numbered(request, pb.ChangeScheduleResponse, patience_s=timeout_s)
