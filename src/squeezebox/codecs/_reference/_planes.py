"""Blocks of 256 elements, each in as many bits a code as its range of codes needs.

A value v is the code rint(v / step), or with the sign kept rint(v / step + a) for positives and - a for
negatives, which stands for (code - a) steps: the first step is 1 - a + 1/2 = 0.789 of the others, its value
where errors that fall evenly have no mean (see ``_quantise.SHIFT``). A block's head is its least code times
16, plus the width w of the others' distance from it; RAW: the elements follow as they are.

A block's codes are 8 rows of 32. Byte k of lane i holds bits 8 k to 8 k + 7 of the lane's 8 codes, first row
lowest, w bits each (vertical layout: Afroozeh and Boncz, FastLanes, PVLDB 16(9), 2023). Of codes above 8 bits
the low bytes come first, then what is above them.

A step is twice the bound less a 2^-9th, which is more than what rounding can do to a code below 2^11 and its
value; for bfloat16 and float16 it is three quarters of that, and codes stay below what their rounding allows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from squeezebox.codecs._reference._groups import compute_dtype
from squeezebox.codecs._reference._quantise import channels

BLOCK = 256
LANES = 32
WIDTH_BITS = 4
RAW = 15
AHEAD = 1.0 - 12**-0.5
LEAST, MOST = -2048, 2047
# Of codes, by dtype: rounding the largest value adds less than a sixth of a step.
LARGEST = {torch.float32: MOST, torch.float64: MOST, torch.bfloat16: 80, torch.float16: 640}


def usable_steps(bound: float, dtype: torch.dtype) -> tuple[float, float, float]:
    """The step of a bound; the least and the largest at which rounding values costs no more than is left."""
    wide = dtype.itemsize >= 4
    unit = 2.0 * bound * (1 - 2.0**-9) * (1.0 if wide else 0.75)
    info = torch.finfo(dtype)
    least = info.smallest_normal * (1.0 if wide else 2.0**5)
    return min(unit, torch.finfo(compute_dtype(dtype)).max), least, info.max / (LARGEST[dtype] + 2)


def _steps(bound: float, scale: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Each channel's step, NaN where it is not usable."""
    unit, least, most = usable_steps(bound, dtype)
    steps = torch.full((1,), unit, dtype=compute_dtype(dtype), device=device)
    steps = steps if scale is None else scale * steps
    return torch.where((steps >= least) & (steps <= most), steps, math.nan)


def data_bytes(heads: Tensor, item_bytes: int) -> Tensor:
    """Bytes of each block."""
    widths = heads.int() & RAW
    return torch.where(widths == RAW, BLOCK * item_bytes, LANES * widths)


def _blocks(flat: Tensor) -> Tensor:
    """Rows of 256 elements, the last one filled up with its last element."""
    missing = -flat.numel() % BLOCK
    return torch.cat([flat, flat[-1:].expand(missing)]).view(-1, BLOCK)


