"""A disk that forgets: real files in memory, of which a power failure keeps what was synced.

The product's own FileStorage runs on it, through an `os` that takes its time (a process can be
killed between any two system calls), fails now and then, and remembers what was synced. A power
failure leaves of everything else what a disk may leave: entries of a directory as they were or
as they are, files with some of what was written after the last sync, or zeros in its place.
"""

from __future__ import annotations

import errno
import os as real
import shutil
import stat
from pathlib import Path
from typing import Any

from .kernel import Kernel, Process, kernel
from .threads import process

_SECTOR_BYTES = 512


class Disk:
    """The disk of one host, below a directory of the real one that is kept in memory."""

    lies = False  # does not do what sync asks for (broken.py)

    def __init__(self, this: Kernel, root: Path) -> None:
        self.root = root
        self.sync_s = this.rng.choice([1e-5, 3e-4, 5e-3, 0.05])  # typical
        self.trouble = 0.0  # how likely a sync fails
        self.stall_s = 0.0  # what each access takes more, while the disk is slow
        self._kernel = this
        self._contents: dict[int, bytes] = {}  # of files, as they were synced, by inode
        self._entries: dict[int, dict[str, int]] = {}  # the same of directories: name → inode
        self._kept: list[int] = []  # descriptors that keep inodes from being used again
        self._entries[root.stat().st_ino] = {}

    def pass_time(self, share: float) -> None:
        this = self._kernel
        if this.current is not None and not this.over:
            this.sleep(self.sync_s * share * this.rng.uniform(0.5, 2) + self.stall_s)

    def synced(self, fd: int) -> None:
        self.pass_time(1)
        if self.trouble and self._kernel.rng.random() < self.trouble:
            raise OSError(errno.EIO, real.strerror(errno.EIO))
        if self.lies:
            return
        status = real.fstat(fd)
        path = Path(real.readlink(f"/proc/self/fd/{fd}"))
        if stat.S_ISDIR(status.st_mode):
            self._entries[status.st_ino] = _listing(path)
        else:
            if status.st_ino not in self._contents:
                self._kept.append(real.open(path, real.O_RDONLY))
            self._contents[status.st_ino] = path.read_bytes()

    def lose_power(self) -> None:
        """To be called when every process of the host is dead."""
        now = {path.stat().st_ino: path for path in sorted(self.root.rglob("*"))}
        now[self.root.stat().st_ino] = self.root
        image = self._image(self.root.stat().st_ino, now)
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.close()
        self._contents, self._entries = {}, {}
        self._write(self.root, image)

    def _image(self, directory: int, now: dict[int, Path]) -> Image:
        """What a disk may hold of this directory, after the failure."""
        before = self._entries.get(directory, {})
        after = _listing(now[directory]) if directory in now else {}
        image: Image = {}
        for names in _together(before, after):
            survives = self._kernel.rng.choice([before, after])
            for name in names:
                inode = survives.get(name)
                if inode is None:
                    continue
                if inode in self._entries or (inode in now and now[inode].is_dir()):
                    image[name] = self._image(inode, now)
                else:
                    image[name] = self._remains(inode, now.get(inode))
        return image

    def _remains(self, inode: int, path: Path | None) -> bytes:
        rng = self._kernel.rng
        synced = self._contents.get(inode, b"")
        content = synced if path is None else path.read_bytes()
        if not content.startswith(synced):  # it was cut, and that was not synced
            return rng.choice([synced, content])
        kept = len(synced) + rng.choice([0, rng.randint(0, len(content) - len(synced))])
        remains = bytearray(content[:kept])
        start = -(-len(synced) // _SECTOR_BYTES) * _SECTOR_BYTES
        for sector in range(start, kept, _SECTOR_BYTES):
            if rng.random() < 0.3:  # its size was written, and the data was not
                stop = min(sector + _SECTOR_BYTES, kept)
                remains[sector:stop] = bytes(stop - sector)
        return bytes(remains)

    def _write(self, directory: Path, image: Image) -> None:
        for name, content in image.items():
            path = directory / name
            if isinstance(content, bytes):
                path.write_bytes(content)
                self._contents[path.stat().st_ino] = content
            else:
                path.mkdir()
                self._write(path, content)
        self._entries[directory.stat().st_ino] = _listing(directory)

    def close(self) -> None:
        for fd in self._kept:
            real.close(fd)
        self._kept.clear()


Image = dict[str, Any]
"""A directory: bytes or another Image, by name."""


def _listing(path: Path) -> dict[str, int]:
    with real.scandir(path) as entries:
        return {entry.name: entry.inode() for entry in sorted(entries, key=lambda e: e.name)}


def _together(before: dict[str, int], after: dict[str, int]) -> list[list[str]]:
    """The names of a directory, in groups of which all entries or none are as they were before: a
    file that was renamed has its old name or the new one.
    """
    old_name = {inode: name for name, inode in before.items()}
    group: dict[str, list[str]] = {name: [name] for name in sorted({*before, *after})}
    for name, inode in after.items():
        moved_from = old_name.get(inode, name)
        if group[name] is not group[moved_from] and after.get(moved_from) != inode:
            joined = group[moved_from]
            joined += group[name]
            for member in group[name]:
                group[member] = joined
    return list({id(names): names for names in group.values()}.values())


class _Descriptors:
    """What a process has open; its end closes it, and with that lets its locks go."""

    def __init__(self, owner: Process) -> None:
        self.open: dict[int, None] = {}
        owner.at_kill.append(self._close)

    def _close(self) -> None:
        for fd in self.open:
            real.close(fd)
        self.open.clear()


class Os:
    """The module `os`, on the disk of the process's host. Of others it sees nothing."""

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        fd = real.open(path, flags, mode)
        _descriptors().open[fd] = None
        return fd

    def close(self, fd: int) -> None:
        owned = _descriptors().open
        if fd in owned:  # or its process is dead, and only being taken apart
            del owned[fd]
            real.close(fd)

    def write(self, fd: int, data: Any) -> int:
        disk = _disk()
        disk.pass_time(0.1)
        if len(data) > 1 and kernel().rng.random() < 0.05:
            data = data[: kernel().rng.randint(1, len(data))]
        return real.write(fd, data)

    def fsync(self, fd: int) -> None:
        shared = kernel().shared
        if shared is not None and real.readlink(f"/proc/self/fd/{fd}").startswith(str(shared.root)):
            shared.synced()
        else:
            _disk().synced(fd)

    def fdatasync(self, fd: int) -> None:
        _disk().synced(fd)

    def rename(self, source: Any, target: Any) -> None:
        shared = kernel().shared
        is_shared = shared is not None and str(source).startswith(str(shared.root))
        (shared if is_shared else _disk()).pass_time(0.1)
        real.rename(source, target)

    def urandom(self, size: int) -> bytes:
        return kernel().rng.randbytes(size)

    def getpid(self) -> int:
        return 1

    def sched_getaffinity(self, _: int) -> set[int]:
        """Each process has two processors, wherever the simulation runs."""
        return {0, 1}

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)


def _descriptors() -> _Descriptors:
    owner = process()
    found = owner.local.get("descriptors")
    if found is None:
        found = owner.local["descriptors"] = _Descriptors(owner)
    assert isinstance(found, _Descriptors)
    return found


def _disk() -> Disk:
    disk = kernel().disk
    assert isinstance(disk, Disk)
    return disk


os = Os()
