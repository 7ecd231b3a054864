"""Builds the distribution, installs it where nothing else is, and imports every module.

Only the base dependencies are installed there. A module that stops at an extra is imported once
more here, in the development environment, which has them all but PyTorch and JAX: what needs these
is imported by tests/frameworks.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import venv
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
FACADES = ("torch", "jax", "keras")
PACKAGES = (
    *("storage", "journal", "service", "benchmarks"),
    *(f"frameworks/{name}" for name in FACADES),
)
SHIPPED = (".py", ".pyi", ".proto", ".typed")

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


def run(*command: str | pathlib.Path, cwd: pathlib.Path) -> str:
    """Run a command outside the repo, so that only what is installed can be imported."""
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        shown = " ".join(map(str, command))
        raise SystemExit(f"{done.stdout}\ncheck_wheel: exit {done.returncode} of: {shown[:500]}")
    return done.stdout


def shipped_files() -> set[str]:
    """What the wheel must hold, by its path there."""
    return {
        f"forebay/{path.relative_to((ROOT / package).parent)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in SHIPPED
    }


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        scratch = pathlib.Path(directory)
        # The wheel is built from the sdist, so no stale build/ in the repo gets into it.
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", scratch, ROOT, cwd=scratch)
        (wheel,) = scratch.glob("*.whl")
        files = shipped_files()
        if missing := files - set(zipfile.ZipFile(wheel).namelist()):
            raise SystemExit(
                f"check_wheel: {wheel.name} lacks {', '.join(sorted(missing))}; "
                "is the package in [tool.setuptools] packages of pyproject.toml?"
            )

        venv.create(scratch / "venv", with_pip=True)
        python = scratch / "venv" / "bin" / "python"
        constraints = ROOT / "constraints.txt"
        run(python, "-m", "pip", "install", "--quiet", "-c", constraints, wheel, cwd=scratch)
        run(python, "-m", "pip", "check", cwd=scratch)

        modules = sorted(
            module_name(f) for f in files if f.endswith(".py") and not f.endswith("__main__.py")
        )
        import_all = ("-W", "error", "-c", IMPORT_ALL)
        extras = "tensorflow,keras,apache_beam,torch,jax"
        with_extras = run(python, *import_all, extras, *modules, cwd=scratch).split()
        run(sys.executable, *import_all, "torch,jax", *with_extras, cwd=scratch)
        run(python.with_name("forebay"), "--help", cwd=scratch)
    print(f"{wheel.name}: {len(modules)} modules imported; in need of an extra: {with_extras}")


if __name__ == "__main__":
    main()
