"""What crosses from one level to the next, kept: later passes begin there, gradients come back to it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from squeezebox.schema import OutputError
from squeezebox.streaming._files import read_at, write_at
from squeezebox.streaming._graph import Streamed
from squeezebox.streaming._journal import Journal, boot
from squeezebox.streaming._rows import Part, Rows

Choice = tuple[frozenset[Node], frozenset[Node]]
"""What is kept in memory, and what lies in a file."""

_ALIGNMENT = 64
_PIECE = 1 << 22  # bytes that are brought into the file's order at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a tensor lies: its shape with the streamed axis, ``dim``, as an axis of its own."""

    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """The first byte behind it."""
        return self.offset + self.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What passes hand on, and where: ``tensors``, and ``gradients`` of those that the parameters change.

    Those in ``filed`` lie in a file of ``disk_bytes``, the others in ``kept_bytes`` of memory.
    """

    tensors: Mapping[Node, _Place]
    gradients: Mapping[Node, _Place]
    filed: frozenset[Node]
    kept_bytes: int
    disk_bytes: int

    @property
    def choice(self) -> Choice:
        """What is in memory, and what in a file."""
        return frozenset(self.tensors.keys() - self.filed), self.filed

    def nbytes(self, node: Node) -> int:
        """Of a tensor and its gradient."""
        return sum(each[node].nbytes for each in (self.tensors, self.gradients) if node in each)


def layout(streamed: Streamed, kept: frozenset[Node], filed: frozenset[Node]) -> Layout:
    """One tensor behind another, each whole: some in memory, others in a file."""
    tensors: dict[Node, _Place] = {}
    gradients: dict[Node, _Place] = {}
    ends = {False: 0, True: 0}
    for node in (each for each in streamed.rows if each in kept or each in filed):
        for places in (tensors, gradients)[: 1 + (node in streamed.differentiable)]:
            places[node] = place = _place(node, streamed.rows[node], ends[node in filed])
            ends[node in filed] = place.stop
    return Layout(
        tensors=tensors, gradients=gradients, filed=filed, kept_bytes=ends[False], disk_bytes=ends[True]
    )


def _place(node: Node, rows: Rows, end: int) -> _Place:
    value = node.meta["val"]
    shape = (*value.shape[: rows.dim], rows.before, rows.count, rows.after, *value.shape[rows.dim + 1 :])
    offset = -(-end // _ALIGNMENT) * _ALIGNMENT
    return _Place(shape=shape, dim=rows.dim + 1, dtype=value.dtype, offset=offset)


class Store(Protocol):
    """Tensors that outlast their pass, and their gradients, by rows."""

    def read(self, node: Node, start: int, stop: int, columns: Part | None = None) -> Tensor:
        """A copy of these rows, of some columns or all."""

    def write(self, node: Node, start: int, x: Tensor, columns: Part | None = None) -> None:
        """Keep rows from ``start`` on."""

    def gradient(self, node: Node, start: int, stop: int, columns: Part | None = None) -> Tensor | None:
        """The loss's derivative by these rows so far, None if there is none by any."""

    def add(self, node: Node, start: int, gradient: Tensor, columns: Part | None = None) -> None:
        """Add to the derivative by rows from ``start`` on."""


class _Array(Protocol):
    """A whole tensor with the streamed axis, ``dim``, as an axis of its own."""

    def read(self, start: int, stop: int, columns: Part | None) -> Tensor:
        """A copy of these rows, of some columns or all."""

    def write(self, start: int, x: Tensor, columns: Part | None) -> None:
        """Put rows there from ``start`` on."""


class _InMemory:
    """On the device."""

    def __init__(self, whole: Tensor, node: Node, streamed: Streamed) -> None:
        self._whole, self._node, self._streamed = whole, node, streamed

    def read(self, start: int, stop: int, columns: Part | None) -> Tensor:
        """A copy of these rows, of some columns or all."""
        part = self._streamed.part(self._node, self._whole, start, stop, columns)
        return part.clone(memory_format=torch.contiguous_format)

    def write(self, start: int, x: Tensor, columns: Part | None) -> None:
        """Put rows there from ``start`` on."""
        count = x.shape[self._streamed.rows[self._node].dim + 1]
        self._streamed.part(self._node, self._whole, start, start + count, columns).copy_(x)


