"""The rules of the house that no other tool checks: who imports whom, and what is shipped."""

from __future__ import annotations

import ast
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("storage", "journal", "service", "benchmarks")

# What each layer may import besides itself: a layer, or a module with all below it. A module's
# layer is the longest name here that it begins with; `package.*` are the modules right in it.
LOOSE = "service.*"
WORDS = {
    "storage.errors",
    "journal.proto",
    "journal.splits",
    "service.proto",
}  # of the system: almost anybody's
LAYERS: dict[str, set[str]] = {
    "storage.proto": set(),
    "storage.*": {"storage.proto"},
    "storage.local": {"storage.*", "storage.proto"},
    "storage.redis": {"storage.*", "storage.proto"},
    "storage.url": {"storage"},
    "storage": {"storage"},  # its __init__, the public face
    "journal": {"storage"},
    "service.proto": {"journal.proto"},
    LOOSE: WORDS,
    "service.core": {"journal", "storage", "service.errors"},
    "service.connections": {"service.errors", "service.proto", "journal.proto"},
    "service.dispatcher": {
        *("service.core", "service.connections.grpc_server", "service.proto"),
        "service.pipelines.definitions",
        *("journal", "storage", LOOSE),
    },
    "service.pipelines": {LOOSE, *WORDS},
    "service.delivery": {LOOSE, *WORDS},
    "service.transport": {"service.delivery", "service.connections.protocols", LOOSE, *WORDS},
    "service.worker": {
        *("service.pipelines", "service.delivery", "service.transport"),
        *("service.connections", LOOSE, *WORDS),
    },
    "service.client": {
        *("service.pipelines", "service.delivery", "service.transport"),
        *("service.connections", LOOSE, *WORDS),
    },
    "service.servers": {"service.worker", "service.connections", LOOSE, *WORDS},
    "service.chaos": {
        *("service.client", "service.connections", "journal", "storage", LOOSE, *WORDS)
    },
    "service.cli": {"service", "journal", "storage", "benchmarks"},
    "service": {"service"},  # its __init__, the public face
    "benchmarks": {"service", "journal", "storage"},
}

# Packages that nobody knows but the package that they are in.
INNER = {"storage.local", "storage.redis"}

# The core is pure: no clock, no random, no I/O. So it names what it may import.
PURE = {
    *("__future__", "abc", "base64", "bisect", "collections", "copy", "dataclasses", "enum"),
    *("functools", "google", "hashlib", "heapq", "itertools", "json", "math", "msgspec"),
    *("operator", "re", "struct", "types", "typing"),
}
HEAVY = {"tensorflow", "keras", "apache_beam"}
BANNED: dict[str, set[str]] = {  # not even lazily
    "storage": HEAVY | {"grpc"},
    "storage.local": {"redis"},
    "journal": HEAVY | {"grpc", "redis"},
    "service": {"redis"},
    "service.connections": HEAVY,
    "service.dispatcher": HEAVY,
    "service.delivery": HEAVY | {"grpc"},
    "service.transport": HEAVY | {"grpc"},
}


@dataclasses.dataclass(frozen=True)
class Import:
    importer: str  # module, relative to forebay
    imported: str  # module: relative to forebay if `ours`
    ours: bool
    where: str


