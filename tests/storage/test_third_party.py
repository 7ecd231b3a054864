"""Storages of other packages: docs/storages.md is one, and what is said of others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.storage import StorageUnusable, open_storage
from forebay.storage.url import GROUP

from ..other_packages import install, install_page
from ..standbys import leads
from ..stock import DispatcherProcess


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with the package that the page shows, and its tests."""
    install_page(tmp_path, "storages.md", "forebay_sqlite")
    return tmp_path


@pytest.mark.long
def test_the_storage_of_the_page_passes_the_contract(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(page))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(page)]
    done = subprocess.run(command, cwd=page, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d\d passed", done.stdout)


def test_a_dispatcher_goes_on_with_it(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(page))
    with DispatcherProcess(f"sqlite://{page}/journal.db") as dispatcher:
        assert leads(dispatcher, 1)
        dispatcher.kill_and_restart()
        assert leads(dispatcher, 2)


def refusal(url: str) -> str:
    with pytest.raises(StorageUnusable) as error:
        open_storage(url)
    return str(error.value)


def test_what_is_said_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "etcd_of_one", GROUP, {"etcd": "one:open", "redis": "one:open"})
    assert "etcd:…, or install the package that brings the scheme" in refusal("etdc://host")
    assert "one:open of the package etcd_of_one cannot be loaded (ModuleNotFoundError: No " in (
        refusal("etcd://user:secret@host")
    )
    (tmp_path / "one.py").write_text("")
    assert "one:open of the package etcd_of_one cannot be loaded" in refusal("ETCD://host")
    (tmp_path / "three.py").write_text("def make(url, *, allow_volatile):\n    return {}\n")
    install(tmp_path, "list_of_three", GROUP, {"list": "three:make"})
    assert "returned a dict, which is no forebay.storage.Storage" in refusal("list://host")
    (tmp_path / "four.py").write_text("def make(url, **_):\n    raise OSError(url)\n")
    install(tmp_path, "bad_of_four", GROUP, {"bad": "four:make", "worse": "five:make"})
    assert "raised OSError; mend" in refusal("bad://user:secret@host")
    (tmp_path / "five.py").write_text("raise RuntimeError('no such machine')\n")
    assert "(RuntimeError: no such machine); mend" in refusal("worse://host")
    install(tmp_path, "etcd_of_two", GROUP, {"etcd": "two:open"})
    said = refusal("etcd://user:secret@host")
    assert "several packages" in said
    assert "etcd_of_one" in said
    assert "etcd_of_two" in said
    assert "secret" not in said
    open_storage("redis://host").close()  # ours
