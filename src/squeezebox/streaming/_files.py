"""Arrays in files, read and written piece by piece: pages of a mapped file would stay in the process."""

from __future__ import annotations

import errno
import math
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from squeezebox.schema import DatasetError

_MAPS = Path("/proc/self/maps")


def mapped_below(array: Any) -> np.memmap[Any, Any] | None:
    """The whole mapped file that an array is a view of, itself included; None if it is none."""
    while array is not None:
        base: Any = getattr(array, "base", None)
        if isinstance(array, np.memmap) and isinstance(base, mmap.mmap):
            return array if array.filename is not None else None
        array = base
    return None


def require_whole(mapped: np.memmap[Any, Any]) -> None:
    """Raise DatasetError where the file has become shorter: reading the map would end the process."""
    size, wanted = Path(str(mapped.filename)).stat().st_size, mapped.offset + mapped.nbytes
    if size < wanted:
        raise DatasetError(
            f"{Path(str(mapped.filename)).name} has {size:,} bytes, and {wanted:,} when it was opened. "
            "Write it again; gradients are as they were before the step."
        )


def overlap(first: Any, second: Any) -> bool:
    """Whether arrays or tensors lie in the same memory, or part of a file, by their first and last bytes."""
    if not all(isinstance(each, Tensor | np.ndarray) and math.prod(each.shape) for each in (first, second)):
        return False
    one, other = _bytes(first), _bytes(second)
    return _meet(one, other) or _meet(_bytes_in_file(first, one), _bytes_in_file(second, other))


_Bytes = tuple[object, int, int]  # where: a device or a file; from the first byte to the last


def _meet(one: _Bytes | None, other: _Bytes | None) -> bool:
    if one is None or other is None:
        return False
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


def _bytes(array: Tensor | np.ndarray[Any, Any]) -> _Bytes:
    if isinstance(array, Tensor):
        begin, size, strides = array.data_ptr(), array.element_size(), array.stride()
        spans = [size * stride * (count - 1) for stride, count in zip(strides, array.shape, strict=True)]
        return array.device, begin, begin + sum(spans) + size
    spans = [stride * (count - 1) for stride, count in zip(array.strides, array.shape, strict=True)]
    begin = _address(array)
    least, most = (sum(sign * max(sign * span, 0) for span in spans) for sign in (-1, 1))
    return torch.device("cpu"), begin + least, begin + most + array.itemsize


def _bytes_in_file(array: Any, memory: _Bytes) -> _Bytes | None:
    mapped = mapped_below(array) if isinstance(array, np.ndarray) else None
    if mapped is None or mapped.mode == "c":
        return None
    try:
        file = os.stat(str(mapped.filename))
    except OSError:
        return None
    shift = mapped.offset - _address(mapped)
    return (file.st_dev, file.st_ino), memory[1] + shift, memory[2] + shift


