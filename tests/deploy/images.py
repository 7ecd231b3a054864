"""Builds the images' targets, and runs containers of them, as far as that goes without an engine.

A build runs the Dockerfile's steps, at their own paths, in a root of its own: a tmpfs that has this
machine's system directories, read-only, in place of the base image's, and a fresh virtual
environment in place of its Python. A container is a process in such a root, as the image's user,
without capabilities, with nothing but the image's environment, and only the given folders writable.
Both take root's rights. The network is this machine's.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from dockerfile_parse import DockerfileParser
from dockerfile_parse.util import extract_key_values

from forebay.service.processes import ChildProcess

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "images" / "Dockerfile"
SYSTEM = ("/bin", "/etc", "/lib", "/lib64", "/sbin", "/usr")
AS_ROOT = () if os.geteuid() == 0 else ("sudo", "--preserve-env")
PYTHON = "/base-python"  # where stages have the base image's Python
WITHOUT_RIGHTS = "--clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all"

Mounts = Mapping[str, Path]
"""Folders of this machine by their paths in the root."""


@dataclasses.dataclass
class Stage:
    """A stage of the build: its files, and what the Dockerfile says of it so far."""

    files: Path  # what it has besides the base image's, as a tree
    workdir: str = "/"
    user: str = "0:0"
    stop_signal: str = ""
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    healthcheck: list[str] = dataclasses.field(default_factory=list)
    entrypoint: list[str] = dataclasses.field(default_factory=list)

    def child(self, files: Path) -> Self:
        subprocess.run(["cp", "--archive", "--link", self.files, files], check=True)
        return dataclasses.replace(self, files=files, env=dict(self.env))

    def inside(self, path: str) -> Path:
        """Where a path of the image lies on this machine."""
        return self.files / os.path.join(self.workdir, path).lstrip("/")


def in_root(writable: Mounts, readable: Mounts, then: str, hosts: str = "") -> list[str]:
    """The command that runs the shell's command `then` in a new root, read-only but for `writable`.

    `hosts` are further lines of /etc/hosts.
    """
    script = ["set -e", "root=/mnt", "mount -t tmpfs root $root"]
    own = {path: Path(path) for path in (*SYSTEM, "/proc", "/dev", sys.base_prefix)}
    how = dict.fromkeys({**own, **readable}, "ro") | dict.fromkeys(writable, "rw")
    sources = {**own, **readable, **writable}
    mounts = sorted(path for path in sources if not sources[path].is_symlink())
    links = sources.keys() - mounts
    script += [f"ln -s {os.readlink(sources[path])} $root{path}" for path in links]
    for path in mounts:
        if sources[path].is_dir():
            script += [f"mkdir -p $root{path}", f"mount --rbind {sources[path]} $root{path}"]
    for path in mounts:  # now that no further folder has to be made
        if sources[path].is_dir():
            script.append(f"mount -o remount,bind,{how[path]} $root{path}")
    if hosts:
        script += ["cat /etc/hosts - > $root/hosts << END", hosts, "END"]
        script += ["mount --bind $root/hosts $root/etc/hosts"]
    script += ["mount -o remount,ro $root", f"exec chroot $root {then}"]
    return [*AS_ROOT, "unshare", "--mount", "sh", "-c", "\n".join(script)]


def contained(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    user: str,
    workdir: str = "/",
    writable: Mounts,
    readable: Mounts,
    hosts: str = "",
) -> ChildProcess:
    """A process in a root of its own, which is read-only but for `writable`."""
    given = [f"{name}={value}" for name, value in env.items()]
    run = shlex.join(["env", "--ignore-environment", *given, *command])
    uid, gid = user.split(":")
    then = (
        f"setpriv --pdeathsig KILL --reuid {uid} --regid {gid} {WITHOUT_RIGHTS} sh -c "
        + shlex.quote(f"cd {workdir} && exec {run}")
    )
    read = {path: source for path, source in readable.items() if path not in writable}
    return ChildProcess(in_root(writable, read, then, hosts), None, piped=True)


class Images:
    """Targets of the Dockerfile, built below `directory` as they are asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._base = Stage(directory / "base", env={"PATH": f"{PYTHON}/bin:/usr/bin:/bin"})
        for path in (PYTHON, "/opt", "/tmp", "/wheels"):  # the base image has some of these
            self._base.inside(path).mkdir(parents=True)
        python = Path(sys.base_prefix, "bin", "python3")
        self._run_command(self._base, f"{python} -m venv {PYTHON}")
        self._stages: dict[str, Stage] = {}
        self._steps: dict[str, list[tuple[str, str]]] = {}
        for step in DockerfileParser(path=str(DOCKERFILE)).structure:
            kind, value = step["instruction"], step["value"]
            if kind == "FROM":
                name = value.split()[-1]
                self._steps[name] = []
            if kind != "COMMENT":
                self._steps[name].append((kind, value))

    def target(self, name: str) -> Stage:
        if name not in self._stages:
            (_, came_from), *steps = self._steps[name]
            parent = came_from.split()[0]
            assert parent in self._steps or parent.startswith("python:3."), parent
            before = self.target(parent) if parent in self._steps else self._base
            stage = before.child(self._directory / name)
            for kind, value in steps:
                self._run(stage, kind, value)
            self._stages[name] = stage
        return self._stages[name]

    def _run(self, stage: Stage, kind: str, value: str) -> None:
        match kind:
            case "WORKDIR":
                stage.workdir = value
                stage.inside(".").mkdir(parents=True, exist_ok=True)
            case "ENV":
                pairs = extract_key_values(
                    env_replace=True, args={}, envs=stage.env, instruction_value=value
                )
                stage.env.update(pairs)
            case "USER":
                stage.user = value
            case "STOPSIGNAL":
                stage.stop_signal = value
            case "EXPOSE":
                pass  # for readers
            case "ENTRYPOINT":
                stage.entrypoint = json.loads(value)
            case "HEALTHCHECK":
                stage.healthcheck = json.loads(value.partition(" CMD ")[2])
            case "COPY":
                self._copy(stage, shlex.split(value))
            case "RUN":
                self._run_command(stage, value)
            case _:
                raise AssertionError(f"what does {kind} do?")

    def _copy(self, stage: Stage, words: Sequence[str]) -> None:
        *sources, target = (word for word in words if not word.startswith("--"))
        (of,) = [word.removeprefix("--from=") for word in words if word.startswith("--")] or [""]
        for source in sources:
            found = self.target(of).inside(source) if of else ROOT / source
            into = stage.inside(target)
            if found.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(
                    found, into, symlinks=True, ignore=None if of else ignored, dirs_exist_ok=True
                )
            else:
                shutil.copy2(found, into)

    def _run_command(self, stage: Stage, command: str) -> None:
        writable = {f"/{folder.name}": folder for folder in stage.files.iterdir()}
        cd = shlex.quote(f"cd {stage.workdir} && {command}")
        run = f"env {shlex.join(f'{name}={value}' for name, value in stage.env.items())} sh -c {cd}"
        subprocess.run(in_root(writable, {}, run), check=True)

    def container(
        self,
        target: str,
        env: Mapping[str, str],
        *,
        writable: Mounts,
        readable: Mapping[str, Path] = {},
        hosts: str = "",
        command: Sequence[str] = (),
    ) -> ChildProcess:
        """A process of the image: its entrypoint, unless told otherwise."""
        image = self.target(target)
        files = {f"/{folder.name}": folder for folder in image.files.iterdir()}
        return contained(
            command or image.entrypoint,
            {**image.env, **env},
            user=image.user,
            workdir=image.workdir,
            writable=writable,
            readable={**files, **readable},
            hosts=hosts,
        )
