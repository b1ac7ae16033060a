"""How many bytes a process may still take, what could not be allocated, and where freed memory goes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from squeezebox.schema import BudgetError, OptionError, SqueezeboxError, in_one_line

_CGROUP = Path("/sys/fs/cgroup")  # and files of a group: its limit, what it uses, and caches in that
_OLDER = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_NEWER = ("memory.max", "memory.current", "inactive_file")


def free_bytes(device: torch.device) -> int:
    """Bytes that tensors can still take there: of the device, or of the host and this process's limits.

    On a host the least of what the system says is available, what the control group leaves, and what
    ``ulimit -v`` leaves of the address space and ``ulimit -d`` of data.

    Raises:
        OptionError: the system does not say; Linux does.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    known = [free for free in (_available(), _of_group(), of_address_space(), _of_data()) if free is not None]
    if not known:
        raise OptionError("this system does not say how much memory is free; give memory=, such as '8GiB'.")
    return max(min(known), 0)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _of_group() -> int | None:
    """The least that this process's control group, of version 1 or 2, and those around it leave."""
    try:
        groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    except (OSError, ValueError):
        return None
    older = "memory" in groups
    top, files = (_CGROUP / "memory", _OLDER) if older else (_CGROUP, _NEWER)
    own = top / groups.get("memory" if older else "", "").lstrip("/")  # a container may not see its own name
    around = [folder for folder in (own, *own.parents) if folder.is_relative_to(top)]
    return min((left for each in around if (left := _left_in(each, *files)) is not None), default=None)


def _left_in(folder: Path, limit: str, used: str, cached: str) -> int | None:
    """Bytes that a group leaves, whose caches of files would give way; None without a limit."""
    try:
        most, taken = ((folder / name).read_text().strip() for name in (limit, used))
        parts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return None if most == "max" else int(most) - int(taken) + int(parts.get(cached, 0))
    except (OSError, ValueError):
        return None


def of_address_space(field: str = "VmSize") -> int | None:
    """Bytes that ``ulimit -v`` leaves of this process's address space; None without that limit."""
    return _of_limit("RLIMIT_AS", field)


def _of_data() -> int | None:
    """Bytes that ``ulimit -d`` leaves; None without that limit."""
    return _of_limit("RLIMIT_DATA", "VmData")


def _of_limit(name: str, field: str) -> int | None:
    try:
        import resource

        limit = resource.getrlimit(getattr(resource, name))[0]
        lines = Path("/proc/self/status").read_text().splitlines()
    except (ImportError, OSError):
        return None
    used = next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)
    return None if used is None or limit == resource.RLIM_INFINITY else limit - used


def free_at_peak() -> int | None:
    """Bytes that ``ulimit -v`` left when this process was largest; None without that limit."""
    free = of_address_space("VmPeak")
    return None if free is None else max(free, 0)


