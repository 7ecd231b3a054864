"""deploy/slurm/forebay.sbatch, with nodes of SLURM that are all this machine.

There is no SLURM here: srun and scontrol stand in for it, and start the steps' tasks as processes.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from forebay.service.processes import ChildProcess, free_port

from .manifests import DEPLOY

SRUN = """
    import os, signal, subprocess, sys
    options = [word for word in sys.argv[1:] if word.startswith("--")]
    command = sys.argv[1:][len(options):]
    tasks = []
    for number in range(2):
        names = {"SLURM_PROCID": str(number), "SLURM_STEP_NUM_TASKS": "2"}
        environment = {**os.environ, **names, "SLURMD_NODENAME": "localhost"}
        tasks.append(subprocess.Popen(command, env=environment))
    def forward(number, frame):
        for task in tasks:
            task.send_signal(number)
    signal.signal(signal.SIGTERM, forward)
    sys.exit(max(task.wait() % 256 for task in tasks))
"""

SCONTROL = """
    import sys
    assert sys.argv[1:] == ["show", "hostnames", "localhost[1-2]"], sys.argv
    print("localhost", "localhost", sep="\\n")
"""

TRAIN = """
import os, pathlib, signal, sys, time

from forebay import service

target, folder = os.environ["FOREBAY_TARGET"], pathlib.Path(sys.argv[1])
rank = os.environ["SLURM_PROCID"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))


def numbers(split):
    yield from range(10 * split, 10 * split + 10)


dataset_id = service.register_dataset(target, numbers, splits=range(40))
read = service.read(target, dataset_id, processing_mode="distributed_epoch", job_name="train")
got = [int(x) for x in read]
(folder / f"part{rank}").write_text("\\n".join(map(str, got)))
(folder / f"part{rank}").rename(folder / f"got{rank}")
time.sleep(600)  # until the job ends it
"""


def start(folder: pathlib.Path) -> ChildProcess:
    """The job, whose training is TRAIN."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
        (programs / name).chmod(0o755)
    (folder / "train.py").write_text(TRAIN)
    environment = {
        "PATH": f"{programs}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "123",
        "SLURM_JOB_NODELIST": "localhost[1-2]",
        "FOREBAY_HOST": "127.0.0.1",
        "FOREBAY_PORT": str(free_port()),
        "TMPDIR": str(folder),
        "MARK": str(folder),
    }
    script = [DEPLOY / "slurm" / "forebay.sbatch", "python", folder / "train.py", folder]
    command = ["env", "--chdir", folder, "bash", *script]
    return ChildProcess([str(word) for word in command], None, environment=environment)


def processes(folder: pathlib.Path) -> list[str]:
    """Processes that the job started: "number: command line"."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if f"MARK={folder}\0".encode() in (process / "environ").read_bytes():
                command = (process / "cmdline").read_text().replace("\0", " ")
                found.append(f"{process.name}: {command}")
        except OSError:
            continue
    return found


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Of a job, which ends with the test."""
    yield tmp_path
    for command in processes(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(command.partition(":")[0]), signal.SIGKILL)


@pytest.mark.timeout(300)
def test_a_job_ends_with_its_training_and_leaves_nothing(folder: pathlib.Path) -> None:
    job = start(folder)
    files = [folder / f"got{rank}" for rank in range(2)]
    while not all(file.exists() for file in files):
        assert job.poll() is None
        time.sleep(0.1)
    assert sorted(int(x) for file in files for x in file.read_text().split()) == [*range(400)]
    assert (folder / ".forebay-123" / "job.key").stat().st_mode & 0o777 == 0o600
    assert len(processes(folder)) > 2
    job.send_signal(signal.SIGTERM)  # which the training gets
    assert job.finish() == 7
    assert processes(folder) == []
    assert not (folder / ".forebay-123").exists(), "the key is gone"
