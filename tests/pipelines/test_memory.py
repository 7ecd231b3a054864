"""What pipelines do to the memory of the process that they run in.

Each case has a process of its own: what malloc is told, it is told once.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap

import pytest

from forebay.service import malloc

from .. import forks

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc's malloc is told anything"
)

PRELUDE = """
import ctypes
import threading

import numpy as np
import tensorflow as tf

from forebay.journal.proto import events_pb2 as ev
from forebay.service import malloc
from forebay.service.client.tf_elements import dataset_of_blocks
from forebay.service.pipelines import SplitRange
from forebay.service.pipelines.tf_data.imports import graph_of
from forebay.service.pipelines.tf_data.pipeline import TfDataPipeline


class Info(ctypes.Structure):  # mallinfo2(3)
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        .split()
    ]


libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info


def in_use():
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


class Feed:
    sources = [ev.SplitSource(count=100)]

    def __init__(self, *ranges):
        self.ranges = [*ranges]

    def is_over(self, sources):
        return False

    def next_range(self, source, opening, endless):
        return self.ranges.pop(0) if self.ranges else None


def comes_from_the_system(size):
    \"""Does each large buffer, once such buffers were freed before, consist of new pages?\"""
    for _ in range(3):
        np.empty(size + (1 << 20), np.uint8)
    before = libc.mallinfo2().hblkhd
    buffer = np.empty(size, np.uint8)
    return libc.mallinfo2().hblkhd >= before + len(buffer)
"""


def run(script: str, **environment: str) -> None:
    code = PRELUDE + textwrap.dedent(script)
    if environment:  # which malloc reads when a program begins
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
    else:
        done = forks.run(["-c", code])
    assert done.returncode == 0, done.stderr


TRAINER = """
        numbers = tf.data.Dataset.range(100)
        executor = TfDataPipeline(graph_of(numbers), element_spec=numbers.element_spec).run(None)
        read = dataset_of_blocks(executor.blocks, numbers.element_spec)
        assert len(list(read)) == 100
        """


def test_a_trainer_keeps_the_large_buffers_of_its_steps() -> None:
    run(
        TRAINER
        + """
        assert not comes_from_the_system(8 << 20)
        signature = tf.TensorSpec([], tf.int64)
        list(tf.data.Dataset.from_generator(lambda: iter([1]), output_signature=signature))
        assert not comes_from_the_system(8 << 20)
        """
    )


def test_a_trainer_whose_environment_decides() -> None:
    run(TRAINER + "assert comes_from_the_system(8 << 20)", MALLOC_TRIM_THRESHOLD_="131072")


def test_a_pipeline_on_leased_splits_keeps_its_large_buffers() -> None:
    run(
        """
        numbers = tf.data.Dataset.range(100)
        feed = Feed(SplitRange(0, 50, 0), SplitRange(50, 50, 0))
        executor = TfDataPipeline(graph_of(numbers), element_spec=numbers.element_spec).run(feed)
        assert sum(block.count for block in executor.blocks()) == 100
        assert not comes_from_the_system(8 << 20)
        """
    )


def test_what_a_thread_has_freed_goes_back_to_the_system() -> None:
    run(
        """
        kept = []

        def work():  # in an arena of its own, with something left at its top
            many = [np.ones(100_000, np.uint8) for _ in range(500)]
            kept.append(np.ones(100_000, np.uint8))

        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        before = resident()
        malloc.give_back()
        assert resident() < before - (40 << 20)
        """
    )


def test_what_large_tensors_a_worker_has_freed_is_mallocs_again() -> None:
    run(
        """
        malloc.manage_large_tensors()
        many = [tf.fill([1 << 18], float(i)) for i in range(64)]

        held = in_use()
        del many
        assert held - in_use() > 48 << 20
        """,
        TF_ENABLE_ONEDNN_OPTS="1",
    )


def test_a_worker_whose_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(malloc.SYSTEM_ALLOCATOR, "0")
    monkeypatch.setattr(malloc, "keep_large_buffers", pytest.fail)
    malloc.manage_large_tensors()
    assert os.environ[malloc.SYSTEM_ALLOCATOR] == "0"


def test_runs_leave_nothing_behind() -> None:
    """Neither long runs nor bundles: less than 10 KB each, of what malloc has given out."""
    run(
        """
        import gc

        dataset = tf.data.Dataset.range(20).shuffle(9).map(lambda i: tf.range(i))
        graph = graph_of(dataset)
        pipeline = TfDataPipeline(graph, element_spec=dataset.element_spec)

        def after(runs):
            for number in range(2 * runs):
                bundle = pipeline.bundle(SplitRange(0, 20, 0), number=number, seed=0)
                assert sum(block.count for block in bundle.blocks()) == 20
            for _ in range(runs):
                one = TfDataPipeline(graph, element_spec=dataset.element_spec)
                feed = Feed(SplitRange(0, 20, 0))
                assert sum(block.count for block in one.run(feed).blocks()) == 20
                one.close()
            gc.collect()
            return in_use()

        few = after(20)
        more = after(40)
        assert more - few < 40 * 10_000, (more - few) / 40
        """
    )
