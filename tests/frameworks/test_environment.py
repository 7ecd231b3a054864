"""What reads without TensorFlow does where there is none."""

from __future__ import annotations

import pathlib
import subprocess

ABSENT = """
import importlib.util, sys
from forebay import service
import forebay.jax, forebay.torch
service.read
assert not {"tensorflow", "apache_beam"} & {name for name in sys.modules}
print(*(name for name in ("tensorflow", "apache_beam") if importlib.util.find_spec(name)))
"""


def test_it_has_no_tensorflow(frameworks: pathlib.Path) -> None:
    said = subprocess.check_output([frameworks, "-c", ABSENT], text=True, timeout=60)
    assert said.split() == []
