"""Builds the distributions, installs them where nothing else is, and imports every module.

forebay is installed by itself first: `forebay chaos` and `forebay bench` must say what to install.
Then its extra brings forebay-tools, which has their code.

A user's first hour comes last: pip installs the wheel, then PyArrow by its extra, without our
constraints, and the program of docs/install.md reads a batch of a directory of Parquet files.

Only the base dependencies are installed there. A module that stops at an extra is imported once
more here, in the development environment, which has them all but PyTorch and JAX: what needs these
is imported by tests/frameworks.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile
import venv
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
FACADES = ("torch", "jax", "keras")
MAIN = ("storage", "journal", "service", *(f"frameworks/{name}" for name in FACADES))
TOOLS = ("chaos", "benchmarks")
SHIPPED = (".py", ".pyi", ".proto", ".typed", ".html", ".css", ".js", ".txt")

# Prints the modules that need one of the extras, one a line; fails at any other import error.
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in sys.argv[1].split(","):
            raise
        print(name)
"""
IMPORT_ALL_STRICTLY = ("-W", "error", "-c", IMPORT_ALL)
EXTRAS = (
    "tensorflow,keras,apache_beam,torch,jax,psycopg,aiohttp,prometheus_client,distributed,pytest,"
)
EXTRAS += "hypothesis,jinja2,markupsafe,ray"

PARQUET = """
import importlib.util, sys
import pyarrow as pa, pyarrow.parquet as pq

assert not importlib.util.find_spec("tensorflow")
for part in range(2):
    numbers = pa.table({"number": range(part * 50, part * 50 + 50)})
    pq.write_table(numbers, f"{sys.argv[1]}/{part}.parquet")
"""
FIRST_PROGRAM = re.compile(r"```python\n(.*?)```", re.DOTALL)  # of docs/install.md


def run(*command: str | pathlib.Path, cwd: pathlib.Path) -> str:
    """Run a command outside the repo, so that only what is installed can be imported."""
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        shown = " ".join(map(str, command))
        raise SystemExit(f"{done.stdout}\ncheck_wheel: exit {done.returncode} of: {shown[:500]}")
    return done.stdout


def shipped_files(packages: tuple[str, ...]) -> set[str]:
    """What the wheel with these packages must hold, by its path there."""
    return {
        f"forebay/{path.relative_to((ROOT / package).parent)}"
        for package in packages
        for path in (ROOT / package).rglob("*")
        if path.suffix in SHIPPED
    }


def build(project: pathlib.Path, packages: tuple[str, ...], scratch: pathlib.Path) -> pathlib.Path:
    """Build the project's wheel into `scratch`; fail unless it has these packages and no other."""
    # The wheel is built from the sdist, so no stale build/ in the repo gets into it.
    out = scratch / f"of {packages[0]}"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, project, cwd=scratch)
    (wheel,) = out.glob("*.whl")
    files = shipped_files(packages)
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("forebay/")}
    if wrong := files ^ held:
        raise SystemExit(
            f"check_wheel: {wheel.name} lacks {', '.join(sorted(wrong - held)) or 'nothing'}, and "
            f"must not have {', '.join(sorted(wrong - files)) or 'anything else'}; is the package "
            f"in [tool.setuptools] packages of {project / 'pyproject.toml'}?"
        )
    return wheel.rename(scratch / wheel.name)


def check_modules(python: pathlib.Path, packages: tuple[str, ...], scratch: pathlib.Path) -> str:
    """Import all modules of these packages; return how many there are, and which need an extra."""
    modules = sorted(
        file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for file in shipped_files(packages)
        if file.endswith(".py") and not file.endswith("__main__.py")
    )
    with_extras = run(python, *IMPORT_ALL_STRICTLY, EXTRAS, *modules, cwd=scratch).split()
    run(sys.executable, *IMPORT_ALL_STRICTLY, "torch,jax", *with_extras, cwd=scratch)
    return f"{len(modules)} modules imported; in need of an extra: {with_extras}"


def check_says_what_to_install(forebay: pathlib.Path, command: str, scratch: pathlib.Path) -> None:
    """Without forebay-tools the command must fail with one line that names its extra.

    It names TensorFlow's as well, which is not installed here either.
    """
    done = subprocess.run(
        [forebay, command], cwd=scratch, stderr=subprocess.PIPE, text=True, check=False
    )
    one_line = len(done.stderr.splitlines()) == 1
    if done.returncode != 1 or not one_line or f"'.[{command}," not in done.stderr:
        raise SystemExit(
            f"check_wheel: without forebay-tools, `forebay {command}` must say what to install; "
            f"its exit code is {done.returncode}, and it says: {done.stderr}"
        )


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        scratch = pathlib.Path(directory)
        wheel = build(ROOT, MAIN, scratch)
        tools = build(ROOT / "deploy" / "tools", TOOLS, scratch)

        venv.create(scratch / "venv", with_pip=True)
        python = scratch / "venv" / "bin" / "python"
        forebay = python.with_name("forebay")
        constraints = ROOT / "constraints.txt"
        install = (python, "-m", "pip", "install", "--quiet", "-c", constraints)
        run(*install, wheel, cwd=scratch)
        run(python, "-m", "pip", "check", cwd=scratch)
        found = {wheel: check_modules(python, MAIN, scratch)}
        run(forebay, "--help", cwd=scratch)
        for command in ("chaos", "bench"):
            check_says_what_to_install(forebay, command, scratch)

        # The extra finds the wheel of the same version in the folder, without an index.
        run(*install, "trustme", cwd=scratch)
        run(*install, "--no-index", "--find-links", scratch, "forebay[chaos]", cwd=scratch)
        run(python, "-m", "pip", "check", cwd=scratch)
        found[tools] = check_modules(python, TOOLS, scratch)

        venv.create(scratch / "user", with_pip=True)
        users = scratch / "user" / "bin" / "python"
        run(users, "-m", "pip", "install", "--quiet", wheel, cwd=scratch)
        run(users, "-m", "pip", "install", "--quiet", "forebay[parquet]", cwd=scratch)
        (files := scratch / "train").mkdir()
        run(users, "-c", PARQUET, files, cwd=scratch)
        (program,) = FIRST_PROGRAM.findall((ROOT / "docs/install.md").read_text())
        first = run(users, "-c", program.replace("/data/train", str(files)), cwd=scratch)
        if first != "{'number': (dtype('int64'), (8,))}\n":
            raise SystemExit(f"check_wheel: the program of docs/install.md printed {first}")
        for path, said in found.items():
            print(f"{path.name}, {path.stat().st_size:,} bytes: {said}")


if __name__ == "__main__":
    main()
