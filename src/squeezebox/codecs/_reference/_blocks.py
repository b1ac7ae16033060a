"""Blocks of 1024 elements in as many bit planes as their largest code needs, put where an arena has room.

An arena is a run of 32-bit words, with a second one, which may lie in the host's memory, for what finds no
room there, and counters: words taken of the first and of the second, blocks that found no room in either, and
the words of each tensor, in a slot of its own. Nothing about a block's size has to reach the host. A table
row says where a block starts, in units of 4 words (-1: nowhere, -2 and down: in the second), and how it is
stored, from the lowest bit: 11 bits of elements other than zero, 5 of width, 5 of factor, 1 whether signs
are stored, 2 of kind.

DENSE: planes of all elements. SPARSE: 32 words that mark what is not zero, then planes of those elements.
RAW: the elements as they are, float64 always. Bit b of word k of a plane belongs to element 32 k + b; planes
run from the lowest bit of the magnitudes to the highest, then the signs.

A magnitude m stands for (m - 1/2 - phase) steps, and a step is ``factor`` sixteenths of twice the bound, less
a 2^-9th: the factor leaves room for the rounding of the dtype. See ``_quantise`` for phases.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from squeezebox.codecs._reference import _quantise

BLOCK = 1024
WORDS = BLOCK // 32
COUNTERS = 3  # before the slots
UNIT = 4  # words a block's start is a multiple of
DENSE, SPARSE, RAW = range(3)
MOST = 4095  # larger magnitudes are kept as they are
LEAST_FACTOR = 4
LARGEST = torch.finfo(torch.float32).max
# half a unit in the last place, relative, of what is decoded
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float64: math.inf}
FIRST_TURN = _quantise.FIRST_TURN[True]


def unit_step(bound: float) -> float:
    """Twice the bound less a 2^-9th, as a float32."""
    return float(np.float32(2.0 * bound * (1 - 2.0**-9)))


def block_count(numel: int) -> int:
    """Blocks needed for this many elements."""
    return -(-numel // BLOCK)


def _scales(start: int, numel: int, scale: Tensor | None, inner: int, device: torch.device) -> Tensor:
    """Every element's scale, a row for each block; ``numel`` elements from ``start`` on."""
    if scale is None:
        return _blocks(torch.ones(numel, device=device), 1.0)
    return _blocks(scale[_quantise.channels(start, numel, inner, scale.numel(), device)], 1.0)


def _blocks(flat: Tensor, fill: float) -> Tensor:
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK), value=fill).view(-1, BLOCK)


def _phases(start: int, numel: int, dither: int, device: torch.device) -> Tensor:
    phase = _quantise.phases(start, numel, dither, True, device)
    return _blocks(torch.as_tensor(phase, dtype=torch.float32, device=device).expand(numel), 0.0)


def _decoded(magnitude: Tensor, step: Tensor, phase: Tensor, dtype: torch.dtype) -> Tensor:
    value = magnitude.float().sub_(phase + 0.5).mul_(step)
    return value.masked_fill_(magnitude == 0, 0.0).to(dtype)