class _InFile:
    """In a file, row behind row, so that some rows are one piece of it; mapped pages would be memory.

    With an axis ``across``, a row is column behind column, so that some columns of a row are one piece.
    """

    def __init__(
        self,
        file: IO[bytes],
        place: _Place,
        across: int | None,
        device: torch.device,
        journal: Journal | None,
    ) -> None:
        self._file, self._place, self._device, self._journal = file, place, device, journal
        self._leading = [place.dim] if across is None else [place.dim, across]
        self._columns = 1 if across is None else place.shape[across]
        self._rest = [size for dim, size in enumerate(place.shape) if dim not in self._leading]
        self._column_bytes = math.prod(self._rest) * place.dtype.itemsize

    def read(self, start: int, stop: int, columns: Part | None) -> Tensor:
        """A copy of these rows, of some columns or all."""
        shape = [*self._place.shape]
        shape[self._place.dim] = stop - start
        if columns is not None:
            shape[self._leading[1]] = columns[1] - columns[0]
        found = torch.empty(shape, dtype=self._place.dtype, device=self._device)
        for first, last, runs, rows in self._pieces(start, stop, columns):
            for memory, offset in runs:
                count = read_at(self._file.fileno(), memory, offset)
                if count != len(memory):
                    raise OutputError(
                        f"of what passes hand on {count:,} of {len(memory):,} bytes could be read back; its "
                        "disk may be failing, so give spool= a folder on another one."
                    )
            self._part(found, first - start, last - start).copy_(rows)
        return found

    def write(self, start: int, x: Tensor, columns: Part | None) -> None:
        """Put rows there from ``start`` on."""
        for first, last, runs, rows in self._pieces(start, start + x.shape[self._place.dim], columns):
            rows.copy_(self._part(x, first - start, last - start))
            for memory, offset in runs:
                try:
                    if self._journal is not None:
                        self._journal.keep(offset, len(memory))
                    write_at(self._file.fileno(), memory, offset)
                except OSError as error:
                    raise OutputError(
                        f"what passes hand on could not be written: {error}. Make room on the disk, or give "
                        "spool= a folder on another one."
                    ) from error

    def _part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """These rows of a tensor, in the file's order of dimensions."""
        return x.narrow(self._place.dim, start, stop - start).movedim(
            self._leading, [*range(len(self._leading))]
        )

    def _pieces(
        self, start: int, stop: int, columns: Part | None
    ) -> Iterator[tuple[int, int, list[tuple[memoryview, int]], Tensor]]:
        """Some rows at a time: from, to, their bytes with the places of these, and all as a tensor."""
        left, right = columns or (0, self._columns)
        row_bytes, part_bytes = self._columns * self._column_bytes, (right - left) * self._column_bytes
        shape = [*([right - left] if len(self._leading) > 1 else []), *self._rest]
        most = max(_PIECE // max(part_bytes, 1), 1)
        held = np.empty(min(most, stop - start) * part_bytes, np.uint8)
        for first in range(start, stop, most):
            last = min(first + most, stop)
            part = held[: (last - first) * part_bytes]
            length = len(part) if part_bytes == row_bytes else part_bytes
            at = self._place.offset + first * row_bytes + left * self._column_bytes
            runs = [
                (part.data[begin : begin + length], at + number * row_bytes)
                for number, begin in enumerate(range(0, len(part), max(length, 1)))
            ]
            yield (
                first,
                last,
                runs,
                torch.from_numpy(part).view(self._place.dtype).view([last - first, *shape]),
            )


class Spool:
    """A store in the device's memory and in a file, which is closed with the store.

    With a journal the file stays for a checkpoint, once there is one.
    """

    def __init__(
        self,
        content: Layout,
        streamed: Streamed,
        device: torch.device,
        file: IO[bytes] | None,
        journal: Journal | None,
        tiled: bool,
    ) -> None:
        self._rows, self._file, self._journal = streamed.rows, file, journal
        self._filed = content.filed
        bytes_ = torch.zeros(content.kept_bytes, dtype=torch.uint8, device=device)

        def array(node: Node, place: _Place, journal: Journal | None = None) -> _Array:
            if file is not None and node in content.filed:
                return _InFile(file, place, streamed.apart_dim(node) if tiled else None, device, journal)
            part = bytes_[place.offset : place.stop]
            return _InMemory(part.view(place.dtype).view(place.shape), node, streamed)

        self._tensors = {node: array(node, place) for node, place in content.tensors.items()}
        self._gradients = {node: array(node, place, journal) for node, place in content.gradients.items()}
        self._known = set[Node]()

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tensors.clear()
        self._gradients.clear()
        if self._file is not None:
            self._file.close()
        if self._journal is not None:
            self._journal.close()
            if not self._journal.settled:  # there is no checkpoint
                self._journal.remove()

    def mark(self) -> dict[str, Any]:
        """What a checkpoint needs of the file, which stays as it is now for that checkpoint."""
        if self._file is None or self._journal is None:
            return {}
        os.fsync(self._file.fileno())
        self._journal.begin()
        return {
            "number": self._journal.number,
            "boot": boot(),
            "known": [node.name for node in self._known],
            "filed": [node.name for node in self._filed],
        }

    def settle(self) -> None:
        """The checkpoint of the last mark has been written."""
        if self._journal is not None:
            self._journal.settle()

    def remove(self) -> None:
        """The step is complete, and its checkpoint gone."""
        if self._journal is not None:
            self._journal.remove()

    def restore(self, found: dict[str, Any]) -> None:
        """Know of which nodes there are gradients."""
        self._known = {node for node in self._gradients if node.name in found["known"]}

    def read(self, node: Node, start: int, stop: int, columns: Part | None = None) -> Tensor:
        """A copy of these rows, of some columns or all."""
        return self._together(node, self._tensors[node].read(start, stop, columns))

    def write(self, node: Node, start: int, x: Tensor, columns: Part | None = None) -> None:
        """Keep rows from ``start`` on."""
        self._tensors[node].write(start, self._rows[node].apart(x), columns)

    def gradient(self, node: Node, start: int, stop: int, columns: Part | None = None) -> Tensor | None:
        """The loss's derivative by these rows so far, None if there is none by any."""
        if node not in self._known:
            return None
        return self._together(node, self._gradients[node].read(start, stop, columns))

    def add(self, node: Node, start: int, gradient: Tensor, columns: Part | None = None) -> None:
        """Add to the derivative by rows from ``start`` on."""
        self._known.add(node)
        apart, array = self._rows[node].apart(gradient), self._gradients[node]
        so_far = array.read(start, start + apart.shape[self._rows[node].dim + 1], columns)
        array.write(start, so_far.add_(apart), columns)

    def _together(self, node: Node, apart: Tensor) -> Tensor:
        dim = self._rows[node].dim
        return apart.flatten(dim, dim + 2)


class Blank:
    """A store that keeps nothing and gives ones: to measure a strip whose input is not known yet."""

    def __init__(self, streamed: Streamed, device: torch.device) -> None:
        self._streamed, self._device = streamed, device

    def __enter__(self) -> Blank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def read(self, node: Node, start: int, stop: int, columns: Part | None = None) -> Tensor:
        """Ones."""
        rows, value = self._streamed.rows[node], node.meta["val"]
        shape = [*value.shape]
        shape[rows.dim] = rows.size(stop - start)
        if columns is not None:
            shape[self._streamed.column_dim(node)] = columns[1] - columns[0]
        return torch.ones(shape, dtype=value.dtype, device=self._device)

    def write(self, node: Node, start: int, x: Tensor, columns: Part | None = None) -> None:
        """Nothing."""

    def gradient(self, node: Node, start: int, stop: int, columns: Part | None = None) -> Tensor | None:
        """Ones."""
        return self.read(node, start, stop, columns)

    def add(self, node: Node, start: int, gradient: Tensor, columns: Part | None = None) -> None:
        """Nothing."""

    def mark(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def settle(self) -> None:
        """Nothing."""

    def remove(self) -> None:
        """Nothing."""
