"""Programs of .frameworks' Python, which say in lines of JSON what they find."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import tempfile
from typing import Any


def said_by(
    python: pathlib.Path,
    program: str,
    *arguments: object,
    launcher: tuple[object, ...] = (),
    timeout_s: float = 110,
    **environment: str,
) -> list[Any]:
    """What it says, once it has ended in order; a file of its own, as processes that it spawns
    import it. The `launcher` is python's arguments before it."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "program.py"
        path.write_text(program)
        command = [str(each) for each in (python, *launcher, path, *arguments)]
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **environment},
        )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert "Warning" not in ended.stderr, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]
