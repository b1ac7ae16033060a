"""Whether the C library keeps freed memory or returns it to the system."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of malloc.h
_USUAL = 1 << 25  # to which glibc's own threshold grows as large blocks are freed
_open = [0]


def return_freed() -> None:
    """Return blocks of 1 MiB and more to the system as soon as they are freed, until :func:`keep_freed`.

    glibc keeps most of them otherwise, so that what is moved to a file would leave the process no smaller.
    Returning takes page faults, which is still far less than calling malloc_trim now and then.
    """
    _open[0] += 1
    if _open[0] == 1:
        _set(_MMAP_THRESHOLD, 1 << 20)


def keep_freed() -> None:
    """End of :func:`return_freed`; after the last one it is as in a process that has trained for a while."""
    _open[0] -= 1
    if _open[0] == 0:
        _set(_MMAP_THRESHOLD, _USUAL)
        _set(_TRIM_THRESHOLD, 2 * _USUAL)


@contextlib.contextmanager
def freed_returned() -> Iterator[None]:
    """Both, around a block."""
    return_freed()
    try:
        yield
    finally:
        keep_freed()


def _set(option: int, value: int) -> None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(option, value)
        library.malloc_trim(0)
