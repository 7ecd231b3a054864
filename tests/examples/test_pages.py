"""Examples, the demo and the notebook run; and so does, as it stands, every Python block of README
and of the pages on frameworks, executors, mixtures, TFDS and ordered reading.

A block is one of three things: a part of a file in examples/, which runs here, too; a
program, which begins with an import and runs here; or lines on a strategy, which begin with a
comment.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest

from .. import forks
from ..frameworks.conftest import frameworks, target

__all__ = ["frameworks", "target"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs/mixtures.md",
    ROOT / "docs/ordered.md",
    ROOT / "docs/executors.md",
    ROOT / "docs/tfds.md",
    *(ROOT / "docs/frameworks").glob("*.md"),
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TEXTS = [textwrap.dedent(path.read_text()) for path in EXAMPLES]
STRATEGIES = {
    "Keras, in one process",
    "OneDeviceStrategy, MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "the same, each task by itself",
}

# Each strategy's lines are run by themselves, all in one process.
PROGRAM = """
import json
import sys

import keras
import tensorflow as tf

from forebay import service

target, snippets = sys.argv[1], json.loads(sys.argv[2])
multi_worker = tf.distribute.MultiWorkerMirroredStrategy()  # which has to be the first


def dataset_fn(context):
    return tf.data.Dataset.range(40).batch(context.get_per_replica_batch_size(4))


def run(title, strategy, training=None, **names):
    seen = []

    def step(batch):
        seen.extend(int(x) for own in strategy.experimental_local_results(batch) for x in own)

    names.update(strategy=strategy, training=training, dataset_fn=dataset_fn, step=step)
    exec(snippets[title], {"service": service, "target": target, **names})
    return sorted(seen)


numbers = tf.data.Dataset.range(40)
pairs = numbers.map(lambda i: (tf.fill([1], i), [1.0])).batch(4)
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
run("Keras, in one process", None, pairs, tested=pairs, model=model)
assert len(model.history.history["val_loss"]) == 5, model.history.history
one_device = tf.distribute.OneDeviceStrategy("cpu:0")
assert run("OneDeviceStrategy, MirroredStrategy", one_device) == [*range(40)]
assert run("MultiWorkerMirroredStrategy", multi_worker) == [*range(40)]
assert run("the same, each task by itself", multi_worker, numbers.batch(4)) == [*range(40)]
"""

# What a program of a page finds in its /data, and what is asked of it afterwards.
PREPARE = """
import numpy as np
import tensorflow as tf

for number in range(2):
    image, label = np.full(64, number / 2, np.float32), np.array([number])
    features = {
        "image": tf.train.Feature(float_list=tf.train.FloatList(value=image)),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=label)),
    }
    example = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
    with tf.io.TFRecordWriter(f"{DATA}/train-{number}.tfrecord") as file:
        for _ in range(32):
            file.write(example)
"""
READ_IT = """
elements = [*service.read(ADDRESS, dataset_id, processing_mode="distributed_epoch")]
assert elements, "the dataset has no elements"
"""


def blocks() -> Iterator[tuple[str, str]]:
    """(where it stands, a block of Python)"""
    for path in PAGES:
        text = path.read_text()
        for found in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{path.relative_to(ROOT)}:{line}", found[1]


def is_a_part_of_an_example(block: str) -> bool:
    """Of consecutive lines, which may be indented further there."""
    wanted = block.strip("\n")
    return any(
        textwrap.indent(wanted, " " * depth, lambda line: bool(line.strip())) in example
        for example in TEXTS
        for depth in range(0, 17, 4)
    )


def snippets() -> dict[str, str]:
    """The code below each comment that begins a line, by the comment's words up to a colon."""
    found = [
        each
        for _, block in blocks()
        if block.startswith("# ")
        for each in re.findall(r"^# (.*)\n((?:[^#\n].*\n|\n)+)", block, re.MULTILINE)
    ]
    # Trainings of their own, which on the page are one that everybody has another strategy for.
    return {
        title.partition(":")[0]: code.replace('"training 1"', repr(title)) for title, code in found
    }


def is_a_program(block: str) -> bool:
    return block.startswith(("import ", "from ")) and not is_a_part_of_an_example(block)


PROGRAMS = [pytest.param(block, id=where) for where, block in blocks() if is_a_program(block)]


