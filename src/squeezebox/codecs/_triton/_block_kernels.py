"""Blocks in bit planes: one pass each way, and every block finds its place without asking the host.

What is stored, and the arithmetic to the bit, is that of ``_reference._blocks``; the order of the blocks in
the arena is that in which programs get to ask for room.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from squeezebox.codecs._reference import _blocks, _quantise
from squeezebox.codecs._triton._parts import READABLE, device_of, rounded

_PROGRAMS = 2112  # 16 for each of 132 multiprocessors
_DENSE = tl.constexpr(_blocks.DENSE)
_SPARSE = tl.constexpr(_blocks.SPARSE)
_RAW = tl.constexpr(_blocks.RAW)
_FIRST = tl.constexpr(_blocks.FIRST_TURN)
_NEXT = tl.constexpr(_quantise.NEXT_TURN)
_MOST = tl.constexpr(_blocks.MOST)
_LEAST_FACTOR = tl.constexpr(_blocks.LEAST_FACTOR)
_LARGEST = tl.constexpr(_blocks.LARGEST)
_SHIFT = tl.constexpr(_quantise.SHIFT)


@triton.jit
def _phase(index, dither, DITHERED: tl.constexpr):
    if DITHERED:
        return (((index // dither) * _NEXT + _FIRST) & 0xFFFF).to(tl.float32) * (1.0 / 131072.0)
    return tl.full(index.shape, _SHIFT, tl.float32)


@triton.jit
def _scale(scale, index, mask, inner, count, SCALED: tl.constexpr):
    if SCALED:
        return tl.load(scale + (index // inner) % count, mask=mask, other=1.0)
    return tl.full(index.shape, 1.0, tl.float32)


@triton.jit
def _decoded(magnitude, step, phase, DTYPE: tl.constexpr):
    value = (magnitude.to(tl.float32) - (phase + 0.5)) * step
    return rounded(tl.where(magnitude == 0, 0.0, value), DTYPE)


@triton.jit
def _bit_length(value):
    length = (value > 0).to(tl.int32)
    for bit in tl.static_range(1, 13):
        length += (value >> bit > 0).to(tl.int32)
    return length


# these differ from tensor to tensor, and nothing gets faster for knowing them
@triton.jit(do_not_specialize=["slot", "blocks", "room", "spill_room"])
def _pack(
    flat, scale, arena, spill, counters, slot, table, scratch, numel, blocks, room, spill_room,
    bound, unit, rounding,
    inner, count, dither, SCALED: tl.constexpr, DITHERED: tl.constexpr, ITEM_BYTES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    own = scratch + program * 1024
    lane = tl.arange(0, 1024)
    word = tl.arange(0, 32)
    slots = word[:, None] * 32 + tl.arange(0, 32)[None, :]
    for block in range(program, blocks, tl.num_programs(0)):
        index = tl.cast(block, tl.int64) * 1024 + lane
        inside = index < numel
        stored = tl.load(flat + index, mask=inside, other=0.0)
        value = stored.to(tl.float32)
        size = tl.abs(value)
        factors = _scale(scale, index, inside, inner, count, SCALED)
        phase = tl.where(inside, _phase(index, dither, DITHERED), 0.0)
        limit = tl.minimum(factors * bound, _LARGEST)
        shares = tl.div_rn(size, limit) * rounding
        lost = tl.max((shares != shares).to(tl.int32), axis=0) > 0
        factor = tl.floor((1.0 - tl.max(tl.where(shares != shares, 0.0, shares), axis=0)) * 16.0)
        known = (factor >= _LEAST_FACTOR) & (lost == 0)
        step = factors * unit * (factor / 16.0)
        raised = tl.maximum(tl.ceil(size * tl.div_rn(1.0, step) + phase), 1.0)
        raised = tl.where(value == 0.0, 0.0, raised)
        known = known & (tl.max((raised <= _MOST).to(tl.int32) ^ 1, axis=0) == 0)
        magnitude = tl.where(known, tl.where(raised <= _MOST, raised, 0.0), 0.0).to(tl.int32)
        decoded = _decoded(magnitude, step, phase, flat.dtype.element_ty)
        off = tl.abs(size - decoded.to(tl.float32))
        good = (off <= limit) & ((decoded > 0.0) == (value != 0.0))
        known = known & (tl.max(good.to(tl.int32) ^ 1, axis=0) == 0)

        present = (magnitude > 0).to(tl.int32)
        nonzero = tl.sum(present, axis=0)
        negative = (value < 0.0).to(tl.int32)
        signed = tl.max(negative, axis=0)
        largest = tl.max(magnitude, axis=0)
        dense = _bit_length(largest)
        sparse = _bit_length(tl.maximum(largest - 1, 0))
        length = (nonzero + 31) // 32
        is_sparse = 32 + length * (sparse + signed) < 32 * (dense + signed)
        width = tl.where(is_sparse, sparse, dense)
        planes = width + signed
        length = tl.where(is_sparse, length, 32)
        skipped = tl.where(is_sparse, 32, 0)
        words = tl.where(known, skipped + length * planes, 256 * ITEM_BYTES)
        taken = (words + 3) // 4 * 4
        start = tl.atomic_add(counters, taken.to(tl.int64), sem="relaxed")
        tl.atomic_add(counters + slot, taken.to(tl.int64), sem="relaxed")
        base = arena + start
        named = (start // 4).to(tl.int32)
        fits = start + words <= room
        if fits == 0:
            start = tl.atomic_add(counters + 1, taken.to(tl.int64), sem="relaxed")
            base = spill + start
            named = -2 - (start // 4).to(tl.int32)
            fits = start + words <= spill_room
            if fits == 0:
                tl.atomic_add(counters + 2, tl.full((), 1, tl.int64), sem="relaxed")
                named = tl.full((), -1, tl.int32)
        kind = tl.where(is_sparse, _SPARSE, _DENSE)
        header = nonzero | (width << 11) | (factor.to(tl.int32) << 16) | (signed << 21) | (kind << 22)
        header = tl.where(known, header, _RAW << 22)
        tl.store(table + 2 * block, named)
        tl.store(table + 2 * block + 1, header)
        if fits:
            if known:
                if is_sparse:
                    place = tl.cumsum(present, axis=0) - 1
                    code = (magnitude - 1) | (negative << width)
                else:
                    place = lane
                    code = magnitude | (negative << width)
                tl.debug_barrier()
                tl.store(own + place, code, mask=tl.where(is_sparse, present, 1) > 0)
                tl.debug_barrier()
                if is_sparse:
                    marks = tl.reshape(present, (32, 32)) << tl.arange(0, 32)[None, :]
                    tl.store(base + word, tl.sum(marks, axis=1))
                held = tl.load(own + slots, mask=slots < tl.where(is_sparse, nonzero, 1024), other=0)
                for plane in range(planes):
                    bits = ((held >> plane) & 1) << tl.arange(0, 32)[None, :]
                    at = base + skipped + plane * length + word
                    tl.store(at, tl.sum(bits, axis=1), mask=word < length)
            else:
                if ITEM_BYTES == 4:
                    tl.store(base + lane, stored.to(tl.int32, bitcast=True))
                else:
                    halves = base.to(tl.pointer_type(tl.int16)) + lane
                    tl.store(halves, stored.to(tl.int16, bitcast=True))


@triton.jit
def _unpack(
    arena, spill, table, scale, out, numel, unit, inner, count, dither,
    SCALED: tl.constexpr, DITHERED: tl.constexpr, ITEM_BYTES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    lane = tl.arange(0, 1024)
    index = tl.cast(block, tl.int64) * 1024 + lane
    inside = index < numel
    start = tl.load(table + 2 * block)
    header = tl.load(table + 2 * block + 1)
    kind = header >> 22
    base = arena + start.to(tl.int64) * 4
    if start < -1:
        base = spill + (-2 - start).to(tl.int64) * 4
    if start == -1:
        tl.store(out + index, tl.full((1024,), float("nan"), out.dtype.element_ty), mask=inside)
    elif kind == _RAW:
        if ITEM_BYTES == 4:
            stored = tl.load(base + lane)
        else:
            stored = tl.load(base.to(tl.pointer_type(tl.int16)) + lane)
        tl.store(out + index, stored.to(out.dtype.element_ty, bitcast=True), mask=inside)
    else:
        width = (header >> 11) & 31
        planes = width + ((header >> 21) & 1)
        is_sparse = kind == _SPARSE
        length = tl.where(is_sparse, ((header & 2047) + 31) // 32, 32)
        first = base + tl.where(is_sparse, 32, 0)
        if is_sparse:
            present = (tl.load(base + lane // 32) >> (lane % 32)) & 1
            place = tl.maximum(tl.cumsum(present, axis=0) - 1, 0)
        else:
            present = tl.full((1024,), 1, tl.int32)
            place = lane
        code = tl.zeros((1024,), tl.int32)
        for plane in range(planes):
            held = tl.load(first + plane * length + place // 32, mask=present > 0, other=0)
            code |= ((held >> (place % 32)) & 1) << plane
        magnitude = (code & ((1 << width) - 1)) + is_sparse.to(tl.int32)
        magnitude = tl.where(present > 0, magnitude, 0)
        factor = ((header >> 16) & 31).to(tl.float32)
        step = _scale(scale, index, inside, inner, count, SCALED) * unit * (factor / 16.0)
        phase = tl.where(inside, _phase(index, dither, DITHERED), 0.0)
        value = _decoded(magnitude, step, phase, out.dtype.element_ty).to(tl.float32)
        value = tl.where((code >> width) > 0, -value, value)
        tl.store(out + index, value.to(out.dtype.element_ty), mask=inside)


def pack_blocks(
    flat: Tensor,
    bound: float,
    scale: Tensor | None,
    inner: int,
    dither: int,
    arena: Tensor,
    spill: Tensor,
    counters: Tensor,
    slot: int,
) -> Tensor:
    """Table of a flat tensor whose blocks go to ``arena``, or else to ``spill``, which may be pinned."""
    blocks = _blocks.block_count(flat.numel())
    table = flat.new_empty(2 * blocks, dtype=torch.int32)
    if flat.dtype not in READABLE:
        return _blocks.pack_blocks(flat, bound, scale, inner, dither, arena, spill, counters, slot)
    if blocks:
        programs = min(blocks, _PROGRAMS)
        scratch = flat.new_empty(programs * _blocks.BLOCK, dtype=torch.int32)
        with device_of(flat):
            _pack[(programs,)](
                flat,
                flat if scale is None else scale,
                arena,
                spill,
                counters,
                _blocks.COUNTERS + slot,
                table,
                scratch,
                flat.numel(),
                blocks,
                arena.numel(),
                spill.numel(),
                bound,
                _blocks.unit_step(bound),
                _blocks.ROUNDING[flat.dtype],
                inner,
                1 if scale is None else scale.numel(),
                dither,
                SCALED=scale is not None,
                DITHERED=dither > 0,
                ITEM_BYTES=flat.element_size(),
                enable_fp_fusion=False,
            )
    return table


def unpack_blocks(
    arena: Tensor,
    spill: Tensor,
    table: Tensor,
    bound: float,
    scale: Tensor | None,
    inner: int,
    dither: int,
    out: Tensor,
) -> None:
    """The inverse of ``pack_blocks``, into ``out``."""
    if out.dtype not in READABLE:
        _blocks.unpack_blocks(arena, spill, table, bound, scale, inner, dither, out)
    elif out.numel():
        with device_of(out):
            _unpack[(table.numel() // 2,)](
                arena,
                spill,
                table,
                out if scale is None else scale,
                out,
                out.numel(),
                _blocks.unit_step(bound),
                inner,
                1 if scale is None else scale.numel(),
                dither,
                SCALED=scale is not None,
                DITHERED=dither > 0,
                ITEM_BYTES=out.element_size(),
                enable_fp_fusion=False,
            )
