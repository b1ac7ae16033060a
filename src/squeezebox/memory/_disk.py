"""Folders on a disk rather than in memory, and files there that leave nothing in the system's cache."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from squeezebox.memory._elsewhere import Area, Elsewhere
from squeezebox.memory._room import keep_freed, return_freed
from squeezebox.schema import OptionError

THREADS = 3  # a disk is slower where it waits for the next request
SECTOR = 4096  # bytes at multiples of which a disk is read and written past the cache
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs", "hugetlbfs"})
_CAN_WRITE = hasattr(os, "pwritev")  # at a place in a file; Windows cannot
_MEMORY_DEVICE = re.compile(r"/dev/z?ram\d+")


@dataclass(frozen=True, slots=True)
class DiskFolder(Elsewhere):
    """A folder that can be written to, and the name of its filesystem ("" where the system does not say)."""

    path: str
    filesystem: str
    kind, most_bytes = "file", None
    advice = (
        "Free space there, set TMPDIR or make the plan with offload='another folder', or with a larger "
        "budget, which offloads less or nothing.",
        "Look after that disk, or make the plan with offload=False.",
    )

    @property
    def frees_memory(self) -> bool:
        """Not where it is in memory itself, has no name, or the system cannot write at a place in a file."""
        return _CAN_WRITE and bool(self.path) and _memory_of(self.path) is None

    @property
    def keeps_state(self) -> bool:
        """A disk does."""
        return self.frees_memory

    def free_bytes(self) -> int:
        """Of its disk."""
        return shutil.disk_usage(self.path).free

    def open(self) -> DiskFile:
        """A new file there."""
        return DiskFile(self.path)

    def __str__(self) -> str:
        return f"{self.path} ({self.filesystem})" if self.filesystem else self.path


def disk_folder(named: str | os.PathLike[str] | None = None) -> DiskFolder:
    """The folder of that name; without one, the first usual one that is not in memory.

    Those are the folder for temporary files (TMPDIR), ``/var/tmp``, ``~/.cache/squeezebox`` and the working
    directory.

    Raises:
        OptionError: it is in memory, missing or not writable, or so are all the usual ones; names another.
    """
    if named is None:
        found = _usual_one()
        if found is None:
            raise OptionError(
                "tensors cannot be offloaded: of the folder for temporary files, /var/tmp, ~/.cache and the "
                "working directory, none is both writable and on a disk. Name one, offload='folder', or give "
                "offload=False."
            )
        return found
    path = os.path.abspath(os.path.expanduser(named))
    reason = _refusal(path)
    if reason is not None:
        other = _usual_one()
        instead = f"offload={other.path!r}" if other is not None else "a folder on a disk"
        raise OptionError(
            f"tensors cannot be offloaded to {path}, which {reason}. Give {instead}, or offload=False."
        )
    return DiskFolder(path, _filesystem(path))


def usual_folder() -> DiskFolder:
    """As :func:`disk_folder`; or else one that is in memory."""
    found = _usual_one()
    if found is not None:
        return found
    path = next(_usual())
    return DiskFolder(path, _filesystem(path))


def _usual_one() -> DiskFolder | None:
    return next((DiskFolder(path, _filesystem(path)) for path in _usual() if _refusal(path) is None), None)


def _usual() -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):  # no folder for temporary files can be written
        yield tempfile.gettempdir()
    yield "/var/tmp"
    with contextlib.suppress(OSError, RuntimeError):  # no home
        cache = Path.home() / ".cache" / "squeezebox"
        cache.mkdir(parents=True, exist_ok=True)
        yield str(cache)
    with contextlib.suppress(OSError):
        yield os.getcwd()


def _refusal(path: str) -> str | None:
    """Why nothing can be offloaded there."""
    if not _CAN_WRITE:
        return "is on a system that cannot write at a place in a file"
    if not os.path.isdir(path):
        return "is no folder"
    if not os.access(path, os.W_OK | os.X_OK):
        return "cannot be written to"
    memory = _memory_of(path)
    return None if memory is None else f"is in memory itself ({memory}), so nothing would be saved"


def _memory_of(path: str) -> str | None:
    """What holds the folder in memory, if anything does."""
    filesystem, device = _mount(path)
    if filesystem in _IN_MEMORY:
        return filesystem
    return f"{filesystem} on {device}" if _MEMORY_DEVICE.fullmatch(device) else None


def _filesystem(path: str) -> str:
    return _mount(path)[0]


def _mount(path: str) -> tuple[str, str]:
    """Filesystem and device of the mount that a folder is in; empty where the system does not say."""
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return "", ""
    real, best, found = os.path.realpath(path), -1, ("", "")
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        point = _plain(before.split(" ")[4]).rstrip("/")
        inside = real == point or real.startswith(f"{point}/")
        if inside and len(point) >= best:  # of two on one point, the later hides the earlier
            filesystem, device = after.split(" ")[:2]
            best, found = len(point), (filesystem, _plain(device))
    return found


def _plain(field: str) -> str:
    """A field of mountinfo without its escapes of spaces and the like."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


