"""Each of Beam's runners writes what the first one writes, whoever of its workers is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay import service

from ..forks import Fork
from ..standbys import wait_until
from ..stock import DispatcherProcess

SPEC = {"number": tf.TensorSpec([], tf.int64), "drawn": tf.TensorSpec([2], tf.float64)}


class Gated:
    """A dataset of six splits, and what another run of it has written, undisturbed.

    Once `held` of them have been begun, others wait for the gate.
    """

    def __init__(self, target: str, folder: Path, held: int) -> None:
        begun, gate = folder / "begun", folder / "gate"
        begun.mkdir()
        self._begun, self._gate = begun, gate

        def numbers(split: int) -> Iterator[dict[str, Any]]:
            (begun / f"{split} {os.getpid()}").touch()
            while len(os.listdir(begun)) > held and not gate.exists():
                time.sleep(0.01)
            for number in range(5 * split, 5 * (split + 1)):
                yield {"number": number, "drawn": np.random.rand(2)}

        self.target = target
        self.dataset_id = service.register_dataset(
            target, numbers, splits=range(6), element_spec=SPEC
        )
        self._folder = folder
        self.output = folder / "output"

    def command(self, runner: str, *options: str) -> Fork:
        """`forebay materialize` by this runner, as a process of its own."""
        command = ["-m", "forebay.service.cli", "materialize", self.target, self.dataset_id]
        return Fork([*command, "--output", str(self.output), "--runner", runner, *options])

    def wait_until_begun(self, splits: int) -> None:
        wait_until(lambda: len(os.listdir(self._begun)) >= splits)

    def workers(self) -> set[int]:
        """The processes of Beam's workers that are in a split."""
        found = set()
        for path in self._begun.iterdir():
            process = int(path.name.split()[1])
            while b"sdk_worker_main" not in Path(f"/proc/{process}/cmdline").read_bytes():
                process = int(stat(process)[1])
            found.add(process)
        return found

    def open(self) -> None:
        self._gate.touch()

    def require_equal(self) -> None:
        """To what a single process writes that nobody disturbs."""
        other = self._folder / "undisturbed"
        done = service.materialize(self.target, self.dataset_id, other)
        assert done.elements == 30
        written, wanted = (
            {path.name: path.read_bytes() for path in folder.iterdir()}
            for folder in (self.output, other)
        )
        assert written == wanted

    def run_again_when_a_worker_is_lost(self, workers: int, runner: str, *options: str) -> None:
        """Kill one of the runner's workers in its split. Beam waits for that for ever, until the
        run is killed as well."""
        running = self.command(runner, *options)
        with killed_at_last(running):
            self.wait_until_begun(workers)
            killed, *others = self.workers()
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: has_ended(killed))
        self.open()
        wait_until(lambda: all(map(has_ended, others)))
        running = self.command(runner, *options)
        with killed_at_last(running):
            assert running.wait(100) == 0
        self.require_equal()


@contextlib.contextmanager
def killed_at_last(*processes: Fork) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.finish()


def test_dask_goes_on_when_a_worker_is_killed(
    dispatcher: DispatcherProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = Gated(dispatcher.target, tmp_path, held=2)
    monkeypatch.setenv("DASK_TEMPORARY_DIRECTORY", str(tmp_path / "dask"))
    monkeypatch.setenv("DASK_LOGGING__DISTRIBUTED", "error")
    file = tmp_path / "scheduler.json"
    common = ["--scheduler-file", str(file), "--host", "127.0.0.1", "--dashboard-address", ":0"]
    scheduler = Fork(["-m", "distributed.cli.dask_scheduler", "--port", "0", *common])
    workers = [
        Fork(["-m", "distributed.cli.dask_worker", "--no-nanny", "--nthreads", "1", *common])
        for _ in range(2)
    ]
    with killed_at_last(*workers, scheduler):
        wait_until(lambda: file.exists() and is_json(file))
        running = gated.command("DaskRunner", f"--dask_scheduler_file={file}")
        with killed_at_last(running):
            gated.wait_until_begun(4)  # so each of them is in a split
            workers[0].kill()
            gated.open()
            assert running.wait(100) == 0
    gated.require_equal()


SUBPROCESS = (
    "--environment_type=beam:env:harness_subprocess_python:v1",
    f"--environment_config={sys.executable} -m apache_beam.runners.worker.sdk_worker_main",
)
"""What Beam's Python job server has in place of PROCESS."""


def test_a_portable_runner(dispatcher: DispatcherProcess, tmp_path: Path) -> None:
    file = tmp_path / "port"
    server = Fork(
        ["-m", "apache_beam.runners.portability.local_job_service_main", "--port_file", str(file)]
    )
    with killed_at_last(server):
        wait_until(lambda: file.exists() and is_json(file))
        endpoint = f"--job_endpoint=127.0.0.1:{file.read_text()}"
        gated = Gated(dispatcher.target, tmp_path, held=0)
        gated.run_again_when_a_worker_is_lost(1, "PortableRunner", endpoint, *SUBPROCESS)


def test_several_processes_of_one_machine(dispatcher: DispatcherProcess, tmp_path: Path) -> None:
    gated = Gated(dispatcher.target, tmp_path, held=0)
    options = ("--direct_running_mode=multi_processing", "--direct_num_workers=2")
    gated.run_again_when_a_worker_is_lost(2, "FnApiRunner", *options)  # both are in a split


def stat(process: int) -> list[str]:
    """From its state on."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def has_ended(process: int) -> bool:
    try:
        return stat(process)[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def is_json(file: Path) -> bool:
    try:
        return bool(json.loads(file.read_text()))
    except ValueError:
        return False