def read_at(number: int, memory: memoryview, offset: int) -> int:
    """Fill memory from an open file as far as that goes; Linux reads at most 2 GiB in one call."""
    done = 0
    while done < len(memory):
        count = os.preadv(number, [memory[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def write_at(number: int, memory: memoryview, offset: int) -> None:
    """Write all of it to an open file; a full disk is an OSError."""
    done = 0
    while done < len(memory):
        count = os.pwritev(number, [memory[done:]], offset + done)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += count


def from_file(array: Any) -> Any:
    """The array, or a stand-in that reads the file which the array is a view of.

    An array stays as it is if it is in memory, if its map has changes of its own (mode "c"), if the file has
    another one's name by now, if its elements lie in the file backwards or more than once, or on Windows.
    """
    mapped = mapped_below(array) if isinstance(array, np.ndarray) else None
    if mapped is None or mapped.mode == "c" or not _is_nested(array) or not hasattr(os, "preadv"):
        return array
    try:
        number = os.open(str(mapped.filename), os.O_RDONLY)
    except OSError:
        return array
    file = FileArray(array, mapped, number)
    return file if _is_mapped(mapped, number) else array


class FileArray:
    """An array in a file: slices are read from the file, not through the map."""

    def __init__(self, view: np.ndarray[Any, Any], mapped: np.memmap[Any, Any], number: int) -> None:
        self._view, self._number, self._mapped = view, number, mapped
        self._begin = mapped.offset - _address(mapped)
        self.shape, self.dtype, self.ndim = view.shape, view.dtype, view.ndim
        weakref.finalize(self, os.close, number)

    @property
    def stamp(self) -> tuple[int, int]:
        """The file's length and when it was last changed, as far as the system knows by now.

        Raises:
            DatasetError: the file has become shorter.
        """
        require_whole(self._mapped)
        found = os.fstat(self._number)
        return found.st_size, found.st_mtime_ns

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        """A copy of this part; it lies in memory in the file's order.

        Raises:
            DatasetError: the file has become shorter.
        """
        view = self._view[index]
        order = _order(view)
        strides = [view.strides[dim] for dim in order]
        sizes = [view.shape[dim] for dim in order]
        run = view.itemsize
        while strides and strides[-1] == run:
            strides.pop()
            run *= sizes.pop()
        offsets = np.full(1, self._begin + _address(view), np.int64)
        for stride, size in zip(strides, sizes, strict=True):
            offsets = np.add.outer(offsets, stride * np.arange(size)).ravel()
        found = np.empty(len(offsets) * run, np.uint8)
        memory = memoryview(found.data)
        for place, offset in enumerate(offsets.tolist()):
            if read_at(self._number, memory[place * run : (place + 1) * run], offset) != run:
                require_whole(self._mapped)
                raise DatasetError(f"{self._mapped.filename} could not be read at byte {offset:,}.")
        ordered = found.view(view.dtype).reshape([view.shape[dim] for dim in order])
        whole: np.ndarray[Any, Any] = ordered.transpose(np.argsort(order))
        return whole

    def rows(
        self, rows: np.ndarray[Any, Any], found: np.ndarray[Any, Any] | None = None
    ) -> np.ndarray[Any, Any]:
        """A copy of these rows of the first dimension, in ``found`` if it is given: a contiguous array.

        Raises:
            DatasetError: the file has become shorter.
        """
        from squeezebox.memory import read_rows  # numba, which images do without

        if found is None:
            found = np.empty((len(rows), *self.shape[1:]), self.dtype)
        row = self._view[:1]
        if not row.flags.c_contiguous or self._view.strides[0] < row.nbytes:
            for place, each in enumerate(rows):
                found[place] = self[each : each + 1][0]
        elif found.size:
            failed = read_rows(self._number, self._begin + _address(row), self._view.strides[0], rows, found)
            if failed >= 0:
                require_whole(self._mapped)
                raise DatasetError(f"{self._mapped.filename} could not be read at row {failed:,}.")
        return found


def release(array: Any) -> None:
    """Take the pages of a mapped file that are written to out of the process; the file keeps its content."""
    mapped = mapped_below(array)
    if mapped is not None and mapped.mode in ("r+", "w+") and hasattr(mmap, "MADV_DONTNEED"):
        pages: Any = mapped.base
        pages.madvise(mmap.MADV_DONTNEED)


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _order(view: np.ndarray[Any, Any]) -> list[int]:
    """Dimensions as they lie in the file, the outermost first; those of one element before all others."""
    return sorted(range(view.ndim), key=lambda dim: (view.shape[dim] > 1, -abs(view.strides[dim])))


def _is_nested(view: np.ndarray[Any, Any]) -> bool:
    """Whether elements lie one behind another in the file, each once."""
    end = view.itemsize
    for dim in reversed(_order(view)):
        if view.shape[dim] > 1 and view.strides[dim] < end:
            return False
        end = max(end, view.strides[dim] * view.shape[dim])
    return True


def _is_mapped(mapped: np.memmap[Any, Any], number: int) -> bool:
    """Whether this open file is the one that is mapped."""
    address = _address(mapped)
    return any(start <= address < stop and inode == os.fstat(number).st_ino for start, stop, inode in _maps())


def _maps() -> Iterator[tuple[int, int, int]]:
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        bounds, _, _, _, inode, *_ = line.split()
        start, stop = (int(bound, 16) for bound in bounds.split("-"))
        yield start, stop, int(inode)
