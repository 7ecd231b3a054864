"""How many epochs of a job are over."""

from __future__ import annotations

import pytest

from forebay.service.core.jobs import epochs_over
from forebay.service.core.state import Iteration, Job, State


@pytest.mark.parametrize(
    ("kept", "summarized", "over"),
    [
        ({}, [], 0),
        ({1: False}, [], 0),
        ({1: True, 2: False}, [], 1),
        ({2: True}, [(1, 2)], 2),
        ({4: False}, [(1, 4)], 3),
    ],
)
def test_the_last_epoch_that_is_over(
    kept: dict[int, bool], summarized: list[tuple[int, int]], over: int
) -> None:
    job = Job(
        1, "j", "d", 0, None, False, 1,
        iterations={epoch: 10 + epoch for epoch in kept}, summarized=summarized,
    )  # fmt: skip
    state = State(jobs={1: job}, job_by_name={"j": 1})
    for epoch, finished in kept.items():
        state.iterations[10 + epoch] = Iteration(10 + epoch, 1, epoch, [], finished=finished)
    assert epochs_over(state, "j") == over
    assert epochs_over(state, "another") == epochs_over(state, "") == 0
