"""Clusters of trainers that are forked, each with its TF_CONFIG."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..forks import Fork

Cluster = Mapping[str, Sequence[str]]


@contextlib.contextmanager
def tf_config(cluster: Cluster, kind: str, index: int, **task: Any) -> Iterator[None]:
    """This process's environment says so, and with it what it starts."""
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": cluster, "task": {"type": kind, "index": index, **task}}
    )
    try:
        yield
    finally:
        del os.environ["TF_CONFIG"]


def start(program: str | Path, cluster: Cluster, kind: str, index: int, *arguments: object) -> Fork:
    """The task of that cluster; its output is to be read, its errors are this process's. The
    program is code, or a file of it."""
    code = ["-c", program] if isinstance(program, str) else [str(program)]
    with tf_config(cluster, kind, index):
        return Fork([*code, *map(str, arguments)])


def said(task: Fork) -> list[str]:
    """All the lines that it says, once it has ended in order."""
    assert task.stdout is not None
    lines = task.stdout.read().splitlines()
    assert task.finish(60) == 0, lines
    return lines
