"""The notebook runs from its first cell to its last, and goes on where a cell was interrupted."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_steps.ipynb"


@pytest.mark.timeout(300)
def test_a_notebook_is_interrupted_and_goes_on(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
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
