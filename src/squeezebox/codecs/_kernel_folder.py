"""The folder where numba keeps compiled kernels: what they depend on, and whose turn it is to fill it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_HERE = Path(__file__).parent
_LOCK = "squeezebox.lock"


def mark_of(name: str) -> Path | None:
    """The file that says that these kernels are on disk; None where numba finds no folder to write to."""
    from squeezebox.codecs._cpu import _quantise_loops  # loads numba

    folder = _quantise_loops.extent.stats.cache_path
    return None if folder is None else Path(folder) / f"squeezebox-{_digest()}-{name.replace(' ', '-')}"


@functools.cache
def _digest() -> str:
    """Of what numba looks at before it takes a compiled function from disk, and of all sources together."""
    import llvmlite.binding
    import numba
    import numpy

    found = hashlib.blake2b(digest_size=8)
    sources = sorted([*_HERE.glob("_cpu/*.py"), *_HERE.glob("_reference/*.py")])
    for source in sources:
        stat = source.stat()
        found.update(f"{source.name} {stat.st_mtime_ns} {stat.st_size}\n".encode())
    machine = (llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten())
    versions = (numba.__version__, llvmlite.__version__, numpy.__version__)
    settings = [os.environ.get(f"NUMBA_CPU_{name}") for name in ("NAME", "FEATURES")]
    found.update(repr((machine, versions, settings, sys.version_info)).encode())
    return found.hexdigest()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Whether this process now has the folder's lock; True too where there are no locks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield True
        return
    mine = _take(descriptor)
    try:
        yield mine
    finally:
        if mine:
            _give(descriptor)
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Whether the lock is this process's; filesystems that know no locks give it to everybody."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _give(descriptor: int) -> None:
    """Before the descriptor is closed: a forked worker may have it too."""
    if sys.platform != "win32":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