def live_bytes(device: torch.device) -> int | None:
    """Bytes of tensors on a CUDA device, or of this process's memory on a host that says so."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            pages = int(file.read(128).split()[1])
    except OSError:
        return None
    return pages * mmap.PAGESIZE


# Of torch's allocators for hosts and for CUDA devices, and of numpy's.
_ASKED = re.compile(r"(?:tried to allocate|Unable to allocate) ([\d.]+) ?(bytes|[KMGTP]iB)", re.IGNORECASE)
# Of oneDNN, whose descriptors fail for other reasons; of C++; of threads; of the linker, and of who calls it.
_LACKS = re.compile(
    r"could not (create a memory|create a primitive(?! desc)|execute a primitive)|bad_alloc"
    r"|can't start new thread|cannot allocate memory|failed to map segment|cannot map zero-fill|libllvmlite",
    re.IGNORECASE,
)
# Of address space, with what else comes with it: about 600 to 700 MiB and 200 MiB were measured.
_IMPORT_BYTES = {"numba": 768 << 20, "torch._dynamo": 256 << 20}
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def lacks_memory(error: BaseException) -> bool:
    """Whether memory is what an operation, or an import, failed for."""
    if isinstance(error, SqueezeboxError | ModuleNotFoundError):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, SystemError):  # of an interpreter that could not even make a MemoryError
        return "without exception set" in str(error)
    said = isinstance(error, RuntimeError | ImportError | OSError)
    return said and bool(_ASKED.search(str(error)) or _LACKS.search(str(error)))


def asked_bytes(error: BaseException) -> int | None:
    """Bytes that were asked for, where the error says so."""
    found = _ASKED.search(str(error)) if lacks_memory(error) else None
    return None if found is None else int(float(found[1]) * 1024 ** _UNITS.index(found[2]))


@contextlib.contextmanager
def within_room(what: str) -> Iterator[None]:
    """Make a BudgetError with the numbers of whatever fails for lack of memory; also a decorator.

    Args:
        what: what is run, for the message: "the steps that measure a plan's choices".
    """
    _spare_address_space()
    try:
        yield
    except (RuntimeError, MemoryError, ImportError, OSError, SystemError) as error:
        if not lacks_memory(error):
            raise
        asked = asked_bytes(error)
        wanted = "More was" if asked is None else f"{asked:,} bytes were"
        raise BudgetError(
            f"there is too little memory for {what}. {wanted} asked for{_left(error)}. Give a smaller "
            f"sample, or leave the process more. ({in_one_line(error)})"
        ) from error


def require_imports(*names: str) -> None:
    """Raise BudgetError where a limit of address space leaves too little to import these.

    Without room an import need not fail by an error: it may leave halves of modules, or end the process.
    """
    needed = sum(_IMPORT_BYTES[name] for name in names if name not in sys.modules)
    free = of_address_space()
    if needed and free is not None and free < needed:
        raise BudgetError(
            f"there is too little memory for what planning imports and compiles: up to {needed:,} bytes of "
            f"address space, where this process has {max(free, 0):,} bytes left of its limit (ulimit -v). "
            "Allow it more; it is taken once, and most of it is never used."
        )


def _left(error: BaseException) -> str:
    """What a host's process had left then; a device's error says it itself."""
    if isinstance(error, torch.OutOfMemoryError):
        return ""
    free = free_at_peak()
    if free is not None:
        return f" where at its largest this process had {free:,} bytes left of its limit (ulimit -v)"
    with contextlib.suppress(OptionError):
        return f"; {free_bytes(torch.device('cpu')):,} bytes are free without it"
    return ""


_MMAP_THRESHOLD, _TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -3, -1, -4, -8  # of malloc.h
_MAPPED = 1 << 16  # blocks: glibc's own limit
_USUAL = 1 << 25  # to which glibc's own threshold grows as large blocks are freed
_open: list[int] = []  # from how many bytes on blocks go back, by whom that is wanted
_SMALL, _LARGE = 1 << 16, 1 << 20
_KEPT = 2.6  # times a plan's peak: what processes came to hold where glibc kept freed blocks


def is_scarce(peak_bytes: int, device: torch.device) -> bool:
    """Whether steps with this peak may not fit this host's process unless it returns what it frees."""
    if device.type != "cpu":
        return False
    with contextlib.suppress(OptionError):
        return free_bytes(device) < _KEPT * peak_bytes
    return False


def return_freed(nbytes: int = _LARGE) -> None:
    """Return blocks of that size and more to the system as soon as they are freed, until :func:`keep_freed`.

    glibc keeps most of them otherwise, so that what is moved to a file would leave the process no smaller.
    Returning takes page faults, which is still far less than calling malloc_trim now and then.
    """
    _open.append(nbytes)
    _set(_MMAP_THRESHOLD, min(_open))


def keep_freed(nbytes: int = _LARGE) -> None:
    """End of :func:`return_freed`; after the last one it is as in a process that has trained for a while."""
    _open.remove(nbytes)
    _settle()


def _settle() -> None:
    """As others want it, or else as glibc comes to have it: once set, it no longer adapts by itself."""
    if _open:
        _set(_MMAP_THRESHOLD, min(_open))
    else:
        _set(_MMAP_THRESHOLD, _USUAL)
        _set(_TRIM_THRESHOLD, 2 * _USUAL)


@contextlib.contextmanager
def freed_returned(*, small: bool = False) -> Iterator[None]:
    """Both, around a block; ``small``: from 64 KiB on instead of 1 MiB."""
    nbytes = _SMALL if small else _LARGE
    return_freed(nbytes)
    try:
        yield
    finally:
        keep_freed(nbytes)


@contextlib.contextmanager
def freed_kept() -> Iterator[None]:
    """Keep all that is freed within a block of code, to be returned by :class:`Ceiling` where it must be.

    glibc returns freed memory of 32 MiB and more at once, and each page costs a fault when wanted again.
    Where a limit counts address space, it is returned all the same.
    """
    if of_address_space() is not None:
        yield
        return
    _set(_MMAP_MAX, 0)
    _set(_TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        _set(_MMAP_MAX, _MAPPED)
        _settle()


@functools.cache
def _spare_address_space() -> None:
    """Where a limit counts address space, have glibc keep none of it from now on; plans reckon with that.

    Its heap in pieces, and one arena for each thread, took four fifths of 325 MiB that nothing was in.
    """
    if of_address_space() is not None:
        return_freed()
        _set(_ARENA_MAX, 1)


def return_all() -> None:
    """Return what is freed by now to the system, where glibc is the C library."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _set(option: int, value: int) -> None:
    library = _glibc()
    if library is not None:
        library.mallopt(option, value)
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
