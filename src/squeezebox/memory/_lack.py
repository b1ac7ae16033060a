"""What could not be allocated, read from the error: torch's, oneDNN's, numpy's, or an import's."""

from __future__ import annotations

import contextlib
import errno
import re
import sys
from collections.abc import Iterator

import torch

from squeezebox.memory._room import free_at_peak, free_bytes, of_address_space
from squeezebox.schema import BudgetError, OptionError, SqueezeboxError

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
    try:
        yield
    except (RuntimeError, MemoryError, ImportError, OSError, SystemError) as error:
        if not lacks_memory(error):
            raise
        asked = asked_bytes(error)
        wanted = "More was" if asked is None else f"{asked:,} bytes were"
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BudgetError(
            f"there is too little memory for {what}. {wanted} asked for{_left(error)}. Give a smaller "
            f"sample, or leave the process more. ({said})"
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
