"""Makes PostgreSQL clusters of this machine's PostgreSQL, and says how they are started.

PostgreSQL refuses to run as root, so root runs it as the user `postgres`, or as `nobody`.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import pwd
import shutil
import signal
from collections.abc import Mapping

from ..service.errors import ForebayError
from ..service.processes import ChildProcess, tail
from .members import Member

USER = "postgres"  # the cluster's superuser
NEEDED = (
    "this needs a PostgreSQL server on this machine, 12 or later: install postgresql (initdb and "
    "postgres are looked for in PATH, and where Debian puts them)"
)
_DEBIAN = pathlib.Path("/usr/lib/postgresql")
_SETTINGS = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "on"}


def postgres_programs() -> pathlib.Path | None:
    """The folder of this machine's newest PostgreSQL server; None without one."""
    versions = (path for path in _DEBIAN.glob("*/bin/initdb"))
    newest = max(versions, key=lambda path: float(path.parts[-3]), default=None)
    found = str(newest) if newest else shutil.which("initdb")
    return pathlib.Path(found).resolve().parent if found else None


def make_cluster(directory: pathlib.Path, password: str = "") -> None:
    """Make a cluster in `directory`, which is made as well. Raises ForebayError.

    Its superuser is USER; without a password, everybody on this machine may connect as it.
    """
    make_directory(directory)
    options = ["--no-sync", "--username", USER, "--encoding", "UTF8", "--locale", "C"]
    secret = directory.with_name(f"{directory.name}.password")
    secret.write_text(password or "-")
    _give(secret)
    options += ["--pwfile", str(secret), "--auth", "scram-sha-256" if password else "trust"]
    try:
        run_program(directory, "initdb", *options)
    finally:
        secret.unlink()


def make_directory(directory: pathlib.Path) -> None:
    """Make a directory for a cluster, of the user who runs it."""
    directory.mkdir(mode=0o700)
    _give(directory)


def _give(path: pathlib.Path) -> None:
    if (user := _user()) is not None:
        os.chown(path, user.pw_uid, user.pw_gid)


def run_program(directory: pathlib.Path, name: str, *options: str) -> None:
    """Run a program of PostgreSQL that fills a cluster's directory. Raises ForebayError."""
    said = directory.with_name(f"{directory.name}.made")
    command = [str(_program(name)), "--pgdata", str(directory), *options]
    code = ChildProcess(_as_user(command), said).finish()
    if code:
        raise ForebayError(f"{command[0]} for {directory} ended with {code}: {tail(said)}")


def server_command(
    directory: pathlib.Path, port: int, settings: Mapping[str, object] = {}
) -> list[str]:
    """The command of a server of the cluster, in the foreground. Raises ForebayError."""
    values = {**_SETTINGS, **settings}
    options = [word for name, value in values.items() for word in ("-c", f"{name}={value}")]
    return _as_user([str(_program("postgres")), "-D", str(directory), "-p", str(port), *options])


def server_processes(pid: int) -> list[int]:
    """A server's process, and those that it has started."""
    children: list[str] = []
    with contextlib.suppress(OSError):
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def signal_server(pid: int, number: signal.Signals) -> None:
    """Send SIGKILL, SIGSTOP or SIGCONT to all of a server's processes.

    It is stopped first, so that it starts no further ones meanwhile.
    """
    _send(pid, signal.SIGSTOP)
    for each in server_processes(pid):
        _send(each, number)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class PostgresMember(Member):
    """A server as a member of a cluster."""

    def send(self, number: signal.Signals) -> None:
        if self._process is not None:
            signal_server(self._process.pid, number)


def _program(name: str) -> pathlib.Path:
    folder = postgres_programs()
    if folder is None:
        raise ForebayError(NEEDED)
    return folder / name


def _user() -> pwd.struct_passwd | None:
    """Who runs it; None for ourselves."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def _as_user(command: list[str]) -> list[str]:
    user = _user()
    if user is None:
        return command
    # A change of the user would forget who is to die with whom.
    options = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    return ["setpriv", *options, "--pdeathsig=KILL", *command]
