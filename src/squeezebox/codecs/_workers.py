"""Loops over pieces on several threads; the kernels and Blosc2 run without the interpreter lock.

Where torch computes with OpenMP they run on its threads: these wait for torch's next loop without sleeping,
and others would have to share the cores with them.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

Result = TypeVar("Result")
Task = Callable[[], None]
_TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_LARGEST_KEPT = 1 << 25  # bytes of scratch that stay with a thread
_room = threading.local()
_rooms: dict[int, dict[str, NDArray[np.uint8]]] = {}  # of threads that Python does not know from call to call


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="squeezebox")


@lru_cache(maxsize=1)
def _parallel() -> Any:
    """The function of torch's own OpenMP that runs a task on each of its threads, if there is one."""
    if not torch.backends.openmp.is_available():
        return None
    try:
        function = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = (_TASK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return function


class _State:
    """Whether this process may use its OpenMP's threads: a forked child has none of its parent's."""

    forked = False

    def start_over(self) -> None:
        """In a child."""
        self.forked = True
        _pool.cache_clear()


_state = _State()
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_state.start_over)


def run(work: Callable[[int], Result], count: int) -> list[Result]:
    """``[work(0), ..., work(count - 1)]`` on ``torch.get_num_threads()`` threads, this one included."""
    threads = torch.get_num_threads()
    if min(threads, count) <= 1:
        return [work(index) for index in range(count)]
    todo = iter(range(count))  # next() on a range iterator is atomic: threads share it without a lock
    results: dict[int, Result] = {}
    failed: list[BaseException] = []
    inference = torch.is_inference_mode_enabled()
    # A thread may hold on to ``drain`` for a while after it has ended: not to the tensors behind ``work``.
    held = [work]
    del work

    def drain() -> None:
        try:
            with torch.inference_mode(inference):
                for index in todo:
                    results[index] = held[0](index)
        except BaseException as error:  # noqa: BLE001  raised below, once all have ended
            failed.append(error)

    (_on_pool if _state.forked or _parallel() is None else _on_team)(drain, threads, count)
    held.clear()
    if failed:
        raise failed[0]
    return [results.pop(index) for index in range(count)]


Native = Any
"""A compiled function of a job's address."""


def native(function: Any) -> Native:
    """What ``run_native`` takes, of what ``_kernels.native`` made; others may run Python in a call."""
    return _TASK(function.address)


def run_native(task: Native, job: ctypes.Array[Any], count: int) -> None:
    """Have the threads that ``run`` uses take pieces of a job, ``count`` of them, until none is left."""
    threads, address = torch.get_num_threads(), ctypes.addressof(job)
    if min(threads, count) <= 1:
        task(address)
    elif _state.forked or _parallel() is None:
        _on_pool(partial(task, address), threads, count)
    else:
        _parallel()(task, address, threads, 0)


def _on_team(drain: Task, threads: int, count: int) -> None:
    """On torch's own threads: always on all of them, as others than before would have to be made."""
    here = threading.get_ident()

    def task(_: Any) -> None:
        if threading.get_ident() != here:
            _room.held = _rooms.setdefault(threading.get_ident(), {})
        drain()

    _parallel()(_TASK(task), None, threads, 0)


def _on_pool(drain: Task, threads: int, count: int) -> None:
    others = [_pool(threads - 1).submit(drain) for _ in range(min(threads, count) - 1)]
    drain()
    wait([other for other in others if not other.cancel()])  # those not begun have nothing left to do


def scratch(name: str, count: int, dtype: DTypeLike) -> NDArray[Any]:
    """Memory of this thread, reused by the next caller of this name: fresh pages cost more than packing."""
    nbytes = count * np.dtype(dtype).itemsize
    if not hasattr(_room, "held"):
        _room.held = {}
    kept: dict[str, NDArray[np.uint8]] = _room.held
    held = kept.get(name)
    if held is None or held.size < nbytes:
        held = np.empty(nbytes, np.uint8)
        if nbytes <= _LARGEST_KEPT:
            kept[name] = held
    return held[:nbytes].view(dtype)


def spans(count: int, least: int) -> list[tuple[int, int]]:
    """``range(count)`` in a few runs of at least ``least``, for ``run``: four for each thread at most."""
    pieces = max(1, min(4 * torch.get_num_threads(), count // least))
    edges = [count * piece // pieces for piece in range(pieces + 1)]
    return list(zip(edges[:-1], edges[1:], strict=True))
