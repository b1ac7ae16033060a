"""Which CPU kernels are compiled, and how they come to be: at once, or by a process in the background.

numba keeps what it compiles in a folder. A file there says that all kernels of one family are there for one
dtype. A lock keeps two processes from filling the folder at once, which numba's index does not stand.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

_HERE = Path(__file__).parent
_LOCK = "squeezebox.lock"


def mark_of(name: str) -> Path | None:
    """The file that says that these kernels are on disk; None where numba finds no folder to write to."""
    from squeezebox.codecs._cpu import _entropy_loops  # loads numba

    folder = _entropy_loops.extent.stats.cache_path
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


_ANY: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
    "no_rewrites": True,  # of whole arrays' expressions and of print, which no loop has
}
PART: dict[str, Any] = {**_ANY, "no_cpython_wrapper": True}
"""Of a function that only compiled ones call: without what Python would call it by, which costs most."""
_FAMILIES = ("values", "groups", "states")  # `blocks` of a device are rarely unpacked on a CPU
_LOG = logging.getLogger("squeezebox")
_SERVE = "import sys; from squeezebox.codecs import _kernels; _kernels.serve(*sys.argv[1:])"
_PAUSE = 0.1  # seconds between two looks at what another process, or thread, compiles
Unit = tuple[str, torch.dtype]  # a family, and float32 or float64


def kernel(function: Callable[..., Any]) -> Any:
    """A loop that Python calls, compiled by numba; kept on disk, unless numba finds no folder to write to."""
    from numba import njit

    compiled = njit(**_ANY)(function)
    try:
        compiled.enable_caching()
    except (RuntimeError, OSError):
        return compiled  # each process then compiles for itself
    return compiled


def native(function: Callable[[int], None]) -> Any:
    """A loop that threads run without the interpreter, given an address; kept on disk as others are."""
    from numba import cfunc, types

    signature = types.void(types.int64)
    try:
        return cfunc(signature, cache=True, error_model="numpy")(function)
    except (RuntimeError, OSError):
        return cfunc(signature, error_model="numpy")(function)


def kernel_part(function: Callable[..., Any]) -> Any:
    """A function that kernels call, kept on disk within each of them."""
    from numba import njit

    return njit(**PART)(function)


def compile_kernels(float64: bool = False) -> None:
    """Compile what packing on a CPU needs, and leave it on disk: once for each machine.

    Args:
        float64: also what float64 tensors need; bfloat16 and float16 go through the kernels of float32.

    Call it as a Docker image is built, or before training, so that tensors are packed from the first step
    on. Without it :func:`squeezebox.attach` has a process compile what it needs in the background, and holds
    tensors exactly until then. Where all are there, it only looks.
    """
    for dtype in (torch.float32, torch.float64) if float64 else (torch.float32,):
        for family in _FAMILIES:
            require(dtype, family)


def require(dtype: torch.dtype, family: str = "values") -> None:
    """Return once a family's kernels for this dtype are compiled, here or by the process that has begun."""
    unit = _unit(dtype, family)
    with _state.turn:
        watch = _state.watches.get(unit)
    if watch is not None:
        watch.join()
    if unit not in _state.ready:
        _compile_here(unit)


def ready(dtype: torch.dtype) -> bool:
    """Whether saved tensors of this dtype can be packed now; if not, their kernels are being compiled.

    Where the background cannot compile them, this call does.
    """
    unit = _unit(dtype, "values")
    if unit in _state.ready:
        return True
    with _state.turn:
        watch = _state.watches.get(unit)
        if watch is None and unit not in _state.failed:
            watch = _begin(unit)
    if watch is not None and watch.is_alive():
        return False
    if unit not in _state.ready:
        _compile_here(unit)
    return True


class _State:
    """What this process knows; a forked one starts over, without its parent's threads and processes."""

    def __init__(self) -> None:
        self.ready: set[Unit] = set()
        self.start_over()

    def start_over(self) -> None:
        """Know what is ready, and nothing of what is being compiled."""
        self.turn = threading.RLock()
        self.failed: set[Unit] = set()
        self.watches: dict[Unit, threading.Thread] = {}
        self.processes: list[subprocess.Popen[str]] = []
        self.ending = False

    def end(self) -> None:
        """End what still compiles: what it has finished stays on disk."""
        self.ending = True
        for process in self.processes:
            process.kill()
            process.wait()


