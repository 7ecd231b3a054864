"""Formats whose libraries workers have or have not, and tables."""

from __future__ import annotations

from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from forebay import service
from forebay.service.errors import PipelineError

from ..cluster import WorkerProcess
from ..other_packages import install_page
from ..stock import DispatcherProcess


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


def test_workers_read_the_registered_version_of_a_table(tmp_path: Path) -> None:
    delta, of_lance = tmp_path / "delta", tmp_path / "lance"
    write_deltalake(delta, pa.table({"n": range(90), "kind": ["a"] * 90}), partition_by=["kind"])
    lance.write_dataset(pa.table({"n": range(90)}), of_lance, max_rows_per_file=20)
    with DispatcherProcess("memory:") as dispatcher:
        registered = [
            service.register_files(dispatcher.target, path, columns=["n"], shuffle_records=True)
            for path in (delta, of_lance)
        ]
        write_deltalake(delta, pa.table({"n": [90], "kind": ["b"]}), mode="append")
        lance.dataset(of_lance).delete("n > 5")
        with WorkerProcess(dispatcher.address):
            for dataset_id in registered:
                with service.read(dispatcher.target, dataset_id) as elements:
                    assert sorted(int(element["n"]) for element in elements) == [*range(90)]
