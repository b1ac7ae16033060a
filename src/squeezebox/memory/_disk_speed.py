"""What a disk takes, and what a step loses while the disk works."""

from __future__ import annotations

import functools
import itertools
import mmap
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from squeezebox.memory._chunks import CHUNK_BYTES
from squeezebox.memory._disk import THREADS
from squeezebox.memory._elsewhere import Elsewhere
from squeezebox.memory._spill import Spill, full
from squeezebox.schema import CaptureError


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskSpeed:
    """Seconds a byte, sustained.

    ``writing`` and ``reading`` are the disk's, behind which a step may go on; the others are the step's own.
    ``leaving``: of copying to a buffer. ``returning``: of copying from one to memory that the system has to
    find first. ``slowing``: by which computing takes longer while the disk works, for a byte either way.
    ``direct``: past the system's cache.
    """

    writing: float
    reading: float
    leaving: float
    returning: float
    slowing: float
    direct: bool


@functools.cache
def disk_speed(folder: Elsewhere) -> DiskSpeed:
    """The median of a few rounds, measured once, in about 0.6 s, with some 300 MiB moved."""
    spill = Spill(folder)
    noise = torch.Generator().manual_seed(0)  # some disks write zeros faster than data
    data = torch.randint(256, (_BLOCK_BYTES,), dtype=torch.uint8, device="cpu", generator=noise)
    out = torch.empty_like(data)
    _round(spill, data, out)  # where the disk finds a place for them, which it does once
    rounds = _rounds(lambda: _round(spill, data, out))
    record = spill.record
    spill.close()
    writing, reading, leaving, returning = (statistics.median(each) for each in zip(*rounds, strict=True))
    return DiskSpeed(
        writing=writing,
        reading=reading,
        leaving=leaving,
        returning=returning,
        slowing=_slowing(folder, data[:CHUNK_BYTES]),
        direct=record is not None and not record.cache_bytes,
    )


_BLOCK_BYTES, _BLOCKS = 1 << 22, 4
_ROUNDS, _SECONDS = 6, 0.35
_SIZE, _PRODUCTS = 640, 4  # of matrices, and how many are multiplied while the disk works


def _rounds(measure: Callable[[], list[float]]) -> list[list[float]]:
    begun, rounds = time.perf_counter(), [measure()]
    while len(rounds) < _ROUNDS and time.perf_counter() - begun < _SECONDS:
        rounds.append(measure())
    return rounds


def _round(spill: Spill, data: torch.Tensor, out: torch.Tensor) -> list[float]:
    """Seconds a byte to write some blocks, to read them, and to copy one, also to new memory."""
    times = [time.perf_counter()]
    slots = [spill.write(data) for _ in range(_BLOCKS)]
    spill.settle()
    times.append(time.perf_counter())
    while slots:
        spill.read(slots.pop(), out)
    times.append(time.perf_counter())
    np.copyto(out.numpy(), data.numpy())
    times.append(time.perf_counter())
    np.copyto(np.frombuffer(mmap.mmap(-1, len(data)), np.uint8), data.numpy())
    times.append(time.perf_counter())
    nbytes = (len(data) * _BLOCKS, len(data) * _BLOCKS, len(data), len(data))
    return [
        (end - begun) / each for (begun, end), each in zip(itertools.pairwise(times), nbytes, strict=True)
    ]


def _slowing(folder: Elsewhere, data: torch.Tensor) -> float:
    """Seconds a byte by which products take longer while threads write and read chunks.

    Raises:
        CaptureError: the disk is full.
    """
    file, matrix = folder.open(), torch.ones(_SIZE, _SIZE, device="cpu")
    moved, ended = [0] * THREADS, threading.Event()
    try:
        file.reserve(0, THREADS * CHUNK_BYTES)
    except OSError as error:
        raise CaptureError(full(THREADS * CHUNK_BYTES, 0, folder, error)) from error

    def move(number: int) -> None:
        memory = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        memory[:] = data.numpy().tobytes()
        for way in itertools.cycle((file.begin_write, file.begin_read)):
            if ended.is_set():
                return
            way(memory, number * CHUNK_BYTES).result()
            moved[number] += CHUNK_BYTES

    def computed() -> float:
        begun = time.perf_counter()
        for _ in range(_PRODUCTS):
            matrix @ matrix
        return time.perf_counter() - begun

    computed()
    alone = statistics.median(each for (each,) in _rounds(lambda: [computed()]))

    def slowed() -> list[float]:
        before, seconds = sum(moved), computed()
        return [(seconds - alone) / max(sum(moved) - before, CHUNK_BYTES)]

    with ThreadPoolExecutor(THREADS) as threads:
        moving = [threads.submit(move, number) for number in range(THREADS)]
        try:
            found = statistics.median(each for (each,) in _rounds(slowed))
        finally:
            ended.set()
    for each in moving:
        each.result()  # where the disk has failed
    file.finish(wait=True)
    file.close()
    return max(0.0, found)
