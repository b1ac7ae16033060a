"""What a layer hands to the next by part: each part's rows, and copies of those that other parts read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from squeezebox.memory import RowFile
from squeezebox.schema import DatasetError
from squeezebox.streaming._nodes import Edges, Part, Reader, kind_of

_Array = np.ndarray[Any, Any]


class Boundary:
    """Which rows of other parts each part reads.

    They are in memory: 4 bytes for each row that a part reads of others, 16 for each pair of parts of which
    one reads of the other.

    Args:
        edges: of the graph.
        cuts: the parts' intervals of nodes.
        came: intervals of rows that come from other ranks, numbered behind the parts.

    Attributes:
        count: how many nodes.
        parts: how many parts.
        ends: for each part where its rows of others end, all parts' behind one another.
    """

    def __init__(self, edges: Edges, cuts: list[tuple[int, int]], came: list[tuple[int, int]]) -> None:
        self._edges, self._cuts = edges, [*cuts, *came]
        self.count, self.parts = edges.count, len(cuts)
        starts = np.array([start for start, _ in self._cuts])
        others, pieces, self.ends = [], [], np.zeros(len(cuts) + 1, np.int64)
        for number, (start, stop) in enumerate(cuts):
            read = edges.part(start, stop).others.astype(edges.sources.dtype)
            bounds = np.append(np.searchsorted(read, starts), len(read))
            owners = np.flatnonzero(np.diff(bounds))
            pieces.append(np.stack([owners, bounds[owners] + self.ends[number], np.diff(bounds)[owners]]))
            others.append(read)
            self.ends[number + 1] = self.ends[number] + len(read)
        self._others = np.concatenate(others)
        found = np.concatenate(pieces, 1).T
        found = found[np.argsort(found[:, 0], kind="stable")]
        self._owned = np.searchsorted(found[:, 0], np.arange(len(self._cuts) + 1))
        self._pieces = np.ascontiguousarray(found[:, 1:])

    def __iter__(self) -> Iterator[Part]:
        return (self.part(number) for number in range(self.parts))

    def part(self, number: int) -> Part:
        """A part, numbered."""
        return self._edges.part(*self._cuts[number], self.others(number))

    def own(self, number: int) -> _Array:
        """A part's own nodes."""
        return np.arange(*self._cuts[number])

    def others(self, number: int) -> _Array:
        """The nodes of other parts that a part reads."""
        return self._others[self.ends[number] : self.ends[number + 1]]

    def copies(self, number: int) -> _Array:
        """Where the rows that a part reads of others lie, among all such."""
        return np.arange(self.ends[number], self.ends[number + 1])

    @property
    def all_others(self) -> _Array:
        """The nodes that parts read of others, all parts' behind one another."""
        return self._others

    def pieces(self, number: int) -> tuple[_Array, _Array, int]:
        """Which of all others are a part's: pieces x (begin, size) of all others, these, the part's start."""
        return (
            self._pieces[self._owned[number] : self._owned[number + 1]],
            self._others,
            self._cuts[number][0],
        )


class PartFile:
    """Rows of ``width`` elements for every node, written and read by part.

    A part's rows go to other parts' copies as they are written, so that a part reads two pieces of the file.
    Gradients go the other way, into the same places: to the copies, and each part adds up those of its rows.

    Raises:
        OutputError: the folder is missing or not writable, or the disk has not enough room.
    """

    def __init__(self, boundary: Boundary, folder: Path, width: int, dtype: torch.dtype, what: str) -> None:
        self._boundary, self.dtype, self.width, self.parts = boundary, dtype, width, boundary.parts
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        self._own = RowFile(folder, boundary.count, width, kind, what)
        self._copies = RowFile(folder, int(boundary.ends[-1]), width, kind, what)
        self.write(0, self.total(0))  # zeros: numba's compiler takes its memory now, and not in a step

    def write(self, number: int, x: Tensor) -> None:
        """A part's rows; what comes from other ranks goes to the parts that read it alone."""
        values = x.contiguous().numpy()
        if number < self.parts:
            self._own.write(self._boundary.own(number), values)
        self._copies.scatter(*self._boundary.pieces(number), values)

    def read(self, number: int) -> Tensor:
        """What a part reads: its own rows, and those of others behind them."""
        own, copies = self._boundary.own(number), self._boundary.copies(number)
        found = torch.empty(len(own) + len(copies), self.width, dtype=self.dtype)
        self._own.read(own, found.numpy()[: len(own)])
        self._copies.read(copies, found.numpy()[len(own) :])
        return found

    def give(self, number: int, gradient: Tensor) -> None:
        """The derivative by what a part has read."""
        own, copies = self._boundary.own(number), self._boundary.copies(number)
        values = gradient.contiguous().numpy()
        self._own.write(own, values[: len(own)])
        self._copies.write(copies, values[len(own) :])

    def total(self, number: int) -> Tensor:
        """The derivative by a part's own rows, once all parts have given theirs."""
        own = self._boundary.own(number)
        found = torch.zeros(len(own), self.width, dtype=self.dtype)
        if number < self.parts:
            self._own.read(own, found.numpy())
        self._copies.gather(*self._boundary.pieces(number), found.numpy())
        return found

    def rows(self, rows: _Array) -> Tensor:
        """A copy of rows of parts."""
        found = torch.empty(len(rows), self.width, dtype=self.dtype)
        self._own.read(rows, found.numpy())
        return found

    def add(self, rows: _Array, gradient: Tensor) -> None:
        """To the derivative by rows of parts, once these have given theirs."""
        self._own.write(rows, self.rows(rows).add_(gradient).numpy())


class Features:
    """Every part's rows of the features.

    Of a mapped file, the rows that parts read of others are copied into a file, so that a part reads two
    pieces; in another order than the given one, so are all rows.

    Args:
        array: a tensor or an array with a row for each node.
        order: the nodes in order; None as given.
        boundary: of the parts.
        folder: where copies go.

    Raises:
        OutputError: the folder is missing or not writable, or the disk has not enough room.
    """

    def __init__(self, array: Any, order: _Array | None, boundary: Boundary, folder: Path) -> None:
        self._boundary, self._rows = boundary, Reader(array, order)
        self._own = self._copies = None
        if not self._rows.is_file:
            return
        self._copies = self._rows.copied(boundary.all_others, folder)
        if order is not None:
            self._own = self._rows.copied(np.arange(boundary.count), folder)
        self._stamp = self._rows.stamp

    def require_unchanged(self) -> None:
        """DatasetError where a mapped file has changed since rows of it were copied, as far as is known."""
        if self._copies is not None and self._rows.stamp != self._stamp:
            raise DatasetError(
                "the features' file has changed since the step was made, which copied some rows, so old and "
                "new ones would mix; make another GraphStep."
            )

    def read(self, number: int, *, others: bool) -> Tensor:
        """A part's own rows, and with ``others`` those that it reads of other parts behind them.

        Raises:
            DatasetError: the mapped file has become shorter.
        """
        own, copies = self._boundary.own(number), self._boundary.copies(number)
        rows = own if not others else np.concatenate([own, self._boundary.others(number)])
        if self._copies is None:
            return self._rows(rows)
        found = torch.empty(len(rows), self._copies.width, dtype=kind_of(self._copies))
        values = found.numpy()
        if self._own is None:
            self._rows(own, values[: len(own)])
        else:
            self._own.read(own, values[: len(own)])
        if others:
            self._copies.read(copies, values[len(own) :])
        return found
