"""What crosses from one level to the next, kept: later passes begin there, gradients come back to it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from squeezebox.reports import human_bytes
from squeezebox.schema import OutputError
from squeezebox.streaming._graph import Streamed
from squeezebox.streaming._rows import Rows

_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where the file has a tensor: its shape with the streamed axis, ``dim``, as an axis of its own."""

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


class Spool:
    """A store in the device's memory; or, in a folder, in a mapped file without a name.

    The file goes when the process that has it open ends, killed or not. The disk's bytes are reserved when it
    is opened, as a full disk would kill a process that writes to a map.

    Raises:
        OutputError: the folder is missing or not writable, or the disk has not enough room.
    """

    def __init__(
        self, content: Layout, streamed: Streamed, folder: Path | None, device: torch.device
    ) -> None:
        self._rows, self._device = streamed.rows, device
        if folder is None:
            mapped = torch.zeros(content.nbytes, dtype=torch.uint8, device=device)
        else:
            mapped = _mapped(folder, content.nbytes)
        self._tensors = dict(_tensors(mapped, content.tensors))
        self._gradients = dict(_tensors(mapped, content.gradients))
        self._known = set[Node]()

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tensors.clear()
        self._gradients.clear()

    def read(self, node: Node, start: int, stop: int) -> Tensor:
        """A copy of these rows."""
        return self._read(self._tensors[node], node, start, stop)

    def write(self, node: Node, start: int, x: Tensor) -> None:
        """Keep rows from ``start`` on."""
        self._part(self._tensors[node], node, start, x).copy_(self._rows[node].apart(x))

    def gradient(self, node: Node, start: int, stop: int) -> Tensor | None:
        """The loss's derivative by these rows so far, None if there is none by any."""
        return self._read(self._gradients[node], node, start, stop) if node in self._known else None

    def add(self, node: Node, start: int, gradient: Tensor) -> None:
        """Add to the derivative by rows from ``start`` on."""
        self._known.add(node)
        whole = self._gradients[node]
        self._part(whole, node, start, gradient).add_(self._rows[node].apart(gradient).to(whole.device))

    def _read(self, whole: Tensor, node: Node, start: int, stop: int) -> Tensor:
        rows = self._rows[node]
        part = whole.narrow(rows.dim + 1, start, stop - start).to(self._device, copy=True)
        return part.contiguous().flatten(rows.dim, rows.dim + 2)

    def _part(self, whole: Tensor, node: Node, start: int, x: Tensor) -> Tensor:
        rows = self._rows[node]
        return whole.narrow(rows.dim + 1, start, x.shape[rows.dim] // (rows.before * rows.after))


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


def _mapped(folder: Path, nbytes: int) -> Tensor:
    """The bytes of a new file, all zero."""
    try:
        free = shutil.disk_usage(folder).free
        if free < nbytes:
            raise OutputError(
                f"what crosses the model's reductions over the image takes {human_bytes(nbytes)} of disk; "
                f"{folder} has {human_bytes(free)} free. Make room, name a folder on another disk, or leave "
                "spool= out, which costs more passes from the image on."
            )
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, nbytes)
            else:
                file.truncate(nbytes)
            return torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=(nbytes,)))
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(
            f"no temporary file of {human_bytes(nbytes)} could be made in {folder}: {error}. Give spool= a "
            "folder that can be written to."
        ) from error


def _tensors(mapped: Tensor, places: Mapping[Node, _Place]) -> Iterator[tuple[Node, Tensor]]:
    for node, place in places.items():
        yield node, mapped[place.offset : place.stop].view(place.dtype).view(place.shape)