class DiskFile(Area):
    """A file without a name, so that nothing is left of it however the process ends.

    It is written and read past the system's cache (direct I/O), and where the filesystem has no such way,
    through it: then every write waits for the disk, and what it leaves in the cache is dropped.

    Offsets, sizes and addresses of buffers are multiples of :data:`SECTOR`. Every method raises OSError.
    """

    fills_anything = False

    def __init__(self, folder: str, *, direct: bool = True) -> None:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)
        return_freed()
        self._close = weakref.finalize(self, _close, file)
        self._descriptor = file.fileno()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="squeezebox-offload")
        self.direct = direct and _set_direct(self._descriptor, True)
        if not self.direct:
            _advise(self._descriptor, "POSIX_FADV_RANDOM", 0, 0)  # which reads nothing ahead into the cache

    def close(self) -> None:
        """Give the disk's bytes back."""
        self._close()

    def fileno(self) -> int:
        """Its descriptor."""
        return self._descriptor

    def reserve(self, offset: int, nbytes: int) -> None:
        """Have the disk set these bytes aside, so that writing them finds no full disk."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._descriptor, offset, nbytes)

    def begin_write(self, data: memoryview, offset: int) -> Future[None]:
        """Have a thread :meth:`write`."""
        return self._threads.submit(self.write, data, offset)

    def begin_read(self, data: memoryview, offset: int) -> Future[None]:
        """Have a thread :meth:`read`."""
        return self._threads.submit(self.read, data, offset)

    def finish(self, *, wait: bool) -> None:
        """Let the threads end after what was begun."""
        self._threads.shutdown(wait=wait)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data`` to the disk."""
        self._move("pwritev", data, offset)
        if not self.direct:
            getattr(os, "fdatasync", os.fsync)(self._descriptor)
            _advise(self._descriptor, "POSIX_FADV_DONTNEED", offset, len(data))

    def read(self, data: memoryview, offset: int) -> None:
        """Fill all of ``data``."""
        self._move("preadv", data, offset)
        if not self.direct:
            _advise(self._descriptor, "POSIX_FADV_DONTNEED", offset, len(data))

    def _move(self, how: str, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            try:
                count = getattr(os, how)(self._descriptor, [data[done:]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                self.direct = False  # a filesystem that takes the flag and nothing else
                _set_direct(self._descriptor, False)
                continue
            if count <= 0:
                raise OSError(errno.EIO, f"the file ends {len(data) - done} bytes early; it was truncated")
            done += count


def _close(file: IO[bytes]) -> None:
    file.close()
    keep_freed()


def _set_direct(descriptor: int, wanted: bool) -> bool:
    """Go past the cache or not; whether the system does."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        if sys.platform == "darwin":
            fcntl.fcntl(descriptor, fcntl.F_NOCACHE, int(wanted))
            return False  # written data stays until it is on the disk
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        direct = getattr(os, "O_DIRECT", 0)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct if wanted else flags & ~direct)
    except OSError:
        return False
    return bool(direct) and wanted


def _advise(descriptor: int, advice: str, offset: int, nbytes: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, nbytes, getattr(os, advice))
