"""What a disk takes, and what a step loses while the disk works."""

from __future__ import annotations

import functools
import itertools
import mmap
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from squeezebox.memory._chunks import CHUNK_BYTES, THREADS
from squeezebox.memory._disk import DiskFile, DiskFolder
from squeezebox.memory._spill import Spill


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
def disk_speed(folder: DiskFolder) -> DiskSpeed:
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


def _slowing(folder: DiskFolder, data: torch.Tensor) -> float:
    """Seconds a byte by which products take longer while threads write and read chunks."""
    file = DiskFile(folder.path)
    moved, ended = [0] * THREADS, threading.Event()

    def move(number: int) -> None:
        memory = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        memory[:] = data.numpy().tobytes()
        for way in _alternating(file):
            if ended.is_set():
                return
            way(memory, number * CHUNK_BYTES)
            moved[number] += CHUNK_BYTES

    matrix = torch.ones(_SIZE, _SIZE)

    def computed() -> float:
        begun = time.perf_counter()
        for _ in range(_PRODUCTS):
            matrix @ matrix
        return time.perf_counter() - begun

    computed()
    alone = statistics.median(each for (each,) in _rounds(lambda: [computed()]))
    threads = [threading.Thread(target=move, args=(number,), daemon=True) for number in range(THREADS)]
    for each in threads:
        each.start()
    while not all(moved):  # places were found
        time.sleep(1e-3)

    def slowed() -> list[float]:
        before, seconds = sum(moved), computed()
        return [(seconds - alone) / max(sum(moved) - before, CHUNK_BYTES)]

    found = statistics.median(each for (each,) in _rounds(slowed))
    ended.set()
    for each in threads:
        each.join()
    file.close()
    return max(0.0, found)


def _alternating(file: DiskFile) -> Iterator[Callable[[memoryview, int], None]]:
    return itertools.cycle((file.write, file.read))
