"""Rows in a file, read and written by number: pages of a mapped file would count as memory."""

# numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path
from typing import IO, Any

import numpy as np
from numba import njit, types

from squeezebox.memory._mapped_file import nameless_file
from squeezebox.schema import OutputError

_CALL = types.int64(types.int32, types.uintp, types.uint64, types.int64)
_pread, _pwrite = types.ExternalFunction("pread", _CALL), types.ExternalFunction("pwrite", _CALL)
_PIECE = 1 << 20  # bytes of a piece that are moved at a time
_Array = np.ndarray[Any, Any]


def read_rows(number: int, begin: int, stride: int, rows: _Array, found: _Array) -> int:
    """Read rows of a file into ``found``, a row each; neighbours in ``rows`` that are so in the file at once.

    Args:
        number: the file's descriptor.
        begin: the byte where row 0 begins.
        stride: bytes from one row to the next.
        rows: which, as int64.
        found: a contiguous array.

    Returns:
        -1, or the first row that could not be read.
    """
    return int(_read(number, begin, stride, rows, _bytes_of(found)))


class RowFile:
    """``count`` rows of ``width`` elements in a new file without a name, all zero.

    Args:
        folder: where the file is.
        count, width, dtype: the rows; numpy's type.
        what: what it is for, for messages: "layers' outputs".

    Raises:
        OutputError: the folder is missing or not writable, or the disk has not enough room.
    """

    def __init__(self, folder: Path, count: int, width: int, dtype: np.dtype[Any], what: str) -> None:
        self.count, self.width, self.dtype, self._what = count, width, dtype, what
        self._row_bytes = width * dtype.itemsize
        self._file: IO[bytes] | None = None
        if count * self._row_bytes:
            self._file = nameless_file(folder, count * self._row_bytes, what)
            weakref.finalize(self, self._file.close)

    def read(self, rows: _Array, found: _Array | None = None) -> _Array:
        """A copy of these rows, in ``found`` if it is given: a contiguous array."""
        found = np.empty((len(rows), self.width), self.dtype) if found is None else found
        if found.size:
            self._check(_read(self._number, 0, self._row_bytes, rows, _bytes_of(found)), "read back")
        return found

    def write(self, rows: _Array, values: _Array) -> None:
        """Change these rows."""
        if values.size:
            held = _bytes_of(np.ascontiguousarray(values, self.dtype))
            self._check(_write(self._number, self._row_bytes, rows, held), "written")

    def mapped(self) -> _Array:
        """All rows, as an array whose pages the system brings in when they are read; it outlives this one."""
        if self._file is None:
            return np.empty((self.count, self.width), self.dtype)
        whole = mmap.mmap(self._number, self.count * self._row_bytes)
        return np.frombuffer(whole, self.dtype).reshape(self.count, self.width)

    def scatter(self, pieces: _Array, picks: _Array, start: int, values: _Array) -> None:
        """Change the rows of each piece, (begin, size), to ``values[picks - start]`` of the same piece."""
        if values.size:
            held = np.ascontiguousarray(values, self.dtype)
            self._check(_scatter(self._number, self._row_bytes, pieces, picks, start, held), "written")

    def gather(self, pieces: _Array, picks: _Array, start: int, sums: _Array) -> None:
        """Add the rows of each piece, (begin, size), to ``sums[picks - start]`` of the same piece."""
        if sums.size:
            self._check(_gather(self._number, self._row_bytes, pieces, picks, start, sums), "read back")

    @property
    def _number(self) -> int:
        return -1 if self._file is None else self._file.fileno()

    def _check(self, failed: int, done: str) -> None:
        if failed >= 0:
            raise OutputError(
                f"row {failed:,} of {self._what} could not be {done}; its disk may be failing, so give "
                "folder= another one."
            )


def _bytes_of(array: _Array) -> _Array:
    return array.view(np.uint8).reshape(len(array), -1)


@njit(cache=True, nogil=True)
def _run(rows, at):
    """Where a run of rows that lie one behind another ends."""
    last = at + 1
    while last < rows.shape[0] and rows[last] == rows[last - 1] + 1:
        last += 1
    return last


@njit(cache=True, nogil=True)
def _moved(call, number, address, nbytes, offset):
    """Whether all of these bytes were read, or written."""
    done = 0
    while done < nbytes:
        count = call(number, np.uintp(address + done), np.uint64(nbytes - done), offset + done)
        if count <= 0:
            return False
        done += count
    return True


if hasattr(os, "RWF_NOWAIT"):
    _preadv2: Any = types.ExternalFunction(
        "preadv2", types.int64(types.int32, types.uintp, types.int32, types.int64, types.int32)
    )
    _fadvise: Any = types.ExternalFunction(
        "posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32)
    )
    _NOWAIT, _WILLNEED = os.RWF_NOWAIT, os.POSIX_FADV_WILLNEED

    @njit(cache=True, nogil=True)
    def _cached(part, number, address, nbytes, offset):
        """Whether these bytes were in memory, and were read; if not, the disk begins to read them."""
        part[0], part[1] = address, nbytes
        if _preadv2(number, part.ctypes.data, 1, offset, _NOWAIT) == nbytes:
            return True
        _fadvise(number, offset, nbytes, _WILLNEED)
        return False

else:

    @njit(cache=True, nogil=True)
    def _cached(part, number, address, nbytes, offset):
        return False


@njit(cache=True, nogil=True)
def _read(number, begin, stride, rows, found):
    """First what the system has in memory; the disk reads the rest together meanwhile."""
    width, address, at = found.shape[1], found.ctypes.data, 0
    part, left, count = np.empty(2, np.uint64), np.empty(rows.shape[0], np.int64), 0
    while at < rows.shape[0]:
        last = _run(rows, at) if stride == width else at + 1
        if not _cached(part, number, address + at * width, (last - at) * width, begin + rows[at] * stride):
            left[count] = at
            count += 1
        at = last
    for at in left[:count]:
        last = _run(rows, at) if stride == width else at + 1
        if not _moved(_pread, number, address + at * width, (last - at) * width, begin + rows[at] * stride):
            return rows[at]
    return -1


@njit(cache=True, nogil=True)
def _write(number, stride, rows, values):
    address, at = values.ctypes.data, 0
    while at < rows.shape[0]:
        last = _run(rows, at)
        if not _moved(_pwrite, number, address + at * stride, (last - at) * stride, rows[at] * stride):
            return rows[at]
        at = last
    return -1


@njit(cache=True, nogil=True)
def _scatter(number, stride, pieces, picks, start, values):
    most = max(min(_PIECE // stride, picks.shape[0]), 1)
    held = np.empty((most, values.shape[1]), values.dtype)
    for begin, size in pieces:
        for first in range(begin, begin + size, most):
            count = min(most, begin + size - first)
            for row in range(count):
                held[row] = values[picks[first + row] - start]
            if not _moved(_pwrite, number, held.ctypes.data, count * stride, first * stride):
                return first
    return -1


@njit(cache=True, nogil=True)
def _gather(number, stride, pieces, picks, start, sums):
    most = max(min(_PIECE // stride, picks.shape[0]), 1)
    held = np.empty((most, sums.shape[1]), sums.dtype)
    for begin, size in pieces:
        for first in range(begin, begin + size, most):
            count = min(most, begin + size - first)
            if not _moved(_pread, number, held.ctypes.data, count * stride, first * stride):
                return first
            for row in range(count):
                sums[picks[first + row] - start] += held[row]
    return -1
