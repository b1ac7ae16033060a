"""An image and a target with the graph of their shapes: what strips read of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from squeezebox.streaming._band import Band, band
from squeezebox.streaming._graph import Streamed
from squeezebox.streaming._rows import Part
from squeezebox.streaming._run import Context, Run
from squeezebox.streaming._spool import Blank, Layout, Store, layout
from squeezebox.streaming._stages import Stage, stages_of
from squeezebox.streaming._strip import Pass

Bands = dict[tuple[Stage, int, int], Band]
"""By stage, width, and place among those of the width."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ways:
    """The ways over an image, by what passes hand on."""

    stages: list[Stage]
    layout: Layout
    bands: Bands

    @classmethod
    def of(cls, streamed: Streamed, kept: frozenset[Node], filed: frozenset[Node], packed: bool) -> Ways:
        """Those that hand on some tensors in memory and in a file; see :func:`stages_of`."""
        content = layout(streamed, kept, filed)
        return cls(stages=stages_of(streamed, kept | filed, packed), layout=content, bands={})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """One image and target with the graph of their shapes."""

    axis: int
    streamed: Streamed
    ways: Ways
    given: dict[Node, Any]
    device: torch.device

    @property
    def stages(self) -> list[Stage]:
        """The ways over the image, in order."""
        return self.ways.stages

    @property
    def layout(self) -> Layout:
        """What passes hand on, and where."""
        return self.ways.layout

    def handed_bytes(self, stage: Stage) -> tuple[int, int, int]:
        """Of what later passes read of a stage: bytes in memory and in a file, and recomputed tensors'."""
        streamed, content, bytes_ = self.streamed, self.layout, [0, 0, 0]
        for node in streamed.crossing() if stage.reduces else ():
            if streamed.level[node] == stage.number:
                place = 2 if node not in content.tensors else int(node in content.filed)
                value = node.meta["val"]
                bytes_[place] += content.nbytes(node) or value.numel() * value.element_size()
        return bytes_[0], bytes_[1], bytes_[2]

    @property
    def rows(self) -> int:
        """The image's rows."""
        return self.streamed.rows[self.streamed.program.image].count

    @property
    def columns(self) -> int:
        """Its size along the other axis."""
        image = self.streamed.program.image
        return int(image.meta["val"].shape[-3 - self.axis])

    def tiles(self, height: int, width: int) -> int:
        """How many strips or tiles of this size there are."""
        return -(-self.rows // height) * -(-self.columns // width)

    def tile(self, stage: Stage, height: int, width: int, number: int) -> tuple[int, int, Band | None]:
        """The first row of a tile, the last, and its band; None where the band has all columns."""
        place, strip = divmod(number, -(-self.rows // height))
        return strip * height, min((strip + 1) * height, self.rows), self.band(stage, width, place)

    def band(self, stage: Stage, width: int, place: int) -> Band | None:
        """The band of this place among those of a width."""
        if width >= self.columns:
            return None
        key = stage, width, place
        bands = self.ways.bands
        if key not in bands:
            start = place * width
            bands[key] = band(stage.work, start, min(start + width, self.columns))
        return bands[key]

    def read(self, node: Node, start: int, stop: int, columns: Part | None = None) -> Tensor:
        """Rows of the image or of a target, of these columns or all."""
        value = self.given[node]
        index: list[Any] = [slice(None)] * len(value.shape)
        index[self.streamed.rows[node].dim] = slice(start, stop)
        if columns is not None:
            index[self.streamed.column_dim(node)] = slice(*columns)
        return _tensor(value[tuple(index)], self.device)

    @property
    def blank(self) -> Blank:
        """A store for a step that needs none, or is only measured."""
        return Blank(self.streamed, self.device)

    @property
    def whole(self) -> dict[Node, Any]:
        """What was given that has no rows, such as labels."""
        return {
            node: _tensor(value[...], self.device) if hasattr(value, "shape") else value
            for node, value in self.given.items()
            if node not in self.streamed.rows
        }

    def run(self, context: Context | None, store: Store) -> Run:
        """A step's beginning."""
        return Run(self.streamed, self.read, self.whole, context, store)

    def middle(self, work: Pass, height: int) -> int:
        """Where a strip in the middle begins: one of those that own the most rows at the ends."""
        first = (self.rows - height) // 2
        counts = {work.streamed.rows[node].count for node in work.ends.values()}
        rows = {count: -(-(first + height) * count // self.rows) for count in counts}
        starts = {-(-row * self.rows // count) - height for count, row in rows.items()}

        def owned(start: int) -> int:
            parts = work.parts(start, start + height, self.rows).values()
            return sum(stop - start for start, stop in parts)

        return max(sorted(starts), key=owned)

    def halo(self, work: Pass, height: int) -> int:
        """Rows that a strip in the middle reads beyond its own, in rows of the image."""
        start = self.middle(work, height)
        demanded = work.demands(work.parts(start, start + height, self.rows))
        read = [
            math.ceil(sum(last - first for first, last in parts) * self.rows / work.streamed.rows[node].count)
            for node, parts in demanded.items()
            if node not in work.operators
        ]
        return max(max(read, default=0) - height, 0)


class Scaled:
    """An image of bytes as floating point numbers between 0 and 1, scaled as it is read."""

    def __init__(self, image: Any, dtype: torch.dtype) -> None:
        self._image, self.shape, self.dtype = image, tuple(image.shape), dtype

    def __getitem__(self, index: Any) -> Tensor:
        """These elements."""
        return _tensor(self._image[index], torch.device("cpu")).to(self.dtype) / 255


def form_of(value: Any) -> Any:
    """A tensor of the value's shape without memory; plain values are themselves."""
    if not hasattr(value, "shape"):
        return value
    if isinstance(value, Scaled):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    empty = value if isinstance(value, Tensor) else _native(np.empty(0, value.dtype))
    return torch.empty(tuple(value.shape), dtype=empty.dtype, device="meta")


def _tensor(value: Any, device: torch.device) -> Tensor:
    """A tensor as it is, without its graph, or a copy of an array or of what inference mode made."""
    if not isinstance(value, Tensor):
        return _native(value).to(device)
    return (value.clone() if value.is_inference() else value.detach()).to(device)


def _native(value: Any) -> Tensor:
    """A copy of an array in this machine's order of bytes, which torch wants."""
    array = np.asarray(value)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
