"""The Python dataset of crowds: a function whose process is killed now and then, wherever it is."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np

from .dataset import PAYLOAD_LENGTH

KILLED = 0.2
"""Of its calls."""

ELEMENT_S = 0.004
RETRIES = 1_000


def elements(split: int) -> Iterator[dict[str, object]]:
    """Of the number `split`, as of all datasets of chaos."""
    if random.random() < KILLED:
        within_s = random.uniform(0, 2 * ELEMENT_S)  # perhaps in the next split, or behind the last
        threading.Timer(within_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    time.sleep(ELEMENT_S)
    yield {"id": split, "payload": np.full(PAYLOAD_LENGTH, split)}