def quantised(
    flat: Tensor, bound: float, scale: Tensor | None, inner: int, dither: int, start: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Elements and magnitudes with their signs, a row for each block; factors, and which blocks have codes.

    ``start``: how many elements of the tensor come before those of ``flat``.
    """
    values = _blocks(flat, 0.0)
    value = values.float()
    scales = _scales(start, flat.numel(), scale, inner, flat.device)
    phase = _phases(start, flat.numel(), dither, flat.device)
    limit = (scales * bound).clamp(max=LARGEST)
    # Rounding to the dtype may use up this share of the bound; the step gets the rest, in sixteenths.
    share = (value.abs() / limit * ROUNDING[flat.dtype]).amax(1)
    factor = ((1.0 - share) * 16.0).floor()
    step = scales * unit_step(bound) * (factor / 16.0)[:, None]
    magnitude = torch.ceil(value.abs() * (1.0 / step) + phase).clamp(min=1)
    magnitude = torch.where(value == 0, 0.0, magnitude)
    known = (factor >= LEAST_FACTOR) & (magnitude <= MOST).all(1)
    # Raw blocks have codes from here on too, which nobody reads.
    factor = factor.nan_to_num(0).clamp(0, 16)
    magnitude = torch.where(known[:, None], magnitude, 0.0).int()
    decoded = _decoded(magnitude, step, phase, flat.dtype)
    off = (value.abs() - decoded.float()).abs()
    known &= ((off <= limit) & ((decoded > 0) == (value != 0))).all(1)
    return values, torch.where(value < 0, -magnitude, magnitude), factor.int(), known


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
    """Table, two numbers a block, of a flat tensor whose blocks go to ``arena``, or else to ``spill``.

    A block without room in either is counted and lost.
    ``scale``: factors of the bound for each channel, of which ``inner`` neighbours share one; ``dither``
    neighbours share a phase (0: all do); what the blocks take is also added to the counter of the ``slot``.
    """
    values, magnitude, factor, known = quantised(flat, bound, scale, inner, dither)
    table = torch.empty(2 * len(values), dtype=torch.int32, device=flat.device)
    for number, row in enumerate(values):
        header, words = _block(row, magnitude[number], int(factor[number]), bool(known[number]))
        taken = len(words) + -len(words) % UNIT
        counters[COUNTERS + slot] += taken
        table[2 * number], table[2 * number + 1] = _placed(words, taken, arena, spill, counters), header
    return table


def _placed(words: Tensor, taken: int, arena: Tensor, spill: Tensor, counters: Tensor) -> int:
    """Put a block where there is room, and say where that is."""
    for number, memory in enumerate((arena, spill)):
        start = int(counters[number])
        # Taken before it is known to fit, as by a device's atomic addition.
        counters[number] += taken
        if start + len(words) <= memory.numel():
            memory[start : start + len(words)] = words
            return start // UNIT if number == 0 else -2 - start // UNIT
    counters[2] += 1
    return -1


def _block(row: Tensor, magnitude: Tensor, factor: int, known: bool) -> tuple[int, Tensor]:
    """Header and words of one block."""
    if not known:
        return RAW << 22, row.view(torch.int32)
    negative, magnitude = magnitude < 0, magnitude.abs()
    present = magnitude > 0
    count, signed = int(present.sum()), int(negative.any())
    dense = int(magnitude.max()).bit_length()
    sparse = (int(magnitude.max()) - 1).bit_length() if count else 0
    words = -(-count // 32)
    is_sparse = WORDS + words * (sparse + signed) < WORDS * (dense + signed)
    width = sparse if is_sparse else dense
    code = magnitude - 1 if is_sparse else magnitude
    code = code | (negative.int() << width)
    parts = [_words(present.int())] if is_sparse else []
    code = code[present] if is_sparse else code
    parts += [_words((code >> plane) & 1) for plane in range(width + signed)]
    header = count | width << 11 | factor << 16 | signed << 21 | (SPARSE if is_sparse else DENSE) << 22
    return header, torch.cat(parts) if parts else magnitude[:0]


def _words(bits: Tensor) -> Tensor:
    """int32 words of 0s and 1s, 32 a word."""
    filled = torch.nn.functional.pad(bits.long(), (0, -bits.numel() % 32)).view(-1, 32)
    return (filled << torch.arange(32, device=bits.device)).sum(1).to(torch.int32)


def _bits(words: Tensor) -> Tensor:
    """The inverse of ``_words``."""
    return ((words.long()[:, None] >> torch.arange(32, device=words.device)) & 1).view(-1)


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
    """The inverse of ``pack_blocks``, into ``out``; NaN where a block had found no room."""
    rows = torch.zeros(block_count(out.numel()), BLOCK, dtype=torch.int32, device=out.device)
    for magnitude, (start, header) in zip(rows, table.view(-1, 2).tolist(), strict=True):
        if start != -1 and header >> 22 != RAW:
            words = _words_at(arena, spill, start)
            magnitude.copy_(_magnitudes(words, header, header >> 22 == SPARSE))
    dequantise(rows, table, bound, scale, inner, dither, out)
    restore_others(arena, spill, table, out)


def dequantise(
    magnitude: Tensor,
    table: Tensor,
    bound: float,
    scale: Tensor | None,
    inner: int,
    dither: int,
    out: Tensor,
    start: int = 0,
) -> None:
    """Elements of magnitudes with their signs, of blocks that have codes; ``start`` elements come before."""
    factor = table.view(-1, 2)[:, 1] >> 16 & 31
    step = _scales(start, out.numel(), scale, inner, out.device) * unit_step(bound) * (factor / 16.0)[:, None]
    value = _decoded(magnitude.abs(), step, _phases(start, out.numel(), dither, out.device), out.dtype)
    out.copy_(value.copysign_(magnitude).view(-1)[: out.numel()])


def restore_others(arena: Tensor, spill: Tensor, table: Tensor, out: Tensor) -> None:
    """Blocks that were kept as they are, and NaN for those that had found no room."""
    rows = table.view(-1, 2)
    for number in ((rows[:, 0] == -1) | (rows[:, 1] >> 22 == RAW)).nonzero().view(-1).tolist():
        start = int(rows[number, 0])
        target = out[number * BLOCK : (number + 1) * BLOCK]
        if start == -1:
            target.fill_(float("nan"))
        else:
            words = _words_at(arena, spill, start)[: BLOCK * out.element_size() // 4]
            target.copy_(words.to(out.device).view(out.dtype)[: target.numel()])


def _words_at(arena: Tensor, spill: Tensor, start: int) -> Tensor:
    return arena[start * UNIT :] if start >= 0 else spill[(-2 - start) * UNIT :].to(arena.device)


def is_sound(arena: Tensor, table: Tensor, item_bytes: int) -> bool:
    """Whether every block that the table names lies in the arena and holds what its header says."""
    for start, header in table.view(-1, 2).tolist():
        count, width, signed, kind = header & 2047, header >> 11 & 31, header >> 21 & 1, header >> 22
        length = -(-count // 32) if kind == SPARSE else WORDS
        words = (WORDS if kind == SPARSE else 0) + length * (width + signed)
        words = BLOCK * item_bytes // 4 if kind == RAW else words
        known = kind in (DENSE, SPARSE, RAW) and count <= BLOCK and width <= MOST.bit_length()
        if start < 0 or not known or start * UNIT + words > arena.numel():
            return False
        if kind == SPARSE and int(_bits(arena[start * UNIT :][:WORDS]).sum()) != count:
            return False
    return True


def _magnitudes(words: Tensor, header: int, is_sparse: bool) -> Tensor:
    """A block's, with their signs."""
    count, width, signed = header & 2047, header >> 11 & 31, header >> 21 & 1
    present = (
        _bits(words[:WORDS]).bool() if is_sparse else torch.ones(BLOCK, dtype=torch.bool, device=words.device)
    )
    skipped, length = (WORDS, -(-count // 32)) if is_sparse else (0, WORDS)
    slots = count if is_sparse else BLOCK
    code = torch.zeros(slots, dtype=torch.int64, device=words.device)
    for plane in range(width + signed):
        first = skipped + plane * length
        code |= _bits(words[first : first + length])[:slots] << plane
    magnitude = torch.zeros(BLOCK, dtype=torch.int64, device=words.device)
    magnitude[present] = (code & (1 << width) - 1) + int(is_sparse)
    magnitude[present] *= 1 - 2 * (code >> width)
    return magnitude
