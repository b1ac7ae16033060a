"""Codes of 1, 2, 3, 4 or 8 bits, packed in groups of 256 so that every lane is a contiguous run."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 256


def group_count(numel: int) -> int:
    """Groups of 256 needed for this many elements."""
    return -(-numel // GROUP)


def pack_lanes(codes: Tensor, bits: int) -> Tensor:
    """[groups, 256] uint8 codes to [groups, 32 * bits] bytes.

    Bits i*b.. of byte j hold element ``i * (256 * b / 8) + j`` of the group; 3 bits are a plane of 2
    followed by a plane of 1.
    """
    if bits == 3:
        return torch.cat((pack_lanes(codes & 3, 2), pack_lanes(codes >> 2, 1)), 1)
    if bits == 8:
        return codes
    lanes = codes.view(-1, 8 // bits, GROUP * bits // 8)
    packed = lanes[:, 0].clone()
    for lane in range(1, 8 // bits):
        packed |= lanes[:, lane] << (lane * bits)
    return packed


def unpack_lanes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of ``pack_lanes``."""
    if bits == 3:
        return unpack_lanes(packed[:, :64], 2) | (unpack_lanes(packed[:, 64:], 1) << 2)
    if bits == 8:
        return packed
    lanes = [(packed >> (lane * bits)) & ((1 << bits) - 1) for lane in range(8 // bits)]
    return torch.cat(lanes, 1)


def pad_groups(flat: Tensor) -> Tensor:
    """[groups, 256] with the last element repeated to fill the last group."""
    missing = -flat.numel() % GROUP
    if missing:
        flat = torch.cat((flat, flat[-1:].expand(missing)))
    return flat.reshape(-1, GROUP)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Flat uint8 codes to flat bytes; the last group is filled with zeros."""
    filled = torch.nn.functional.pad(codes, (0, -codes.numel() % GROUP))
    return pack_lanes(filled.view(-1, GROUP), bits).reshape(-1)


def unpack_codes(packed: Tensor, bits: int, numel: int) -> Tensor:
    """The inverse of ``pack_codes``."""
    return unpack_lanes(packed.view(-1, 32 * bits), bits).reshape(-1)[:numel]


def pack_nonzero(flat: Tensor, value: float, negative: bool) -> tuple[Tensor, Tensor]:
    """Bits of ``x == value``, and whether every element is ``value`` or a zero (-0.0 if ``negative``)."""
    hit = flat == value
    return pack_codes(hit.to(torch.uint8), 1), (hit | (flat == 0) & (flat.signbit() == negative)).all()


def pack_positive(flat: Tensor) -> Tensor:
    """Bits of ``not (x <= 0)``: what threshold_backward lets through, NaN included."""
    return pack_codes((flat <= 0).logical_not().to(torch.uint8), 1)


def pack_between(flat: Tensor, lower: float, upper: float, inclusive: bool) -> Tensor:
    """Bits of ``lower <= x <= upper`` (clamp), or of ``not (x <= lower or x >= upper)`` (hardtanh)."""
    return pack_codes(between(flat, lower, upper, inclusive).to(torch.uint8), 1)


def between(flat: Tensor, lower: float, upper: float, inclusive: bool) -> Tensor:
    """Whether each element lies in the interval; hardtanh compares halves as float32, clamp as they are."""
    if inclusive:
        return (flat >= lower) & (flat <= upper)
    wide = flat.double() if flat.dtype == torch.float64 else flat.float()
    return ((wide <= lower) | (wide >= upper)).logical_not()


def unpack_bits(packed: Tensor, zero: float, one: float, out: Tensor) -> None:
    """``one`` where the bit is set, else ``zero``, into ``out``."""
    bits = unpack_codes(packed, 1, out.numel()).bool()
    pair = torch.tensor([zero, one], device=out.device, dtype=torch.float64).to(out.dtype)
    out.copy_(torch.where(bits, pair[1], pair[0]))
