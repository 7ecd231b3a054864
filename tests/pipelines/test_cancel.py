"""Cancelling ends a pipeline wherever it is, and never stops the process.

Each case has a process of its own, which a watchdog ends: a call that holds Python's global lock
and waits would take this one with it. TensorFlow's `sleep` keeps a lock while it waits for its
input, and wants it to be cancelled.
"""

from __future__ import annotations

import textwrap

from .. import forks

PRELUDE = """
import faulthandler
import os
import threading

import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

from forebay.journal.proto import events_pb2 as ev
from forebay.service.pipelines.tf_data.imports import graph_of
from forebay.service.pipelines import SplitRange
from forebay.service.pipelines.tf_data import drivers
from forebay.service.pipelines.tf_data.pipeline import TfDataPipeline

faulthandler.dump_traceback_later(60, exit=True)
asleep = testing.sleep(1)
asked, closed = threading.Event(), threading.Event()


class Feed:
    sources = [ev.SplitSource(count=100)]

    def __init__(self, ranges):
        self.ranges = ranges

    def is_over(self, sources):
        return False

    def next_range(self, source, opening, endless):
        if self.ranges:
            return self.ranges.pop(0)
        asked.set()
        closed.wait()
        raise RuntimeError("closed")


def start(dataset, feed=None):
    executor = TfDataPipeline(graph_of(dataset), element_spec=dataset.element_spec).run(feed)
    got = []
    reader = threading.Thread(
        target=lambda: got.extend(block.count for block in executor.blocks()), daemon=True
    )
    reader.start()
    return executor, reader, got


count = tf.data.Dataset.range
"""


def run(script: str) -> None:
    done = forks.run(["-c", PRELUDE + textwrap.dedent(script) + "os._exit(0)"])
    assert done.returncode == 0, done.stderr


def test_a_pipeline_that_waits_for_splits() -> None:
    """Before the first ones, and later; the feed is closed before cancelling, or after it."""
    run(
        """
        for ranges in [], [SplitRange(0, 10, 0)]:
            for first, then in ("cancel", "close"), ("close", "cancel"):
                asked.clear()
                closed.clear()
                executor, reader, got = start(count(100).apply(asleep), Feed(list(ranges)))
                steps = {"cancel": executor.cancel, "close": closed.set}
                asked.wait()
                steps[first]()
                steps[then]()
                reader.join()
                assert sum(got) <= 10  # any part of what was ready
        """
    )


def test_a_pipeline_that_is_ahead_of_its_reader_or_yields_nothing() -> None:
    run(
        """
        full = count(10).repeat().map(lambda i: tf.zeros([1 << 20])).apply(asleep)
        executor = TfDataPipeline(graph_of(full), element_spec=full.element_spec).run(None)
        blocks = executor.blocks()
        next(blocks)
        executor.cancel()
        blocks.close()

        never = count(10).repeat().filter(lambda i: i < 0)
        for dataset in never, never.prefetch(2), never.ignore_errors():
            executor, reader, got = start(dataset)
            executor.cancel()
            reader.join()
            assert got == []
        """
    )


def test_a_pipeline_in_a_function_of_the_users() -> None:
    """Where TensorFlow itself cannot end it, as here, all else goes on."""
    run(
        """
        drivers.UNWIND_S = 0
        inside, leave = threading.Event(), threading.Event()

        def wait(i):
            inside.set()
            leave.wait()
            return i

        def waiting(i):
            return tf.numpy_function(wait, [i], tf.int64)

        executor, reader, got = start(count(3).map(waiting))
        inside.wait()
        executor.cancel()
        leave.set()
        reader.join()
        assert got == []

        inside.clear()
        leave.clear()
        executor, reader, got = start(count(3).map(waiting).apply(asleep))
        inside.wait()
        executor.cancel()
        reader.join(0.5)  # so that it begins to wait for the lock
        other, reader, got = start(count(3))
        reader.join()
        assert sum(got) == 3
        """
    )