def test_every_block_runs_somewhere() -> None:
    for where, block in blocks():
        strategies = block.startswith("# ")
        assert strategies or is_a_program(block) or is_a_part_of_an_example(block), (
            f"{where}: no test runs this block: take it from examples/, or make it a program"
        )
    assert snippets().keys() == STRATEGIES, "PROGRAM runs these"
    assert {where.partition(":")[0] for where, _ in blocks()} == {
        str(path.relative_to(ROOT)) for path in PAGES
    }, "a page has no example"


@pytest.mark.parametrize("block", PROGRAMS)
def test_a_program_runs(
    block: str, target: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    address = target.removeprefix("grpc://")
    np.savez(tmp_path / "images.npz", images=np.zeros([8, 4, 4]), labels=np.arange(8))
    code = block.replace("localhost:5050", address).replace("/data/", f"{tmp_path}/")
    without_tensorflow = "forebay.torch" in block or "forebay.jax" in block
    program = tmp_path / "program.py"
    if without_tensorflow:
        program.write_text(code)
        python = request.getfixturevalue("frameworks")
        environment = {**os.environ, "KERAS_BACKEND": "jax"}
        ran = subprocess.run(
            [python, program], env=environment, capture_output=True, text=True, timeout=300
        )
    else:
        prepared = PREPARE.replace("{DATA}", str(tmp_path)) if "/data/train-" in block else ""
        whole = "" if "ordered=True" in block else READ_IT.replace("ADDRESS", repr(address))
        program.write_text(prepared + code + whole)
        ran = forks.run([str(program)])
    assert not ran.returncode, ran.stderr


def test_each_strategy_s_lines_run(target: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, target, json.dumps(snippets())],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not ran.returncode, ran.stderr


def test_the_table_names_the_call_that_has_no_job_name() -> None:
    """`distribute_across` always has one."""
    page = ROOT / "docs/frameworks/tf_distribute.md"
    rows = [row for row in page.read_text().splitlines() if row.startswith("| ")]
    (unnamed,) = [row for row in rows if "without a `job_name`" in row]
    assert "`service.distribute`" in unnamed
    assert "job_name" not in snippets()["the same, each task by itself"]


@pytest.mark.timeout(300)
def test_it_says_what_it_shows_and_nothing_else() -> None:
    command = [sys.executable, str(ROOT / "examples" / "demo"), "--epochs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    first, *_, last = done.stdout.splitlines()
    assert first == "1797 handwritten digits in 16 TFRecord files"
    assert last == "every image once an epoch, and resumed exactly"
    told = re.findall(r"read in order, (.+?) *│ (1797 images, SHA-256 \w{20})", done.stdout)
    (undisturbed, order), (resumed, same) = told
    assert (undisturbed, resumed) == ("undisturbed", "with a resume")
    assert order == same
    assert "after 896 images; 2 trainers went on" in done.stdout


TIMEOUT_S = 250

WITHOUT_TENSORFLOW = {
    *("digits_pytorch", "digits_jax", "digits_lightning", "digits_transformers", "digits_orbax"),
    "digits_torchrun",
}


@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_learns(example: Path, request: pytest.FixtureRequest) -> None:
    if example.stem in WITHOUT_TENSORFLOW:
        python = request.getfixturevalue("frameworks")
        ended = subprocess.run([python, example], capture_output=True, text=True, timeout=TIMEOUT_S)
    else:
        ended = forks.run([str(example)], timeout_s=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("learned: "), ended.stdout


@pytest.mark.timeout(300)
def test_a_notebook_is_interrupted_and_goes_on(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples" / "first_steps.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear its outputs"
    where = {"metadata": {"path": tmp_path}}
    client = nbclient.NotebookClient(notebook, timeout=200, resources=where)
    interrupted = 0
    results: dict[str, str] = {}  # what cells show, by their last lines
    with client.setup_kernel():
        for number, cell in enumerate(notebook.cells):
            try:
                client.execute_cell(cell, number)
            except nbclient.exceptions.CellExecutionError as error:
                assert error.ename == "KeyboardInterrupt", error
                interrupted += 1
                client.execute_cell(cell, number)
            for output in cell.get("outputs", ()):
                if output.output_type == "execute_result":
                    results[cell.source.splitlines()[-1]] = output.data["text/plain"]
    assert interrupted == 1
    assert results["len(labels)"] == "1797"
    assert results["sorted(labels.tolist()) == sorted(digits.target.tolist())"] == "True"
