"""A few threads shared by all packers; the kernels and Blosc2 run without the interpreter lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

Result = TypeVar("Result")
_room = threading.local()


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="squeezebox")


# A forked child has none of its parent's threads: it must start its own.
os.register_at_fork(after_in_child=_pool.cache_clear)


def run(work: Callable[[int], Result], count: int) -> list[Result]:
    """``[work(0), ..., work(count - 1)]`` on ``torch.get_num_threads()`` threads, this one included."""
    threads = min(torch.get_num_threads(), count)
    if threads <= 1:
        return [work(index) for index in range(count)]
    todo = iter(range(count))  # next() on a range iterator is atomic: threads share it without a lock
    results: dict[int, Result] = {}
    inference = torch.is_inference_mode_enabled()
    # The pool may hold on to ``drain`` for a while after it has ended: not to the tensors behind ``work``.
    held = [work]
    del work

    def drain() -> None:
        task = held[0]
        with torch.inference_mode(inference):
            for index in todo:
                results[index] = task(index)

    others = [_pool(torch.get_num_threads() - 1).submit(drain) for _ in range(threads - 1)]
    try:
        drain()
    finally:  # all have ended before anything is raised; those not begun are not waited for
        running = [other for other in others if not other.cancel()]
        wait(running)
        held.clear()
    for other in running:
        other.result()
    return [results.pop(index) for index in range(count)]


def scratch(name: str, count: int, dtype: DTypeLike) -> NDArray[Any]:
    """Memory of this thread, reused by the next caller of this name: fresh pages cost more than packing."""
    nbytes = count * np.dtype(dtype).itemsize
    held: NDArray[np.uint8] | None = getattr(_room, name, None)
    if held is None or held.size < nbytes:
        held = np.empty(nbytes, np.uint8)
        setattr(_room, name, held)
    return held[:nbytes].view(dtype)


def spans(count: int, least: int) -> list[tuple[int, int]]:
    """``range(count)`` in a few runs of at least ``least``, for ``run``: four for each thread at most."""
    pieces = max(1, min(4 * torch.get_num_threads(), count // least))
    edges = [count * piece // pieces for piece in range(pieces + 1)]
    return list(zip(edges[:-1], edges[1:], strict=True))
