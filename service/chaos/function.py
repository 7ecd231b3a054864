"""The Python dataset of crowds: a function whose process is killed now and then, wherever it is."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np

PAYLOAD_LENGTH = 2048
"""Of every dataset of chaos."""

KILLED = 0.2
"""Of its calls."""

ELEMENT_S = 0.004
SPLIT_ELEMENTS = 5
"""So that a process is killed in the midst of a split as well, and the next one goes on there."""

RETRIES = 1_000


def elements(split: int) -> Iterator[dict[str, object]]:
    """Of the numbers that are the split's, as of all datasets of chaos."""
    if random.random() < KILLED:
        # Perhaps in the next split, or behind the last.
        within_s = random.uniform(0, 2 * SPLIT_ELEMENTS * ELEMENT_S)
        threading.Timer(within_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for number in range(SPLIT_ELEMENTS * split, SPLIT_ELEMENTS * (split + 1)):
        time.sleep(ELEMENT_S)
        yield {"id": number, "payload": np.full(PAYLOAD_LENGTH, number)}
