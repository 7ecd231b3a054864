"""Packages as an installer would leave them, for a folder of sys.path."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def install(folder: Path, name: str, group: str, entries: Mapping[str, str]) -> None:
    """Let a package of that name have these entry points."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{entry} = {value}\n" for entry, value in entries.items())
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{lines}")


def install_page(folder: Path, page: str, name: str) -> None:
    """The package that a page shows, and its tests."""
    text = (DOCS / page).read_text()
    module, tests = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (project,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (folder / f"{name}.py").write_text(module)
    (folder / f"test_{name}.py").write_text(tests)
    [(group, entries)] = tomllib.loads(project)["project"]["entry-points"].items()
    install(folder, name, group, entries)
