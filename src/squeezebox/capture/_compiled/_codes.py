"""Values in 8, 4 or 2 bits and flags in one, as plain tensor functions that a compiler can fuse.

A row of elements shares one step. One code means exactly zero; the others are the middles of equal steps on
either side of it, as many below and above zero as the row needs. So zeros stay zero, signs stay, and
``|x - unpack(pack(x))| <= step / 2`` for every element, up to the rounding of the tensor's own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import squeezebox.codecs  # noqa: F401  (registers the operators used below)

BITS = (8, 4, 2)
_LEAST_ROW = 128  # elements that share a step, so that the steps weigh little


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How one tensor is packed: ``order`` lists its dims from the outermost in memory to the innermost.

    In that order ``rows`` are the dims of which all elements share a step, and ``split`` is the dim whose
    equal parts lie in the same bytes.
    """

    bits: int
    order: tuple[int, ...]
    rows: tuple[int, ...]
    split: int = 0


def layout_of(shape: Sequence[int], order: Sequence[int], bits: int, *, channel: int | None = None) -> Layout:
    """The layout of a tensor; ``channel`` is the dim of an image's channels, None where there is none.

    Images get a step a channel and sample, or a channel where samples are small; others a step for each run
    of trailing dims. The bits become 8 where no dim divides into 8 / bits parts.
    """
    sizes = [shape[dim] for dim in order]
    parts = [place for place, size in enumerate(sizes) if size % (8 // bits) == 0]
    if not parts:
        bits, parts = 8, [0]
    return Layout(bits=bits, order=tuple(order), rows=_rows(shape, order, channel), split=parts[0])


def memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Dims from the outermost in memory to the innermost."""
    return tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))


def _rows(shape: Sequence[int], order: Sequence[int], channel: int | None) -> tuple[int, ...]:
    if channel is not None:
        within = [dim for dim in range(len(shape)) if dim not in (0, channel)]
        wide = within if math.prod(shape[dim] for dim in within) >= _LEAST_ROW else [0, *within]
        return tuple(sorted(order.index(dim) for dim in wide))
    numel, first = 1, len(order)
    while first > 0 and numel < _LEAST_ROW:
        first -= 1
        numel *= shape[order[first]]
    return tuple(range(first, len(order)))


def pack(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (uint8, 8 / bits in a byte), step (float32) and number of codes below zero (uint8) of each row.

    A row with a NaN or an infinity has no finite step, and nothing finite comes back of it.
    """
    values = x.permute(layout.order).to(torch.float32)
    step, below = _steps(values, layout)
    above = float((1 << layout.bits) - 1) - below
    magnitude = (values.abs() / step).ceil().clamp(min=1.0)
    signed = torch.minimum(torch.maximum(values.sign() * magnitude, -below), above)
    codes = torch.where(values == 0.0, below, signed + below)
    return pack_lanes(codes, layout.bits, layout.split), step, below.to(torch.uint8)


def _steps(values: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Of each row: the step, and how many codes lie below zero.

    ``step <= (high - low) / (2**bits - 2)``: rounding one side's share of that many codes up leaves the other
    side enough of the one that is left over.
    """
    levels = float((1 << layout.bits) - 1)
    low = values.amin(layout.rows, keepdim=True).clamp(max=0.0)
    high = values.amax(layout.rows, keepdim=True).clamp(min=0.0)
    share = -low / (high - low).clamp(min=torch.finfo(torch.float32).tiny)
    below = (share * (levels - 1.0)).ceil()
    below = torch.where(low < 0.0, below.clamp(min=1.0), below)
    above = levels - below
    return torch.maximum(-low / below.clamp(min=1.0), high / above), below


def half_steps(x: Tensor, bits: int, *, channel: int | None = None) -> Tensor:
    """The bound of every element at ``bits`` bits, broadcastable to ``x``."""
    layout = layout_of(tuple(x.shape), memory_order(x.stride()), bits, channel=channel)
    step, _ = _steps(x.detach().permute(layout.order).to(torch.float32), layout)
    return 0.5 * step.permute(_inverse(layout.order))


def unpack(codes: Tensor, step: Tensor, below: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`pack`, within half a step."""
    lanes = unpack_lanes(codes, layout.bits, layout.split)
    signed = lanes.to(torch.float32) - below.to(torch.float32)
    values = (signed - 0.5 * signed.sign()) * step
    return values.to(dtype).permute(_inverse(layout.order))


def pack_lanes(codes: Tensor, bits: int, split: int) -> Tensor:
    """Several codes a byte: the equal parts of dim ``split``, the first in the lowest bits.

    ``codes`` are whole floats: sums of them are what compilers vectorise best.
    """
    if bits == 8:
        return codes.to(torch.uint8)
    parts = codes.unflatten(split, (8 // bits, -1))
    packed: Tensor = parts.select(split, 0)
    for lane in range(1, 8 // bits):
        packed = packed + parts.select(split, lane) * float(1 << (lane * bits))
    return packed.to(torch.uint8)


def unpack_lanes(packed: Tensor, bits: int, split: int) -> Tensor:
    """The inverse of :func:`pack_lanes`, as integers."""
    if bits == 8:
        return packed
    shape = [1] * (packed.dim() + 1)
    shape[split] = 8 // bits
    shifts = (torch.arange(8 // bits, device=packed.device, dtype=torch.int32) * bits).view(shape)
    lanes = (packed.unsqueeze(split).to(torch.int32) >> shifts) & ((1 << bits) - 1)
    return lanes.flatten(split, split + 1)


def pack_indices(indices: Tensor, layout: Layout) -> Tensor:
    """Whole numbers below 2^bits, several a byte."""
    return pack_lanes(indices.permute(layout.order).to(torch.float32), layout.bits, layout.split)


def unpack_indices(packed: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`pack_indices`."""
    return unpack_lanes(packed, layout.bits, layout.split).to(dtype).permute(_inverse(layout.order))


def pack_flags(flags: Tensor, layout: Layout) -> Tensor:
    """Eight booleans a byte; where no dim divides by 8 (``layout.bits`` is 8), flat in groups of 256.

    By way of floats: in what Inductor generates, bytes to and from booleans take many times longer.
    """
    ones = flags.permute(layout.order).to(torch.float32)
    if layout.bits == 1:
        return pack_lanes(ones, 1, layout.split)
    packed: Tensor = torch.ops.squeezebox.pack_codes(ones.to(torch.uint8).reshape(-1), 1)
    return packed


def unpack_flags(packed: Tensor, shape: Sequence[int], layout: Layout) -> Tensor:
    """The inverse of :func:`pack_flags`."""
    if layout.bits == 1:
        ones = unpack_lanes(packed, 1, layout.split)
    else:
        sizes = [shape[dim] for dim in layout.order]
        ones = torch.ops.squeezebox.unpack_codes(packed, 1, math.prod(sizes)).view(sizes)
    return (ones.to(torch.float32) > 0.5).permute(_inverse(layout.order))


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=lambda place: order[place]))
