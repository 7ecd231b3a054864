"""Explains Keras's warning that data ran out, if `steps_per_epoch` meets an unknown length.

A dataset of the service has an unknown length: others may share the job, and several workers make
batches of their own. With `steps_per_epoch`, `fit` then uses one iteration for all its epochs.
Epochs after the iteration's end have no steps, and Keras only warns that data ran out. Then a
second warning says what happened, and what helps.
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from types import FrameType
from typing import Any

from .tf_saving import reads_the_service

log = logging.getLogger(__name__)

RAN_OUT, WARNS = "Your input ran out of data", "_interrupted_warning"
"""The start of Keras's warning, and the function that warns."""


def explain_keras_warning() -> None:
    """From now on, explain Keras's warning. Idempotent."""
    if hasattr(warnings.showwarning, "explains_keras"):
        return
    shown = warnings.showwarning

    @functools.wraps(shown)
    def explained(message: Any, *how: Any, **named: Any) -> None:
        shown(message, *how, **named)
        if str(message).startswith(RAN_OUT) and _goes_on(sys._getframe(1)):
            log.warning(
                "the dataset of the service, whose length Keras does not know, has come to the end "
                "of its epoch. With steps_per_epoch, Keras goes on in the same iteration in its "
                "next epoch, which has no steps then: leave steps_per_epoch out, or repeat() the "
                "dataset, or, if it is sure to have so many elements, tell it by "
                ".apply(tf.data.experimental.assert_cardinality(…))"
            )

    explained.explains_keras = True  # type: ignore[attr-defined]
    warnings.showwarning = explained


def _goes_on(frame: FrameType | None) -> bool:
    """Whether Keras, which warns further down the stack, reads the service with
    `steps_per_epoch`."""
    while frame is not None and frame.f_code.co_name != WARNS:
        frame = frame.f_back
    reads = frame and frame.f_locals.get("self")
    if not getattr(reads, "steps_per_epoch", None):
        return False
    dataset = getattr(reads, "_distributed_dataset", None)
    return reads_the_service(getattr(dataset, "_original_dataset", dataset))
