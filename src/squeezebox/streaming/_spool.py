"""What crosses from one level to the next, kept: later passes begin there, gradients come back to it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from squeezebox.memory import nameless_file
from squeezebox.schema import OutputError
from squeezebox.streaming._graph import Streamed
from squeezebox.streaming._rows import Rows

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
    def stop(self) -> int:
        """The first byte behind it."""
        return self.offset + int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What is kept where: ``tensors``, and ``gradients`` of those that the parameters change."""

    tensors: Mapping[Node, _Place]
    gradients: Mapping[Node, _Place]

    @property
    def nbytes(self) -> int:
        """The bytes of all of it."""
        return max((place.stop for place in [*self.tensors.values(), *self.gradients.values()]), default=0)


def layout(streamed: Streamed, nodes: frozenset[Node]) -> Layout:
    """One tensor behind another, each whole."""
    tensors: dict[Node, _Place] = {}
    gradients: dict[Node, _Place] = {}
    end = 0
    for node in (each for each in streamed.rows if each in nodes):
        tensors[node] = place = _place(node, streamed.rows[node], end)
        end = place.stop
        if node in streamed.differentiable:
            gradients[node] = place = _place(node, streamed.rows[node], end)
            end = place.stop
    return Layout(tensors=tensors, gradients=gradients)


def _place(node: Node, rows: Rows, end: int) -> _Place:
    value = node.meta["val"]
    shape = (*value.shape[: rows.dim], rows.before, rows.count, rows.after, *value.shape[rows.dim + 1 :])
    offset = -(-end // _ALIGNMENT) * _ALIGNMENT
    return _Place(shape=shape, dim=rows.dim + 1, dtype=value.dtype, offset=offset)


class Store(Protocol):
    """Tensors that outlast their pass, and their gradients, by rows."""

    def read(self, node: Node, start: int, stop: int) -> Tensor:
        """A copy of these rows."""

    def write(self, node: Node, start: int, x: Tensor) -> None:
        """Keep rows from ``start`` on."""

    def gradient(self, node: Node, start: int, stop: int) -> Tensor | None:
        """The loss's derivative by these rows so far, None if there is none by any."""

    def add(self, node: Node, start: int, gradient: Tensor) -> None:
        """Add to the derivative by rows from ``start`` on."""


class _Array(Protocol):
    """A whole tensor with the streamed axis, ``dim``, as an axis of its own."""

    def read(self, start: int, stop: int) -> Tensor:
        """A copy of these rows."""

    def write(self, start: int, x: Tensor) -> None:
        """Put rows there from ``start`` on."""


class _InMemory:
    """On the device."""

    def __init__(self, whole: Tensor, dim: int) -> None:
        self._whole, self._dim = whole, dim

    def read(self, start: int, stop: int) -> Tensor:
        """A copy of these rows."""
        return self._whole.narrow(self._dim, start, stop - start).clone(memory_format=torch.contiguous_format)

    def write(self, start: int, x: Tensor) -> None:
        """Put rows there from ``start`` on."""
        self._whole.narrow(self._dim, start, x.shape[self._dim]).copy_(x)


class _InFile:
    """In a file, row behind row, so that some rows are one piece of it; mapped pages would be memory."""

    def __init__(self, file: IO[bytes], place: _Place, device: torch.device) -> None:
        self._file, self._place, self._device = file, place, device
        self._shape = [size for dim, size in enumerate(place.shape) if dim != place.dim]
        self._row_bytes = math.prod(self._shape) * place.dtype.itemsize
        self._most = max(_PIECE // max(self._row_bytes, 1), 1)

    def read(self, start: int, stop: int) -> Tensor:
        """A copy of these rows."""
        shape = [*self._place.shape]
        shape[self._place.dim] = stop - start
        found = torch.empty(shape, dtype=self._place.dtype, device=self._device)
        for first, last, memory, rows in self._pieces(start, stop):
            count = os.preadv(self._file.fileno(), [memory], self._offset(first))
            if count != len(memory):
                raise OutputError(
                    f"of what passes hand on {count:,} of {len(memory):,} bytes could be read back; its disk "
                    "may be failing, so give spool= a folder on another one."
                )
            self._part(found, first - start, last - start).copy_(rows)
        return found

    def write(self, start: int, x: Tensor) -> None:
        """Put rows there from ``start`` on."""
        for first, last, memory, rows in self._pieces(start, start + x.shape[self._place.dim]):
            rows.copy_(self._part(x, first - start, last - start))
            try:
                written = os.pwritev(self._file.fileno(), [memory], self._offset(first))
            except OSError as error:
                raise OutputError(
                    f"what passes hand on could not be written: {error}. Give spool= a folder on another "
                    "disk."
                ) from error
            if written != len(memory):
                raise OutputError(
                    f"of what passes hand on {written:,} of {len(memory):,} bytes could be written; make "
                    "room on the disk, or give spool= a folder on another one."
                )

    def _offset(self, row: int) -> int:
        return self._place.offset + row * self._row_bytes

    def _part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """These rows of a tensor, in the file's order of dimensions."""
        return x.narrow(self._place.dim, start, stop - start).movedim(self._place.dim, 0)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, memoryview, Tensor]]:
        """Some rows at a time: from, to, their bytes, and the same as a tensor in the file's order."""
        held = np.empty(min(self._most, stop - start) * self._row_bytes, np.uint8)
        for first in range(start, stop, self._most):
            last = min(first + self._most, stop)
            part = held[: (last - first) * self._row_bytes]
            rows = torch.from_numpy(part).view(self._place.dtype).view([last - first, *self._shape])
            yield first, last, part.data, rows


