"""`forebay bench` runs, and writes what it found; all ways read alike. How fast is for people."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay import service
from forebay.benchmarks import run
from forebay.benchmarks.cases import CASES, ENDLESS, pipeline
from forebay.benchmarks.contents import AT_LEAST_ONCE, AT_MOST_ONCE, FILE_CASES, ORDERED, RECORDS
from forebay.benchmarks.in_process import DRIVERS
from forebay.benchmarks.ordered import CASES as ROWS
from forebay.benchmarks.real_files import PAIRS, WAYS
from forebay.benchmarks.results import Reading, Result, compared, together
from forebay.benchmarks.setting import Setting
from forebay.service.cli.bench import bench
from forebay.service.errors import ForebayError
from forebay.storage.tfrecord import read_frames

from .. import forks
from ..stock import OwnDispatcher, stock_workers
from ..terminals import written_to
from ..trainers.conftest import target

__all__ = ["target"]


def forebay(*arguments: object, timeout_s: int = 60) -> subprocess.CompletedProcess[str]:
    return forks.run(["-m", "forebay.service.cli", "bench", *map(str, arguments)], timeout_s)


@pytest.mark.timeout(200)  # TensorFlow is imported eight times, on whatever else is going on
def test_rows_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = forebay(
        *("scalars", "file_tokens", "--quick", "--json", file, "--directory", tmp_path),
        timeout_s=195,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    results = record["results"]
    assert [result["row"] for result in results[:5]] == [*["scalars"] * 4, "file_tokens"]
    for result in results:
        assert len(result["forebay"]) == len(result["peer"]) == len(result["ratios"]) == 1
    whats = " ".join(result["what"] for result in results if result["row"] == "file_tokens")
    for way, (_, peer, _, _) in zip(("read", "from_dataset_id"), (PAIRS[0], PAIRS[2]), strict=True):
        assert f"{way}; peer: {WAYS[peer]}" in whats
    assert len(record["calibrations_ms"]) == 2
    assert "scalars, batched in-graph" in done.stdout
    assert "how quiet the machine was" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("hopes",), "no such row: hopes; there are scalars, records"),
        (("scalars", "--directory", "/nowhere"), "--directory /nowhere is no directory"),
        (("--rounds", 0), "--rounds"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[object, ...], said: str) -> None:
    done = forebay(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def measured(_: Setting) -> list[Result]:
    return [Result(row="row", what="w", unit="u", ours=[2.0], peer=[1.0])]


def broken(_: Setting) -> list[Result]:
    raise ForebayError("a worker ended\nas its log says")


def run_here(file: Path, *rows: str) -> None:
    bench(list(rows), 1, True, str(file), str(file.parent))


def test_a_row_that_fails_does_not_cost_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(run.ROWS, "row", measured)
    monkeypatch.setitem(run.ROWS, "broken", broken)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "figures.json"
    master, slave = os.openpty()
    with open(slave, "w") as terminal, monkeypatch.context() as on_terminal:
        on_terminal.setattr(sys, "stderr", terminal)
        with pytest.raises(ForebayError, match="not all was measured: broken failed, see above"):
            run_here(file, "broken", "row")
    shown = written_to(master).decode()
    assert "measuring row" in shown and "1/2" in shown and "-:--:--" in shown
    record = json.loads(file.read_text())
    assert [result["row"] for result in record["results"]] == ["row"]
    assert record["failed"] == {"broken": "a worker ended\nas its log says"}
    assert "as its log says" in capsys.readouterr().out


def test_an_interrupted_run_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Setting) -> list[Result]:
        raise KeyboardInterrupt

    monkeypatch.setitem(run.ROWS, "row", measured)
    monkeypatch.setitem(run.ROWS, "long", interrupted)
    monkeypatch.setitem(run.ROWS, "broken", broken)
    file = tmp_path / "figures.json"
    with pytest.raises(KeyboardInterrupt):  # for which `forebay` exits with 130
        run_here(file, "row", "long", "broken")
    record = json.loads(file.read_text())
    assert [result["row"] for result in record["results"]] == ["row"]
    assert record["failed"].keys() == {"long"}
    assert capsys.readouterr().err == "", "it is no terminal"


def result(less: bool, ours: list[float], peer: list[float], **required: float) -> Result:
    return Result(
        row="row", what="what", unit="things/s", less=less, ours=ours, peer=peer, **required
    )


def reading(elements: float, seconds: float) -> Reading:
    return Reading(
        elements=elements,
        seconds=seconds,
        client_cpu_s=1.0,
        worker_cpu_s=2.0,
        client_peak_mb=100.0,
        worker_peak_mb=300.0,
        first_s=seconds / 10,
    )


def test_ratios_say_how_many_times_better_ours_is() -> None:
    assert result(False, ours=[10, 30], peer=[5, 10]).ratios() == [2, 3]
    assert result(True, ours=[10, 5], peer=[5, 10]).ratios() == [0.5, 2]
    assert result(False, ours=[10], peer=[]).ratios() == []


@pytest.mark.parametrize(("less", "ours", "peer"), [(False, 3, 0), (True, 0, 3)])
def test_there_is_no_ratio_to_nothing(less: bool, ours: float, peer: float) -> None:
    one = result(less, ours=[ours], peer=[peer], required=3)
    assert (one.ratios(), one.met()) == ([], True)
    assert one.as_json()["median"] == {"peer": peer, "forebay": ours, "ratio": None}
    assert not result(less, ours=[ours], peer=[peer], required_ratio=1).met()


@pytest.mark.parametrize(
    ("less", "ours", "peer", "required", "met", "words"),
    [
        (False, [3, 9, 1], [1, 1, 1], {"required_ratio": 3}, True, "≥ 3 ×"),
        (False, [2, 9, 1], [1, 1, 1], {"required_ratio": 3}, False, "≥ 3 ×"),
        (True, [4], [2], {"required_ratio": 1}, False, "≥ 1 ×"),
        (False, [4000], [], {"required": 4000}, True, "≥ 4,000 things/s"),
        (True, [4], [], {"required": 3}, False, "≤ 3 things/s"),
        (True, [4], [1], {}, True, ""),
    ],
)
def test_medians_have_to_meet_what_is_required(
    less: bool,
    ours: list[float],
    peer: list[float],
    required: dict[str, float],
    met: bool,
    words: str,
) -> None:
    one = result(less, ours, peer, **required)
    assert one.met() is met
    assert one.requirement() == words
    assert one.as_json()["met"] is met


def test_rates_of_several_readers_add_up() -> None:
    one, other = reading(100, 1.0), reading(300, 2.0)
    both = together([one, other])
    assert both.elements_per_s == pytest.approx(100 + 150)
    assert (both.client_cpu_s, both.worker_cpu_s) == (2.0, 2.0)  # of two readers, of one worker
    assert (both.client_peak_mb, both.worker_peak_mb) == (200.0, 300.0)
    assert both.first_s == 0.2


def test_processor_time_is_compared_round_by_round() -> None:
    """A reading has 3 s of processor time."""
    ours, peer = [reading(100, 1.0), reading(50, 1.0)], [reading(150, 1.0), reading(150, 1.0)]
    found = compared("row", "what", "cpu_us", ours, peer, least=0.5)
    assert found.ours == pytest.approx([30_000, 60_000])
    assert found.ratios() == pytest.approx([2 / 3, 1 / 3])
    assert found.met()
    assert not compared("row", "what", "elements_per_s", ours, peer, least=0.6).met()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    for content in [RECORDS, *(case.content for case in FILE_CASES.values())]:
        content.write(directory, quick=True)
    return directory


def size_of(batch: Any) -> int:
    return int(tf.nest.flatten(batch)[0].shape[0])


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("file_")])
def test_a_trainer_gets_as_many_elements_at_once_as_are_counted(name: str, files: Path) -> None:
    case = CASES[name]
    dataset = case.dataset(files, 0)
    cardinality = int(dataset.cardinality())
    assert cardinality == tf.data.INFINITE_CARDINALITY or cardinality >= ENDLESS
    if case.gather is None:
        assert case.batch == 1
    else:
        assert size_of(next(iter(case.gather(dataset)))) == case.batch


@pytest.mark.parametrize("name", ["scalars", "splits"])
def test_a_size_makes_an_end(name: str, files: Path) -> None:
    assert len(list(CASES[name].dataset(files, 7))) == 7


def test_records_are_whole_and_differ(files: Path) -> None:
    with RECORDS.file(files).open("rb") as opened:
        contents = [data for _, data in read_frames(opened.fileno())]
    assert {len(data) for data in contents} == {1024}
    assert len(set(contents)) == RECORDS.quick_count


def test_all_ways_read_the_same_pipeline() -> None:
    for row in ROWS:
        in_order, once = CASES[row + ORDERED], CASES[row + AT_MOST_ONCE]
        least = CASES[row + AT_LEAST_ONCE]
        assert (least.claimed, least.ordered, least.mode) == (True, False, "OFF")
        assert (in_order.ordered, in_order.mode) == (True, "OFF")
        assert (once.ordered, once.mode) == (False, "DYNAMIC")
        assert in_order.numpy and once.numpy and least.numpy


def test_every_other_round_begins_at_the_other_end(tmp_path: Path) -> None:
    setting = Setting(rounds=3, quick=True, path=tmp_path, seconds=0.1, warm_up_s=0.1)
    turns: list[str] = []

    def side(name: str) -> int:
        turns.append(name)
        return len(turns)

    figures = setting.alternate(peer=lambda: side("peer"), ours=lambda: side("ours"))
    assert turns == ["peer", "ours", "ours", "peer", "peer", "ours"]
    assert figures == {"peer": [1, 4, 5], "ours": [2, 3, 6]}
    assert len(setting.calibrations_ms) == 3


SIZE = 3  # elements or batches


def digest(elements: Iterable[Any]) -> list[bytes]:
    """Digests of the elements, of one tensor each, in an order that is not theirs."""
    found = []
    for element in elements:
        value = element.numpy() if hasattr(element, "numpy") else element
        # Only as an object does a string keep trailing zeros.
        array = np.asarray(value, object if isinstance(value, bytes) else None)
        content = array.astype(object).tolist() if array.dtype.kind in "OS" else array.tobytes()
        what = repr((array.shape, array.dtype.kind in "OS" or array.dtype.name, content))
        found.append(hashlib.blake2b(what.encode()).digest())
    return sorted(found)


@pytest.fixture(scope="module")
def peer_target() -> Iterator[str]:
    """Processes, which are killed: a stop of TensorFlow's servers waits for its jobs' ends."""
    peer = OwnDispatcher()
    with stock_workers(peer.address):
        yield peer.target
    peer.kill()


@pytest.mark.parametrize("row", FILE_CASES)
def test_all_ways_give_the_same(row: str, files: Path, target: str, peer_target: str) -> None:
    dataset = pipeline(FILE_CASES[row], files, SIZE)
    wanted = digest(dataset)
    assert len(wanted) == SIZE
    dataset_id = service.register_dataset(target, dataset)
    assert digest(service.read(target, dataset_id)) == wanted
    assert digest(service.from_dataset_id("parallel_epochs", target, dataset_id)) == wanted
    peer = tf.data.experimental.service
    dataset_id = peer.register_dataset(peer_target, dataset)
    assert digest(peer.from_dataset_id("parallel_epochs", peer_target, dataset_id)) == wanted


@pytest.mark.parametrize("drive", DRIVERS.values())
def test_a_driven_pipeline_makes_all_its_elements(drive: Callable[[Any, Any], Any]) -> None:
    made: list[int] = []

    def make(number: Any) -> Any:
        made.append(int(number))
        return number

    def made_of(number: Any) -> Any:
        return tf.py_function(make, [number], tf.int64)

    elements = tf.data.Dataset.range(100).map(made_of).batch(2)
    assert int(drive(elements, tf.constant(7, tf.int64))) == 7
    assert made[:14] == list(range(14))
