"""`planes` on a device: one pass finds each block's width, the next puts its bytes where they belong.

A block is 8 rows of 32 codes, and the 8 codes of a column are at most 64 bits: an integer that is shifted
together, and stored a byte at a time. The arithmetic to the bit is that of ``_reference._planes``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from squeezebox.codecs._reference import _planes
from squeezebox.codecs._triton._parts import READABLE, device_of, rounded

_BLOCKS = 8  # of a program
_RAW = tl.constexpr(_planes.RAW)
_WIDTH_BITS = tl.constexpr(_planes.WIDTH_BITS)
_FAR = tl.constexpr(float(_planes.MOST + 1))


@triton.jit
def _places(BLOCKS: tl.constexpr):
    """Numbers of the program's blocks, and of their elements as [BLOCKS, 8, 32]."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    within = tl.arange(0, 8)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    return block, block[:, None, None] * 256 + within


@triton.jit
def _own_steps(scale, index, unit, least, most, inner, count, SCALED: tl.constexpr):
    """Each element's step; NaN where it is not usable."""
    step = tl.full(index.shape, 1.0, tl.float32) * unit
    if SCALED:
        step = tl.load(scale + (index // inner) % count) * unit
    return tl.where((step >= least) & (step <= most), step, float("nan"))


@triton.jit
def _codes(value, step, ahead):
    """Codes, and 1 where there is none."""
    scaled = value * tl.div_rn(1.0, step)
    near = tl.abs(scaled) < _FAR  # false for NaN
    moved = tl.where(value > 0.0, ahead, tl.where(value < 0.0, -ahead, 0.0))
    code = ((tl.where(near, scaled, 0.0) + moved) + 12582912.0) - 12582912.0  # halves to even
    return code.to(tl.int32), 1 - near.to(tl.int32)


@triton.jit
def _put_lanes(packed, start, code, width, mask):
    """Rows of codes below 2^width, at most 8 bits, as ``width`` rows of bytes."""
    row = tl.arange(0, 8)[None, :, None].to(tl.int64)
    lane = tl.sum(code.to(tl.int64) << (row * width[:, None, None]), axis=1)
    at = packed + start[:, None, None] + row * 32 + tl.arange(0, 32)[None, None, :]
    byte = (lane[:, None, :] >> (row * 8)) & 255
    tl.store(at, byte.to(tl.uint8), mask=mask[:, None, None] & (row < width[:, None, None]))


@triton.jit
def _take_lanes(packed, start, width, mask):
    """The inverse of ``_put_lanes``."""
    row = tl.arange(0, 8)[None, :, None].to(tl.int64)
    at = packed + start[:, None, None] + row * 32 + tl.arange(0, 32)[None, None, :]
    byte = tl.load(at, mask=mask[:, None, None] & (row < width[:, None, None]), other=0)
    lane = tl.sum(byte.to(tl.int64) << (row * 8), axis=1)
    wide = width[:, None, None]
    return ((lane[:, None, :] >> (row * wide)) & ((1 << wide) - 1)).to(tl.int32)


@triton.jit
def _pack(
    flat, scale, heads, ends, packed, numel, blocks, unit, least, most, ahead, largest, inner, count,
    SCALED: tl.constexpr, PLACED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Heads; once they are there (PLACED), and where each block ends, its bytes."""
    block, index = _places(BLOCKS)
    known = block < blocks
    stored = tl.load(flat + tl.minimum(index, numel - 1))  # the last block repeats its last element
    step = _own_steps(scale, index, unit, least, most, inner, count, SCALED)
    code, missing = _codes(stored.to(tl.float32), step, ahead)
    if PLACED:
        head = tl.load(heads + block, mask=known, other=_RAW).to(tl.int32)
        width = (head & _RAW).to(tl.int64)
        is_raw = width == _RAW
        end = tl.load(ends + block, mask=known, other=0)
        size = tl.where(is_raw, 256 * (flat.dtype.element_ty.primitive_bitwidth // 8), 32 * width)
        above = code - (head >> _WIDTH_BITS)[:, None, None]
        coded, low = known & (is_raw == 0), tl.minimum(width, 8)
        _put_lanes(packed, end - size, above & 255, low, coded)
        _put_lanes(packed, end - size + 256, above >> 8, width - low, coded)
        whole = (packed + (end - size)).to(tl.pointer_type(flat.dtype.element_ty))
        within = index - block[:, None, None] * 256
        tl.store(whole[:, None, None] + within, stored, mask=(known & is_raw)[:, None, None])
    else:
        low = tl.min(tl.min(code, axis=2), axis=1)
        high = tl.max(tl.max(code, axis=2), axis=1)
        width = tl.zeros_like(low)
        for bit in tl.static_range(13):
            width += ((high - low) >> bit > 0).to(tl.int32)
        good = (tl.max(tl.max(missing, axis=2), axis=1) == 0) & (low >= -largest - 1) & (high <= largest)
        head = tl.where(good, (low << _WIDTH_BITS) | width, _RAW)
        tl.store(heads + block, head.to(tl.int16), mask=known)


@triton.jit
def _unpack(
    heads, ends, packed, scale, out, numel, blocks, unit, least, most, ahead, inner, count,
    SCALED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block, index = _places(BLOCKS)
    known = block < blocks
    head = tl.load(heads + block, mask=known, other=0).to(tl.int32)
    width = (head & _RAW).to(tl.int64)
    is_raw = width == _RAW
    size = tl.where(is_raw, 256 * (out.dtype.element_ty.primitive_bitwidth // 8), 32 * width)
    start = tl.load(ends + block, mask=known, other=0) - size
    coded, low = known & (is_raw == 0), tl.minimum(width, 8)
    code = _take_lanes(packed, start, low, coded) + (head >> _WIDTH_BITS)[:, None, None]
    code += _take_lanes(packed, start + 256, tl.where(is_raw, 0, width - low), coded) << 8
    step = _own_steps(scale, index, unit, least, most, inner, count, SCALED)
    value = code.to(tl.float32)
    moved = tl.where(value > 0.0, ahead, tl.where(value < 0.0, -ahead, 0.0))
    value = rounded((value - moved) * step, out.dtype.element_ty)
    whole = (packed + start).to(tl.pointer_type(out.dtype.element_ty))
    within = index - block[:, None, None] * 256
    stored = tl.load(whole[:, None, None] + within, mask=(known & is_raw)[:, None, None], other=0.0)
    tl.store(out + index, tl.where(is_raw[:, None, None], stored, value), mask=index < numel)


def pack_planes(
    flat: Tensor, bound: float, keep_sign: bool, scale: Tensor | None, inner: int
) -> tuple[Tensor, Tensor]:
    """Heads and bytes; the host waits for their number."""
    if flat.dtype not in READABLE or not flat.numel():
        return _planes.pack_planes(flat, bound, keep_sign, scale, inner)
    blocks = -(-flat.numel() // _planes.BLOCK)
    heads = flat.new_empty(blocks, dtype=torch.int16)
    steps, largest = _planes.usable_steps(bound, flat.dtype), _planes.LARGEST[flat.dtype]
    options = (*steps, _ahead(keep_sign), largest, inner)
    ends, packed = heads, heads  # not there yet, and not looked at
    for placed in (False, True):
        if placed:
            ends = _planes.data_bytes(heads, flat.element_size()).cumsum(0)
            packed = flat.new_empty(int(ends[-1]), dtype=torch.uint8)
        arguments = (flat, flat if scale is None else scale, heads, ends, packed, flat.numel(), blocks)
        _launch(_pack, blocks, (*arguments, *options), scale, PLACED=placed)
    return heads, packed


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
    if out.dtype not in READABLE or not out.numel():
        return _planes.unpack_planes(heads, packed, bound, keep_sign, scale, inner, out)
    ends, blocks = _planes.data_bytes(heads, out.element_size()).cumsum(0), heads.numel()
    arguments = (heads, ends, packed, out if scale is None else scale, out, out.numel(), blocks)
    options = (*_planes.usable_steps(bound, out.dtype), _ahead(keep_sign), inner)
    _launch(_unpack, blocks, (*arguments, *options), scale)


def _ahead(keep_sign: bool) -> float:
    return _planes.AHEAD if keep_sign else 0.0


def _launch(
    kernel: triton.JITFunction,
    blocks: int,
    arguments: tuple[object, ...],
    scale: Tensor | None,
    **named: bool,
) -> None:
    """Run over all blocks, on the device of the first argument, without fusing roundings away."""
    first = arguments[0]
    assert isinstance(first, Tensor)
    count = 1 if scale is None else scale.numel()
    with device_of(first):
        kernel[(triton.cdiv(blocks, _BLOCKS),)](
            *arguments, count, SCALED=scale is not None, BLOCKS=_BLOCKS, enable_fp_fusion=False, **named
        )
