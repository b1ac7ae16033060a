"""Optimizer state in 8 or 16 bits an element, rounded stochastically: its mean is the state.

Rounding to nearest would freeze an average that moves by a thousandth a step, as a code is a tenth wide.
Random bits are a hash of a key and the element's number: the same however a tensor is cut into pieces.

Squares (averages of squared gradients, never negative) are a float's bits without the last 20: 3 of the
significand, and an exponent that counts down from the block's largest, 32 of them. Zero stays zero; what is
smaller than all codes becomes the smallest. The others are whole steps, -127 to 127, of the block's largest;
where a square of the same gradients is there, in units of its root, which is what the update divides by.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
CUT = 20  # bits of a float that a square's code leaves out
MOST = 127
_INFINITE = 0x7F800000
_LARGEST = 0x7FF00000  # the last float, a NaN, to which the random bits may be added


def _noise(key: int, start: int, count: int, device: torch.device) -> Tensor:
    """32 random bits for each element, as int64 (the finaliser of MurmurHash3)."""
    mask = 0xFFFFFFFF
    found = torch.arange(start, start + count, dtype=torch.int64, device=device)
    found = (found * 0x9E3779B1 + key) & mask
    found = ((found ^ found >> 16) * 0x85EBCA6B) & mask
    found = ((found ^ found >> 13) * 0xC2B2AE35) & mask
    return found ^ found >> 16


def _in_blocks(flat: Tensor) -> Tensor:
    """Rows of a block, the last one filled up with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def pack_squares(flat: Tensor, key: int, start: int, codes: Tensor, heads: Tensor) -> None:
    """Codes (uint8) of float32 squares, and for each block what is added to a code (int32)."""
    bits = (flat.view(torch.int32) & 0x7FFFFFFF).clamp(max=_LARGEST)
    tops = _in_blocks(bits).amax(1)
    heads.copy_((tops >> CUT) - 254)
    moved = bits + (_noise(key, start, flat.numel(), flat.device) >> 32 - CUT).int()
    found = _in_blocks(moved >> CUT) - heads[:, None]
    found = found.clamp(1, 255).view(-1)[: flat.numel()]
    codes.copy_(torch.where(bits == 0, 0, found))


def unpack_squares(codes: Tensor, heads: Tensor, out: Tensor) -> None:
    """Squares, into ``out``."""
    found = (_in_blocks(codes.int()) + heads[:, None] << CUT).view(-1)[: codes.numel()]
    out.copy_(torch.where(codes == 0, 0, found).view(torch.float32))


def _scales(steps: Tensor, squares: Tensor | None, count: int) -> Tensor:
    """Each element's step."""
    own = steps.repeat_interleave(BLOCK)[:count]
    return own if squares is None else squares.sqrt() * own


def pack_signed(
    flat: Tensor, squares: Tensor | None, key: int, start: int, codes: Tensor, steps: Tensor
) -> None:
    """Codes (int8) of float32 values, and each block's step (float32), in units of the squares' roots."""
    size = flat.abs() if squares is None else flat.abs() / squares.sqrt()
    if squares is not None:
        size = torch.where((squares == 0) & (flat == flat), 0.0, size)
    # As integers NaN is the largest; where there is one, the block's step and all its values are.
    tops = _in_blocks(size.view(torch.int32) & 0x7FFFFFFF).amax(1).view(torch.float32)
    steps.copy_(tops / MOST)
    scales = _scales(steps, squares, flat.numel())
    random = (_noise(key, start, flat.numel(), flat.device) >> 8).float() * 2.0**-24
    found = torch.floor(flat / scales + random)
    found = torch.where(scales > 0, found, 0.0).nan_to_num(0.0)  # of what is not finite the step tells
    codes.copy_(found.clamp(-MOST, MOST))


def unpack_signed(codes: Tensor, steps: Tensor, squares: Tensor | None, out: Tensor) -> None:
    """Values, into ``out``."""
    out.copy_(codes.float() * _scales(steps, squares, codes.numel()))


def pack_short(flat: Tensor, key: int, start: int, codes: Tensor) -> None:
    """The first 16 bits (int16) of float32 values: bfloat16, rounded up or down by chance."""
    bits = flat.view(torch.int32)
    random = (_noise(key, start, flat.numel(), flat.device) >> 16).int()
    finite = (bits & _INFINITE) != _INFINITE
    codes.copy_(torch.where(finite, bits + random, bits) >> 16)


def unpack_short(codes: Tensor, out: Tensor) -> None:
    """Values, into ``out``."""
    out.copy_((codes.int() << 16).view(torch.float32))
