"""Programs of .frameworks' Python, which say in lines of JSON what they find."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest


def said_by(
    python: Path,
    program: str,
    *arguments: object,
    launcher: tuple[object, ...] = (),
    timeout_s: float = 110,
    **environment: str,
) -> list[Any]:
    """What it says, once it has ended in order; a file of its own, as processes that it spawns
    import it. The `launcher` is python's arguments before it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(program)
        command = [str(each) for each in (python, *launcher, path, *arguments)]
        began = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", **environment},
            start_new_session=True,
        )
        try:
            said, errors = began.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(began.pid, signal.SIGABRT)  # all of its processes say where they are
            said, errors = began.communicate()
            pytest.fail(f"not at its end after {timeout_s} s\n{said}\n{errors}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(began.pid, signal.SIGKILL)
    assert began.returncode == 0, f"{said}\n{errors}"
    assert "Warning" not in errors, errors
    return [json.loads(line) for line in said.splitlines()]
