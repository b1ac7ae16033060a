"""Operators that read rows at fixed places: interpolation, and indexing with constants.

Where interpolation magnifies by a whole number, a strip with some rows around is magnified by torch's own
operator. Otherwise its columns are, and its rows are weighted sums of a few taps each.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from squeezebox.streaming._rows import Call, Need, Operator, Rows, Strip, run_node

_aten = torch.ops.aten
_CUBIC = -0.75  # torch's coefficient of cubic convolution


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """One way to interpolate: torch's operator, taps a row, and whether corners can be aligned."""

    operator: Any
    taps: int
    aligns: bool


_KINDS: dict[Any, _Kind] = {
    _aten.upsample_nearest2d.vec: _Kind(operator=_aten.upsample_nearest2d.default, taps=1, aligns=False),
    _aten._upsample_nearest_exact2d.vec: _Kind(
        operator=_aten._upsample_nearest_exact2d.default, taps=1, aligns=False
    ),
    _aten.upsample_bilinear2d.vec: _Kind(operator=_aten.upsample_bilinear2d.default, taps=2, aligns=True),
    _aten.upsample_bicubic2d.vec: _Kind(operator=_aten.upsample_bicubic2d.default, taps=4, aligns=True),
}
_KINDS |= {kind.operator: kind for kind in _KINDS.values()}


def interpolated(call: Call) -> Operator:
    """Nearest, bilinear and bicubic interpolation to any size."""
    source, rows = call.source()
    kind = _KINDS[call.target]
    axis = rows.dim - (len(call.shape) - 2)
    if axis < 0:
        raise call.refuse("the streamed axis is not one of its spatial ones")
    aligned = bool(call.args[2]) if kind.aligns else False
    given: Any = call.args[2 + kind.aligns :]
    given = given if call.target is kind.operator else (given[0] if given else None) or ()
    scales = [*given, None, None][:2]
    count = call.shape[rows.dim]
    resize = _Resize(kind, axis, aligned, [None if scale is None else float(scale) for scale in scales])
    factor, rest = divmod(count, rows.count)
    whole = not rest and scales[axis] in (None, float(factor)) and (not aligned or factor == 1)
    make = _magnified if whole else _tapped
    return make(resize, source, rows, Rows(dim=rows.dim, count=count), call.shape[-1 if axis == 0 else -2])


@dataclass(frozen=True, slots=True)
class _Resize:
    """An interpolation's settings."""

    kind: _Kind
    axis: int
    aligned: bool
    scales: list[float | None]

    def __call__(self, x: Tensor, size: int, scale: float | None, other: int) -> Tensor:
        """``size`` rows at this scale, and ``other`` columns at the scale that was given."""
        sizes, scales = [other, other], [*self.scales]
        sizes[self.axis], scales[self.axis] = size, scale
        aligned = [self.aligned] if self.kind.aligns else []
        result: Tensor = self.kind.operator(x, sizes, *aligned, *scales)
        return result


