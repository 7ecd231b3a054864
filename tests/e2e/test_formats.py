"""A format of another package, which workers have or have not."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from forebay import service
from forebay.service.errors import PipelineError

from ..cluster import WorkerProcess
from ..other_packages import install_page
from ..stock import DispatcherProcess


def test_workers_read_a_format_that_their_packages_bring(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
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
