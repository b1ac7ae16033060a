"""One table's rows with their optimizer state: those looked up most often in memory, the others in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from squeezebox.memory import mapped_file

_CHUNK_ROWS = 16 * 1024  # 16 divides it: torch draws normal numbers in groups of 16


class TableRows:
    """``rows`` records of a weight's ``dim`` elements and as many for each further entry of ``values``.

    Args:
        rows: how many.
        dim: of the weight.
        values: what each part of a record begins with; None draws normal numbers, as nn.EmbeddingBag does.
        dtype: of all of it.
        memory_bytes: for records in memory.
        folder: where the file is.

    Attributes:
        held: how many records are in memory.
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        values: Sequence[float | None],
        *,
        dtype: torch.dtype,
        memory_bytes: int,
        folder: Path,
    ) -> None:
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        width = dim * len(values)
        self._file = (
            mapped_file(folder, rows * width * kind.itemsize, "tables").view(kind).reshape(rows, width)
        )
        self._room = min(rows, memory_bytes // (width * kind.itemsize))
        self._held = np.empty((self._room, width), kind)
        self._owners = np.empty(self._room, np.int64)
        self._slots = np.full(rows, -1, np.int32)
        self._counts = np.zeros(rows, np.uint32)
        self._lookups = self._settled = 0
        self.held = 0
        _begin(self._file, dim, values, dtype)

    def read(self, ids: np.ndarray) -> np.ndarray:
        """A copy of these records; ids are distinct."""
        slots = self._slots[ids]
        near = slots >= 0
        found = np.empty((len(ids), self._file.shape[1]), self._file.dtype)
        found[near] = self._held[slots[near]]
        found[~near] = self._file[ids[~near]]
        return found

    def write(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Change these records; ids are distinct. While memory has room, it takes those that the file had."""
        slots = self._slots[ids]
        far = np.flatnonzero(slots < 0)[: self._room - self.held]
        if far.size:
            taken = np.arange(self.held, self.held + far.size)
            self._take(ids[far], taken)
            slots[far] = taken
            self.held += int(far.size)
        near = slots >= 0
        self._held[slots[near]] = records[near]
        self._file[ids[~near]] = records[~near]
        # Each time after twice the lookups, for it reads the counts of all rows.
        if self.held == self._room < len(self._slots) and self._lookups >= 2 * self._settled:
            self._settle()

    def count(self, ids: np.ndarray) -> None:
        """Note that these were looked up."""
        self._counts[ids] += 1
        self._lookups += len(ids)

    def _take(self, ids: np.ndarray, slots: np.ndarray) -> None:
        self._slots[ids], self._owners[slots] = slots, ids

    def _settle(self) -> None:
        """Exchange records, so that memory has those looked up most often."""
        self._settled = self._lookups
        if not self._room:
            return
        wanted = np.argpartition(self._counts, -self._room)[-self._room :]
        stays = np.zeros(len(self._slots), bool)
        stays[wanted] = True
        come = np.sort(wanted[self._slots[wanted] < 0])
        slots = np.flatnonzero(~stays[self._owners])
        self._file[self._owners[slots]] = self._held[slots]
        self._slots[self._owners[slots]] = -1
        self._held[slots] = self._file[come]
        self._take(come, slots)


def _begin(file: np.ndarray, dim: int, values: Sequence[float | None], dtype: torch.dtype) -> None:
    for start in range(0, len(file), _CHUNK_ROWS):
        rows = file[start : start + _CHUNK_ROWS]
        for number, value in enumerate(values):
            part = rows[:, number * dim : (number + 1) * dim]
            part[:] = torch.empty(part.shape, dtype=dtype).normal_().numpy() if value is None else value
