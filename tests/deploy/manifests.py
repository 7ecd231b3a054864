"""What lies in deploy/, as the tools for it read it."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = ("single-node", "redis", "spot", "gke", "stock-clients", "autoscaled")

Object = dict[str, Any]


@functools.cache
def rendered(overlay: str) -> tuple[Object, ...]:
    """The objects that `kubectl apply --kustomize` would send."""
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return tuple(yaml.safe_load_all(done.stdout))


def named(objects: tuple[Object, ...], kind: str, name: str) -> Object:
    (found,) = [o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def secrets(folder: Path) -> tuple[Object, ...]:
    """Those that deploy/certificates makes."""
    command = [str(DEPLOY / "certificates"), str(folder), "--kubernetes"]
    return tuple(yaml.safe_load_all(subprocess.check_output(command, text=True)))