def read(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def shipped_modules() -> dict[str, pathlib.Path]:
    """The distribution's modules, by their name below forebay; a package is `name.__init__`."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


MODULES = shipped_modules()
HANDWRITTEN = {name: path for name, path in MODULES.items() if not name.endswith("_pb2")}


def imports_of(name: str, path: pathlib.Path) -> Iterator[Import]:
    package = name.split(".")[:-1]
    for node in ast.walk(read(path)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        if isinstance(node, ast.Import):
            yield from (Import(name, a.name, False, where) for a in node.names)
        elif node.level == 0:
            yield Import(name, node.module or "", False, where)
        else:
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            parent = ".".join(filter(None, base))
            for alias in node.names:  # a name is a submodule, or lives in its parent
                child = f"{parent}.{alias.name}"
                known = child in MODULES or f"{child}.__init__" in MODULES
                yield Import(name, child if known else parent, True, where)


IMPORTS = [i for name, path in HANDWRITTEN.items() for i in imports_of(name, path)]


def within(module: str, layer: str) -> bool:
    return f"{module}.".startswith(f"{layer}.")


def layer_of(module: str) -> str:
    if module in LAYERS:
        return module
    loose = f"{module.rpartition('.')[0]}.*"
    package = module.endswith("__init__") or f"{module}.__init__" in MODULES
    if loose in LAYERS and not package:
        return loose
    return max((layer for layer in LAYERS if within(module, layer)), key=len)


def report(wrong: list[str]) -> None:
    assert not wrong, "\n".join(wrong)


def test_imports_point_one_way() -> None:
    wrong = []
    for i in filter(lambda i: i.ours, IMPORTS):
        layer = layer_of(i.importer)
        allowed = {layer, *LAYERS[layer]}
        fine = layer_of(i.imported) in allowed or any(within(i.imported, a) for a in allowed)
        if not fine:
            wrong.append(f"{i.where}: {layer} must not import {i.imported}, only {sorted(allowed)}")
        for inner in (inner for inner in INNER if within(i.imported, inner)):
            outer = inner.rpartition(".")[0]
            if not within(i.importer, outer):
                wrong.append(f"{i.where}: only {outer} itself may import {i.imported}")
    report(wrong)


def test_layers_know_only_their_tools() -> None:
    wrong = []
    for i in IMPORTS:
        top = i.imported.partition(".")[0]
        if i.ours:
            continue
        if within(i.importer, "service.core") and top not in PURE:
            wrong.append(f"{i.where}: the core is pure and must not import {i.imported}")
        banned = [b for layer, b in BANNED.items() if within(i.importer, layer)]
        if any(top in b for b in banned):
            wrong.append(f"{i.where}: {layer_of(i.importer)} must not import {i.imported}")
    report(wrong)


def test_nothing_is_imported_under_a_second_name() -> None:
    """A file loaded as `service.x` and as `forebay.service.x` has every class twice."""
    wrong = [
        f"{i.where}: inside the distribution, import {i.imported} relatively"
        for i in IMPORTS
        if not i.ours and i.imported.partition(".")[0] in {*PACKAGES, "forebay"}
    ]
    for folder in ("tests", "scripts", "deploy"):
        for path in (ROOT / folder).rglob("*.py"):
            wrong += [
                f"{i.where}: import forebay.{i.imported}"
                for i in imports_of(".".join(path.relative_to(ROOT).with_suffix("").parts), path)
                if not i.ours and i.imported.partition(".")[0] in PACKAGES
            ]
    report(wrong)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("forebay.storage", HEAVY | {"grpc", "redis"}),
        ("forebay.service", HEAVY),
        ("forebay.service.dispatcher", HEAVY),
        ("forebay.service.transport", HEAVY | {"grpc"}),
        ("forebay.service.client", {"forebay.service.core", "forebay.service.dispatcher"}),
        ("forebay.service.worker", {"forebay.service.core", "forebay.service.dispatcher"}),
        ("forebay.service.cli", HEAVY),
    ],
)
def test_import_stays_light(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert not absent & set(loaded.split())


def test_every_package_is_shipped() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {f"forebay.{name.rpartition('.')[0]}" for name in MODULES}
    assert folders == set(project["tool"]["setuptools"]["packages"])


def test_constraints_are_plain_versions() -> None:
    """No address and no path gets in, and the few versions that others force are right."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.+!-]+", pin)] == []
    versions = dict(pin.split("==") for pin in pins)
    assert versions["protobuf"].startswith("6.33."), "Beam needs protobuf below 7"
    assert versions["grpcio-tools"].startswith("1.80."), "later ones generate for protobuf 7"


# An address of a package registry, or a path that exists on one machine only.
PRIVATE = re.compile(r"--(?:extra-)?index-url|https?://[^\s/]*pypi|/(?:root|home|Users|work)/\w")


BINARY = {".png", ".tfrecord", ".snapshot"}


def text_files() -> Iterator[pathlib.Path]:
    """The files that can be committed: what .gitignore names is left out."""
    generated = re.compile(r"\.(?!ci$).+|__pycache__|build|dist|.+\.egg-info")
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if not generated.fullmatch(f)]
        for file in files:  # .git is one in a worktree, and says where its repository is
            if file != ".git" and pathlib.Path(file).suffix not in BINARY:
                yield pathlib.Path(folder, file)


def test_no_address_and_no_path_of_one_machine() -> None:
    report(
        [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
            for path in text_files()
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
            if PRIVATE.search(line)
        ]
    )