def _magnified(resize: _Resize, source: Node, rows: Rows, made: Rows, columns: int) -> Operator:
    factor, around = made.count // rows.count, resize.kind.taps // 2

    def within(start: int, stop: int) -> tuple[int, int]:
        last = (stop - 1) // factor + 1 + around
        return max(start // factor - around, 0), min(last, rows.count)

    def run(strip: Strip, start: int, stop: int) -> Tensor:
        first, last = within(start, stop)
        part = strip.rows(source, first, last)
        larger = resize(part, (last - first) * factor, float(factor), columns)
        return larger.narrow(rows.dim, start - first * factor, stop - start)

    return Operator(rows=made, needs=lambda start, stop: [(source, *within(start, stop))], run=run)


def _tapped(resize: _Resize, source: Node, rows: Rows, made: Rows, columns: int) -> Operator:
    # Arrays and not tensors: where a band is recorded, torch would take those for unknown.
    places, weights = (each.numpy() for each in _taps(resize, rows.count, made.count))

    def within(start: int, stop: int) -> tuple[int, int]:
        part = places[:, start:stop]
        return int(part.min()), int(part.max()) + 1

    def run(strip: Strip, start: int, stop: int) -> Tensor:
        first, last = within(start, stop)
        part = resize(strip.rows(source, first, last), last - first, None, columns)
        shape = [-1] + [1] * (part.dim() - 1 - rows.dim)
        taps = []
        for place, weight in zip(places[:, start:stop] - first, weights[:, start:stop], strict=True):
            tap = part.index_select(rows.dim, torch.tensor(place, device=part.device))
            taps.append(tap * torch.tensor(weight, dtype=part.dtype, device=part.device).view(shape))
        total: Tensor = functools.reduce(operator.add, taps)
        return total

    return Operator(rows=made, needs=lambda start, stop: [(source, *within(start, stop))], run=run)


def _taps(resize: _Resize, given: int, made: int) -> tuple[Tensor, Tensor]:
    """Which input rows every output row reads, and their weights: both taps x rows."""
    scale = resize.scales[resize.axis]
    if resize.kind.taps == 1:  # torch rounds in single precision, so torch tells
        numbers = torch.arange(given, dtype=torch.float64, device="cpu").view(
            [1, 1, *((-1, 1) if resize.axis == 0 else (1, -1))]
        )
        places = resize(numbers, made, scale, 1).reshape(1, -1).long()
        return places, torch.ones_like(places, dtype=torch.float64)
    row = torch.arange(made, dtype=torch.float64, device="cpu")
    if resize.aligned:
        position = row * ((given - 1) / (made - 1) if made > 1 else 0.0)
    else:
        position = (row + 0.5) * (given / made if scale is None else 1.0 / scale) - 0.5
        position = position.clamp_min(0.0) if resize.kind.taps == 2 else position
    first = position.floor()
    part = position - first
    offsets = (0, 1) if resize.kind.taps == 2 else (-1, 0, 1, 2)
    places = torch.stack([first.long() + offset for offset in offsets]).clamp_(0, given - 1)
    return places, torch.stack([1.0 - part, part] if resize.kind.taps == 2 else _cubic(part))


def _cubic(part: Tensor) -> list[Tensor]:
    def near(x: Tensor) -> Tensor:
        return ((_CUBIC + 2.0) * x - (_CUBIC + 3.0)) * x * x + 1.0

    def far(x: Tensor) -> Tensor:
        return ((_CUBIC * x - 5.0 * _CUBIC) * x + 8.0 * _CUBIC) * x - 4.0 * _CUBIC

    return [far(part + 1.0), near(part), near(1.0 - part), far(2.0 - part)]


def indexed(call: Call) -> Operator:
    """Rows, or others, picked by constants (reflected and replicated padding are), or a table's by rows."""
    table, indices = call.args[0], call.args[1]
    assert isinstance(table, Node) and isinstance(indices, list | tuple)
    if table not in call.inputs:
        return _looked_up(call, [*indices])
    rows = call.inputs[table]
    named = [dim for dim, index in enumerate(indices) if index is not None]
    if len(call.inputs) > 1 or len(named) != 1 or indices[named[0]].meta["val"].dim() != 1:
        raise call.refuse("it is indexed by more than one vector")
    if rows.dim not in named:
        return _elsewhere(call, table, rows)
    if rows.merged:
        raise call.refuse("the streamed axis has been merged with another one before")
    picked = _folded(call, indices[rows.dim])
    places = torch.where(picked < 0, picked + rows.count, picked).cpu().numpy()

    def within(start: int, stop: int) -> tuple[int, int]:
        part = places[start:stop]
        return int(part.min()), int(part.max()) + 1

    def run(strip: Strip, start: int, stop: int) -> Tensor:
        first, last = within(start, stop)
        part: Tensor = strip.rows(table, first, last)
        if last - first == stop - start and bool((np.diff(places[start:stop]) == 1).all()):
            return part
        picked: Tensor = part.index_select(
            rows.dim, torch.tensor(places[start:stop] - first, device=part.device)
        )
        return picked

    def needs(start: int, stop: int) -> list[Need]:
        return [(table, *within(start, stop))]

    return Operator(rows=Rows(dim=rows.dim, count=len(places)), needs=needs, run=run)


def _elsewhere(call: Call, table: Node, rows: Rows) -> Operator:
    return Operator(
        rows=rows,
        needs=lambda start, stop: [(table, start, stop)],
        run=lambda strip, start, stop: _aten.index.Tensor(
            strip.rows(table, start, stop), strip.value(call.args[1])
        ),
    )


def _looked_up(call: Call, indices: list[Any]) -> Operator:
    if len(indices) != 1 or indices[0] not in call.inputs:
        raise call.refuse("it is indexed by several tensors")
    index = indices[0]
    return Operator(
        rows=call.inputs[index],
        needs=lambda start, stop: [(index, start, stop)],
        run=lambda strip, start, stop: _aten.index.Tensor(
            strip.value(call.args[0]), [strip.rows(index, start, stop)]
        ),
    )


def _folded(call: Call, node: Node) -> Tensor:
    """The value of a node that depends on nothing."""
    node = node.meta.get("stands_for", node)
    if node.op != "call_function":
        raise call.refuse("the rows that it picks are not known beforehand")
    arguments, keywords = (
        map_arg(each, lambda inner: _folded(call, inner)) for each in (node.args, node.kwargs)
    )
    value: Tensor = run_node(node, arguments, keywords)
    return value


RESAMPLED: dict[Any, Callable[[Call], Operator]] = {
    **dict.fromkeys(_KINDS, interpolated),
    _aten.index.Tensor: indexed,
}