def _own_steps(numel: int, steps: Tensor, inner: int) -> Tensor:
    return steps[channels(0, -(-numel // BLOCK) * BLOCK, inner, steps.numel(), steps.device)].view(-1, BLOCK)


def _pack_bits(codes: Tensor, width: int) -> Tensor:
    """Bytes of blocks of codes below 2^width, width <= 8."""
    lanes = codes.view(-1, 8, LANES)
    places = torch.arange(width, device=codes.device)
    bits = (lanes[:, :, None] >> places[None, None, :, None]) & 1  # block, row, bit, lane
    bits = bits.reshape(len(lanes), width, 8, LANES)  # block, byte, bit, lane
    weights = 1 << torch.arange(8, device=codes.device)
    return (bits * weights[None, None, :, None]).sum(2).to(torch.uint8).view(len(lanes), -1)


def _unpack_bits(packed: Tensor, width: int) -> Tensor:
    """The inverse of ``_pack_bits``."""
    places = torch.arange(8, device=packed.device)
    bits = (packed.view(-1, width, 1, LANES).int() >> places[None, None, :, None]) & 1
    bits = bits.reshape(-1, 8, width, LANES)
    weights = 1 << torch.arange(width, device=packed.device)
    return (bits * weights[None, None, :, None]).sum(2).view(-1, BLOCK)


def _bytes(codes: Tensor, width: int) -> Tensor:
    if width <= 8:
        return _pack_bits(codes, width)
    return torch.cat([(codes & 255).to(torch.uint8), _pack_bits(codes >> 8, width - 8)], 1)


def pack_planes(
    flat: Tensor, bound: float, keep_sign: bool, scale: Tensor | None, inner: int
) -> tuple[Tensor, Tensor]:
    """Heads and bytes of a flat tensor; ``scale`` as in ``pack_blocks``."""
    if not flat.numel():
        return flat.new_empty(0, dtype=torch.int16), flat.new_empty(0, dtype=torch.uint8)
    steps = _steps(bound, scale, flat.dtype, flat.device)
    values = _blocks(flat)
    value = values.to(steps.dtype)
    moved = torch.where(value == 0, 0.0, torch.full_like(value, AHEAD * keep_sign).copysign(value))
    scaled = value * _own_steps(flat.numel(), 1.0 / steps, inner)
    near = scaled.abs() < MOST + 1
    codes = torch.where(near, scaled, 0.0).add(moved).round().int()
    low, high = codes.aminmax(dim=1)
    largest = LARGEST[flat.dtype]
    known = near.all(1) & (low >= max(LEAST, -largest - 1)) & (high <= largest)
    widths = torch.frexp((high - low).double()).exponent.clamp(min=0)
    widths = torch.where(known, widths, RAW)
    heads = torch.where(known, low << WIDTH_BITS | widths, RAW).to(torch.int16)
    sizes = data_bytes(heads, flat.element_size())
    starts = sizes.cumsum(0) - sizes
    packed = flat.new_empty(int(sizes.sum()), dtype=torch.uint8)
    for width in widths.unique().tolist():
        chosen = (widths == width).nonzero()[:, 0]
        if width == RAW:
            rows = _blocks_as_bytes(values[chosen], flat)
        elif width:
            rows = _bytes(codes[chosen] - low[chosen, None], width)
        else:
            continue
        packed[starts[chosen, None] + torch.arange(rows.shape[1], device=flat.device)] = rows
    return heads, packed


def _blocks_as_bytes(values: Tensor, flat: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8).view(len(values), BLOCK * flat.element_size())


def unpack_planes(
    heads: Tensor,
    packed: Tensor,
    bound: float,
    keep_sign: bool,
    scale: Tensor | None,
    inner: int,
    out: Tensor,
) -> None:
    """The inverse of ``pack_planes``, into ``out``."""
    if not out.numel():
        return
    steps = _steps(bound, scale, out.dtype, out.device)
    widths, low = heads.int() & RAW, heads.int() >> WIDTH_BITS
    sizes = data_bytes(heads, out.element_size())
    starts = sizes.cumsum(0) - sizes
    codes = low[:, None].expand(-1, BLOCK).clone()
    whole = out.new_empty(len(heads), BLOCK)
    for width in widths.unique().tolist():
        chosen = (widths == width).nonzero()[:, 0]
        size = BLOCK * out.element_size() if width == RAW else LANES * width
        rows = packed[starts[chosen, None] + torch.arange(size, device=out.device)]
        if width == RAW:
            whole[chosen] = rows.contiguous().view(out.dtype)
        elif width:
            above = _unpack_bits(rows[:, : LANES * min(width, 8)].contiguous(), min(width, 8))
            if width > 8:
                above |= _unpack_bits(rows[:, BLOCK:].contiguous(), width - 8) << 8
            codes[chosen] += above.int()
    value = codes.to(steps.dtype)
    moved = AHEAD * keep_sign * value.sign()
    decoded = ((value - moved) * _own_steps(out.numel(), steps, inner)).to(out.dtype)
    whole = torch.where((widths == RAW)[:, None], whole, decoded)
    out.copy_(whole.view(-1)[: out.numel()])
