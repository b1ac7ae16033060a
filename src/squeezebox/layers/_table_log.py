"""A table's rows in a file, where changed ones are written one behind another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from squeezebox.memory import RowFile

_MOST_ZONES = 64  # a step's rows take a write in each
_ZONE_ROWS = 1 << 16  # at least, where there are as many
_CHUNK_ROWS = 8 * 1024
_Array = np.ndarray[Any, Any]


class RowLog:
    """``count`` rows of ``width`` elements in a file without a name, all zero.

    A changed row is written behind the last one, so that a step's rows are few writes. Written to places of
    their own, each would change a page of the file. Rows that are neighbours in the table share a zone of
    the file, which has room for half as many again. Once it is full, rows that are still in use move
    together (Rosenblum and Ousterhout, "The design and implementation of a log-structured file system",
    1992).

    Args:
        folder: where the file is.
        count, width, dtype: the rows; numpy's type.

    Attributes:
        where: int32 for each row: -1 - its place within its zone, or anything from 0 on if its owner has
            it elsewhere. Only ``write`` may bring a row back.

    Raises:
        OutputError: the folder is missing or not writable, or the disk has not enough room.
    """

    def __init__(self, folder: Path, count: int, width: int, dtype: np.dtype[Any]) -> None:
        self._zone = min(max(-(-count // _MOST_ZONES), _ZONE_ROWS), count)
        self._length = self._zone + self._zone // 2
        begins = np.arange(0, count, self._zone)
        self._ends = np.minimum(count - begins, self._zone)
        self._lengths = self._ends + self._ends // 2
        self.where = np.empty(count, np.int32)
        for begin, rows in zip(begins, self._ends, strict=True):
            self.where[begin : begin + rows] = ~np.arange(rows)
        length = (len(begins) - 1) * self._length + int(self._lengths[-1])
        self._file = RowFile(folder, length, width, dtype, "tables")

    def read(self, ids: _Array) -> _Array:
        """A copy of these rows, which are in the file."""
        return self._file.read(ids // self._zone * self._length + ~self.where[ids])

    def write(self, ids: _Array, rows: _Array) -> None:
        """Change these rows, or bring them back; ids are distinct and in order."""
        zones = ids // self._zone
        counts = np.bincount(zones, minlength=len(self._ends))
        begins = counts.cumsum() - counts
        for zone in np.flatnonzero(self._ends + counts > self._lengths):
            self._pack(int(zone), ids[begins[zone] : begins[zone] + counts[zone]])
        places = np.arange(len(ids)) + (self._ends - begins)[zones]
        self._file.write(zones * self._length + places, rows)
        self.where[ids] = ~places
        self._ends += counts

    def _pack(self, zone: int, leaving: _Array) -> None:
        """Move a zone's rows together, in the order that they have, but for those that are leaving."""
        first, base, end, done = zone * self._zone, zone * self._length, int(self._ends[zone]), 0
        places = ~self.where[first : first + self._zone]
        places[leaving - first] = -1
        owners = np.full(end, -1, np.int32)
        here = np.flatnonzero(places >= 0)
        owners[places[here]] = here
        for start in range(0, end, _CHUNK_ROWS):
            part = owners[start : start + _CHUNK_ROWS]
            picks = np.flatnonzero(part >= 0)
            if len(picks):
                rows = self._file.read(base + start + np.arange(picks[-1] + 1))[picks]
                moved = done + np.arange(len(picks))
                self._file.write(base + moved, rows)
                self.where[first + part[picks]] = ~moved
                done += len(picks)
        self._ends[zone] = done