class Spool:
    """A store in the device's memory; or, in a folder, in a file without a name.

    The file goes when the process that has it open ends, killed or not.

    Raises:
        OutputError: the folder is missing or not writable, or the disk has not enough room.
    """

    def __init__(
        self, content: Layout, streamed: Streamed, folder: Path | None, device: torch.device
    ) -> None:
        self._rows, self._device, self._file = streamed.rows, device, None
        if folder is None:
            bytes_ = torch.zeros(content.nbytes, dtype=torch.uint8, device=device)

            def array(place: _Place) -> _Array:
                part = bytes_[place.offset : place.stop]
                return _InMemory(part.view(place.dtype).view(place.shape), place.dim)
        else:
            self._file = file = nameless_file(folder, content.nbytes, "what passes hand on", "spool=")

            def array(place: _Place) -> _Array:
                return _InFile(file, place, device)

        self._tensors = {node: array(place) for node, place in content.tensors.items()}
        self._gradients = {node: array(place) for node, place in content.gradients.items()}
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

    def read(self, node: Node, start: int, stop: int) -> Tensor:
        """A copy of these rows."""
        return self._together(node, self._tensors[node].read(start, stop))

    def write(self, node: Node, start: int, x: Tensor) -> None:
        """Keep rows from ``start`` on."""
        self._tensors[node].write(start, self._rows[node].apart(x))

    def gradient(self, node: Node, start: int, stop: int) -> Tensor | None:
        """The loss's derivative by these rows so far, None if there is none by any."""
        return self._together(node, self._gradients[node].read(start, stop)) if node in self._known else None

    def add(self, node: Node, start: int, gradient: Tensor) -> None:
        """Add to the derivative by rows from ``start`` on."""
        self._known.add(node)
        apart, array = self._rows[node].apart(gradient), self._gradients[node]
        so_far = array.read(start, start + apart.shape[self._rows[node].dim + 1])
        array.write(start, so_far.add_(apart))

    def _together(self, node: Node, apart: Tensor) -> Tensor:
        dim = self._rows[node].dim
        return apart.flatten(dim, dim + 2)


class Blank:
    """A store that keeps nothing and gives ones: to measure a strip whose input is not known yet."""

    def __init__(self, streamed: Streamed, device: torch.device) -> None:
        self._rows, self._device = streamed.rows, device

    def read(self, node: Node, start: int, stop: int) -> Tensor:
        """Ones."""
        rows, value = self._rows[node], node.meta["val"]
        shape = (*value.shape[: rows.dim], rows.size(stop - start), *value.shape[rows.dim + 1 :])
        return torch.ones(shape, dtype=value.dtype, device=self._device)

    def write(self, node: Node, start: int, x: Tensor) -> None:
        """Nothing."""

    def gradient(self, node: Node, start: int, stop: int) -> Tensor | None:
        """Ones."""
        return self.read(node, start, stop)

    def add(self, node: Node, start: int, gradient: Tensor) -> None:
        """Nothing."""
