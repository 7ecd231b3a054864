"""The oldest TensorFlow, a middle one and the newest, each in an environment as pip makes it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.errors import PipelineError
from forebay.service.processes import ChildProcess

from ..stock import STOP_TIMEOUT_S, DispatcherProcess

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("job.py")


def python_of(name: str) -> Path:
    """The Python of an environment, which `make test-nightly` makes before: it takes minutes."""
    made = ROOT / ".environments" / name
    if not (made / "made-of").exists():
        pytest.fail(f"{made} is not there: run scripts/environment {name}")
    return made / "bin" / "python"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "protobuf", "numpy"),
    [("tf-2.16", "4.25.", "1.26."), ("tf-2.18", "5.", "2.0."), ("tf-2.21", "7.", "2.")],
)
def test_a_job_in_an_environment(name: str, protobuf: str, numpy: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [python_of(name), JOB, tmp_path], cwd=tmp_path, capture_output=True, text=True, timeout=290
    )
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    versions = zip(found, (f"{name.removeprefix('tf-')}.", protobuf, numpy), strict=True)
    assert all(version.startswith(wanted) for version, wanted in versions), found


def test_an_older_worker_names_the_version_that_a_graph_needs(
    dispatcher: DispatcherProcess,
) -> None:
    """It runs what it can: operations that both have, with attributes that only the newer has."""
    target = dispatcher.target
    dataset = tf.data.Dataset.range(8)
    common = service.register_dataset(target, dataset.map(lambda n: n + 1))
    newer = service.register_dataset(
        target, dataset.map(lambda n: tf.raw_ops.CheckPinned(tensor=n))
    )
    command = ["-m", "forebay.service.cli", "worker", "--dispatcher", dispatcher.address]
    worker = ChildProcess([str(python_of("tf-2.16")), *command], None, piped=True)
    try:
        assert worker.line()
        with service.read(target, common, processing_mode="distributed_epoch") as elements:
            assert sorted(map(int, elements)) == list(range(1, 9))
        said = (
            r"registered by TensorFlow 2\.21, and this process has TensorFlow 2\.16\.\d, which "
            "lacks the operation 'CheckPinned': run workers, "
        )
        how: dict[str, Any]
        for how in ({"processing_mode": "distributed_epoch"}, {"ordered": True}):
            with (
                pytest.raises(PipelineError, match=said),
                service.read(target, newer, **how) as elements,
            ):
                list(elements)
    finally:
        worker.terminate()
        worker.finish(STOP_TIMEOUT_S)