_state = _State()
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_state.start_over)
atexit.register(_state.end)


def _unit(dtype: torch.dtype, family: str) -> Unit:
    """Loops compute in float32, or in float64 where a tensor's own values are."""
    wide = dtype == torch.float64 and family in ("values", "groups")
    return family, torch.float64 if wide else torch.float32


def _name(unit: Unit) -> str:
    return f"{unit[0]} {str(unit[1]).removeprefix('torch.')}"


def _begin(unit: Unit) -> threading.Thread | None:
    """A thread that has a process compile the unit; None where it is there, or this process has to."""
    mark = None if find_spec("numba") is None else mark_of(_name(unit))
    if find_spec("numba") is None or (mark is not None and mark.exists()):
        _state.ready.add(unit)
        return None
    if mark is None or not sys.executable:
        _state.failed.add(unit)
        return None
    _LOG.warning(
        "Squeezebox compiles its %s kernels in the background, once on this machine. Until then tensors are "
        "held exactly, in plain PyTorch's memory; squeezebox.compile_kernels() compiles them beforehand.",
        str(unit[1]).removeprefix("torch."),
    )
    thread = _state.watches[unit] = threading.Thread(target=_watch, args=(unit, mark), daemon=True)
    thread.start()
    return thread


def _watch(unit: Unit, mark: Path) -> None:
    """Until somebody's process has compiled the unit, or this one's has failed."""
    begun = time.monotonic()
    while not mark.exists() and not _state.ending:
        with locked(mark.parent) as mine:
            if mine and not mark.exists():
                why = _in_a_process(unit)
                if not mark.exists():
                    _tell_failed(unit, why)
                    return
        time.sleep(_PAUSE)
    if mark.exists():
        _state.ready.add(unit)
        if not _state.ending:
            seconds = time.monotonic() - begun
            _LOG.warning("Squeezebox's kernels are compiled, after %.0f s; tensors are packed now.", seconds)


def _tell_failed(unit: Unit, why: str) -> None:
    _state.failed.add(unit)
    if not _state.ending:
        _LOG.warning(
            "Squeezebox's kernels could not be compiled in the background (%s); this process compiles them "
            "now, in some seconds.",
            why,
        )


def _in_a_process(unit: Unit) -> str:
    """Have a process compile the unit; what it said last, should it fail."""
    paths = os.pathsep.join(str(path) for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _SERVE, *_name(unit).split()]
    pipe = subprocess.PIPE  # of stdin, whose end tells the process that this one is gone
    try:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, text=True, env=environment
        )
    except OSError as error:
        return str(error)
    _state.processes.append(process)
    if _state.ending:
        process.kill()
    with process:
        assert process.stderr is not None
        said = process.stderr.read().strip().splitlines()
        process.wait()
    _state.processes.remove(process)
    return f"exit status {process.returncode}{': ' + said[-1] if said else ''}"


def _compile_here(unit: Unit) -> None:
    """In this process, as soon as no other one does."""
    if find_spec("numba") is not None:
        mark = mark_of(_name(unit))
        if mark is None or not mark.exists():
            _LOG.warning(
                "Squeezebox compiles its kernels (%s), once on this machine, for some seconds.",
                _name(unit),
            )
            with _turn_at(mark):
                run(unit, mark)
    _state.ready.add(unit)


@contextlib.contextmanager
def _turn_at(mark: Path | None) -> Iterator[None]:
    """Alone in the folder of the mark, or once the mark is there."""
    while mark is not None:
        with locked(mark.parent) as mine:
            if mine or mark.exists():
                yield
                return
        time.sleep(_PAUSE)
    yield


def run(unit: Unit, mark: Path | None) -> None:
    """Run the unit's kernels, which compiles what is not on disk, and mark that they are there."""
    from squeezebox.codecs import _cpu

    runs = {"values": _cpu.run_values, "groups": _cpu.run_groups, "states": _cpu.run_states}
    with _no_collection():
        runs.get(unit[0], _cpu.run_blocks)(unit[1])
    if mark is not None:
        with contextlib.suppress(OSError):  # the next process looks again
            mark.touch()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without looking for cycles among all that numba makes as it compiles: a tenth of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def serve(family: str, dtype: str) -> None:
    """All that the background's process does; it ends with the process that began it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(5)  # of ten, two busy cores leave it a tenth of one
    unit = family, getattr(torch, dtype)
    run(unit, mark_of(_name(unit)))


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)
