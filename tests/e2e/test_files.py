"""Files of records: in the order that arithmetic says, of formats of packages, and of a hub."""

from __future__ import annotations

import gzip
import io
import itertools
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay import service
from forebay.service.client.reader import fetch_dataset
from forebay.service.errors import PipelineError
from forebay.service.order import EpochOrder, permuted_many
from forebay.storage.tfrecord import frame

from ..cluster import WorkerProcess
from ..hub import TOKEN, Hub, running_hub
from ..ordered_reads import Cluster, as_bytes, read
from ..other_packages import install_page
from ..record_files import FORMATS, GROUP, MDS_COLUMNS, pattern, written
from ..standbys import status
from ..stock import DispatcherProcess

COUNTS = (40, 1, 63, 16)
SPLIT = 9
COLUMNS = {
    "mds": MDS_COLUMNS,
    "parquet": ["bytes", "number", "list", "pair", "kind", "fixed", "time"],
    "arrow": ["bytes", "number", "list", "half", "kind", "day"],
}


class Data:
    """The files of a format, and their records as the format's own library reads them."""

    def __init__(self, format: str, directory: Path) -> None:  # noqa: A002
        found = written(format, directory, COUNTS)
        columns = COLUMNS.get(format)
        if columns is not None:
            found = [{name: record[name] for name in columns} for record in found]
        self.records = [*map(as_bytes, found)]
        self.pattern = pattern(format, directory)
        self.how: dict[str, Any] = {"columns": columns} if columns else {}
        self.count = len(self.records)
        self.cuts = [*range(0, self.count, SPLIT), self.count]
        self.groups = [0]  # where splits of a row group or two begin
        if format in ("parquet", "arrow"):
            ends = [min(at + GROUP, count) for count in COUNTS for at in range(0, count, GROUP)]
            before = np.repeat(np.cumsum([0, *COUNTS[:-1]]), [-(-n // GROUP) for n in COUNTS])
            for end in np.array(ends) + before:
                if end - self.groups[-1] >= SPLIT or end == self.count:
                    self.groups.append(int(end))

    def register(self, target: str, **how: Any) -> str:
        return service.register_files(target, self.pattern, split_records=SPLIT, **self.how | how)

    def in_order(
        self, epoch: int, seed: int, *, shuffled: bool, cycle_length: int, block_length: int
    ) -> list[bytes]:
        """An epoch of an ordered read."""
        records = self.records
        cuts = self.groups if len(self.groups) > 1 and not shuffled else self.cuts
        if shuffled:
            ranks = permuted_many(np.arange(self.count), self.count, seed, epoch)
            records = [records[number] for number in ranks]
        bundles = len(cuts) - 1
        at = permuted_many(np.arange(bundles), bundles, seed, epoch)
        order = EpochOrder(bundles, cycle_length, block_length, np.diff(cuts)[at])
        places, indexes = order.elements(0, order.known_until)
        return [
            records[cuts[at[place]] + index]
            for place, index in zip(places.tolist(), indexes.tolist(), strict=True)
        ]


@pytest.fixture(scope="module", params=FORMATS)
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Data:
    return Data(request.param, tmp_path_factory.mktemp(request.param))


def test_the_order_is_what_arithmetic_says(cluster: Cluster, data: Data) -> None:
    """With any number of workers and consumers, from any position, for two epochs."""
    draws = random.Random(data.pattern.rpartition(".")[2])
    registered = {
        shuffled: data.register(cluster.target, shuffle_records=shuffled)
        for shuffled in (False, True)
    }
    for case in range(3):
        shuffled = case % 2 == 1
        seed = draws.randrange(100)
        order: dict[str, Any] = {
            "cycle_length": draws.choice([1, 3, 16]),
            "block_length": draws.choice([1, 4]),
        }
        cluster.resize(draws.randint(1, 3))
        position = draws.choice([0, draws.randrange(2 * data.count)])
        epoch = position // data.count
        expected = data.in_order(epoch, seed, shuffled=shuffled, **order)
        found = read(
            cluster.target,
            registered[shuffled],
            draws.randint(1, 3),
            start_position=position,
            seed=seed,
            **order,
        ).elements
        assert found == expected[position - epoch * data.count :], (case, order, position)


def test_splits_of_a_bundle_follow_each_other(cluster: Cluster, data: Data) -> None:
    """Also where a bundle has several, whose lengths nobody has declared."""
    dataset_id = data.register(cluster.target)
    how: dict[str, Any] = {"shuffle": False, "cycle_length": 1, "bundle_splits": 3}
    found = read(cluster.target, dataset_id, start_position=20, **how).elements
    assert found == data.records[20:]


@pytest.mark.parametrize("mode", ["distributed_epoch", "parallel_epochs"])
def test_reads_that_are_not_ordered(cluster: Cluster, data: Data, mode: str) -> None:
    """Workers of a divided read shuffle alike, and each epoch otherwise."""
    cluster.resize(2)
    dataset_id = data.register(cluster.target, shuffle_records=True)
    for _ in range(2):
        with service.read(cluster.target, dataset_id, processing_mode=mode) as elements:
            found = Counter(map(as_bytes, elements))
        times = 2 if mode == "parallel_epochs" else 1
        assert found == Counter(times * data.records)


def test_at_least_once(cluster: Cluster, data: Data) -> None:
    dataset_id = data.register(cluster.target, shuffle_records=True)
    with service.read(
        cluster.target, dataset_id, delivery="at_least_once", bundle_splits=1, seed=1
    ) as elements:
        assert Counter(map(as_bytes, elements)) == Counter(data.records)


def test_records_that_are_left_out_have_no_place_in_any_epoch(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The journal names each once, whichever worker read it how often."""
    path = tmp_path / "a.tfrecord"
    path.write_bytes(b"".join(frame(b"%d" % number) for number in range(90)))

    def mapped(record: bytes) -> int | None:
        if int(record) in (17, 55):
            raise ValueError("no")
        return None if int(record) == 30 else int(record)

    dataset_id = service.register_files(
        cluster.target, path, map=mapped, on_error="skip", split_records=9
    )

    how: dict[str, Any] = {"ordered": True, "seed": 1, "job_name": "skips"}
    good = [number for number in range(90) if number not in (17, 30, 55)]
    epochs = []
    for start in (0, 87):
        reading = service.read(cluster.target, dataset_id, start_position=start, **how)
        with reading as elements:
            epochs.append([int(number) for number in itertools.islice(elements, 87)])
            (job,) = (
                j
                for j in status(cluster.dispatcher)["jobs"]
                if j["name"] and j["name"].endswith("/skips")
            )
            (iteration,) = job["iterations"]
            assert not [*elements]
    assert [*map(sorted, epochs)] == [good, good] and epochs[0] != epochs[1]
    assert iteration["skipped"] == 2
    skips = iteration["skips"]
    assert sorted((skip["split"], skip["element"], skip["reason"]) for skip in skips) == [
        (1, 8, f"record 17 of {path}: ValueError('no')"),
        (6, 1, f"record 55 of {path}: ValueError('no')"),
    ]
    how["job_name"] = "within"
    within = service.read(cluster.target, dataset_id, start_position=50, **how)
    assert [int(number) for number in within] == epochs[0][50:]


def test_compressed_lines_that_nobody_counted(cluster: Cluster, tmp_path: Path) -> None:
    """Lengths are learned; what is broken has no place in any epoch."""
    cluster.resize(2)
    good = []
    for file in range(5):
        rows = [1000 * file + number for number in range(400 * (file % 3))]
        lines = [b'{"n": %d, "at": %d}\n' % (row, row) for row in rows]
        if file == 4:
            lines[200] = b'{"n": \n'
        good += [row for at, row in enumerate(rows) if (file, at) != (4, 200)]
        (tmp_path / f"{file}.jsonl.gz").write_bytes(gzip.compress(b"".join(lines)))
    dataset_id = service.register_files(cluster.target, tmp_path, count=False, on_error="skip")
    total = len(good)

    def from_position(start: int, **how: Any) -> list[int]:
        name = f"lines-{start}-{len(how)}"
        with service.read(
            cluster.target, dataset_id, ordered=True, start_position=start, job_name=name, **how
        ) as elements:
            return [int(one["n"]) for one in elements]

    assert from_position(610, shuffle=False, cycle_length=1) == good[610:]  # counts what is before
    assert from_position(0, shuffle=False, cycle_length=1) == good
    epochs = [from_position(start, seed=3) for start in (0, total)]
    assert [*map(sorted, epochs)] == [good, good] and epochs[0] != epochs[1]
    for start in (333, total - 1, total + 900):
        assert from_position(start, seed=3) == epochs[start // total][start % total :]
    with service.read(
        cluster.target, dataset_id, delivery="at_least_once", bundle_splits=1, seed=1
    ) as elements:
        assert Counter(int(one["n"]) for one in elements) == Counter(good)


def test_the_dispatcher_knows_what_has_code(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(frame(b"a record"))
    for function, is_plain in ((None, True), (len, False)):
        dataset_id = service.register_files(cluster.target, tmp_path, map=function)
        definition = fetch_dataset(cluster.target, dataset_id).definition
        assert definition.python_function.no_code == is_plain


def test_nested_columns_through_the_service(cluster: Cluster, tmp_path: Path) -> None:
    """Lists of lists are ragged: as a function has them, in batches, and in TensorFlow."""
    grid: list[list[list[int]]] = [[[1], [2, 3]], [], [[]], [[4, 5, 6]]]
    table = pa.table({"a": [{"g": one, "s": [{"t": "x" * len(one)}]} for one in grid]})
    pq.write_table(table, tmp_path / "a.parquet")

    def lists(ragged: Any) -> list[list[int]]:
        return [one.tolist() for one in np.split(ragged.values, ragged.row_splits[1:-1])]

    dataset_id = service.register_files(cluster.target, tmp_path)
    with service.read(
        cluster.target, dataset_id, ordered=True, shuffle=False, batch_size=4
    ) as batches:
        batch = next(iter(batches))["a"]
    assert [lists(one) if len(one.row_splits) > 1 else [] for one in batch["g"]] == grid
    assert [one.tolist() for one in batch["s"]["t"]] == [[b"xx"], [b""], [b"x"], [b"x"]]
    found = service.from_dataset_id(service.ShardingPolicy.DYNAMIC, cluster.target, dataset_id)
    assert sorted(one["a"]["g"].to_list() for one in found) == sorted(grid)
    mapped = service.register_files(cluster.target, tmp_path, map=lambda record: record["a"])
    with service.read(cluster.target, mapped, ordered=True, shuffle=False) as elements:
        assert [one["g"].row_splits.tolist() for one in itertools.islice(elements, 4)] == [
            [0, 1, 3], [0], [0, 0], [0, 3],
        ]  # fmt: skip


def test_workers_read_a_format_that_their_packages_bring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    install_page(packages, "formats.md", "forebay_fvecs")
    monkeypatch.syspath_prepend(packages)
    vectors = np.random.default_rng(0).random((90, 7), np.float32)
    sizes = np.full((90, 1), 7, np.int32).view(np.float32)
    np.hstack([sizes, vectors]).tofile(tmp_path / "a.fvecs")
    with DispatcherProcess("memory:") as dispatcher:
        dataset_id = service.register_files(dispatcher.target, tmp_path, split_records=7)
        with (
            WorkerProcess(dispatcher.address, {"PYTHONPATH": str(packages)}),
            service.read(
                dispatcher.target, dataset_id, ordered=True, shuffle=False, cycle_length=1
            ) as elements,
        ):
            np.testing.assert_array_equal(np.stack([*elements]), vectors)
        with (
            WorkerProcess(dispatcher.address),
            pytest.raises(PipelineError, match="by forebay_fvecs, which is not installed"),
            service.read(dispatcher.target, dataset_id) as elements,
        ):
            next(iter(elements))


REGISTER = """
import sys
from forebay import service
print(service.register_files(sys.argv[1], sys.argv[2]))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with running_hub() as running:
        running.home = str(tmp_path_factory.mktemp("home"))
        yield running


def table(numbers: range) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"n": numbers}), file, row_group_size=100)
    return file.getvalue()


def register(
    hub: Hub, dispatcher: DispatcherProcess, url: str, token: str = ""
) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the library reads its environment as it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", REGISTER, dispatcher.target, url],
        env=environment(hub, token),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert TOKEN not in done.stdout + done.stderr
    return done


def registered(hub: Hub, dispatcher: DispatcherProcess, url: str, token: str = "") -> str:
    done = register(hub, dispatcher, url, token)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def environment(hub: Hub, token: str) -> dict[str, str]:
    return {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HOME": hub.home}


def numbers(target: str, dataset_id: str) -> list[int]:
    order: dict[str, Any] = {"ordered": True, "shuffle": False, "cycle_length": 1}
    with service.read(target, dataset_id, **order) as elements:
        return [int(element["n"]) for element in elements]


def test_the_commit_of_the_registration_is_what_is_read(
    hub: Hub, dispatcher: DispatcherProcess
) -> None:
    files = {"data/0.parquet": table(range(300)), "data/1.parquet": table(range(300, 500))}
    sha = hub.commit("someone/numbers", {**files, "README.md": b"#"})
    url = "hf://datasets/someone/numbers"
    dataset_id = registered(hub, dispatcher, f"{url}/data/*.parquet")
    hub.commit("someone/numbers", {"data/0.parquet": table(range(7)), "more/1.parquet": b""})
    hub.asked.clear()
    with WorkerProcess(dispatcher.address, environment(hub, "")):
        assert numbers(dispatcher.target, dataset_id) == [*range(500)]
        asked = [one for one in hub.asked if "/numbers/" in one]
        assert len({one.split()[0] for one in asked if f"/resolve/{sha}/data/" in one}) == 2
        assert all(sha in one for one in asked)
        newer = registered(hub, dispatcher, f"{url}@main/data/")
        assert numbers(dispatcher.target, newer) == [*range(7)]
        again = registered(hub, dispatcher, f"{url}@{sha}/data/*.parquet")
        assert again == dataset_id


def test_a_private_repository_needs_a_token_that_nobody_sees(
    hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.commit("someone/secret", {"0.parquet": table(range(50))})
    hub.private.add("someone/secret")
    url = "hf://datasets/someone/secret/0.parquet"
    with DispatcherProcess(tmp_path) as dispatcher:
        refused = register(hub, dispatcher, url).stderr
        assert "NotFound" in refused
        assert "or is private: set HF_TOKEN where this runs; a data set is hf:" in refused
        dataset_id = registered(hub, dispatcher, url, TOKEN)
        with (
            WorkerProcess(dispatcher.address, environment(hub, "")),
            pytest.raises(PipelineError, match="set HF_TOKEN where this runs") as error,
        ):
            numbers(dispatcher.target, dataset_id)
        with WorkerProcess(dispatcher.address, environment(hub, TOKEN)):
            assert numbers(dispatcher.target, dataset_id) == [*range(50)]
    assert TOKEN not in str(error.value)
    assert TOKEN not in "".join(capfd.readouterr())
    kept = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"someone/secret@" in kept
    assert TOKEN.encode() not in kept


def test_what_is_not_there_is_named(hub: Hub, dispatcher: DispatcherProcess) -> None:
    hub.commit("someone/few", {"0.parquet": table(range(5))})
    for place, said in (
        ("few@nothing/0.parquet", "few@nothing"),
        ("few/*.tar", "no object matches 'hf://datasets/someone/few@"),
        ("few/1.parquet", "few@"),
    ):
        assert said in register(hub, dispatcher, f"hf://datasets/someone/{place}").stderr
