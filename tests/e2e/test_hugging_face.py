"""Files in repositories of a hub like Hugging Face's, by its own library."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay import service
from forebay.service.errors import PipelineError

from ..cluster import WorkerProcess
from ..hub import TOKEN, Hub, running_hub
from ..stock import DispatcherProcess

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
